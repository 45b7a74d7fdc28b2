"""bitsandbytes: 4-bit numbers of a code book (NF4, FP4), and LLM.int8(). Read only.

https://github.com/bitsandbytes-foundation/bitsandbytes, in files as transformers saves them.

4 bits (QLoRA, Dettmers et al., 2023): ``weight`` holds the whole weight row by row, two numbers to a byte, the first in
the high bits, in a single column of bytes or of wider words (``bnb_4bit_quant_storage``). A number is an index into
``weight.quant_map``, float32 ``[16]``; every block of the flat weight is multiplied by its ``weight.absmax``, float32.
Quantised twice, ``absmax`` is uint8, an index into ``weight.nested_quant_map`` (``[256]``), times the
``weight.nested_absmax`` of its own block, plus an offset. Sizes of blocks, the offset and the shape are JSON in the
bytes of ``weight.quant_state.bitsandbytes__nf4`` (or ``__fp4``).

8 bits (LLM.int8(), Dettmers et al., 2022): ``weight`` int8 ``[out, in]``, ``SCB`` float32 ``[out]``, the largest
magnitude of each row: 127 stands for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelexport.errors import CheckpointError, ValuesError, shown
from modelexport.quantization.methods._arguments import numbers as arguments
from modelexport.quantization.methods._arguments import with_modules_below
from modelexport.quantization.methods._read_only import has_no_native_form, writes_nothing
from modelexport.quantization.methods.base import (
    AS_WEIGHT,
    QuantizationConfig,
    ReadOnlyNumbers,
    Scheme,
    StoredTensorSpec,
    StoredView,
    WeightSlice,
    is_size,
    strings,
)

if TYPE_CHECKING:
    from torch import Tensor


METHOD = "bitsandbytes"
FORMAT = None
SCALES = "F32"
KV_SCALES: Mapping[str, str] = {}
KV_SHAPE: tuple[int, ...] = ()
SIDE_FILES: tuple[str, ...] = ()

refusal, quantization_files, encode = writes_nothing(METHOD, "choose another --format")
decode = has_no_native_form
_KINDS = ("nf4", "fp4")
_WORDS = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4}
_BLOCKS = (64, 32, 128, 256, 512, 1024, 2048, 4096)  # the first is what is written unless asked otherwise
_LONGEST_STATE = 4096
_ROW_FORMAT = 0
_PER_127 = 7.874015718698502e-3  # the float32 that its kernels multiply by in place of dividing by 127


def read(value: Mapping[str, Any]) -> QuantizationConfig:
    """Reads a ``quantization_config``.

    Raises:
        CheckpointError: it says neither 4 nor 8 bits, or another code book than nf4 and fp4; or the list of kept
            modules has the wrong type.
    """
    four, eight = (any(value.get(f"{mark}load_in_{bits}bit") for mark in ("", "_")) for bits in (4, 8))
    listed = value.get("llm_int8_skip_modules")
    kept = ("lm_head",) if listed is None else strings(listed, "llm_int8_skip_modules")  # an empty list keeps nothing
    if four == eight:
        said = (
            "both load_in_4bit and load_in_8bit are true" if four else "neither load_in_4bit nor load_in_8bit is true"
        )
        raise CheckpointError(f"config.json: quantization_config: {said}; one of them is needed")
    if eight:
        weights = arguments("int", 8, "channel")
        scheme = Scheme("int8-bnb", ("Linear",), "llm_int8", weights, None, None, METHOD)
    else:
        kind = value.get("bnb_4bit_quant_type", "fp4")
        if kind not in _KINDS:
            raise CheckpointError(
                f"config.json: quantization_config: bnb_4bit_quant_type is {shown(kind)}; {' and '.join(_KINDS)} "
                "are known"
            )
        nested = bool(value.get("bnb_4bit_use_double_quant"))
        weights = arguments(kind[:2], 4, "group", group_size=_BLOCKS[0])
        scheme = Scheme(kind, ("Linear",), "nested" if nested else "plain", weights, None, None, METHOD)
    return QuantizationConfig(METHOD, scheme.format, None, (scheme,), with_modules_below(kept), None)


def read_only_name(scheme: Scheme) -> str:
    """The name of a scheme's numbers, which no number format of ours holds."""
    return scheme.name


def tensor_specs(scheme: Scheme, shape: tuple[int, int]) -> dict[str, StoredTensorSpec]:
    """The tensors, by suffix, that a linear of that shape (``[out, in]``) has."""
    if scheme.format == "llm_int8":
        return {
            "weight": StoredTensorSpec(("I8",), (shape,), AS_WEIGHT),
            "SCB": StoredTensorSpec(("F32",), ((shape[0],),), ((0, 1),)),
        }
    size = math.prod(shape)
    words = dict.fromkeys(-(-size // (2 * width)) for width in _WORDS.values())
    counts = dict.fromkeys(-(-size // block) for block in _BLOCKS)
    nested = scheme.format == "nested"
    found = {
        "weight": StoredTensorSpec(tuple(_WORDS), tuple(s for n in words for s in ((n, 1), (1, n)))),
        "weight.absmax": StoredTensorSpec(("U8" if nested else "F32",), tuple((n,) for n in counts)),
        "weight.quant_map": StoredTensorSpec(("F32",), ((16,),)),
        f"weight.quant_state.bitsandbytes__{scheme.name}": StoredTensorSpec(("U8",), ((256,),), most=_LONGEST_STATE),
    }
    if nested:
        inner = dict.fromkeys(-(-n // block) for block in (256, *_BLOCKS) for n in counts)
        found["weight.nested_absmax"] = StoredTensorSpec(("F32",), tuple((n,) for n in inner))
        found["weight.nested_quant_map"] = StoredTensorSpec(("F32",), ((256,),))
    return found


def extras(scheme: Scheme, shape: tuple[int, int]) -> dict[str, StoredTensorSpec]:
    """Returns the spec of the word that newer versions write beside int8 weights: the order of their bytes."""
    return {"weight_format": StoredTensorSpec(("U8",), ((), (1,)))} if scheme.format == "llm_int8" else {}


def views(
    scheme: Scheme, stored: Mapping[str, tuple[str, tuple[int, ...]]], shape: tuple[int, int]
) -> dict[str, StoredView]:
    """Another look at the flat tensors: bytes, and in rows of the weight where no block reaches over a row's end."""
    if scheme.format == "llm_int8":
        return {}
    dtype, words = stored["weight"]
    nbytes, count = math.prod(words) * _WORDS[dtype], math.prod(stored["weight.absmax"][1])
    size = math.prod(shape)
    block = size // count if count and size % count == 0 else 0
    if not block or block & (block - 1) or shape[1] % block or 2 * nbytes != size:
        return {"weight": StoredView("U8", (1, nbytes), ((0, shape[0]),))}  # of all rows together
    return {
        "weight": StoredView("U8", (shape[0], shape[1] // 2), ((0, 1), (1, 2))),
        "weight.absmax": StoredView(stored["weight.absmax"][0], (shape[0], shape[1] // block), ((0, 1), (1, block))),
    }


def dequantise(number_format: ReadOnlyNumbers, tensors: Mapping[str, Tensor], part: WeightSlice) -> Tensor:
    """The weight, float32 ``[out, in]``, of tensors as :func:`views` has them.

    Raises:
        CheckpointError: what is beside the numbers contradicts them.
    """
    if number_format.scheme.format == "llm_int8":
        return _of_int8(tensors)
    state, absmax, weight = _State(tensors, number_format.name, part.shape), tensors["weight.absmax"], tensors["weight"]
    begin, by_rows = 0, absmax.dim() == 2
    if by_rows:
        begin = part.origin[0] * (part.shape[1] // state.block) + part.origin[1] // state.block
    scales = absmax if absmax.is_floating_point() else state.absmax(absmax, tensors, begin, part.shape[1])
    pairs = tensors["weight.quant_map"][_indices()]
    found = pairs.index_select(0, weight.flatten().int())
    if by_rows:  # whole blocks of rows
        blocks = found.view(weight.shape[0], -1, state.block)
        return blocks.mul_(scales.unsqueeze(2)).view(weight.shape[0], -1)
    rows, cols = part.shape
    flat = found.flatten()[: rows * cols]
    flat *= scales.repeat_interleave(state.block)[: rows * cols]
    (row, col), (height, width) = part.origin, part.extent
    return flat.view(rows, cols)[row : row + height, col : col + width]


def _indices() -> Tensor:
    """The two indices in each byte, int64 ``[256, 2]``."""
    import torch

    byte = torch.arange(256)
    return torch.stack((byte >> 4, byte & 15), dim=1)


class _State:
    """The JSON beside a weight of 4 bits.

    Attributes:
        block: weights that share a number of ``absmax``.
    """

    def __init__(self, tensors: Mapping[str, Tensor], kind: str, shape: tuple[int, int]) -> None:
        """Reads and checks it.

        Raises:
            CheckpointError: it is no JSON object, or contradicts config.json or the tensors.
        """
        suffix = f"weight.quant_state.bitsandbytes__{kind}"
        try:
            said = json.loads(bytes(tensors[suffix].tolist()).rstrip(b"\0 "))
        except (ValueError, RecursionError) as error:
            raise ValuesError(f"{suffix} is no JSON") from error
        if not isinstance(said, dict):
            raise ValuesError(f"{suffix} is no JSON object")
        self._said, self._suffix = said, suffix
        self.block = self._size("blocksize")
        for key, wanted in (("shape", list(shape)), ("quant_type", kind)):
            if said.get(key, wanted) != wanted:
                raise ValuesError(f"{suffix} says {key} {shown(said[key])}, but config.json makes it {wanted}")
        absmax = tensors["weight.absmax"]
        if absmax.dim() == 1:  # all of it
            self._check_count("weight.absmax", absmax.numel(), math.prod(shape), self.block)
        elif tensors["weight"].numel() * 2 != absmax.numel() * self.block:
            per = tensors["weight"].numel() * 2 // max(1, absmax.numel())
            raise ValuesError(f"{suffix} says blocksize {self.block}, but weight.absmax has a number for each {per}")

    def _size(self, key: str) -> int:
        size = self._said.get(key)
        if not is_size(size):
            raise ValuesError(f"{self._suffix} says {key} {shown(size)}; a number of elements is needed")
        return size

    def _check_count(self, name: str, found: int, size: int, block: int) -> None:
        if found != -(-size // block):
            raise ValuesError(
                f"{name} has {found} numbers, but {size} elements in blocks of {block} need {-(-size // block)}"
            )

    def absmax(self, indices: Tensor, tensors: Mapping[str, Tensor], begin: int, cols: int) -> Tensor:
        """The scales of blocks, float32 of the shape of ``indices``.

        Args:
            begin: number of the first of them among all of the weight's.
            cols: of the whole weight.

        Raises:
            CheckpointError: what is said of their blocks is none, or contradicts the tensors.
        """
        import torch

        block, offset = self._size("nested_blocksize"), self._said.get("nested_offset")
        if not isinstance(offset, (int, float)) or isinstance(offset, bool) or not math.isfinite(offset):
            raise ValuesError(f"{self._suffix} says nested_offset {shown(offset)}; a number is needed")
        nested = tensors["weight.nested_absmax"]
        if indices.dim() == 1:
            self._check_count("weight.nested_absmax", nested.numel(), indices.numel(), block)
            places = torch.arange(indices.numel())
        else:
            rows, columns = (torch.arange(size) for size in indices.shape)
            places = begin + rows.unsqueeze(1) * (cols // self.block) + columns
        if places.numel() and int(places.max()) // block >= nested.numel():
            raise ValuesError(f"weight.nested_absmax has {nested.numel()} numbers: too few for blocks of {block}")
        return tensors["weight.nested_quant_map"][indices.long()] * nested[places // block] + offset


def _of_int8(tensors: Mapping[str, Tensor]) -> Tensor:
    order = tensors.get("weight_format")
    if order is not None and int(order) != _ROW_FORMAT:
        raise ValuesError(
            f"weight_format is {int(order)}, the order of a GPU's tiles; {_ROW_FORMAT}, rows, is needed: save the "
            "model again with a newer bitsandbytes"
        )
    found: Tensor = tensors["weight"].float() * tensors["SCB"].unsqueeze(1) * _PER_127
    return found
