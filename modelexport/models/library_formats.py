"""Checkpoints quantised by libraries that load them by code of their own: bitsandbytes, HQQ. Their weights are decoded.

No engine's rules tell such tensors: blocks run over a weight row after row, whatever its shape. So weights alone are
read, as in :mod:`modelexport.models.decoded`: each is computed from the blocks that its rows lie in.

- bitsandbytes of 4 bits (``QuantState.as_dict`` of https://github.com/bitsandbytes-foundation/bitsandbytes):
  ``weight`` has two codes to a byte, the first one in the upper half, ``quant_map`` the value of each code, ``absmax``
  the factor of each block. With double quantisation that is a code itself: its value in ``nested_quant_map``, times
  ``nested_absmax``, plus an offset. The numbers are in ``quant_state.bitsandbytes__nf4`` (``__fp4``), as JSON.
- bitsandbytes of 8 bits: ``weight`` int8, ``SCB`` the largest magnitude of each row, which stands for 127.
- HQQ (https://github.com/dropbox/hqq): ``W_q`` has groups of a weight one below the other, of which the first ones have
  the upper bits of each byte; ``(W_q - zero) * scale`` for each group.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport.checkpoints.safetensors.file import Checkpoint, Reader, TensorInfo, tensor_nbytes, torch_dtype
from modelexport.errors import CheckpointError, shown
from modelexport.quantization.methods import QUANTIZATION_KEYS
from modelexport.sharding.plan import Range
from modelexport.system.dtypes import FLOATS, find_dtype

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BlockwiseWeight", "is_of_a_library", "plain"]

_STATE = "weight.quant_state.bitsandbytes__"
_HQQ = ("W_q", "scale", "zero")
_LARGEST_STATE = 1 << 16
_TILE = 1 << 20
"""Elements that are decoded together."""


@dataclass(frozen=True)
class BlockwiseWeight:
    """A weight whose blocks run over it row after row.

    Attributes:
        name: of its numbers: ``nf4``, ``fp4``, ``int8``, ``hqq``.
        weight: the weight, which lies nowhere.
        parts: what it is computed from.
        block: elements of a block.
        offset: of nested factors.
        nested: factors that share one of theirs.
        bits: of a code, of HQQ's.
    """

    name: str
    weight: TensorInfo
    parts: Mapping[str, TensorInfo]
    block: int = 1
    offset: float = 0.0
    nested: int = 0
    bits: int = 4

    @property
    def sources(self) -> Collection[TensorInfo]:
        """The tensors that hold it."""
        return self.parts.values()

    @cached_property
    def _size(self) -> int:
        return math.prod(self.weight.shape)

    def read(self, reader: Reader, rows: Range, cols: Range, out: Tensor | None = None) -> Tensor:
        """Rows and columns of the weight, decoded in float32 and rounded to its dtype.

        Raises:
            CheckpointError: a file cannot be read, or its values mean nothing.
        """
        import torch

        if out is None:
            out = torch.empty(rows[1] - rows[0], cols[1] - cols[0], dtype=torch_dtype(self.weight.dtype))
        step = max(1, _TILE // max(1, self.weight.shape[1]))
        for start in range(rows[0], rows[1], step):
            tile = (start, min(start + step, rows[1]))
            out[tile[0] - rows[0] : tile[1] - rows[0]] = self._rows(reader, tile)[:, cols[0] : cols[1]]
        if not bool(torch.isfinite(out).all()):
            raise CheckpointError(f"{self.weight.name}: its scales hold NaN or Inf")
        return out

    def _rows(self, reader: Reader, rows: Range) -> Tensor:
        """Whole rows in float32."""
        if self.name == "int8":
            codes = reader.read_stored(self.parts["weight"], rows=rows).float()
            return codes * reader.read_stored(self.parts["SCB"], rows=rows).float()[:, None] * (1 / 127)
        width = self.weight.shape[1]
        start, stop = rows[0] * width, rows[1] * width
        first, last = start // self.block, -(-stop // self.block)
        decode = self._hqq if self.name == "hqq" else self._coded
        values = decode(reader, first, last).flatten()[start - first * self.block : stop - first * self.block]
        return values.view(rows[1] - rows[0], width)

    def _coded(self, reader: Reader, first: int, last: int) -> Tensor:
        """Blocks ``first`` to ``last`` of bitsandbytes' 4 bits, ``[blocks, block]`` in float32."""
        import torch

        span = (first * self.block // 2, min(last * self.block, self._size) // 2)
        packed = reader.read_stored(self.parts["weight"], rows=span).flatten().long()
        codes = torch.stack([packed >> 4, packed & 15], dim=1).flatten()
        codes = torch.nn.functional.pad(codes, (0, (last - first) * self.block - codes.numel()))
        factors = reader.read_stored(self.parts["weight.absmax"], rows=(first, last))
        if "weight.nested_absmax" in self.parts:
            values = reader.read_stored(self.parts["weight.nested_quant_map"]).float()
            around = (first // self.nested, -(-last // self.nested))
            outer = reader.read_stored(self.parts["weight.nested_absmax"], rows=around).float()
            which = torch.arange(first, last) // self.nested - around[0]
            factors = values[factors.long()] * outer[which] + self.offset
        table = reader.read_stored(self.parts["weight.quant_map"]).float()
        return table[codes].view(-1, self.block) * factors.float()[:, None]

    def _hqq(self, reader: Reader, first: int, last: int) -> Tensor:
        """Groups ``first`` to ``last`` of HQQ's, ``[groups, group]`` in float32."""
        import torch

        groups, per_byte = self._size // self.block, 8 // self.bits
        step, found = groups // per_byte, []
        for part in range(per_byte):  # the first groups have the upper bits
            begin, end = max(first, part * step), min(last, (part + 1) * step)
            if begin < end:
                packed = reader.read_stored(self.parts["W_q"], rows=(begin - part * step, end - part * step))
                found.append((packed >> (8 - self.bits * (part + 1))) & ((1 << self.bits) - 1))
        codes = torch.cat(found).float().view(-1, self.block)
        zero, scale = (reader.read_stored(self.parts[name], rows=(first, last)).float() for name in ("zero", "scale"))
        return (codes - zero.view(-1, 1)) * scale.view(-1, 1)


def is_of_a_library(config: Mapping[str, Any] | None) -> bool:
    """Returns whether config.json's quantization config is that of a library whose weights :func:`plain` decodes."""
    return _library(config) in _LIBRARIES


def _library(config: Mapping[str, Any] | None) -> object:
    said = next((value for key in QUANTIZATION_KEYS if (value := (config or {}).get(key))), None)
    return said.get("quant_method") if isinstance(said, Mapping) else None


def plain(checkpoint: Checkpoint) -> Checkpoint:
    """The plain model that such a checkpoint stands for.

    Raises:
        CheckpointError: tensors are missing, contradict each other or are laid out in a way that is not known;
            everything that is wrong.
    """
    config = checkpoint.config or {}
    dtype = find_dtype(str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch."))
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in checkpoint.infos.items():
        module, _, suffix = _split(name)
        modules.setdefault(module, {})[suffix] = info
    infos, computed, problems = dict(checkpoint.infos), dict(checkpoint.computed), []
    read = _LIBRARIES[str(_library(config))]
    with Reader(checkpoint) as reader:
        for module, tensors in modules.items():
            try:
                weight = read(reader, f"{module}.weight", tensors, dtype if dtype in FLOATS else "F16")
            except CheckpointError as error:
                problems.append(str(error))
                continue
            if weight is not None:
                for suffix, info in tensors.items():
                    if suffix != "bias":
                        del infos[info.name]
                infos[weight.weight.name] = weight.weight
                computed[weight.weight.name] = weight
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise CheckpointError(f"{checkpoint.directory}: {'; '.join(problems[:4])}{more}")
    rest = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    return replace(checkpoint, infos=infos, computed=computed, config=rest)


def _split(name: str) -> tuple[str, str, str]:
    """A module, and the name of its tensor, of which bitsandbytes' have dots."""
    module, dot, inside = name.partition(".weight.")
    return (module, dot, f"weight.{inside}") if dot else name.rpartition(".")


def _bitsandbytes(reader: Reader, name: str, tensors: Mapping[str, TensorInfo], dtype: str) -> BlockwiseWeight | None:
    """A weight of bitsandbytes'; None: it is not quantised."""
    if "SCB" in tensors:
        parts = {suffix: tensors[suffix] for suffix in ("weight", "SCB") if suffix in tensors}
        if [info.dtype for info in parts.values()] != ["I8", "F32"] or parts["SCB"].shape != parts["weight"].shape[:1]:
            raise CheckpointError(f"{name}: int8 of bitsandbytes is weight int8 [out, in] with SCB float32 [out]")
        return BlockwiseWeight("int8", _weight(name, dtype, parts["weight"].shape), parts)
    state = next((suffix for suffix in tensors if suffix.startswith(_STATE)), None)
    if state is None:
        return None
    said = _state(reader, tensors[state])
    shape, block, nested = _sizes(said, tensors[state].name)
    blocks = -(-math.prod(shape) // block)
    wanted = {"weight": (math.prod(shape) + 1) // 2, "weight.absmax": blocks, "weight.quant_map": 16}
    if nested:
        wanted |= {"weight.nested_absmax": -(-blocks // nested), "weight.nested_quant_map": 256}
    _check(name, tensors, wanted)
    kept = find_dtype(str(said.get("dtype")))
    weight = _weight(name, kept if kept in FLOATS else dtype, shape)
    parts = {suffix: tensors[suffix] for suffix in wanted}
    return BlockwiseWeight(
        state.removeprefix(_STATE), weight, parts, block, float(said.get("nested_offset") or 0), nested
    )


def _sizes(said: Mapping[str, Any], where: str) -> tuple[tuple[int, int], int, int]:
    """A weight's shape, the elements of a block, and the factors that share one of theirs, 0 for none.

    Raises:
        CheckpointError: they are no such numbers.
    """
    shape, block, nested = said.get("shape"), said.get("blocksize"), said.get("nested_blocksize", 0)
    sizes: list[Any] = [*shape, block] if isinstance(shape, list) and len(shape) == 2 else [None]
    whole = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)
    if not whole or sizes[-1] % 2 or not isinstance(nested, int) or nested < 0:
        raise CheckpointError(f"{where} says shape {shown(shape)}, blocksize {shown(block)}, {shown(nested)}")
    return (sizes[0], sizes[1]), sizes[2], nested


def _state(reader: Reader, info: TensorInfo) -> dict[str, Any]:
    """The numbers of a quantised weight, which bitsandbytes writes as text."""
    if info.dtype != "U8" or info.nbytes > _LARGEST_STATE:
        raise CheckpointError(f"{info.name} is {info.dtype} of {info.nbytes} bytes: no text")
    try:
        said = json.loads(bytes(reader.read_stored(info).flatten().tolist()))
    except ValueError as error:
        raise CheckpointError(f"{info.name} is no JSON: {error}") from None
    if not isinstance(said, dict):
        raise CheckpointError(f"{info.name} is no JSON object")
    return said


def _hqq(reader: Reader, name: str, tensors: Mapping[str, TensorInfo], dtype: str) -> BlockwiseWeight | None:
    """A weight of HQQ's; None: it is not quantised."""
    if "W_q" not in tensors:
        return None
    numbers = {}
    for key in ("nbits", "group_size", "axis", "shape"):
        if key not in tensors:
            raise CheckpointError(f"{name.removesuffix('.weight')} has W_q, and no {key}")
        numbers[key] = [int(value) for value in reader.read_stored(tensors[key]).flatten().tolist()]
    shape = tuple(numbers["shape"])
    bits, group, axis = (numbers[key][0] if numbers[key] else 0 for key in ("nbits", "group_size", "axis"))
    if bits not in (1, 2, 4, 8) or axis != 1 or len(shape) != 2 or group < 1 or math.prod(shape) % group:
        raise CheckpointError(
            f"{name}: HQQ of {bits} bits, axis {axis}, groups of {group}, shape {list(shape)}; 1, 2, 4 and 8 bits "
            "along axis 1 are read"
        )
    groups = math.prod(shape) // group
    _check(name, tensors, {"W_q": math.prod(shape) * bits // 8, "scale": groups, "zero": groups})
    if groups % (8 // bits):
        raise CheckpointError(f"{name}: {groups} groups do not fill bytes of {bits}-bit codes")
    kept = tensors["scale"].dtype
    weight = _weight(name, kept if kept in FLOATS else dtype, (shape[0], shape[1]))
    rows = replace(tensors["W_q"], shape=(groups * bits // 8, group))
    if tensors["W_q"].shape != rows.shape:
        raise CheckpointError(f"{name}: W_q is {list(tensors['W_q'].shape)}, not {list(rows.shape)}")
    parts = {suffix: tensors[suffix] for suffix in _HQQ}
    return BlockwiseWeight("hqq", weight, parts, group, bits=bits)


def _weight(name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(name, dtype, shape, Path(), 0, tensor_nbytes(dtype, shape))


def _check(name: str, tensors: Mapping[str, TensorInfo], wanted: Mapping[str, int]) -> None:
    """Refuse a weight that lacks tensors, or whose tensors have another number of elements.

    Raises:
        CheckpointError: it does.
    """
    for suffix, size in wanted.items():
        found = tensors.get(suffix)
        if found is None:
            raise CheckpointError(f"{name.removesuffix('weight')}{suffix} is missing")
        if math.prod(found.shape) != size:
            raise CheckpointError(f"{found.name} has {math.prod(found.shape)} elements; {size} are needed")


_LIBRARIES = {"bitsandbytes": _bitsandbytes, "hqq": _hqq}
