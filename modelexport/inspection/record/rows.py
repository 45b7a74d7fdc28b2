"""The modules of a record: rows for people, and what decides which engine loads them.

No weight is read, and torch is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from modelexport.inspection.record.reading import ExportRecord
from modelexport.models.engines import Linear
from modelexport.models.loading import CheckpointKind

__all__ = ["RecordRow", "linears_of", "rows_of", "stored_of"]


@dataclass
class RecordRow:
    """All modules of one name and number format.

    Attributes:
        name: within a decoder layer, ``*`` for an expert's number.
        number_format: ``"int4"``, ``"int4:32"``, or the dtype of what is not quantised.
        weights, nbytes: elements of the weights; bytes stored, scales and biases included.
        sqnr_db, worst: of the worst module, and its name; None where nothing was rounded.
    """

    name: str
    number_format: str
    quantised: bool
    count: int = 0
    weights: int = 0
    nbytes: int = 0
    sqnr_db: float | None = None
    worst: str | None = None

    @property
    def bits(self) -> float:
        """Stored bits per weight."""
        return 8 * self.nbytes / max(1, self.weights)


def rows_of(record: ExportRecord) -> list[RecordRow]:
    """Returns one row for each name and number format, in the order of the record."""
    found: dict[tuple[str, str], RecordRow] = {}
    for module in record.modules:
        written = module.label or next((tensor.dtype.lower() for tensor in module.tensors.values()), "-")
        is_cache = module.role.endswith("_cache")  # scales of the KV cache: they belong to no weight
        name = f"{module.path} (KV cache scales)" if is_cache else module.path
        row = found.setdefault((name, written), RecordRow(name, written, module.label is not None))
        row.count += 1
        row.weights += 0 if is_cache else math.prod(module.shape)
        row.nbytes += sum(tensor.nbytes for tensor in module.tensors.values())
        error = record.sqnr_db.get(module.name)
        if error is not None and (row.sqnr_db is None or error < row.sqnr_db):
            row.sqnr_db, row.worst = error, module.name
    return list(found.values())


def stored_of(record: ExportRecord) -> CheckpointKind:
    """Returns what of an exported checkpoint decides which engine loads it."""
    labels = {module.label for module in record.modules if module.label is not None}
    return CheckpointKind(
        format=str(record.recipe.get("format", "hf")),
        number_formats=tuple(sorted(labels)) or ("none",),
        model_type=record.model.model_type,
        sharded=any(record.recipe.get(f"target_{axis}", 1) != 1 for axis in ("tp", "pp", "ep")),
        kv_cache=None if (cache := record.recipe.get("kv_cache")) is None else str(cache),
    )


def linears_of(record: ExportRecord) -> Iterator[Linear]:
    """Yields the quantised linears, as the table of what engines refuse takes them."""
    for module in record.modules:
        if module.number_format is not None and len(module.shape) == 2:
            shape, is_expert = (module.shape[0], module.shape[1]), ".*" in module.path
            yield Linear(
                module.name, module.number_format, shape, module.group_size, module.role, module.partition, is_expert
            )
