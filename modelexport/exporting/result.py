"""The result of an export: sizes, errors and cuts by kind of module, and what the record says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from modelexport.exporting.plan import ExportPlan, full_name
from modelexport.exporting.prepare import PreparedExport
from modelexport.recipe import ExportRecipe

if TYPE_CHECKING:
    from modelexport.exporting.calibrated.device_memory import DeviceMemory
    from modelexport.inspection.evaluate import Evaluation


@dataclass(frozen=True)
class SummaryRow:
    """One row of the summary: all modules of one name (``self_attn.q_proj``) taken together.

    Attributes:
        bits: stored bits per weight, scales included.
        sqnr_db: of the worst of them, None where nothing was quantised or nothing was lost.
        error_before, error_after: mean squared error of their outputs on the calibration samples, as a part of the
            outputs' own square, rounded to nearest and as written; None where nothing was calibrated.
    """

    name: str
    count: int
    number_format: str
    weights: int
    nbytes: int
    bits: float
    sqnr_db: float | None
    worst: str | None
    error_before: float | None = None
    error_after: float | None = None


@dataclass(frozen=True)
class CutRow:
    """The cut of all modules of one name.

    Attributes:
        partition: ``column``, ``row`` or ``replicated``.
        dim: the dimension of ``shape`` that is cut, None where nothing is.
        owned, held: elements along it that each rank reads and emits, and that its part of the model needs.
    """

    name: str
    partition: str
    dim: int | None
    shape: tuple[int, ...]
    owned: list[int]
    held: list[int]


@dataclass(frozen=True)
class ExportResult:
    """The result of an export, or of a dry run (``out`` is None then).

    Attributes:
        source_bytes, output_bytes: of the weights.
        peak_rank_bytes: estimate of the largest rank's buffers, beyond what importing torch takes.
        tensor_parallel_sizes: at which an engine can load the result.
        notes: what to know of how the model's family is exported.
        seconds: wall time of the export, 0 for a dry run.
        evaluation: perplexity and a sentence before and after; of the demo model only.
        cuts: which part of each kind of module the ranks read.
        kernels: ``fused``, ``triton`` on a GPU; ``plain``, where plain torch is quicker; or which slower ones were used
            and why.
        format: the checkpoint format written.
        warnings: engines that are known to refuse what is written, and why.
        calibration: the text that static scales were made with; None where there are none.
        calibrated_bytes: what calibration holds of a model, beside ``peak_rank_bytes``: the largest layer in float32
            (all ranks together), and the samples' hidden states (each rank); None where nothing is calibrated.
        device_memory: what calibration takes on each rank's GPU; None where none computes, and but for dry runs and
            exports with ``device_memory``.
        pushed: the address of the hub's repository that it was uploaded to; None where it was not.
        target: lines that say which rank of the written checkpoint holds what; empty where it is whole.
    """

    source: str
    out: str | None
    quant: str
    tp: int
    rows: list[SummaryRow]
    source_bytes: int
    output_bytes: int
    files: list[str]
    peak_rank_bytes: int
    tensor_parallel_sizes: list[int]
    notes: list[str] = field(default_factory=list)
    unquantised: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    evaluation: Evaluation | None = None
    cuts: list[CutRow] = field(default_factory=list)
    kernels: str = "fused"
    format: str = ExportRecipe.format
    algorithm: str = ExportRecipe.algorithm
    target: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    calibration: dict[str, Any] | None = None
    calibrated_bytes: tuple[int, int] | None = None
    device_memory: DeviceMemory | None = None
    pushed: str | None = None

    def as_json(self) -> dict[str, Any]:
        """JSON-able form, for ``--json``."""
        fields = asdict(replace(self, evaluation=None, device_memory=None))
        if self.device_memory is None:  # said only where a device computes
            del fields["device_memory"]
        else:
            fields["device_memory"] = self.device_memory.as_json()
        return {**fields, "evaluation": self.evaluation.as_json() if self.evaluation else None}


def preview_of(prepared: PreparedExport) -> ExportResult:
    """The result of a dry run."""
    return _result(prepared, prepared.source.label, None, {"left_out": prepared.plan.left_out}, 0.0)


def result_of(prepared: PreparedExport, record: dict[str, Any], seconds: float) -> ExportResult:
    """The result of an export that published ``record``, after ``seconds``."""
    return _result(prepared, record["source"], prepared.recipe.out, record, seconds)


def _result(
    prepared: PreparedExport, source: str, out: str | None, record: dict[str, Any], seconds: float
) -> ExportResult:
    plan, recipe, target = prepared.plan, prepared.recipe, prepared.target
    return ExportResult(
        source=source,
        out=out,
        quant=recipe.quant,
        tp=plan.parallelism.tp,
        rows=_rows(plan, record.get("sqnr_db", {}), record.get("output_error", {})),
        source_bytes=plan.source_bytes,
        output_bytes=sum(step.output_bytes for step in plan.steps),
        files=[file.name for file in target.layout.files],
        peak_rank_bytes=plan.peak_rank_bytes(),
        tensor_parallel_sizes=plan.admissible_tp(),
        notes=list(record.get("notes", plan.notes)),
        unquantised=plan.unquantised,
        left_out=record["left_out"],
        seconds=seconds,
        cuts=_cuts(plan),
        kernels=_kernels(plan, recipe.device, foretold=out is None),
        format=target.format,
        algorithm=record.get("recipe", {}).get("algorithm", recipe.algorithm),
        target=list(target.plan.describe()) if target.plan.parallelism.size > 1 else [],
        warnings=list(prepared.warnings),
        calibrated_bytes=_calibrated_bytes(plan, recipe),
        device_memory=prepared.device_memory,
        calibration=record.get("calibration") if plan.formats() or plan.kv_cache else None,
    )


def _cuts(plan: ExportPlan) -> list[CutRow]:
    """One row for each name of a module, from the first layer that has it."""
    rows: dict[str, CutRow] = {}
    described: dict[str, str] = {}  # the row's name -> the module that it describes
    for step in plan.steps:
        for task in step.tasks:
            path, cut = plan.general_path(step, task), task.cut
            full = full_name(step.layer, task.path)
            if task.parameter != "weight" or described.setdefault(path, full) != full:
                continue
            row = rows.setdefault(path, CutRow(path, task.module.partition, cut.dim, task.info.shape, [], []))
            for sizes, ranges in ((row.owned, cut.owned), (row.held, cut.held)):
                before = sizes or [0] * len(ranges)  # of the slabs of rows before this one
                sizes[:] = [n + stop - start for n, (start, stop) in zip(before, ranges, strict=True)]
    return list(rows.values())


def _calibrated_bytes(plan: ExportPlan, recipe: ExportRecipe) -> tuple[int, int] | None:
    if not plan.needs_ranges and not plan.calibrated:
        return None
    layers = [step for step in plan.steps if step.index is not None]
    largest = max((4 * sum(math.prod(task.info.shape) for task in step.tasks) for step in layers), default=0)
    hidden = 4 * recipe.calib_samples * recipe.calib_length * plan.dimensions.hidden
    return largest, hidden if recipe.calib_memory is None else min(hidden, recipe.calib_memory)


def _kernels(plan: ExportPlan, device: str, *, foretold: bool) -> str:
    from modelexport.quantization import devices, kernels

    kind = devices.kind_of(device)
    here = kind in (devices.AUTO, devices.CPU)
    backend = kernels.backend(plan.source_bytes, foretold=foretold) if here else kernels.backend_on(kind)
    slower = backend.name == "reference" or (here and backend.name == "triton")
    return f"{backend.name} ({backend.reason})" if slower else backend.name


def _rows(plan: ExportPlan, sqnr: dict[str, float], errors: dict[str, dict[str, float]]) -> list[SummaryRow]:
    """Group the plan's tensors by the module's name within its layer, in the plan's order."""
    sums: dict[str, dict[str, Any]] = {}
    for step in plan.steps:
        for task in step.tasks:
            path = plan.general_path(step, task)
            if path not in sums:
                empty = {"modules": set(), "weights": 0, "nbytes": 0, "formats": {}, "linears": []}
                sums[path] = {**empty, "worst": (math.inf, None)}
            row = sums[path]
            full = full_name(step.layer, task.path)
            row["modules"].add(full)
            share = (task.rows[1] - task.rows[0]) / max(1, task.info.shape[0] if task.info.shape else 1)
            row["nbytes"] += round(share * sum(out.nbytes for out in task.outputs))
            if task.parameter == "weight":
                row["weights"] += round(share * math.prod(task.info.shape))
                kept = task.info.dtype.lower()
                row["formats"][kept if task.number_format is None else task.number_format.name] = None
            row["linears"].append(full)
            if full in sqnr:
                row["worst"] = min(row["worst"], (sqnr[full], full))
    return [
        SummaryRow(
            path,
            len(row["modules"]),
            ", ".join(row["formats"]) or "-",
            row["weights"],
            row["nbytes"],
            8 * row["nbytes"] / max(1, row["weights"]),
            row["worst"][0] if row["worst"][1] else None,
            row["worst"][1],
            _mean(errors.get("before", {}), row["linears"]),
            _mean(errors.get("after", {}), row["linears"]),
        )
        for path, row in sums.items()
    ]


def _mean(errors: Mapping[str, float], names: Sequence[str]) -> float | None:
    known = [errors[name] for name in dict.fromkeys(names) if name in errors]
    return math.fsum(known) / len(known) if known else None
