"""Comparison of a linear's tensors with its source rounded to nearest by the number format's own rule.

What verify knows of a checkpoint without a record. Scales and weights then have one right value each, so that a single
bit that is another one shows; unless the checkpoint was made in another way, which shows in that most linears differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modelexport.checkpoints.safetensors.file import Checkpoint, Reader

if TYPE_CHECKING:
    from modelexport.inspection.verify.items import AuditItem, ModuleCheck
    from modelexport.quantization.formats.base import NumberFormat

_ROWS_BYTES = 4 << 20
_OF_THE_INPUTS = ("input_scale", "input_global_scale", "activation_scaling_factor")  # under the names of any method
_LISTED = 3


def nearest(
    number_format: NumberFormat, weight: Tensor, native: Mapping[str, Tensor], amax: Tensor | None, name: str
) -> dict[str, Tensor]:
    """The native tensors of some rows of a source, with scales in the dtype that the checkpoint has.

    Args:
        amax: see :func:`shared_maxima`.
    """
    scale = native.get("weight_scale")
    if scale is not None and scale.is_floating_point() and scale.dtype.itemsize > 1:
        number_format = replace(number_format, scale_dtype=scale.dtype)
    inputs = 1.0 if number_format.has_static_inputs else None
    return number_format.quantise(weight, amax=amax, inputs=inputs, name=f"source of {name}")


def unlike(rounded: Mapping[str, Tensor], native: Mapping[str, Tensor]) -> Counter[str]:
    """Returns the number of elements that differ to the bit in each native tensor that the weight decides."""
    counts: Counter[str] = Counter()
    for suffix, ours in rounded.items():
        theirs = native.get(suffix)
        if suffix in _OF_THE_INPUTS or suffix == "weight_shape":
            continue
        if theirs is None or (theirs.dtype, theirs.numel()) != (ours.dtype, ours.numel()):
            counts[suffix] = ours.numel()
        else:
            counts[suffix] = int((_bytes(ours) != _bytes(theirs)).any(dim=1).sum())
    return +counts


def _bytes(tensor: Tensor) -> Tensor:
    # Not contiguous(), which leaves any stride to a dim of one element: GPTQ's scales of one group are such.
    return tensor.clone(memory_format=torch.contiguous_format).view(-1, 1).view(torch.uint8)


def shared_maxima(items: Sequence[AuditItem], source: Checkpoint | None, threads: int = 1) -> dict[str, Tensor]:
    """Returns the input of scales that span whole weights: ``AuditItem.shared`` -> the largest magnitude.

    Modules that engines fuse share one.
    """
    wanted = [
        item for item in items if item.number_format is not None and item.number_format.scale_granularity == "tensor"
    ]
    if source is None or not wanted:
        return {}
    with Reader(source) as reader, ThreadPoolExecutor(max(1, threads)) as pool:
        maxima: dict[str, Tensor] = {}
        for item, amax in zip(wanted, pool.map(lambda item: _amax(item, reader), wanted), strict=True):
            maxima[item.shared] = torch.maximum(maxima.get(item.shared, amax), amax)
        return maxima


def _amax(item: AuditItem, reader: Reader) -> Tensor:
    assert item.source is not None
    assert item.number_format is not None
    rows, found = item.source.shape[0], torch.zeros(1)
    step = max(1, _ROWS_BYTES // max(1, item.source.nbytes // max(1, rows)))
    for start in range(0, rows, step):
        part = reader.read(item.source, rows=(start, min(start + step, rows)))
        found = torch.maximum(found, item.number_format.amax(part))
    return found


def judge(items: Iterable[AuditItem], checks: Iterable[ModuleCheck]) -> tuple[list[str], list[str], set[str]]:
    """Result of requantising a checkpoint without a record.

    Returns:
        Problems, a line each; what could not be checked, a line each; and the names of the tensors that are right.
    """
    of_format: dict[str, list[tuple[AuditItem, ModuleCheck]]] = {}
    for item, check in zip(items, checks, strict=True):
        if item.number_format is not None and check.unlike is not None:
            of_format.setdefault(item.number_format.name, []).append((item, check))
    problems: list[str] = []
    unchecked: list[str] = []
    right: set[str] = set()
    for name, pairs in of_format.items():
        same = [item for item, check in pairs if not check.unlike]
        if 2 * len(same) <= len(pairs):
            unchecked.append(
                f"the bytes of {len(pairs)} linears in {name}, which were not made by rounding the source to nearest "
                f"({len(same)} of them are what that gives)"
            )
            continue
        problems += _damaged(pairs, len(same))
        for item, _ in pairs:
            right.update(info.name for suffix, info in item.tensors.items() if suffix not in _OF_THE_INPUTS)
    return problems, unchecked, right


def _damaged(pairs: Sequence[tuple[AuditItem, ModuleCheck]], same: int) -> Iterator[str]:
    for item, check in pairs:
        if check.unlike:
            counts = ", ".join(f"{count:,} of the values of {name}" for name, count in sorted(check.unlike.items()))
            yield (
                f"{item.name}: {counts}: not what rounding the source to nearest gives, as {same} of {len(pairs)} "
                "linears are to the bit: damaged or changed"
            )


def unchecked_tensors(checks: Iterable[ModuleCheck], right: set[str], in_doubt: bool) -> list[str]:
    """A line on the tensors that neither equal the source's nor can be made anew; none where there are none.

    Args:
        right: those known to be right.
        in_doubt: whether linears that were rounded otherwise have been named already.
    """
    left = [
        name
        for check in checks
        if check.identical is None and not (in_doubt and check.unlike is not None)
        for name in check.sha256
        if name not in right
    ]
    if not left:
        return []
    more = f" and {len(left) - _LISTED} more" if len(left) > _LISTED else ""
    return [f"the bytes of {', '.join(left[:_LISTED])}{more}, which the source does not tell"]
