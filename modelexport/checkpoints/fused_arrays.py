"""The arrays that an engine's ranks hold: modules that the engine fuses are one array, and a layer's experts are one.

Common to the formats whose arrays are an engine's own parameters. Such an engine has tp * pp ranks. For the experts the
tensor-parallel ranks of a stage split into ep groups, neighbours into different ones: each group holds its share of the
experts, and its tp / ep ranks cut them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from modelexport.checkpoints.safetensors.arrays import Array, Share
from modelexport.checkpoints.safetensors.sharded import widened
from modelexport.errors import PlanError
from modelexport.sharding.boxes import Box, extent
from modelexport.sharding.plan import Parallelism
from modelexport.sharding.rules import TensorRule
from modelexport.sharding.shard_plan import ShardPlan, build_shard_plan
from modelexport.system.dtypes import FLOATS


@dataclass(frozen=True)
class Slot:
    """The place of a module, or of one part of a fused one, in the arrays of an engine.

    Attributes:
        array: the array's name, with ``{parameter}``, and ``{layer}`` within the layers.
        order: its place among what is joined along the output features.
    """

    array: str
    order: int = 0


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The names, fusions and cuts of an engine.

    Attributes:
        slots: where things go, by their role.
        padded_vocabulary: rows that all ranks together hold of a vocabulary of that size and that many ranks.
        local_layers: whether each stage counts its layers from 0.
        whole_embedding: whether every rank holds the embedding whole.
        tied: what is stored of an embedding that is the head as well: the array of each, or only the head's.
        float32: roles whose weights the engine wants in float32.
        parameters: arrays of their own for parameters that a module's slot is not the place of, by their name.
        one_of_experts: parameters of one number of which all experts that a rank holds have one.
    """

    slots: Mapping[str, Slot]
    padded_vocabulary: Callable[[int, int], int]
    local_layers: bool = False
    whole_embedding: bool = False
    tied: Literal["both", "head"] = "both"
    float32: frozenset[str] = frozenset()
    parameters: Mapping[str, str] = field(default_factory=dict)
    one_of_experts: frozenset[str] = frozenset()

    def slot(self, role: str, parameter: str) -> Slot:
        """The place of a parameter of a module with that role."""
        own = self.parameters.get(parameter)
        return self.slots[role] if own is None else Slot(own)


@dataclass
class _Joined:
    """An array of one rank in the making: its parts as (expert or -1, order, the tensor, what of it)."""

    rows: int | None = None  # where there are more than the parts have
    parts: list[tuple[int, int, TensorRule, Box]] = field(default_factory=list)


def check_roles(rules: Collection[TensorRule], format_name: str, slots: Mapping[str, Slot]) -> None:
    """Refuse tensors that the engine has no place for, whatever is in them.

    Raises:
        PlanError: there are any; says how many, names the first and what to do instead.
    """
    unknown = [rule for rule in rules if not ({part.role for part in rule.parts} or {rule.role}) <= slots.keys()]
    if unknown:
        roles = ", ".join(dict.fromkeys(rule.role for rule in unknown))
        raise PlanError(
            f"--format {format_name}: {len(unknown)} tensors have no place in what the engine reads ({roles}), "
            f"the first {unknown[0].name}; --format hf and --format dcp hold them"
        )


def check_type(config: Mapping[str, Any], format_name: str, known: Collection[str]) -> None:
    """Refuse models whose names an engine has, but which it may compute as another model: Llama's names are widespread.

    Raises:
        PlanError: config.json's model_type is not one that was tried.
    """
    kind = config.get("model_type")
    if kind not in known:
        raise PlanError(
            f"--format {format_name} is known to hold {', '.join(sorted(known))} models; that its engine computes a "
            f"{kind} model was never tried: use --format hf or dcp"
        )


def check_plain(rules: Collection[TensorRule], format_name: str, slots: Mapping[str, Slot], what_to_do: str) -> None:
    """Refuse tensors that the engine has no place for, and quantised ones.

    Raises:
        PlanError: there are any; says how many, names the first and what to do instead.
    """
    check_roles(rules, format_name, slots)
    quantised = [rule for rule in rules if rule.dtype not in FLOATS or rule.parameter not in ("weight", "bias")]
    if quantised:
        first = quantised[0]
        raise PlanError(
            f"--format {format_name}: {len(quantised)} tensors are quantised (none of {', '.join(FLOATS)}), the first "
            f"{first.name}, {first.dtype}; {what_to_do}"
        )


def rank_arrays(plan: ShardPlan, engine: Engine, file: Callable[[int, int], str]) -> list[Array]:
    """The arrays of every rank, in the model's order.

    Args:
        plan: of the whole model; its ep divides its tp.
        file: a rank's file, from its tensor-parallel rank and its stage.

    Raises:
        PlanError: a module that the engine has no place for, a dtype that it cannot hold, experts that cannot be cut
            so; everything that is wrong.
    """
    grid = plan.parallelism
    rules = list(plan.rules.values())
    _check(rules, engine)
    dense = build_shard_plan(rules, Parallelism(grid.tp, grid.pp), layers=plan.layers)
    experts = dense
    if grid.ep > 1:
        own = [rule for rule in rules if rule.expert is not None]
        experts = build_shard_plan(own, Parallelism(grid.tp // grid.ep, grid.pp, grid.ep), layers=plan.layers)
    found: list[Array] = []
    for stage in range(grid.pp):
        for tp in range(grid.tp):
            joined: dict[str, _Joined] = {}
            at = dense.parallelism.rank_of(tp, stage)
            expert_at = experts.parallelism.rank_of(tp // grid.ep, stage, tp % grid.ep) if grid.ep > 1 else at
            for rule in rules:
                if rule.role in ("embedding", "head"):
                    _add_vocabulary(joined, dense, engine, rule, (tp, stage))
                elif rule.expert is None:
                    _add(joined, dense, engine, rule, at)
                else:
                    _add(joined, experts, engine, rule, expert_at)
            found += [_array(file(tp, stage), name, each, engine) for name, each in joined.items()]
    return found


def _check(rules: Sequence[TensorRule], engine: Engine) -> None:
    roles = {role: rule.name for rule in rules for role in ({part.role for part in rule.parts} or {rule.role})}
    unknown = [(role, name) for role, name in roles.items() if role not in engine.slots]
    problems = [f"{name}: the engine has no place for '{role}'" for role, name in unknown]
    wide = [rule for rule in rules if rule.role in engine.float32 and rule.dtype not in ("BF16", "F32")]
    if wide:
        problems.append(
            f"{wide[0].name} is {wide[0].dtype}: the engine wants it in F32, which can be written from BF16 or F32 "
            "only; convert the model to bfloat16 first, or choose --format hf or dcp"
        )
    problems += [] if unknown else _unlike(rules, engine)
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise PlanError("; ".join(problems[:8]) + more)


def _unlike(rules: Sequence[TensorRule], engine: Engine) -> list[str]:
    """Checks that modules which the engine fuses have one dtype, and biases all of them or none."""
    problems = []
    joined: dict[str, list[TensorRule]] = {}
    for rule in rules:
        for role in {part.role for part in rule.parts} or {rule.role}:
            name = engine.slot(role, rule.parameter).array.format(layer=rule.layer, parameter=rule.parameter)
            joined.setdefault(name, []).append(rule)
    for name, parts in joined.items():
        first = parts[0]
        other = next((rule for rule in parts if rule.dtype != first.dtype), None)
        if other is not None:
            problems.append(f"the engine joins {first.name}, {first.dtype}, and {other.name}, {other.dtype}")
        whole = joined.get(name.removesuffix("bias") + "weight", parts) if name.endswith("bias") else parts
        if len(parts) < len(whole):
            lacking = {rule.module for rule in whole} - {rule.module for rule in parts}
            problems.append(f"the engine joins {first.module}, which has a bias, and {min(lacking)}, which has none")
    return problems


def _add(joined: dict[str, _Joined], plan: ShardPlan, engine: Engine, rule: TensorRule, rank: int) -> None:
    """Adds a rank's part of a tensor; a tensor that is fused on disk may go to several arrays, or change its order."""
    expert = -1 if rule.expert is None else rule.expert
    for part, box in plan.held(rule.name, rank):
        name, slot = _name(plan, engine, rule, part.role if part is not None else rule.role)
        joined.setdefault(name, _Joined()).parts.append((expert, slot.order, rule, box))


def _name(plan: ShardPlan, engine: Engine, rule: TensorRule, role: str) -> tuple[str, Slot]:
    slot = engine.slot(role, rule.parameter)
    layer = rule.layer
    if layer is not None and engine.local_layers:
        layer -= plan.layers_of(plan.stage_of(layer)).start
    return slot.array.format(layer=layer, parameter=rule.parameter), slot


def _add_vocabulary(
    joined: dict[str, _Joined], plan: ShardPlan, engine: Engine, rule: TensorRule, rank: tuple[int, int]
) -> None:
    """The rows of the embedding or the head that a rank holds: equal numbers on each, zeros behind the last."""
    grid = plan.parallelism
    tp, stage = rank
    if stage not in plan.stages(rule.name):
        return
    roles = [rule.role]
    if rule.role == "embedding" and "last" in rule.stages:  # it is the head, too
        roles = (["embedding"] if stage == 0 and engine.tied == "both" else []) + ["head"] * (stage == grid.pp - 1)
    for role in roles:
        name, slot = _name(plan, engine, rule, role)
        each, first = engine.padded_vocabulary(rule.shape[0], grid.tp) // grid.tp, tp
        if role == "embedding" and engine.whole_embedding:
            each, first = rule.shape[0], 0
        start, stop = (min(n * each, rule.shape[0]) for n in (first, first + 1))
        box = ((start, stop), *((0, size) for size in rule.shape[1:]))
        joined[name] = _Joined(each, [(-1, slot.order, rule, box)])


def _array(file: str, name: str, joined: _Joined, engine: Engine) -> Array:
    """Join the parts: along the output features in their order, experts stacked; what is one number is there once."""
    parts = sorted(joined.parts, key=lambda part: part[:2])
    first = parts[0][2]
    if first.role in engine.float32 and first.dtype == "BF16":
        return widened(file, name, first.name, first.shape)
    numbers = list(dict.fromkeys(expert for expert, _, _, _ in parts))
    if first.dim is None and math.prod(first.shape) == 1:
        return _number(file, name, parts, numbers, engine)
    # A scale may run along the output features by another dim than its first.
    axis = first.dim or 0 if any(order != parts[0][1] for _, order, _, _ in parts) else 0
    heights: dict[int, int] = dict.fromkeys(numbers, 0)
    at = {expert: number for number, expert in enumerate(numbers)}
    shares = []
    for expert, _, rule, box in parts:
        outer = (at[expert],) if expert >= 0 else ()
        if extent(box)[axis]:
            inner = (heights[expert] if dim == axis else 0 for dim in range(len(box)))
            shares.append(Share(rule.name, box, (*outer, *inner)))
        heights[expert] += extent(box)[axis]
    height = joined.rows if joined.rows is not None else heights[numbers[0]]
    assert joined.rows is not None or set(heights.values()) == {height}, f"{name}: experts of different sizes"
    stack = (len(numbers),) if numbers[0] >= 0 else ()
    whole = (height if dim == axis else size for dim, size in enumerate(extent(parts[0][3])))
    return Array(file, name, first.dtype, (*stack, *whole), tuple(shares))


def _number(
    file: str, name: str, parts: Sequence[tuple[int, int, TensorRule, Box]], experts: Sequence[int], engine: Engine
) -> Array:
    """A parameter of one number: all parts that are joined share it, so that they must have the same."""
    first = parts[0][2]
    stacked = experts[0] >= 0 and first.parameter not in engine.one_of_experts
    shape = (len(experts), *first.shape) if stacked else first.shape if experts[0] < 0 else (1,)
    inner = (0,) * (len(shape) - stacked)
    shares = [
        Share(rule.name, box, (experts.index(expert), *inner) if stacked else inner) for expert, _, rule, box in parts
    ]
    return Array(file, name, first.dtype, shape, tuple(shares))
