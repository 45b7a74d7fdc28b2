"""The cuts of each tensor of a checkpoint over ranks: its family's, on the units that its number format keeps together.

The tensors of a quantised linear go with its weight: a rank that holds some of its rows holds their scales, their zero
points and their packed words. Where a format keeps several elements of the weight together (a group, a block, a packed
word), all of its tensors are cut there and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from modelexport.checkpoints.draft_names import NUMBERED, DraftNames
from modelexport.checkpoints.safetensors.file import Checkpoint
from modelexport.errors import CheckpointError
from modelexport.models.architecture import Dimensions, Module, read_dimensions
from modelexport.models.draft_layers import usual_drafts
from modelexport.models.families.base import AxisSize
from modelexport.models.matching import ModelDescription, Place, blocks, match, refuse
from modelexport.quantization.methods.base import Axes
from modelexport.sharding.rules import CutRange, Spread, TensorRule

MOST_BLOCKS = 1_000_000


def tensor_rules(checkpoint: Checkpoint) -> list[TensorRule]:
    """The rules by which every tensor of a checkpoint may be cut, from its headers and its config.json.

    Any number format of the quantisation methods that are known, or none. Tensors that are no part of the model have
    no rule (:func:`left_out` names them).

    Returns:
        In the model's order: before the layers, layer by layer, behind them.

    Raises:
        CheckpointError: config.json is missing or contradicts the tensors; everything that is missing, unknown or of
            the wrong dtype or shape is listed.
        PlanError: an unknown architecture, or another method of quantisation.
    """
    matched = match(checkpoint)
    if problems := matched.problems():
        refuse(str(checkpoint.directory), problems)
    rules: list[TensorRule] = []
    for module in matched.modules:
        tensors = {s: (info.dtype, info.shape, module.specs[s].axes) for s, info in module.tensors.items()}
        rules += module_rules(module.place, matched.model.dimensions, tensors)
    return rules


def left_out(checkpoint: Checkpoint) -> dict[str, str]:
    """The tensors of a checkpoint that are no part of its model -> why; a second copy of tied embeddings is one."""
    return ModelDescription.of(checkpoint).left_out(checkpoint.infos)


def expected_rules(
    config: Mapping[str, Any],
    dtypes: Callable[[str], str] | str,
    *,
    has: Callable[[str], bool] | None = None,
    apart: bool = False,
    drafts: Sequence[Collection[str]] = (),
    draft_names: DraftNames = NUMBERED,
) -> list[TensorRule]:
    """The same for a model of which only config.json is known: its tensors must be these, with these shapes.

    Args:
        config: config.json's content.
        dtypes: the dtype of a tensor by its name, or that of all; where config.json leaves it open.
        has: whether a tensor is there that config.json does not announce: asked for the bias of each module that may
            have one, and for what may stand around draft layers. None: there is none.
        apart: whether every expert has linears of its own, in place of stacks of them.
        drafts: of each draft layer, the paths within a decoder layer of the modules that it has.
        draft_names: the names of their modules.

    Raises:
        CheckpointError: config.json lacks a number, or contradicts itself.
        PlanError: an unknown architecture, or another method of quantisation.
    """
    model = ModelDescription.read(config, "config.json")
    if apart and model.family.has_stacks:
        family = model.family.apart()
        model = replace(model, family=family, dimensions=read_dimensions(config, family), _expected={})
    if model.dimensions.most_blocks > MOST_BLOCKS:  # nothing else to hold a stranger's number against
        raise CheckpointError(f"config.json: {blocks(model.dimensions)}; at most {MOST_BLOCKS:,} are believed")
    if drafts:
        found = usual_drafts(model.family, model.dimensions, drafts, draft_names)
        there = (each for each in found if each.path or (has is not None and has(f"{each.name}.weight")))
        model = replace(model, drafts=tuple(there), _expected={})
    rules = []
    for place in model.places():
        expected = model.expected(place)
        specs = dict(expected.required)
        if (
            has is not None
            and place.module.bias is not False
            and "bias" in expected.optional
            and has(place.tensor("bias"))
        ):
            specs["bias"] = expected.optional["bias"]
        tensors = {}
        for suffix, spec in specs.items():
            wanted = spec.dtypes[0]
            if len(spec.dtypes) > 1:
                wanted = dtypes if isinstance(dtypes, str) else dtypes(place.tensor(suffix))
            tensors[suffix] = (wanted if wanted in spec.dtypes else spec.dtypes[0], spec.shapes[0], spec.axes)
        rules += module_rules(place, model.dimensions, tensors)
    return rules


def module_rules(
    place: Place, dimensions: Dimensions, tensors: Mapping[str, tuple[str, tuple[int, ...], Axes]]
) -> list[TensorRule]:
    """The rules of one module's tensors.

    Args:
        tensors: suffix -> dtype, shape, and the dims of the module's weight that its dims run along.
    """
    module = place.module
    along = module.cut_dim
    parts: tuple[CutRange, ...] = ()
    if along is not None:
        units = (axis[1] for _, _, axes in tensors.values() for axis in axes if axis is not None and axis[0] == along)
        parts = weight_parts(module, dimensions, math.lcm(*units))
    rules = []
    for suffix, (dtype, shape, axes) in tensors.items():
        dim, unit = _own_dim(axes, along, len(shape))
        if dim and module.either_way and shape != dimensions.weight_shape(module):  # its last two dims are swapped
            dim = 2 * len(shape) - 3 - dim
        rules.append(
            TensorRule(
                name=place.tensor(suffix),
                dtype=dtype,
                shape=shape,
                module=place.name,
                path=module.path,
                parameter=suffix,
                role=f"attention.{suffix[0]}" if place.is_cache_scale else module.role,
                layer=place.layer,
                draft=None if place.draft is None else place.draft.number,
                stages=place.stages,
                expert=place.expert,
                experts=shape[0] if module.stacked and shape else 0,
                dim=dim,
                parts=() if dim is None else tuple(_per(part, unit) for part in parts),
            )
        )
    return rules


def weight_parts(module: Module, dims: Dimensions, kept: int = 1) -> tuple[CutRange, ...]:
    """The ranges of a module's cut dimension, in elements of its weight.

    Args:
        kept: elements along it that its number format keeps together.
    """
    parts: list[CutRange] = []
    start = 0
    for role, axis in module.axes:
        along = dims.axis(axis)
        size, heads = along.size, along.heads
        unit = math.lcm(along.unit, kept)
        if along.shared and heads == 1:
            unit = size  # never cut, only shared: its last block may be short
        parts.append(
            CutRange(
                role=role,
                start=start,
                stop=start + size,
                unit=unit,
                spread=_spread(axis, along),
                heads=heads,
            )
        )
        start += size
    if any(part.start % kept for part in parts):  # two of them share a group: they cannot be told apart
        return (CutRange(role=module.role, start=0, stop=start, unit=start),)
    return tuple(parts)


def _spread(name: str, axis: AxisSize) -> Spread:
    if name == "vocab":
        return "padded"
    return "kv_heads" if axis.shared else "heads" if axis.heads else "even"


def _own_dim(axes: Axes, along: int | None, rank: int) -> tuple[int | None, int]:
    """The dim of a tensor that runs along the weight's cut one, and the weight's elements for each of its own."""
    for dim, axis in enumerate(axes[:rank]):
        if axis is not None and axis[0] == along:
            return dim, axis[1]
    return None, 1


def _per(part: CutRange, unit: int) -> CutRange:
    """A part of the weight, in elements of a tensor that has one for each ``unit`` of it."""
    if unit == 1:
        return part
    kept = -(-part.unit // unit)
    return replace(part, start=part.start // unit, stop=-(-part.stop // unit), unit=kept, stands_for=unit)
