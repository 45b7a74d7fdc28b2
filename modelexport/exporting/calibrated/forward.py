"""The part of every decoder layer that a rank computes while calibration samples run through it.

Engines' cuts: output features of what comes before a nonlinearity (heads, intermediate features), input features of
what comes after it. They are made of tiles, next to each other, that are the same for any number of ranks; so hidden
states are the same to the bit (see :mod:`~modelexport.quantization.calibration.cut`).

A rank holds whole groups of the heads that share keys and values, or some heads of one group: transformers' modules
know no other. Ranks beyond the number of tiles have no part in a module; they build it with one head or feature, and
what that gives is not looked at. An attention whose queries go through a norm all together is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelexport.errors import PlanError
from modelexport.exporting.plan import ExportPlan
from modelexport.models.architecture import Dimensions, Family, Module
from modelexport.quantization.calibration.cut import ForwardCut, ForwardShard, Range, even_ranges
from modelexport.quantization.calibration.layers import BATCH_TOKENS

__all__ = ["batch_tokens", "forward_cut", "layer_cut"]

_TILES = 16
"""Along an axis at most: as many ranks can share the work, and the products are large enough to run at full speed."""

_STEP = 32
"""Features that intermediate tiles are multiples of. An elementwise function computes what is left over of a row by
other instructions, with other last bits, than full vectors, of which torch takes two at a time: 32 numbers at most. A
width that is no multiple is one tile."""


@dataclass(frozen=True)
class _Held:
    """This rank's part of an axis, in units (heads; features).

    Attributes:
        span: the units; one of them where the rank has no part.
        tiles: the tiles that it has, ranges of units within the whole axis.
        first: the first one's number.
        count: of all tiles.
    """

    span: Range
    tiles: tuple[Range, ...]
    first: int
    count: int

    def times(self, size: int) -> _Held:
        """The same for units of ``size`` features, in features."""
        tiles = tuple((start * size, stop * size) for start, stop in self.tiles)
        return _Held((self.span[0] * size, self.span[1] * size), tiles, self.first, self.count)


def batch_tokens(*, learns: bool) -> int:
    """Returns the tokens of a batch of samples; see :func:`layer_cut`. A step down the gradients is of few samples,
    which threads and ranks share by batches: these are small then."""
    return BATCH_TOKENS // 2 if learns else BATCH_TOKENS


def layer_cut(plan: ExportPlan, rank: int, *, learns: bool) -> ForwardCut:
    """The part of each decoder layer that a rank holds while samples run through it.

    Args:
        learns: whether the gradients of layers are followed: then it is all of them, for some of the samples.
    """
    if learns:
        return ForwardCut()
    return forward_cut(plan.family, plan.dimensions, rank, plan.parallelism.tp)


def forward_cut(family: Family, dimensions: Dimensions, rank: int, world: int) -> ForwardCut:
    """The part of each decoder layer that one of ``world`` ranks computes.

    Raises:
        PlanError: the family cuts along an axis that this does not know to cut.
    """
    if family.is_derived:  # what a derived family's layers compute is not known: each rank does all of it
        return ForwardCut()
    queries, kv = _heads(dimensions.heads, dimensions.kv_heads, rank, world)
    counts = {
        "num_attention_heads": queries.span[1] - queries.span[0],
        "num_key_value_heads": kv.span[1] - kv.span[0],
    }
    used = {axis for module in family.layer for _, axis in module.axes}
    latent = "kv_heads" not in used and not any(axis.of == "heads" for axis in family.axes.values())
    together = any(
        module.kind == "norm" and dimensions.axis_heads(axis) for module in family.layer for _, axis in module.axes
    )
    # Where heads are fused one by one, modules take their number from the width of what they are given.
    config = dict(counts) if not together and (latent or "kv_heads" in used) else {}
    axes: dict[str, _Held] = {}
    shares: dict[str, ForwardShard] = {}
    for module in family.layer:
        if module.partition == "replicated" or module.kind not in ("linear", "vector"):
            continue
        if not all(dimensions.axis_size(axis) for _, axis in module.axes):
            continue  # this model lacks it
        if together and any(dimensions.axis_heads(axis) for _, axis in module.axes):
            continue
        parts, start = [], 0
        for _, axis in module.axes:
            if axis not in axes:
                axes[axis] = _held(family, dimensions, axis, (queries, kv), config, (rank, world))
            parts.append((start, axes[axis]))
            start += dimensions.axis_size(axis)
        shares[module.general_path] = _share(module, parts)
    if latent or together:
        return ForwardCut(config, shares)
    config["head_dim"] = dimensions.head_dim
    return ForwardCut(config, shares, (kv.span if kv.tiles else (0, 0)))


def _heads(heads: int, kv_heads: int, rank: int, world: int) -> tuple[_Held, _Held]:
    """This rank's query heads, and the key/value heads that these read."""
    group = heads // kv_heads
    if kv_heads > _TILES:  # a tile is some groups
        groups = even_ranges(kv_heads, _TILES)
        tiles = [[(start * group, stop * group)] for start, stop in groups]
    else:  # a group is some tiles
        groups = [(head, head + 1) for head in range(kv_heads)]
        pieces = even_ranges(group, min(group, _TILES // kv_heads))
        tiles = [[(head * group + a, head * group + b) for a, b in pieces] for head in range(kv_heads)]
    clumps = len(groups)
    first, stop = _own(clumps, rank, world)
    own = [tile for clump in tiles[first:stop] for tile in clump]
    before = sum(len(clump) for clump in tiles[:first])
    if world > clumps:  # several ranks, next to each other, share the tiles of one
        sharing = [other for other in range(world) if _own(clumps, other, world)[0] == first]
        low, high = even_ranges(len(own), len(sharing))[sharing.index(rank)]
        own, before = own[low:high], before + low
    count = sum(len(clump) for clump in tiles)
    reads = (groups[first][0], groups[stop - 1][1])
    if not own:
        start = reads[0] * group
        return _Held((start, start + 1), (), 0, count), _Held((reads[0], reads[0] + 1), (), 0, clumps)
    queries = _Held((own[0][0], own[-1][1]), tuple(own), before, count)
    return queries, _Held(reads, tuple(groups[first:stop]), first, clumps)


def _own(count: int, rank: int, world: int) -> Range:
    """The range of ``count`` units that belongs to a rank; where there are more ranks, one unit that it shares."""
    if world > count:
        return rank * count // world, rank * count // world + 1
    return even_ranges(count, world)[rank]


def _features(size: int, rank: int, world: int) -> _Held:
    """This rank's part of an axis without heads."""
    count = min(_TILES, size // _STEP) if size % _STEP == 0 else 1
    tiles = [(start * _STEP, stop * _STEP) for start, stop in even_ranges(size // _STEP, count)] if count > 1 else []
    tiles = tiles or [(0, size)]
    first, stop = even_ranges(count, world)[rank]
    own = tuple(tiles[first:stop])
    return _Held((own[0][0], own[-1][1]) if own else (0, 1), own, first, count)


def _held(
    family: Family,
    dimensions: Dimensions,
    axis: str,
    attention: tuple[_Held, _Held],
    config: dict[str, int],
    place: tuple[int, int],
) -> _Held:
    """This rank's part of an axis, in features; ``config`` gets the key that says its width."""
    unit = dimensions.axis_unit(axis)
    if axis in ("heads", "kv_heads"):
        return attention[axis == "kv_heads"].times(unit)
    if dimensions.axis_heads(axis):
        return attention[0].times(unit)
    declared = family.axes.get(axis)
    keys = ("intermediate_size",) if axis == "intermediate" else declared.features if declared is not None else ()
    if len(keys) != 1:
        raise PlanError(
            f"calibration cannot cut {family.name}'s axis {axis!r}: {len(keys)} keys of config.json make its width"
        )
    times = 1
    if declared is not None and declared.times is not None:  # the shared experts: some of one expert's width
        alike = (name for name, other in family.axes.items() if other.features == keys and other.times is None)
        single = next(alike, None)
        if single is None:
            raise PlanError(f"calibration cannot cut {family.name}'s axis {axis!r}: no other has the width of one")
        times = dimensions.axis_size(axis) // dimensions.axis_size(single)
    held = _features(dimensions.axis_size(axis) // times, *place)
    config[keys[0]] = held.span[1] - held.span[0]
    return held.times(times)


def _share(module: Module, parts: Sequence[tuple[int, _Held]]) -> ForwardShard:
    """Of a linear, or of one that is fused on disk of several; with the first feature of each."""
    spans, tiles, place = [], [], 0
    for start, held in parts:
        first, stop = held.span
        spans.append((start + first, start + stop))
        tiles += [(place + a - first, place + b - first) for a, b in held.tiles]
        place += stop - first
    if module.partition == "column":
        return ForwardShard(0, tuple(spans), tuple(tiles))
    [(_, held)] = parts
    numbers = range(held.first, held.first + len(held.tiles))
    return ForwardShard(1, tuple(spans), tuple(tiles), tuple(numbers), held.count)
