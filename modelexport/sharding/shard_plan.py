"""ShardPlan: which rectangle of every tensor each rank of a parallelism holds, as engines and trainers cut models.

A pure function of :class:`~modelexport.sharding.rules.TensorRule` and
:class:`~modelexport.sharding.plan.Parallelism`. Everything that does not fit is found before a byte is read and said
at once. Cuts follow Megatron-LM (Shoeybi et al., 2019): equal whole units for every tensor-parallel rank; key/value
heads shared by neighbours where there are fewer of them than ranks; a vocabulary in equal parts, the last ones short.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from modelexport.errors import PlanError
from modelexport.sharding.boxes import Box, whole
from modelexport.sharding.plan import Parallelism, Range
from modelexport.sharding.rules import CutRange, TensorRule

Held = tuple[CutRange | None, Box]
"""A rectangle that a rank holds, and the part of the tensor that it comes from (None: the tensor is not cut)."""


def cut_part(part: CutRange, tp: int, rank: int) -> Range:
    """The elements of a part's dimension that tensor-parallel rank ``rank`` of ``tp`` holds; perhaps none.

    :func:`part_problem` has found nothing.
    """
    units = -(-part.size // part.unit)
    if part.spread == "padded":
        each = -(-units // tp)
        first, last = min(rank * each, units), min((rank + 1) * each, units)
    elif part.spread == "kv_heads" and tp > units:
        first = rank // (tp // units)
        last = first + 1
    else:
        first, last = rank * units // tp, (rank + 1) * units // tp
    return min(part.start + first * part.unit, part.stop), min(part.start + last * part.unit, part.stop)


def first_holder(part: CutRange, tp: int, rank: int) -> int:
    """The lowest tensor-parallel rank that holds the same elements of a part as ``rank`` of ``tp``."""
    units = -(-part.size // part.unit)
    if part.spread == "kv_heads" and tp > units:
        return rank - rank % (tp // units)
    return rank


def part_problem(part: CutRange, tp: int) -> str | None:
    """The reason for which ``tp`` ranks cannot hold equal whole parts, with both numbers; None where they can."""
    if tp == 1 or part.spread == "padded":
        return None
    units, rest = divmod(part.size, part.unit)
    if rest:
        size, unit = part.size * part.stands_for, part.unit * part.stands_for
        return f"{size} is no multiple of {unit}, which must stay whole: it cannot be cut over {tp} ranks"
    if units % tp == 0:
        return None
    if units == 1 and not (part.spread == "kv_heads" and part.heads == 1):
        return f"{part.size * part.stands_for} elements that must stay together cannot be cut over {tp} ranks"
    count = f"{units} {_unit_name(part, units)}"
    if part.spread != "kv_heads":
        return f"{count} cannot be divided equally among {tp} ranks"
    if units != part.heads:
        return f"{count} cannot be divided equally among {tp} ranks, nor shared by them"
    if tp % units == 0:
        return None
    return f"{count} can neither be divided equally among {tp} ranks nor shared by equally many"


def _unit_name(part: CutRange, units: int) -> str:
    if part.spread == "even":
        unit = part.unit * part.stands_for
        return f"units of {unit}" if unit > 1 else "elements"
    kind = "key/value heads" if part.spread == "kv_heads" else "heads"
    if part.heads in (0, units):
        return kind
    return f"units of {part.heads // units} {kind}" if part.heads % units == 0 else f"units ({part.heads} {kind})"


@dataclass(frozen=True)
class ShardPlan:
    """The rectangles that each rank holds; :func:`build_shard_plan` makes it.

    Attributes:
        rules: every tensor by name, in the model's order.
        layers: decoder layers.
    """

    rules: dict[str, TensorRule]
    parallelism: Parallelism
    layers: int

    @cached_property
    def experts(self) -> int:
        """Experts of a layer, 0 where there are none."""
        return count_experts(self.rules.values())

    def stage_of(self, layer: int) -> int:
        """The pipeline stage of a decoder layer; the first stages have one layer more where they differ."""
        base, extra = divmod(self.layers, self.parallelism.pp)
        longer = extra * (base + 1)
        return layer // (base + 1) if layer < longer else extra + (layer - longer) // base

    def layers_of(self, stage: int) -> range:
        """The decoder layers of a pipeline stage."""
        base, extra = divmod(self.layers, self.parallelism.pp)
        start = stage * base + min(stage, extra)
        return range(start, start + base + (stage < extra))

    def stages(self, name: str) -> tuple[int, ...]:
        """The pipeline stages that hold a tensor: one, or for tied embeddings the first and the last."""
        rule = self.rules[name]
        if rule.layer is not None:
            return (self.stage_of(rule.layer),)
        last = self.parallelism.pp - 1
        return tuple(dict.fromkeys({"first": 0, "last": last}[end] for end in rule.stages))

    def expert_rank(self, expert: int) -> int:
        """The expert-parallel rank of an expert."""
        return expert // (self.experts // self.parallelism.ep)

    def held(self, name: str, rank: int) -> tuple[Held, ...]:
        """The rectangles of a tensor that a rank holds.

        Returns:
            One for each part of it, in order (empty ones left out); ``((None, whole box),)`` where it is not cut;
            ``()`` where the rank holds nothing of it.
        """
        rule = self.rules[name]
        tp, pp, ep = self.parallelism.coordinates(rank)
        if pp not in self.stages(name) or (rule.expert is not None and self.expert_rank(rule.expert) != ep):
            return ()
        outer = whole(rule.shape)
        if rule.experts:
            each = rule.experts // self.parallelism.ep
            outer = ((ep * each, (ep + 1) * each), *outer[1:])
        if rule.dim is None:
            return ((None, outer),)
        found: list[Held] = []
        for part in rule.parts:
            start, stop = cut_part(part, self.parallelism.tp, tp)
            if stop > start:
                found.append((part, tuple((start, stop) if d == rule.dim else span for d, span in enumerate(outer))))
        return tuple(found)

    def owners(self, name: str, rank: int, number: int = 0) -> tuple[int, ...]:
        """The ranks that hold the same rectangle, lowest first.

        Args:
            number: which of the rectangles in ``held(name, rank)``; those of a fused tensor have owners of their own.
        """
        rule, grid = self.rules[name], self.parallelism
        part, _ = self.held(name, rank)[number]
        tp, _, ep = grid.coordinates(rank)
        tps: Iterable[int] = range(grid.tp)
        if part is not None:
            first = first_holder(part, grid.tp, tp)
            tps = [other for other in tps if first_holder(part, grid.tp, other) == first]
        eps = [ep] if _has_experts(rule) else range(grid.ep)
        return tuple(sorted(grid.rank_of(t, p, e) for p in self.stages(name) for e in eps for t in tps))

    def is_first(self, name: str, rank: int, number: int = 0) -> bool:
        """Returns whether the rank is the first that holds this rectangle (its main replica); see :meth:`owners`."""
        rule, grid = self.rules[name], self.parallelism
        part, _ = self.held(name, rank)[number]
        tp, pp, ep = grid.coordinates(rank)
        first = 0 if part is None else first_holder(part, grid.tp, tp)
        return tp == first and pp == self.stages(name)[0] and (_has_experts(rule) or ep == 0)

    def owned(self, name: str, rank: int) -> tuple[Held, ...]:
        """Those of the rectangles that a rank holds of which it is the main replica; over all ranks they tile it."""
        return tuple(held for number, held in enumerate(self.held(name, rank)) if self.is_first(name, rank, number))

    def names(self, rank: int) -> Iterator[str]:
        """The tensors of which a rank holds anything."""
        return (name for name in self.rules if self.held(name, rank))

    def describe(self) -> list[str]:
        """Lines for people: what the stages hold, and for each kind of tensor how it is cut."""
        grid = self.parallelism
        lines = [f"{grid.size} rank{'s' if grid.size > 1 else ''}: {grid}"]
        if grid.pp > 1:
            spans = (self.layers_of(stage) for stage in range(grid.pp))
            texts = [f"{stage}: {_span(span.start, span.stop)}" for stage, span in enumerate(spans)]
            lines.append(f"layers of each pipeline stage: {', '.join(texts)}")
        if grid.ep > 1:
            each = self.experts // grid.ep
            texts = [f"{e}: {_span(e * each, (e + 1) * each)}" for e in range(grid.ep)]
            lines.append(f"experts of each expert-parallel rank: {', '.join(texts)}")
        kinds: dict[tuple[object, ...], TensorRule] = {}
        for rule in self.rules.values():
            kinds.setdefault((rule.path, rule.parameter, rule.shape, rule.parts), rule)
        width = max((len(_kind_name(rule)) for rule in kinds.values()), default=0)
        return lines + [
            f"{_kind_name(rule):{width}}  {rule.dtype} {list(rule.shape)}: {self._cut_text(rule)}"
            for rule in kinds.values()
        ]

    def _cut_text(self, rule: TensorRule) -> str:
        tp = self.parallelism.tp
        ends = f", stages {' and '.join(map(str, stages))}" if len(stages := self.stages(rule.name)) > 1 else ""
        if rule.dim is None or tp == 1:
            return "whole" + ends
        texts = []
        for part in rule.parts:
            ranges = [cut_part(part, tp, rank) for rank in range(tp)]
            text = _counted([stop - start for start, stop in ranges])
            shared = tp // len(set(ranges))
            if part.spread == "kv_heads" and shared > 1:
                text += f", {shared} ranks share each"
            texts.append(f"{part.role} {text}" if len(rule.parts) > 1 else text)
        return f"dim {rule.dim}: {'; '.join(texts)}{ends}"


def _kind_name(rule: TensorRule) -> str:
    return f"{rule.path}.{rule.parameter}".replace("{e}", "*")


def _span(start: int, stop: int) -> str:
    return "none" if stop == start else str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def _counted(sizes: Sequence[int]) -> str:
    """``[53, 53, 53, 52]`` -> ``"53 x 3, 52"``."""
    texts: list[list[int]] = []
    for size in sizes:
        if texts and texts[-1][0] == size:
            texts[-1][1] += 1
        else:
            texts.append([size, 1])
    return ", ".join(f"{size} x {count}" if count > 1 else str(size) for size, count in texts)


def count_experts(rules: Iterable[TensorRule]) -> int:
    """Experts of a layer, 0 where there are none."""
    return max((rule.experts if rule.expert is None else rule.expert + 1 for rule in rules), default=0)


def _has_experts(rule: TensorRule) -> bool:
    """Returns whether expert parallelism divides the tensor: one expert's tensor, or a stack of all."""
    return rule.expert is not None or rule.experts > 0


def build_shard_plan(rules: Sequence[TensorRule], parallelism: Parallelism, *, layers: int) -> ShardPlan:
    """Cuts every tensor for ``parallelism``.

    Args:
        rules: every tensor of the model, in its order.
        layers: its decoder layers.

    Raises:
        PlanError: something does not fit; all of it is listed, with both numbers, and the largest parallelism that
            does: tp and pp not above what was asked for, ep a divisor of the experts.
    """
    experts = count_experts(rules)
    stacks = {rule.experts for rule in rules if rule.experts}
    problems = [
        *(f"{text} ({_listed(names)})" for text, names in _tp_problems(rules, parallelism.tp).items()),
        *_other_problems(parallelism, layers, sorted(stacks | {experts})),
    ]
    if problems:
        works = _largest(rules, parallelism, layers, math.gcd(experts, *stacks))
        raise PlanError(f"{parallelism} does not suit the model: {'; '.join(problems)}. The largest that does: {works}")
    return ShardPlan({rule.name: rule for rule in rules}, parallelism, layers)


def _tp_problems(rules: Iterable[TensorRule], tp: int) -> dict[str, list[str]]:
    """The problems of cutting for ``tp`` ranks: message -> the modules that have it."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for kind, part in _different_parts(rules):
        problem = part_problem(part, tp)
        if problem is not None:
            found[problem][kind] = None
    return {text: list(names) for text, names in found.items()}


def _different_parts(rules: Iterable[TensorRule]) -> dict[tuple[str, CutRange], None]:
    """Every part, once for all layers and experts, with the module's general name."""
    return {(rule.path.replace("{e}", "*"), part): None for rule in rules for part in rule.parts}


def _other_problems(parallelism: Parallelism, layers: int, experts: Sequence[int]) -> Iterator[str]:
    if parallelism.pp > layers:
        yield f"pp is {parallelism.pp}, but there are only {layers} layers"
    if parallelism.ep > 1 and not any(experts):
        yield f"ep is {parallelism.ep}, but the model has no experts"
    for count in experts:
        if count % parallelism.ep:
            yield f"{count} experts cannot be divided equally among ep {parallelism.ep} ranks"


def _largest(rules: Sequence[TensorRule], wanted: Parallelism, layers: int, experts: int) -> Parallelism:
    parts = list(dict.fromkeys(part for _, part in _different_parts(rules)))
    # More ranks than a part has units that must be shared equally cannot be; whoever asks for billions need not wait.
    most = min([wanted.tp, *(max(1, part.size // part.unit) for part in parts if part.spread in ("even", "heads"))])
    tp = next(n for n in range(most, 0, -1) if all(part_problem(part, n) is None for part in parts))
    ep = next(n for n in range(min(wanted.ep, max(1, experts)), 0, -1) if experts % n == 0)
    return replace(wanted, tp=tp, pp=max(1, min(wanted.pp, layers)), ep=ep)


def _listed(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
