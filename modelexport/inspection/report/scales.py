"""Distribution of a checkpoint's quantisation scales, read in pieces and counted in bins.

A bin is an eighth of the way from one power of two to the next, taken from the bits of the float32, so that the counts
are exact and the same on every machine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from modelexport.checkpoints.safetensors.file import Checkpoint, Reader, TensorInfo
from modelexport.models.modules import StoredModule
from modelexport.quantization.ggml_layouts import LAYOUTS

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINS_PER_OCTAVE", "ScaleCounts", "bin_edge", "count_scales"]

BINS_PER_OCTAVE = 8
MOST_SCALES = 1 << 25
"""Scales that are read of a checkpoint, about; of larger ones, an even part."""
_PIECE = 1 << 20
"""Elements in memory at a time."""
_MOST_TENSORS = 4096
"""Tensors of one kind that are read."""
_SMALL = 1 << 16
"""Scales of a tensor that is read as a whole, or not at all."""
_SLABS = 8
"""Places of a tensor from which a part of it is read."""
_SHIFT = 20  # leaves of a positive float32 the exponent and three bits of the fraction
_FLOATS = ("F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2")
_EXPONENTS = ("U8", "F8_E8M0")
_DIVISORS = ("weight_global_scale",)  # compressed-tensors: the scale of the scales, which divides them
_FACTORS = ("weight_scale_2", "weights_scaling_factor_2")  # modelopt, TensorRT-LLM: multiplies them
_GGUF_EXPONENT_BLOCK = 17  # bytes of an MXFP4 block of GGUF
_GGUF_LOCAL_BLOCK, _GGUF_LOCALS = 36, 4  # bytes of one of NVFP4, and its e4m3 scales, with which it begins
_GGUF_SCALES = {layout.nbytes: layout.d for layout in LAYOUTS.values()}
"""Bytes of a block of another type -> where in it its float16 scale begins."""


@dataclass
class ScaleCounts:
    """The scales of the linears of one kind.

    Attributes:
        name, number_format: of the linears.
        total, seen: how many scales there are, and how many were looked at.
        unusable: of those seen, how many are zero, negative zero, NaN or Inf.
        counts: bin -> number of scales in it. Bin ``b`` is from :func:`bin_edge` of ``b`` to that of ``b + 1``.
        least, most: of those counted; NaN where none were.
        powers: True if they are stored as powers of two.
    """

    name: str
    number_format: str
    total: int = 0
    seen: int = 0
    unusable: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    least: float = math.nan
    most: float = math.nan
    powers: bool = False

    @property
    def median(self) -> float:
        """Of those counted, to within a bin; NaN where none were."""
        half, before = sum(self.counts.values()) / 2, 0
        for number in sorted(self.counts):
            before += self.counts[number]
            if before >= half:
                middle = bin_edge(number) if self.powers else math.sqrt(bin_edge(number) * bin_edge(number + 1))
                return min(max(middle, self.least), self.most)
        return math.nan

    def add(self, values: Tensor) -> None:
        """Counts the magnitudes of these scales, float32 of any shape."""
        import torch

        magnitudes = values.reshape(-1).abs()
        self.seen += magnitudes.numel()
        good = magnitudes[torch.isfinite(magnitudes) & (magnitudes > 0)]
        self.unusable += magnitudes.numel() - good.numel()
        if not good.numel():
            return
        binned = torch.bincount(good.view(torch.int32) >> _SHIFT, minlength=1)
        for number in binned.nonzero().flatten().tolist():
            self.counts[number] = self.counts.get(number, 0) + int(binned[number])
        least, most = (float(value) for value in good.aminmax())
        self.least = least if math.isnan(self.least) else min(self.least, least)
        self.most = most if math.isnan(self.most) else max(self.most, most)


def bin_edge(number: int) -> float:
    """Returns the least scale of a bin."""
    octave, part = divmod(number, BINS_PER_OCTAVE)
    return math.ldexp(1 + part / BINS_PER_OCTAVE, octave - 127) if octave else math.ldexp(part, -129)


def count_scales(
    checkpoint: Checkpoint, kinds: Mapping[str, Sequence[StoredModule]], *, most: int = MOST_SCALES
) -> tuple[list[ScaleCounts], list[str]]:
    """Counts the scales of each kind of linear.

    Args:
        kinds: a name -> the modules that are taken together; those without scales are skipped.
        most: how many scales are read at most, about.

    Returns:
        One for each name and number format, and what could not be read, in words.

    Raises:
        CheckpointError: a file ends early or cannot be read.
    """
    found: dict[tuple[str, str], ScaleCounts] = {}
    unread: Counter[str] = Counter()
    with Reader(checkpoint) as reader:
        for name, modules in kinds.items():
            listed = list(_scaled(modules))
            every, share = _spread([_scales_in(module, info) for module, info in listed], most // max(1, len(kinds)))
            for number, (module, info) in enumerate(listed):
                number_format = module.stored.number_format
                if not _is_readable(module, info):
                    unread[f"{number_format}: scales stored as {info.dtype}"] += 1
                    continue
                counts = found.setdefault((name, number_format), ScaleCounts(name, number_format))
                counts.total += _scales_in(module, info)
                if number % every == 0:
                    _count(reader, module, info, counts, share)
    notes = [f"{what} are not read here ({count} tensors)" for what, count in unread.items()]
    return list(found.values()), notes


def _scaled(modules: Sequence[StoredModule]) -> Iterator[tuple[StoredModule, TensorInfo]]:
    """Yields modules that have scales, each with the tensor that holds them."""
    for module in modules:
        suffix = "weight" if _in_blocks(module) else module.stored.scale
        info = module.tensors.get(suffix)
        if module.stored.quantised and info is not None:
            yield module, info


def _in_blocks(module: StoredModule) -> bool:
    """Returns True if the scales stand within the weight, as GGUF has them: ``[rows, blocks, bytes]``, perhaps with a
    dim of 1 behind."""
    info = module.tensors.get("weight")
    return not module.stored.scale and info is not None and info.dtype == "U8" and len(info.shape) in (3, 4)


def _scales_in(module: StoredModule, info: TensorInfo) -> int:
    if not _in_blocks(module):
        return math.prod(info.shape)
    return math.prod(info.shape[:2]) * (_GGUF_LOCALS if info.shape[2] == _GGUF_LOCAL_BLOCK else 1)


def _spread(sizes: Sequence[int], most: int) -> tuple[int, int]:
    """Returns the stride over tensors of these sizes, and the scales to read of each, for about ``most`` in all."""
    total, count = sum(sizes), max(1, len(sizes))
    every = math.ceil(count / _MOST_TENSORS)
    if total <= every * most:
        return every, total
    if total <= count * _SMALL:  # many small tensors: fewer of them, rather than a little of each
        return math.ceil(total / most), total
    return every, max(1, most * every // count)


def _is_readable(module: StoredModule, info: TensorInfo) -> bool:
    if _in_blocks(module):
        return True
    # bitsandbytes' absmax may be quantised itself.
    return info.dtype in _FLOATS or (info.dtype in _EXPONENTS and module.stored.scale != "weight.absmax")


def _count(reader: Reader, module: StoredModule, info: TensorInfo, counts: ScaleCounts, most: int) -> None:
    """Counts one tensor's scales, or about ``most`` of them."""
    import torch

    blocks = _in_blocks(module)
    if blocks:
        counts.powers = info.shape[2] == _GGUF_EXPONENT_BLOCK
    else:
        counts.powers = info.dtype in _EXPONENTS
    factor = _factor(reader, module)
    for rows in _row_spans(info, blocks, most):
        values = reader.read(info, rows=rows)
        if blocks and info.shape[2] == _GGUF_LOCAL_BLOCK:
            values = values[..., :_GGUF_LOCALS].contiguous().view(torch.float8_e4m3fn)
        elif blocks:
            at = 0 if counts.powers else _GGUF_SCALES[info.shape[2]]
            held = values.flatten(2)[..., at : at + (1 if counts.powers else 2)].contiguous()
            values = held if counts.powers else held.view(torch.float16)
        if counts.powers:
            values = _powers(values.view(torch.uint8))
        counts.add(values.to(torch.float32) * factor)


def _powers(stored: Tensor) -> Tensor:
    """Decodes exponents to float32: 2 to the power of the byte - 127; 255 is NaN."""
    import torch

    numbers = stored.to(torch.int32)
    values = torch.where(numbers > 0, numbers << 23, 1 << 22).view(torch.float32)
    return torch.where(numbers == 255, torch.nan, values)


def _factor(reader: Reader, module: StoredModule) -> float:
    """Returns the factor of the stored scales; 1 where they have no scale of their own."""
    beside_blocks = ("scale",) if _in_blocks(module) else ()
    for names, power in (((*_FACTORS, *beside_blocks), 1), (_DIVISORS, -1)):
        for name in names:
            info = module.tensors.get(name)
            if info is not None and info.dtype in _FLOATS and math.prod(info.shape) == 1:
                value = float(reader.read(info).reshape(()))
                return value**power if value else math.nan
    return 1.0


def _row_spans(info: TensorInfo, blocks: bool, most: int) -> Iterator[tuple[int, int] | None]:
    """Yields rows to read at a time: all of them, or as many as hold ``most`` scales, spread evenly."""
    if not info.shape:
        yield None
        return
    rows, elements = info.shape[0], math.prod(info.shape)
    if not elements:
        return
    scales = elements // info.shape[2] if blocks else elements
    wanted = rows if scales <= most else min(rows, max(1, most * rows // scales))
    slabs = 1 if wanted == rows else min(_SLABS, wanted)
    step = max(1, _PIECE * rows // elements)
    for slab in range(slabs):
        before, end = (wanted * part // slabs for part in (slab, slab + 1))
        skipped = (rows - wanted) * slab // max(1, slabs - 1)  # so that the last slab ends where the tensor does
        begin, end = before + skipped, end + skipped
        for start in range(begin, end, step):
            yield start, min(start + step, end)
