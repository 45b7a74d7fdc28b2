"""A family's scalings as folds of one layer's weights; applies the scales that were chosen to the weights.

Whatever is stored in the model's own dtype decides which scales there can be: a norm's weight is divided and rounded,
and what it was divided by after rounding is what its readers are multiplied by; a router, or any linear that is not
quantised, takes powers of two, and so does a source that has a bias or is not quantised itself. Some models multiply
by 1 + a norm's weight: then that sum is divided, and what is stored rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from modelexport.models.families.base import Dimensions, Family, Module, Scaling
from modelexport.quantization.algorithms.base import CalibratedLinear, Fold
from modelexport.quantization.calibration.cut import WHOLE, ForwardShard, Range

__all__ = ["LayerFold", "apply_fold", "folds_of_layer"]


@dataclass
class LayerFold:
    """A fold, and where its source lies.

    Attributes:
        fold: what a :class:`~modelexport.quantization.algorithms.base.Folding` is asked about.
        rows: of the source's whole weight, that give its features; None for a norm.
        source: the source, where that is a linear.
        dtype: that a norm is stored in.
        offset: what is added to a norm's weight before anything is multiplied by it.
    """

    fold: Fold
    rows: Range | None
    source: CalibratedLinear | None
    dtype: torch.dtype
    offset: float = 0.0


def folds_of_layer(
    family: Family,
    dimensions: Dimensions,
    layer: int,
    linears: Mapping[str, CalibratedLinear],
    tensors: Mapping[str, Tensor],
    dtype_of: Callable[[str], torch.dtype],
) -> list[LayerFold]:
    """All that may be folded in decoder layer ``layer``, in the order of the family's data.

    A pair is left out where none of the readers is quantised, since there is nothing to gain.

    Args:
        linears: module's name in the checkpoint -> linear, also those that are not quantised (routers).
        tensors: name in the checkpoint -> float32; norms' weights are taken from it, and which linears have a bias.
        dtype_of: the dtype that a tensor of that name is stored in.
    """
    prefix = family.layer_prefix.format(i=layer) + "."
    found = []
    for scaling, source, part, readers in _pairs(family, dimensions, layer):
        name, rows, features = prefix + source[0], None, dimensions.weight_shape(source[1])[0]
        own = linears.get(name)
        if source[1].kind == "norm":
            weight, exact = tensors[f"{name}.weight"], f"{name}.bias" in tensors
        else:
            assert own is not None, f"{name} is folded from, but was not given"
            rows = _rows_of_part(source[1], dimensions, part, scaling.share)
            weight, features = None, rows[1] - rows[0]
            # A bias is stored as it is: only a power of two leaves all of it.
            exact = not _is_quantised(own) or f"{name}.bias" in tensors
        reading = [linears[prefix + path] for path, _ in readers]
        if not any(_is_quantised(linear) for linear in reading):
            continue
        exact = exact or not all(_is_quantised(linear) for linear in reading)
        columns = _columns(source[1], part, readers[0][1], dimensions, features)
        fold = Fold(name, weight, reading, columns, exact, features)
        offset = family.norm_offset if scaling.offset is None else scaling.offset
        found.append(LayerFold(fold, rows, own, dtype_of(f"{name}.weight"), offset))
    return found


def apply_fold(
    tensors: Mapping[str, Tensor], shares: Mapping[str, ForwardShard], fold: LayerFold, scale: Tensor
) -> Tensor:
    """Put a scale into this rank's weights and into the fold's linears, in place; returns the scale as it could be.

    A source's weight (and bias) is divided, the columns of its readers are multiplied; so are the weights of the
    linears, where they are not the same memory, and what is known of the readers' inputs is divided (histograms and
    Hessians, of which that is not possible, are dropped). What the layer computes stays the same but for the rounding
    of float32.

    Args:
        tensors: name in the checkpoint -> float32, this rank's part of a layer's forward pass, writable.
        shares: linear's name -> which part that is; those that are missing are whole.
        scale: float32 ``[features]``, positive, the same on all ranks.

    Raises:
        ValueError: the scale is not positive and finite, or of another shape.
    """
    if scale.shape != (fold.fold.features,) or not bool(((scale > 0) & torch.isfinite(scale)).all()):
        raise ValueError(f"{fold.fold.source}: a scale of {fold.fold.features} positive numbers is needed")
    name = fold.fold.source
    weight = tensors[f"{name}.weight"]
    if fold.rows is None:
        scale = _divide_norm(weight, fold, scale)
        if f"{name}.bias" in tensors:
            tensors[f"{name}.bias"].div_(scale.to(weight.device))
    else:
        held = _held(shares.get(name, WHOLE), 0, weight.shape[0])
        divisor = _for_rows(held, fold.rows, scale).to(weight.device)
        weight.div_(divisor.unsqueeze(1))
        if f"{name}.bias" in tensors:
            tensors[f"{name}.bias"].div_(divisor)
        if fold.source is not None and not _same_memory(fold.source.weight, weight):
            divisor = _for_rows(torch.arange(*fold.source.rows), fold.rows, scale)
            fold.source.weight.div_(divisor.to(fold.source.weight.device).unsqueeze(1))
    factor = scale if fold.fold.columns is None else scale[fold.fold.columns.to(scale.device)]
    for linear in fold.fold.linears:
        weight = tensors[f"{linear.name}.weight"]
        columns = _held(shares.get(linear.name, WHOLE), 1, weight.shape[1])
        weight.mul_(factor[columns.to(factor.device)].to(weight.device))
        if not _same_memory(linear.weight, weight):
            linear.weight.mul_(factor.to(linear.weight.device))
    _divide_inputs(fold.fold, factor)
    return scale


def _pairs(
    family: Family, dimensions: Dimensions, layer: int
) -> Iterator[tuple[Scaling, tuple[str, Module], str, list[tuple[str, Module]]]]:
    """(scaling, (path, module), role of the part) of each source, and what reads it, all of them there."""
    modules: dict[tuple[str, int | None], tuple[str, Module]] = {}
    for path, expert, module in family.modules_of_layer(dimensions, layer):
        if family.is_derived:  # the first of what has a path is its weight
            modules.setdefault((module.general_path, expert), (path, module))
            continue
        for role in {module.role, *(role for role, _ in module.parts)}:
            modules[role, expert] = path, module
    for scaling in family.scalings:
        if scaling.layers is not None and layer not in scaling.layers:
            continue
        for (role, expert), source in modules.items():
            if role != scaling.source:
                continue
            # By role first: readers come in the order of the family's data, whatever that of its modules.
            readers = [
                found
                for into in scaling.into
                for (reader, e), found in modules.items()
                if reader == into and (expert is None or e == expert)
            ]
            if readers:
                yield scaling, source, scaling.part if family.is_derived else role, readers


def _is_quantised(linear: CalibratedLinear) -> bool:
    return linear.number_format is not None and linear.number_format.quantised


def _rows_of_part(module: Module, dimensions: Dimensions, part: str, share: tuple[int, int] | None) -> Range:
    if not part:
        number, count = share or (0, 1)
        size = dimensions.weight_shape(module)[0] // count
        return (number * size, (number + 1) * size)
    start = 0
    for role, axis in module.axes:
        size = dimensions.axis_size(axis)
        if role == part:
            return (start, start + size)
        start += size
    raise AssertionError(f"{module.path} has no part {part}")


def _columns(source: Module, part: str, reader: Module, dimensions: Dimensions, features: int) -> Tensor | None:
    """The feature of the source that each input of the reader is, where that is not the one of its own number.

    Heads, or whatever no cut of the source's axis may separate, that several of the reader's in turn are made from; a
    norm's features all.
    """
    inputs = dimensions.weight_shape(reader)[1]
    if inputs == features:
        return None
    if source.kind == "norm":
        unit = features
    else:
        axis = dict(source.axes).get(part or source.role)
        unit = dimensions.axis_unit(axis) if axis is not None and dimensions.axis_heads(axis) else dimensions.head_dim
    head = torch.arange(inputs // unit).unsqueeze(1) // (inputs // features)
    return (head * unit + torch.arange(unit)).flatten()


def _divide_norm(weight: Tensor, fold: LayerFold, scale: Tensor) -> Tensor:
    """Divide a norm's weight by about ``scale``, so that the result can be stored; what it was divided by.

    1 where nothing can be: at a weight of 0, and where a quotient leaves the dtype's range.
    """
    scale = scale.to(weight.device)
    factor = weight + fold.offset
    stored = (factor / scale - fold.offset).to(fold.dtype).float()
    divided = stored + fold.offset
    found = factor / divided
    usable = torch.isfinite(found) & torch.isfinite(divided) & (divided != 0) & (found > 0)
    if fold.fold.exact:
        usable &= found == scale
    weight.copy_(torch.where(usable, stored, weight))
    return torch.where(usable, found, torch.ones_like(found))


def _held(share: ForwardShard, dim: int, size: int) -> Tensor:
    """int64 ``[size]``: which of the whole weight's rows (dim 0) or columns (dim 1) a rank holds, in its order."""
    if share.dim != dim:
        return torch.arange(size)
    held = torch.cat([torch.arange(*span) for span in share.spans] or [torch.arange(0)])
    if not share.tiles and held.numel() != size:  # without a part in it: what it holds in its place counts for nothing
        return torch.zeros(size, dtype=torch.int64)
    assert held.numel() == size, f"a share of {held.numel()} along dim {dim}, but {size} are held"
    return held


def _for_rows(held: Tensor, rows: Range, scale: Tensor) -> Tensor:
    """The divisor of each row: 1 for those that are of another part."""
    divisor = torch.ones(held.numel(), dtype=torch.float32, device=scale.device)
    inside = (held >= rows[0]) & (held < rows[1])
    divisor[inside.to(scale.device)] = scale[(held[inside] - rows[0]).to(scale.device)]
    return divisor


def _same_memory(part: Tensor, whole: Tensor) -> bool:
    """Returns whether ``part`` lies within the memory of ``whole``."""
    start, size = whole.data_ptr(), whole.numel() * whole.element_size()
    return part.numel() > 0 and part.device == whole.device and start <= part.data_ptr() < start + size


def _divide_inputs(fold: Fold, factor: Tensor) -> None:
    seen: set[int] = set()
    for linear in fold.linears:
        inputs = linear.inputs
        if inputs is None or id(inputs) in seen:
            continue
        seen.add(id(inputs))
        inputs.histogram = inputs.hessian = None
        for name in ("amax", "mean", "sample"):
            value: Tensor | None = getattr(inputs, name)
            if value is not None:
                setattr(inputs, name, value / factor.to(value.device))
