"""Quantisation methods: the encodings of quantised linears in checkpoints; one file each, registered by being there.

Importing this package or any method does not import torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from modelexport.errors import CheckpointError, PlanError, nearest, shown
from modelexport.quantization.ggml_layouts import LAYOUTS
from modelexport.quantization.methods.base import (
    Method,
    NumberFormatProtocol,
    QuantizationConfig,
    ReadOnlyNumbers,
    Scheme,
    StoredTensorSpec,
    StoredView,
    WeightSlice,
    mapping,
)
from modelexport.system.dtypes import FLOATS

__all__ = [
    "FLOATS",
    "QUANTIZATION_KEYS",
    "Method",
    "QuantizationConfig",
    "ReadOnlyNumbers",
    "Scheme",
    "StoredTensorSpec",
    "WeightSlice",
    "extras",
    "holding_cache",
    "methods",
    "of_format",
    "of_method",
    "read_only_numbers",
    "read_quantization_config",
    "refusal",
    "tensor_specs",
    "views",
]

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""The keys of config.json that may say how a model is quantised."""


@cache
def methods() -> dict[str, Method]:
    """Every method by its ``quant_method``, in the order of their names."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name.startswith("_"):  # helpers, which may want torch
            continue
        loaded = importlib.import_module(f"{__name__}.{module.name}")
        for method in getattr(loaded, "METHODS", (loaded,) if hasattr(loaded, "METHOD") else ()):
            found[method.METHOD] = cast(Method, method)
    return dict(sorted(found.items()))


def of_method(name: str) -> Method:
    """The method of that ``quant_method``.

    Raises:
        PlanError: there is none; the message has those that are known.
    """
    if name not in methods():
        raise PlanError(f"quant_method '{shown(name)}' is not known{nearest(name, methods())}")
    return methods()[name]


def of_format(name: str) -> Method | None:
    """The method that a ``--format`` is named after, None where that is no method."""
    return next((method for method in methods().values() if name == method.FORMAT), None)


def refusal(method: Method, number_format: NumberFormatProtocol, shape: tuple[int, int]) -> str | None:
    """Returns why a method cannot encode such a linear (``[out, in]``), and what can; None where it can."""
    if number_format.checkpoint_format in LAYOUTS and method.METHOD != "gguf":
        return (
            f"number format {number_format.name} is the blocks of llama.cpp, which GGUF files alone hold: choose "
            "--format gguf, or another number format (--quant int4, int8-wo)"
        )
    return method.refusal(number_format, shape)


def holding_cache(name: str) -> list[Method]:
    """The methods whose checkpoints have words for a KV cache of that name, in ``--format``'s order of choice."""
    found = [method for method in methods().values() if name in getattr(method, "KV_CACHES", ())]
    return sorted(found, key=lambda method: method.FORMAT != "hf")


def read_quantization_config(config: Mapping[str, Any] | None) -> QuantizationConfig | None:
    """Reads the quantization config in config.json's content; None where the model is not quantised.

    Of a method that is not known here only its name is read, and what it ignores.

    Raises:
        CheckpointError: a part of it has the wrong type, or a pattern is no regular expression.
    """
    value = next((value for key in QUANTIZATION_KEYS if (value := (config or {}).get(key))), None)
    if not value:
        return None
    value = mapping(value, "quantization_config")
    name = str(value.get("quant_method", "compressed-tensors" if "config_groups" in value else "unknown"))
    name = next((m.METHOD for m in methods().values() if name in getattr(m, "ALIASES", ())), name)
    if name in methods():
        return methods()[name].read(value)
    ignored = value.get("ignore") or value.get("exclude_modules") or value.get("modules_to_not_convert")
    listed = tuple(map(str, ignored)) if isinstance(ignored, list) else ()
    return QuantizationConfig(name, None, None, (), listed, None, "wildcard")


def tensor_specs(scheme: Scheme, shape: tuple[int, int]) -> dict[str, StoredTensorSpec]:
    """The tensors, by suffix, that a linear of that shape (``[out, in]``) has under a scheme.

    Raises:
        CheckpointError: the scheme, or the method, is not known here.
    """
    if scheme.method not in methods():
        raise CheckpointError(f"{scheme.name}: quant_method '{scheme.method}' is not known here")
    return methods()[scheme.method].tensor_specs(scheme, shape)


def extras(scheme: Scheme, shape: tuple[int, int]) -> dict[str, StoredTensorSpec]:
    """Returns the specs of tensors, by suffix, that such a linear may have besides."""
    own = getattr(methods().get(scheme.method), "extras", None)
    found: dict[str, StoredTensorSpec] = {} if own is None else own(scheme, shape)
    return found


def views(
    scheme: Scheme, stored: Mapping[str, tuple[str, tuple[int, ...]]], shape: tuple[int, int]
) -> dict[str, StoredView]:
    """Returns other looks at a linear's tensors, by suffix, in which parts of the weight can be read by themselves.

    Args:
        stored: suffix -> dtype and shape in the file.
    """
    own = getattr(methods().get(scheme.method), "views", None)
    found: dict[str, StoredView] = {} if own is None else own(scheme, stored, shape)
    return found


def read_only_numbers(scheme: Scheme) -> ReadOnlyNumbers | None:
    """The numbers of a scheme where they can only be decoded, and no number format holds them; None for others."""
    own = getattr(methods().get(scheme.method), "read_only_name", None)
    return None if own is None else ReadOnlyNumbers(own(scheme), scheme)
