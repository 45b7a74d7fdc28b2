"""Configs as data: a tree of dataclasses, containers and scalars, with tensors as leaves, as JSON and tensors.

A rank describes what it hands over by a tree; what travels is JSON text and named tensors, never pickle.
:func:`split` takes a tree apart and :func:`restore` is its exact inverse: tuples stay tuples, integer keys stay
integers, NaN stays NaN, two places that held one tensor hold one tensor again.

Data never names code: a dataclass comes back only if this process registered it with :func:`register_config`.

What plain JSON cannot say is an object with the key ``"$"``::

    {"$": "tensor", "name": "mlp.up.weight"}      {"$": "tuple", "items": [..]}     {"$": "size", "items": [..]}
    {"$": "dict", "items": [[key, value], ..]}    {"$": "ordered_dict", ..}         {"$": "float", "value": "nan"}
    {"$": "dtype", "name": "bfloat16"}            {"$": "bytes", "base64": ".."}    {"$": "int", "hex": "0x.."}
    {"$": "config", "class": "package.module:Name", "fields": {..}}
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from modelexport.errors import GatherError
from modelexport.system.dtypes import torch_dtype_named, torch_name

__all__ = ["register_config", "restore", "split"]

T = TypeVar("T")
_MARK = "$"
_LONG = 2048  # bits: Python refuses to write or read decimal numbers of some thousand digits (640 at the least)
_RESERVED = "__metadata__"  # safetensors keeps this name for itself
_registry: dict[str, type] = {}


def _registered_name(cls: type) -> str:
    # A process started by multiprocessing imports the user's script under another name.
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__
    return f"{module}:{cls.__qualname__}"


def register_config(cls: type[T]) -> type[T]:
    """Class decorator: lets a dataclass travel in a config tree, under ``"module:qualname"``.

    :func:`restore` rebuilds it from its fields without running ``__init__`` or ``__post_init__``, so that what
    comes back is what was sent.

    Raises:
        TypeError: ``cls`` is not a dataclass (put ``@dataclass`` below ``@register_config``).
    """
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise TypeError(f"register_config takes a dataclass, got {cls!r}: put @dataclass below @register_config")
    _registry[_registered_name(cls)] = cls
    return cls


def split(tree: Any) -> tuple[str, dict[str, torch.Tensor]]:
    """Takes ``tree`` apart into JSON text and its tensors by name.

    Args:
        tree: registered dataclasses, dict, OrderedDict, list, tuple, ``torch.Size``, None, bool, int, float, str,
            bytes, ``torch.dtype`` and strided tensors of any dtype and shape, to any depth.

    Returns:
        ``(json_text, tensors)``. A tensor is named by its path (``"layers.0.weight"``), detached, and otherwise
        the very tensor of the tree (no copy). A tensor that occurs twice is listed once.

    Raises:
        TypeError: a value of another kind, naming its path.
        ValueError: the tree contains itself.
    """
    encoder = _Encoder()
    encoded = encoder.encode(tree, ())
    return json.dumps(encoded, allow_nan=False, separators=(",", ":")), encoder.tensors


def restore(json_text: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree that :func:`split` took apart.

    Raises:
        GatherError: the text is damaged, names a class that is not registered here, fields that the class does
            not have, or a tensor that is missing.
    """
    try:
        return _decode(json.loads(json_text), tensors, ())
    except GatherError:
        raise
    except (ValueError, RecursionError) as error:
        raise GatherError(f"the config's JSON text cannot be read: {error}") from error


class _Encoder:
    """One pass over a tree; collects its tensors under unique names."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}  # what memory a tensor shows -> its name
        self._open: set[int] = set()  # containers that enclose the current value

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if kind is int and value.bit_length() > _LONG:
            return {_MARK: "int", "hex": hex(value)}
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {_MARK: "float", "value": _encode_float(value)}
        if isinstance(value, torch.Tensor):
            return {_MARK: "tensor", "name": self._tensor(value, path)}
        if kind is torch.dtype:
            return {_MARK: "dtype", "name": torch_name(value)}
        if kind is bytes:
            return {_MARK: "bytes", "base64": base64.b64encode(value).decode("ascii")}
        if id(value) in self._open:
            raise ValueError(f"the config contains itself at {_where(path)}")
        self._open.add(id(value))
        try:
            return self._container(value, path)
        finally:
            self._open.discard(id(value))

    def _container(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if kind in (list, tuple, torch.Size):
            items = [self.encode(item, (*path, str(i))) for i, item in enumerate(value)]
            return items if kind is list else {_MARK: "tuple" if kind is tuple else "size", "items": items}
        if kind in (dict, OrderedDict):
            if kind is dict and _MARK not in value and all(type(key) is str for key in value):
                return {key: self.encode(item, (*path, key)) for key, item in value.items()}
            pairs = [
                [self.encode(key, (*path, f"key {key!r}")), self.encode(item, (*path, str(key)))]
                for key, item in value.items()
            ]
            return {_MARK: "dict" if kind is dict else "ordered_dict", "items": pairs}
        name = _registered_name(kind)
        if _registry.get(name) is kind:
            fields = {
                field.name: self.encode(getattr(value, field.name), (*path, field.name))
                for field in dataclasses.fields(value)
            }
            return {_MARK: "config", "class": name, "fields": fields}
        hint = "; decorate the class with register_config" if dataclasses.is_dataclass(value) else ""
        raise TypeError(f"a config cannot carry {kind.__module__}.{kind.__qualname__} at {_where(path)}{hint}")

    def _tensor(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(
                f"a config cannot carry {type(tensor).__qualname__} at {_where(path)}: pass its local plain tensor"
            )
        if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
            raise TypeError(
                f"a config cannot carry a tensor of layout {tensor.layout}, dtype {tensor.dtype}, device "
                f"{tensor.device} at {_where(path)}: make it a dense tensor with data"
            )
        if tensor.numel():
            view = (
                tensor.data_ptr(),
                tuple(tensor.shape),
                tensor.stride(),
                tensor.is_conj(),
                tensor.is_neg(),
            )
            key: tuple[Any, ...] = (tensor.device, tensor.dtype, *view)
        else:
            key = (id(tensor),)
        name = self._names.get(key)
        if name is None:
            base = name = ".".join(path) or "tensor"
            count = 1
            while name in self.tensors or name == _RESERVED:
                count += 1
                name = f"{base}#{count}"
            self._names[key] = name
            self.tensors[name] = tensor.detach()
        return name


def _encode_float(value: float) -> str:
    """NaN or infinity with its sign, which repr leaves out for NaN."""
    return ("-" if math.copysign(1, value) < 0 else "") + repr(abs(value))


def _where(path: tuple[str, ...]) -> str:
    return repr(".".join(path)) if path else "its root"


def _decode(value: Any, tensors: Mapping[str, torch.Tensor], path: tuple[str, ...]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors, (*path, str(i))) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {key: _decode(item, tensors, (*path, key)) for key, item in value.items()}
    decoder = _DECODERS.get(value[_MARK]) if isinstance(value[_MARK], str) else None
    if decoder is None:
        raise GatherError(f"the config has an unknown kind of value {value[_MARK]!r} at {_where(path)}")
    try:
        return decoder(value, tensors, path)
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
        if isinstance(error, GatherError):
            raise
        raise GatherError(f"the config's {value[_MARK]} at {_where(path)} is damaged: {error!r}") from error


def _decode_tensor(value: dict[str, Any], tensors: Mapping[str, torch.Tensor], path: tuple[str, ...]) -> Any:
    if value["name"] not in tensors:
        raise GatherError(f"the config names the tensor {value['name']!r} at {_where(path)}, which did not come")
    return tensors[value["name"]]


def _decode_items(value: dict[str, Any], tensors: Mapping[str, torch.Tensor], path: tuple[str, ...]) -> Any:
    items = [_decode(item, tensors, (*path, str(i))) for i, item in enumerate(value["items"])]
    return tuple(items) if value[_MARK] == "tuple" else torch.Size(items)


def _decode_dict(value: dict[str, Any], tensors: Mapping[str, torch.Tensor], path: tuple[str, ...]) -> Any:
    pairs = [(_decode(key, tensors, path), _decode(item, tensors, (*path, str(key)))) for key, item in value["items"]]
    return dict(pairs) if value[_MARK] == "dict" else OrderedDict(pairs)


def _decode_dtype(value: dict[str, Any], tensors: Mapping[str, torch.Tensor], path: tuple[str, ...]) -> Any:
    return torch_dtype_named(value["name"])


def _decode_config(value: dict[str, Any], tensors: Mapping[str, torch.Tensor], path: tuple[str, ...]) -> Any:
    cls = _registry.get(value["class"])
    if cls is None:
        raise GatherError(
            f"the config holds a {value['class']!r} at {_where(path)}, which is not registered in this process: "
            "import the module that defines it, and decorate it with register_config"
        )
    known = {field.name for field in dataclasses.fields(cls)}
    sent = value["fields"].keys()
    if known != sent:
        raise GatherError(
            f"the config's {value['class']!r} at {_where(path)} has the fields {sorted(sent)}, here the class has "
            f"{sorted(known)}: run the same version of the code on every rank"
        )
    config: Any = object.__new__(cls)
    for name, item in value["fields"].items():
        # Around frozen dataclasses' own __setattr__; works with slots too.
        object.__setattr__(config, name, _decode(item, tensors, (*path, name)))
    return config


_DECODERS: dict[str, Callable[[dict[str, Any], Mapping[str, torch.Tensor], tuple[str, ...]], Any]] = {
    "tensor": _decode_tensor,
    "tuple": _decode_items,
    "size": _decode_items,
    "dict": _decode_dict,
    "ordered_dict": _decode_dict,
    "float": lambda value, tensors, path: float(value["value"]),
    "int": lambda value, tensors, path: int(value["hex"], 16),
    "dtype": _decode_dtype,
    "bytes": lambda value, tensors, path: base64.b64decode(value["base64"], validate=True),
    "config": _decode_config,
}
