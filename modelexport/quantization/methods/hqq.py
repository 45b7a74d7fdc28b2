"""hqq: integers of 1 to 8 bits and zero points that are none, found by half-quadratic optimisation. Read only.

https://github.com/mobiusml/hqq, in files as transformers and HQQ itself save them: ``HQQLinear``'s state dict, with
everything that is not a tensor encoded as one. HQQ itself leaves config.json as it was: what it says there follows from
the settings beside each linear's numbers (:data:`SETTINGS`), or in HQQ's own pickle
(:mod:`modelexport.checkpoints.formats.hqq`).

The weight (``[out, in]``, n elements) is taken as ``[n / group, group]`` (``axis`` 1) or ``[group, n / group]``
(``axis`` 0), with one ``scale`` and one ``zero`` along that axis: a value is ``(number - zero) * scale``. Bytes of
``W_q`` hold numbers from equal parts of the first dim, those of the first part in the highest bits (``4bit_u8``: rows
of the first half above those of the second); 3 bits are ten to an int32, the first dim filled up to a multiple of ten
(``3bit_32``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from modelexport.errors import CheckpointError, ValuesError, quoted, shown
from modelexport.quantization.methods._read_only import has_no_native_form, writes_nothing
from modelexport.quantization.methods.base import (
    QuantizationConfig,
    ReadOnlyNumbers,
    Scheme,
    StoredTensorSpec,
    StoredView,
    WeightSlice,
    is_size,
    mapping,
    strings,
)
from modelexport.system.dtypes import FLOATS

if TYPE_CHECKING:
    from torch import Tensor


METHOD = "hqq"
FORMAT = None
SCALES = None
KV_SCALES: Mapping[str, str] = {}
KV_SHAPE: tuple[int, ...] = ()
SIDE_FILES: tuple[str, ...] = ()
SETTINGS = ("W_q", ("nbits", "group_size", "axis", "quant_scale", "quant_zero"))

refusal, quantization_files, encode = writes_nothing(METHOD, "choose another --format")
decode = has_no_native_form
_PER_BYTE = {8: 1, 6: 1, 5: 1, 4: 2, 2: 4, 1: 8}
_PER_WORD = 10
_FLAGS = ("view_as_float", "quant_scale", "quant_zero", "offload_meta", "encoded_state_dict", "stores_quant_config")
_NUMBERS = ("nbits", "group_size", "axis", *_FLAGS, "channel_wise", "optimize", "round_zero")
_TEXTS = ("packing", "unpack_view_dtype", "compute_dtype")
_WHOLE_NUMBERS = ("U8", "I32", "I64")
_LONGEST_TEXT = 64
_LEFT_OUT_OF_TAGS = r"(?:(?:model|layers|\d+)\.)*"


def read(value: Mapping[str, Any]) -> QuantizationConfig:
    """Reads a ``quantization_config``: one setting for all linears, one for each kind of them, or for each linear.

    Raises:
        CheckpointError: a part of it has the wrong type, or is not known.
    """
    if "linears" in value:
        return _of_linears(mapping(value["linears"], "linears"))
    said = mapping(value.get("quant_config"), "quant_config")
    skipped = strings(value.get("skip_modules"), "skip_modules")
    if "weight_quant_params" in said:
        schemes = [_scheme("hqq", ["Linear"], said)]
    else:
        schemes = [
            _scheme(f"hqq of {tag}", [_pattern(tag)], mapping(own, f"quant_config of {tag}"))
            for tag, own in said.items()
            if own is not None
        ]
    kept = tuple(map(_pattern, skipped))
    return QuantizationConfig(METHOD, None, None, tuple(schemes), kept, None)


def _of_linears(linears: Mapping[str, Any]) -> QuantizationConfig:
    """The quantisation of a model whose linears have settings of their own: a scheme for all that have the same."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, said in linears.items():
        own = mapping(said, f"the settings of {name}")
        for key in SETTINGS[1]:
            if isinstance(own.get(key), (list, dict)):
                raise CheckpointError(f"{shown(name)}: {key} is {quoted(own[key])}; a number is needed")
        alike.setdefault(tuple(map(own.get, SETTINGS[1])), []).append(name)
    schemes = []
    for (bits, size, axis, scale, zero), names in alike.items():
        title = f"hqq of {shown(bits)} bits in groups of {shown(size)} along axis {shown(axis)}"
        said = {
            "weight_quant_params": {"nbits": bits, "group_size": size, "axis": axis},
            "scale_quant_params": scale,
            "zero_quant_params": zero,
        }
        try:
            schemes.append(_scheme(title, names, said))
        except CheckpointError as error:
            raise CheckpointError(f"{names[0]}: {error}") from error
    return QuantizationConfig(METHOD, None, None, tuple(schemes), (), None)


def _pattern(tag: str) -> str:
    """A pattern of the linears that a tag means: their names without ``model``, ``layers`` and numbers."""
    parts = "".join(rf"{_LEFT_OUT_OF_TAGS}{re.escape(part)}\." for part in tag.split("."))
    return f"re:{parts[:-2]}$"


def _scheme(name: str, targets: Sequence[str], said: Mapping[str, Any]) -> Scheme:
    own = mapping(said.get("weight_quant_params"), "weight_quant_params")
    if any(said.get(f"{which}_quant_params") for which in ("scale", "zero")):
        raise CheckpointError(
            "config.json: quantization_config: scales and zero points that are quantised are not known"
        )
    bits, size, axis = own.get("nbits", 4), own.get("group_size", 64), own.get("axis", 0)
    known = (*_PER_BYTE, 3)
    if isinstance(bits, bool) or bits not in known:
        numbers = ", ".join(map(str, sorted(known)))
        raise CheckpointError(f"config.json: quantization_config: nbits is {shown(bits)}; {numbers} are known")
    if size is not None and not is_size(size):
        raise CheckpointError(f"config.json: quantization_config: group_size is {shown(size)}; a number is needed")
    if isinstance(axis, bool) or axis not in (0, 1) or not own.get("channel_wise", True):
        what = f"axis {shown(axis)} and channel_wise {shown(own.get('channel_wise', True))}"
        raise CheckpointError(f"config.json: quantization_config has {what}; axis 0 or 1, channel_wise true, are known")
    weights = {
        "num_bits": int(bits),
        "type": "int",
        "symmetric": False,
        "strategy": "channel" if size is None else "group",
        "group_size": size,
        "dynamic": False,
        "axis": axis,
    }
    return Scheme(name, tuple(targets), "hqq", weights, None, None, METHOD)


def read_only_name(scheme: Scheme) -> str:
    """The name of a scheme's numbers, which no number format of ours holds."""
    return f"int{scheme.bits}-hqq"


class _Layout:
    """The arrangement of a weight's numbers.

    Attributes:
        grouped: the shape that the weight is taken as.
        packed: the shape of what holds it, in bytes or int32.
        scales: the shape of scales and zero points.
        parts: how many numbers share a byte or word.
        row_units: rows of the weight that a part has, where parts are whole rows and groups end with rows; 0 where not.
    """

    def __init__(self, scheme: Scheme, shape: tuple[int, int]) -> None:
        self.bits, self.axis = scheme.bits, scheme.weights["axis"]
        size = scheme.weights["group_size"]
        self.group: int = size or shape[self.axis] or 1
        elements = math.prod(shape)
        if elements % self.group:
            raise CheckpointError(
                f"{scheme.name}: {elements} weights of shape {list(shape)} are no multiple of groups of {self.group}"
            )
        count = elements // self.group
        self.grouped = (count, self.group) if self.axis == 1 else (self.group, count)
        self.parts = _PER_BYTE.get(self.bits, _PER_WORD)
        self.packed = (-(-self.grouped[0] // self.parts), self.grouped[1])
        self.scales = (count, 1) if self.axis == 1 else (1, count)
        across = self.group if self.axis == 0 else shape[0]  # what has to be cut evenly into parts
        ends = shape[1] % self.group == 0 if self.axis == 1 else shape[0] % self.group == 0
        self.row_units = shape[0] // self.parts if self.bits != 3 and ends and across % self.parts == 0 else 0

    @property
    def packing(self) -> str:
        """hqq's word for it."""
        return "3bit_32" if self.bits == 3 else f"{8 // self.parts}bit_u8"


def tensor_specs(scheme: Scheme, shape: tuple[int, int]) -> dict[str, StoredTensorSpec]:
    """The tensors, by suffix, that a linear of that shape (``[out, in]``) has.

    Raises:
        CheckpointError: its elements are no multiple of the group's size.
    """
    layout = _Layout(scheme, shape)
    rows, cols = layout.packed
    shapes: tuple[tuple[int, ...], ...] = ((rows, cols),)
    dtypes: tuple[str, ...] = ("I32",)
    if layout.bits != 3:  # bytes may be viewed as floats
        shapes = tuple(dict.fromkeys(((rows, cols), (rows, cols // 2), (rows, cols // 4))))
        dtypes = ("U8", "BF16", "F16", "F32")
    return {
        "W_q": StoredTensorSpec(dtypes, shapes),
        "scale": StoredTensorSpec(FLOATS, (layout.scales,)),
        "zero": StoredTensorSpec(FLOATS, (layout.scales,)),
    }


def extras(scheme: Scheme, shape: tuple[int, int]) -> dict[str, StoredTensorSpec]:
    """Returns the specs of what is stored beside them: settings, encoded as tensors."""
    return {
        "shape": StoredTensorSpec(_WHOLE_NUMBERS, ((2,),)),
        **{name: StoredTensorSpec((*_WHOLE_NUMBERS, "BOOL"), ((), (1,))) for name in _NUMBERS},
        **{name: StoredTensorSpec(("U8",), ((7,),), most=_LONGEST_TEXT) for name in _TEXTS},
    }


def views(
    scheme: Scheme, stored: Mapping[str, tuple[str, tuple[int, ...]]], shape: tuple[int, int]
) -> dict[str, StoredView]:
    """Another look at the tensors: bytes, and with the weight's columns where groups end with its rows."""
    layout = _Layout(scheme, shape)
    if not layout.row_units:
        dtype = "I32" if layout.bits == 3 else "U8"
        return {"W_q": StoredView(dtype, (1, *layout.packed), ((0, shape[0]),))}  # of all rows together
    if layout.axis == 1:
        scales: tuple[int, int] = (shape[0], shape[1] // layout.group)
        axes: tuple[tuple[int, int] | None, ...] = ((0, 1), (1, layout.group))
    else:
        scales, axes = (shape[0] // layout.group, shape[1]), (None, (1, 1))
    return {
        "W_q": StoredView("U8", (layout.row_units, shape[1]), (None, (1, 1))),
        **{name: StoredView(stored[name][0], scales, axes) for name in ("scale", "zero")},
    }


def dequantise(number_format: ReadOnlyNumbers, tensors: Mapping[str, Tensor], part: WeightSlice) -> Tensor:
    """The weight, float32 ``[out, in]``, of tensors as :func:`views` has them.

    Raises:
        CheckpointError: what is beside the numbers contradicts config.json.
    """
    import torch

    layout = _Layout(number_format.scheme, part.shape)
    _check_settings(layout, tensors, part.shape)
    packed, scale, zero = tensors["W_q"], tensors["scale"].float(), tensors["zero"].float()
    (row, col), (height, width) = part.origin, part.extent
    if not layout.row_units:
        words = packed.view(layout.packed)
        found = torch.cat([_unpacked(words, layout, number) for number in range(layout.parts)])[: layout.grouped[0]]
        return ((found - zero) * scale).reshape(part.shape)[row : row + height, col : col + width]
    found = torch.empty(height, packed.shape[1])
    for number in range(layout.parts):  # rows of this part of the weight, among those asked for
        begin = number * layout.row_units
        first, last = max(row, begin), min(row + height, begin + layout.row_units)
        if first < last:
            found[first - row : last - row] = _unpacked(packed[first - begin : last - begin], layout, number)
    if layout.axis == 1:
        grouped = found.view(height, -1, layout.group)
        return grouped.sub_(zero.unsqueeze(2)).mul_(scale.unsqueeze(2)).view(height, -1)
    rows = torch.arange(row, row + height) % scale.shape[0]
    return found.sub_(zero[rows]).mul_(scale[rows])


def _unpacked(packed: Tensor, layout: _Layout, number: int) -> Tensor:
    """The numbers, float32, of one of the parts that share bytes or words."""
    if layout.bits == 3:
        return ((packed >> (27 - 3 * number)) & 7).float()
    bits = 8 // layout.parts
    return ((packed >> (8 - bits * (number + 1))) & ((1 << bits) - 1)).float()


def _check_settings(layout: _Layout, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> None:
    """Compares the settings beside the numbers with config.json's.

    Raises:
        CheckpointError: they differ.
    """
    for name, wanted in _wanted(layout, shape):
        if name in tensors:
            tensor = tensors[name]
            found: Any = bytes(tensor.tolist()).decode("latin-1") if name == "packing" else tensor.tolist()
            found = found[0] if found != wanted and tensor.shape == (1,) else found
            if found != wanted:
                raise ValuesError(f"{name} is {shown(found)}, but config.json makes it {shown(wanted)}")


def _wanted(layout: _Layout, shape: tuple[int, int]) -> Iterator[tuple[str, Any]]:
    yield from (("shape", list(shape)), ("nbits", layout.bits), ("axis", layout.axis), ("group_size", layout.group))
    yield from (("packing", layout.packing), ("quant_scale", 0), ("quant_zero", 0))
