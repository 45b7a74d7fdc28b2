"""The result of a resharding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from modelexport.models.rules import left_out
from modelexport.resharding.plan import ReshardStep, deal
from modelexport.resharding.prepare import PreparedReshard


@dataclass(frozen=True)
class ReshardResult:
    """The result of a resharding, or of a dry run (``out`` is None then).

    Attributes:
        source_format, format: the checkpoint formats, as ``--format`` spells them.
        tensors, nbytes: of the model, each element once.
        stored_bytes: of the files written.
        bytes_sent: what processes sent to each other.
        reads: bytes that each process reads.
        plan: lines that say who holds what.
        left_out: what of the source is not part of the model -> what it is.
        warnings: what was said before the work started.
        notes: what to know of how the source was read.
    """

    source: str
    source_format: str
    out: str | None
    format: str
    tp: int
    pp: int
    ep: int
    ranks: int
    tensors: int
    nbytes: int
    stored_bytes: int
    files: list[str]
    reads: list[int] = field(default_factory=list)
    bytes_sent: int = 0
    seconds: float = 0.0
    plan: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """JSON-able form, for ``--json``."""
        return asdict(self)


def result_of(
    prepared: PreparedReshard, world: int, outcome: Mapping[str, Any] | None = None, seconds: float = 0.0
) -> ReshardResult:
    """The result of a resharding; of a dry run where there is no ``outcome``."""
    recipe, checkpoint, layout = prepared.recipe, prepared.checkpoint, prepared.target.layout
    return ReshardResult(
        source=recipe.checkpoint,
        source_format=checkpoint.format,
        out=None if outcome is None else recipe.out,
        format=recipe.format,
        tp=recipe.tp,
        pp=recipe.pp,
        ep=recipe.ep,
        ranks=world,
        tensors=len(prepared.target.plan.rules),
        nbytes=sum(step.nbytes for step in prepared.steps),
        stored_bytes=sum(file.size for file in layout.files),
        files=[file.name for file in layout.files],
        reads=_reads(prepared.steps, world),
        bytes_sent=0 if outcome is None else outcome["bytes_sent"],
        seconds=seconds,
        plan=list(prepared.target.plan.describe()),
        left_out={**checkpoint.left_out, **left_out(checkpoint)},
        warnings=prepared.warnings,
        notes=checkpoint.notes,
    )


def _reads(steps: Iterable[ReshardStep], world: int) -> list[int]:
    shares = [0] * world
    for step in steps:
        sizes = [unit.nbytes for unit in step.units]
        for nbytes, owner in zip(sizes, deal(sizes, world), strict=True):
            shares[owner] += nbytes
    return shares
