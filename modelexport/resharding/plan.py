"""The work of a resharding, cut into units that a process moves at once and steps that need not be repeated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from modelexport.checkpoints.replicas import chunks
from modelexport.checkpoints.safetensors.file import TensorInfo
from modelexport.sharding.boxes import Box, volume, whole
from modelexport.sharding.rules import TensorRule

UNIT_BYTES = 4 << 20  # so much stays in the cache between reading and writing
STEP_BYTES = 256 << 20


@dataclass(frozen=True)
class Unit:
    """Some rows of a tensor: what one process reads, once, and writes wherever it belongs."""

    info: TensorInfo
    box: Box
    nbytes: int


@dataclass
class ReshardStep:
    """Units that are journaled together: a layer, a module outside of them, or a part of one that is large."""

    id: str
    units: list[Unit] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all its units."""
        return sum(unit.nbytes for unit in self.units)


def plan_steps(rules: Iterable[TensorRule], infos: dict[str, TensorInfo]) -> list[ReshardStep]:
    """Every byte of every tensor, in the order of the rules, in steps of at most ``STEP_BYTES`` and a unit."""
    steps: dict[str, list[ReshardStep]] = {}
    for rule in rules:
        group = rule.module if rule.layer is None else f"layer {rule.layer}"
        parts = steps.setdefault(group, [ReshardStep(group)])
        filled = parts[-1].nbytes
        for unit in units_of(infos[rule.name]):
            if filled + unit.nbytes > STEP_BYTES and filled:
                parts.append(ReshardStep(f"{group} ({len(parts) + 1})"))
                filled = 0
            parts[-1].units.append(unit)
            filled += unit.nbytes
    return [step for parts in steps.values() for step in parts]


def units_of(info: TensorInfo) -> list[Unit]:
    """A tensor in units of whole rows, of ``UNIT_BYTES`` where its rows are not longer than that."""
    elements = max(1, volume(whole(info.shape)))
    return [Unit(info, box, info.nbytes * volume(box) // elements) for box in chunks(info, UNIT_BYTES)]


def deal(sizes: Sequence[int], world: int) -> list[int]:
    """The rank that takes each piece of work: balanced, and the same wherever it is computed."""
    if world == 1:
        return [0] * len(sizes)
    from modelexport.sharding.distribution import distribute_shards_to_ranks

    everyone = list(range(world))
    work = range(len(sizes))
    owners = distribute_shards_to_ranks(dict.fromkeys(work, everyone), dict(enumerate(sizes)), world, set())
    return [owners[i] for i in work]
