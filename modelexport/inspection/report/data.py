"""The content of a report: gathered from a checkpoint's headers, its record and its scales; JSON-able.

Lists that a checkpoint could make arbitrarily long are cut, and their lengths are told.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from modelexport.checkpoints.formats.hf import RECORD
from modelexport.errors import CheckpointError, PlanError
from modelexport.inspection.inspect import Inspection, describe
from modelexport.inspection.opened import OpenedCheckpoint, open_contents
from modelexport.inspection.record.reading import EvaluationFigures, ExportRecord, RecordedAssignment, read_record
from modelexport.inspection.report.figures import (
    MOST_ROWS,
    UNQUANTISED,
    ErrorGrid,
    FormatGrid,
    KindOutputError,
    ModuleKinds,
    cell_of,
    format_grid,
    make_grid,
    outliers,
    output_errors,
)
from modelexport.inspection.report.scales import ScaleCounts, bin_edge, count_scales
from modelexport.inspection.report.timeline import RunTimeline
from modelexport.models.modules import Architecture, StoredModule
from modelexport.quantization import algorithms, kv_caches
from modelexport.quantization.methods import QuantizationConfig, of_method

__all__ = ["ModuleGroup", "ModuleRow", "Report", "StoredBytes", "gather"]

_PARTS = (
    ("experts", ("expert",)),
    ("attention", ("attn", "attention")),
    ("MLP", ("mlp", "ffn", "feed_forward", "feedforward", "fc1", "fc2")),
)
_ORDER = ("embedding", "attention", "MLP", "experts", "router", "norms", "head", "other")


@dataclass(frozen=True)
class StoredBytes:
    """A part of the model (attention, experts, a decoder layer) and its bytes by number format."""

    name: str
    parameters: int
    nbytes: int
    formats: dict[str, int]

    @property
    def bits(self) -> float:
        """Stored bits per parameter."""
        return 8 * self.nbytes / self.parameters if self.parameters else 0.0


@dataclass(frozen=True)
class ModuleRow:
    """All modules of one path within a layer that are stored alike.

    Attributes:
        shapes: of the weights, in words.
        worst_db, mean_db: SQNR in dB against the source; None where it is not recorded.
        worst: the module with the worst.
    """

    name: str
    count: int
    number_format: str
    shapes: str
    parameters: int
    nbytes: int
    bits: float
    worst_db: float | None = None
    mean_db: float | None = None
    worst: str | None = None


@dataclass(frozen=True)
class ModuleGroup:
    """Modules that were left as they are for one reason: each kind with its number of modules."""

    reason: str
    modules: dict[str, int]

    @property
    def names(self) -> list[str]:
        """The kinds, each with its number of modules where there are several."""
        return [name if count == 1 else f"{name} ({count})" for name, count in self.modules.items()]


@dataclass
class Report:
    """The content of the page.

    Attributes:
        name: of the checkpoint's directory.
        family: the family that describes its modules, None with ``family_note`` giving the reason.
        inspection: the result of ``modelexport inspect``.
        parts, layers: bytes by part of the model, and by decoder layer.
        sqnr: error of the weights; output_sqnr: of the outputs after calibration, in dB.
        outliers: linears far worse than others of their kind, the worst first.
        assignment: autoquant's choice, and what it chose from; None without.
        chosen_formats: the number formats that it chose.
        recipe, producer, versions, calibration, evaluation: as recorded; empty where nothing is.
        run: of the log that was given; None without.
        unknown: what is not known, and the command that would measure it.
    """

    name: str
    inspection: Inspection
    family: str | None
    family_note: str
    parts: list[StoredBytes]
    layers: list[StoredBytes]
    modules: list[ModuleRow]
    sqnr: ErrorGrid | None = None
    output_sqnr: ErrorGrid | None = None
    output_errors: list[KindOutputError] = field(default_factory=list)
    scales: list[ScaleCounts] = field(default_factory=list)
    outliers: list[str] = field(default_factory=list)
    assignment: RecordedAssignment | None = None
    chosen_formats: FormatGrid | None = None
    unquantised: list[ModuleGroup] = field(default_factory=list)
    left_out: list[ModuleGroup] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    source: str | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    producer: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    run: RunTimeline | None = None

    @property
    def is_recorded(self) -> bool:
        """True if the checkpoint has a record of its export."""
        return bool(self.recipe)

    @property
    def producer_text(self) -> str:
        """Name and version of the program that wrote the checkpoint."""
        return " ".join(map(str, self.producer.values())) or "an unnamed program"

    @property
    def algorithm_in_words(self) -> str:
        """The end of "quantised to int4"; empty where no algorithm is recorded."""
        return algorithms.in_words(self.recipe.get("algorithm"))

    @property
    def evaluation_figures(self) -> EvaluationFigures:
        """The figures of ``evaluation``."""
        return EvaluationFigures.of(self.evaluation)

    @property
    def format_bytes(self) -> dict[str, int]:
        """Bytes of each number format, the largest first."""
        sums: Counter[str] = Counter()
        for part in self.parts:
            sums.update(part.formats)
        return dict(sums.most_common())

    @property
    def quantised_formats(self) -> list[str]:
        """Number formats that are quantised, by their bytes, the largest first."""
        return [name for name in self.format_bytes if name not in UNQUANTISED]

    @property
    def has_equal_layers(self) -> bool:
        """True if all layers have the same bytes in each number format."""
        return all(layer.formats == self.layers[0].formats for layer in self.layers)

    def as_json(self) -> dict[str, Any]:
        """JSON-able form, for ``--json``; bins of scales with their edges."""
        bare = replace(self.inspection, record=None)  # of which the report has its own
        fields = asdict(replace(self, inspection=bare))
        inspection = fields.pop("inspection")
        for long in ("quantised", "kept", "directory", "record"):  # of every expert; inspect --json lists them
            del inspection[long]
        for entry, counts in zip(fields["scales"], self.scales, strict=True):
            numbers = sorted(entry.pop("counts"))
            entry["histogram"] = [[bin_edge(n), bin_edge(n + 1), counts.counts[n]] for n in numbers]
            entry |= {key: _finite(entry[key]) for key in ("least", "most")}
            entry["median"] = _finite(counts.median)
        return {**fields, "inspection": {**inspection, "bits": self.inspection.bits}}


def gather(directory: Path, config: Path | None = None) -> Report:
    """Returns the report of a checkpoint.

    Args:
        config: the model's config.json, where the checkpoint has none of its own.

    Raises:
        CheckpointError: no checkpoint there, or a damaged one.
    """
    contents = open_contents(directory, config)
    inspection, modules = describe(contents), contents.modules
    checkpoint, architecture = contents.checkpoint, contents.architecture
    kinds = ModuleKinds(modules, [row.name for row in inspection.rows])
    report = Report(
        name=directory.resolve().name or str(directory),
        inspection=inspection,
        family=None if architecture.family is None else architecture.family.name,
        family_note=architecture.reason,
        parts=_stored_bytes(modules, _part_of),
        layers=_layers(modules),
        modules=[],
        warnings=list(inspection.warnings),
    )
    figures: Mapping[str, float] = {}
    try:
        record = read_record(checkpoint.directory)
    except CheckpointError:  # inspection's warnings have it
        record = None
    if record is not None:
        figures = record.sqnr_db
        _add_record(report, record, kinds)
    report.modules = _module_rows(inspection, modules, kinds, figures)
    if not report.unquantised:
        report.unquantised = _kept(inspection, kinds, recorded=record is not None)
    report.warnings += _engine_warnings(contents)
    scaled = {name: [m for m in group if m.stored.quantised] for name, group in kinds.groups.items()}
    try:
        report.scales, notes = count_scales(checkpoint, scaled)
        report.warnings += notes
    except CheckpointError as error:
        report.warnings.append(f"the scales cannot be read: {error}")
    report.warnings = list(dict.fromkeys(report.warnings))
    report.unknown += _unknown(report, figures)
    return report


def _add_record(report: Report, record: ExportRecord, kinds: ModuleKinds) -> None:
    """Fills in what modelexport.json has."""
    report.source = record.source
    for key in ("recipe", "producer", "versions", "calibration", "evaluation"):
        setattr(report, key, _pruned(getattr(record, key)))
    report.warnings += [str(_pruned(text)) for text in record.warnings]
    report.warnings += [f"{RECORD}: {problem}: left out of this report" for problem in record.problems]
    report.sqnr = make_grid(record.sqnr_db, kinds)
    report.outliers = outliers(record.sqnr_db, kinds)
    before, after = record.output_error_before, record.output_error_after
    both = {name: (before[name], after[name]) for name in after if before.get(name, 0) > 0 and after[name] > 0}
    report.output_errors = output_errors(both, kinds)
    report.output_sqnr = make_grid({name: -10 * math.log10(value) for name, (_, value) in both.items()}, kinds)
    report.assignment = record.assignment
    if record.assignment is not None:
        linears = (module for module in record.modules if module.kind == "linear")
        report.chosen_formats = format_grid({module.name: module.label or "none" for module in linears}, kinds)
    report.unquantised = _by_reason(record.unquantised, kinds)
    report.left_out = _by_reason(record.left_out, kinds)


def _pruned(value: Any, depth: int = 5) -> Any:
    """Returns JSON without infinities and NaN, which JSON cannot hold, and no deeper than a reader goes."""
    if isinstance(value, (dict, list)) and not depth:
        return "..."
    if isinstance(value, dict):
        return {key: _pruned(part, depth - 1) for key, part in value.items()}
    if isinstance(value, list):
        return [_pruned(part, depth - 1) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _by_reason(reasons: Mapping[str, str], kinds: ModuleKinds) -> list[ModuleGroup]:
    """Returns modules grouped by the reason, and by kind within it."""
    groups: dict[str, Counter[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault(reason, Counter())[kinds.of_name(name)] += 1
    shown = list(groups.items())[:MOST_ROWS]
    return [ModuleGroup(reason, dict(list(counts.items())[:MOST_ROWS])) for reason, counts in shown]


def _kept(inspection: Inspection, kinds: ModuleKinds, *, recorded: bool) -> list[ModuleGroup]:
    """Returns linears without scales whose reason is not recorded; none where nothing is quantised."""
    if not inspection.quantised:
        return []
    why = "kept as it is" if recorded else "stored without scales; why is not recorded"
    return _by_reason(dict.fromkeys(inspection.kept, why), kinds)


def _part_of(module: StoredModule) -> str:
    if module.kind in ("embedding", "head", "router"):
        return module.kind
    if module.kind == "norm" or module.name.rpartition(".")[2].endswith("norm"):
        return "norms"
    path = module.path.lower()
    return next((part for part, words in _PARTS if any(word in path for word in words)), "other")


def _stored_bytes(modules: Sequence[StoredModule], name_of: Callable[[StoredModule], str]) -> list[StoredBytes]:
    sums: dict[str, tuple[int, dict[str, int]]] = {}
    for module in modules:
        name = name_of(module)
        parameters, formats = sums.get(name, (0, {}))
        number_format = module.stored.number_format
        formats[number_format] = formats.get(number_format, 0) + module.nbytes
        sums[name] = parameters + module.parameters, formats
    order = {name: number for number, name in enumerate(_ORDER)}
    return [
        StoredBytes(name, parameters, sum(formats.values()), dict(sorted(formats.items(), key=lambda item: -item[1])))
        for name, (parameters, formats) in sorted(sums.items(), key=lambda item: order.get(item[0], 0))
    ]


def _layers(modules: Sequence[StoredModule]) -> list[StoredBytes]:
    """Returns the decoder layers by number; those of several stacks one after the other."""
    stacked = [module for module in modules if module.index is not None]
    ordered = sorted(stacked, key=lambda module: (module.stack, module.index or 0))
    return _stored_bytes(ordered, lambda module: f"{module.stack}.{module.index}")


def _module_rows(
    inspection: Inspection, modules: Sequence[StoredModule], kinds: ModuleKinds, figures: Mapping[str, float]
) -> list[ModuleRow]:
    by_kind: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for module in modules:
        if module.name in figures:
            key = kinds.of(module), module.stored.number_format
            by_kind.setdefault(key, []).append((figures[module.name], module.name))
    rows = []
    for row in inspection.rows:
        cell = cell_of(by_kind.get((row.name, row.number_format), ()))
        shapes = " or ".join(" x ".join(map(str, shape)) for shape in row.shapes[:3])
        more = f" and {len(row.shapes) - 3} more" if len(row.shapes) > 3 else ""
        error = (None, None, None) if cell is None else (cell.worst, cell.mean, cell.name)
        size = row.parameters, row.nbytes, row.bits
        rows.append(ModuleRow(row.name, row.count, row.number_format, f"{shapes}{more}" or "-", *size, *error))
    return rows


def _engine_warnings(contents: OpenedCheckpoint) -> list[str]:
    """Returns what engines are known to refuse; empty where the family or the format is not known."""
    quantization, stored = contents.quantization, contents.checkpoint.format
    if quantization is None or contents.architecture.family is None:
        return []
    try:
        method_format = of_method(quantization.method).FORMAT
    except PlanError:
        return []
    from modelexport.models.engines import warnings

    name = stored if stored != "hf" else method_format
    found = _linears(contents.architecture, quantization, contents.modules)
    cache = kv_caches.of_scheme(quantization.kv_cache_scheme)
    return [] if name is None else warnings(name, found, cache=None if cache is None else cache.name)


def _linears(
    architecture: Architecture, quantization: QuantizationConfig, modules: Sequence[StoredModule]
) -> Iterator[Any]:
    """Yields one of each kind of quantised linear, as the table of engines takes it."""
    from modelexport.models.engines import Linear
    from modelexport.quantization import formats

    assert architecture.family is not None
    declared = {module.general_path: module for module in architecture.family.layer}
    seen = set()
    for module in modules:
        own, scheme, shape = declared.get(module.path), quantization.scheme_of(module.name), module.stored.shape
        key = (module.path, module.stored.number_format, shape)
        name = None if scheme is None else formats.name_of(scheme)
        if own is None or scheme is None or name is None or shape is None or len(shape) != 2:
            continue
        if not module.stored.quantised or key in seen:
            continue
        seen.add(key)
        group = scheme.weights.get("group_size") if scheme.weights.get("strategy") != "channel" else -1
        size = group if isinstance(group, int) and formats.has_groups(name) else None
        shape = shape[0], shape[1]
        yield Linear(module.name, name, shape, size, own.role, own.partition, own.is_expert)


def _unknown(report: Report, figures: Mapping[str, float]) -> Iterator[str]:
    """Yields what is not known, each with the command that would measure it."""
    quantised = bool(report.inspection.quantised)
    if not report.is_recorded:
        yield (
            f"There is no {RECORD}: who made the checkpoint, from what and by which recipe is not known"
            + (
                "; how far it is from its source neither (modelexport verify CKPT --against SOURCE measures it)."
                * quantised
            )
        )
    elif quantised and not figures:
        yield (
            "The record has no error per linear: the weights were not compared with a source's "
            "(modelexport verify CKPT --against SOURCE, or modelexport eval, compares them)."
        )
    if quantised and not report.evaluation_figures.has_reference:
        yield (
            "Perplexity and KL divergence are not recorded: "
            "modelexport eval CKPT --against SOURCE measures them on held-out text."
        )
    if report.inspection.tensor_parallel_sizes is None:
        yield f"Tensor-parallel sizes are not known: {report.inspection.tensor_parallel_note}."


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
