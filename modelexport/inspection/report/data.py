"""What a report tells of a checkpoint: gathered from its headers, its record and its scales; JSON-able.

Lists that a stranger's checkpoint could make as long as it likes end somewhere, and say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from modelexport.checkpoints.formats.hf import RECORD
from modelexport.errors import CheckpointError, PlanError
from modelexport.inspection.inspect import Inspection, describe
from modelexport.inspection.opened import Contents, open_contents
from modelexport.inspection.record.reading import read_record
from modelexport.inspection.report.figures import (
    MOST_ROWS,
    Grid,
    Naming,
    OutputError,
    cell_of,
    make_grid,
    outliers,
    output_errors,
)
from modelexport.inspection.report.scales import ScaleCounts, bin_edge, count_scales
from modelexport.models.modules import Architecture, StoredModule
from modelexport.quantization.methods import QuantizationConfig, of_method

__all__ = ["Group", "ModuleRow", "Part", "Report", "gather"]

_PARTS = (
    ("experts", ("expert",)),
    ("attention", ("attn", "attention")),
    ("MLP", ("mlp", "ffn", "feed_forward", "feedforward", "fc1", "fc2")),
)
_ORDER = ("embedding", "attention", "MLP", "experts", "router", "norms", "head", "other")


@dataclass(frozen=True)
class Part:
    """A part of the model (attention, experts, a decoder layer): bytes by number format."""

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
class Group:
    """Modules that something holds for, with the reason: each kind with how many of it there are."""

    reason: str
    modules: dict[str, int]


@dataclass
class Report:
    """All that the page shows; see the members' own classes.

    Attributes:
        name: of the checkpoint's directory.
        family: by which its modules are known, None with ``family_note`` saying why not.
        inspection: what ``modelexport inspect`` tells.
        parts, layers: bytes by part of the model, and by decoder layer.
        sqnr: error of the weights; output_sqnr: of the outputs after calibration, in dB.
        outliers: linears far worse than others of their kind, the worst first.
        recipe, producer, versions, calibration, evaluation: as recorded; empty where nothing is.
        unknown: what cannot be told, and what would tell it.
    """

    name: str
    inspection: Inspection
    family: str | None
    family_note: str
    parts: list[Part]
    layers: list[Part]
    modules: list[ModuleRow]
    sqnr: Grid | None = None
    output_sqnr: Grid | None = None
    output_errors: list[OutputError] = field(default_factory=list)
    scales: list[ScaleCounts] = field(default_factory=list)
    outliers: list[str] = field(default_factory=list)
    unquantised: list[Group] = field(default_factory=list)
    left_out: list[Group] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    source: str | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    producer: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)

    @property
    def is_recorded(self) -> bool:
        """Whether the checkpoint has a record of its export."""
        return bool(self.recipe)

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
    """Everything that can be told of a checkpoint.

    Args:
        config: the model's config.json, where the checkpoint has none of its own.

    Raises:
        CheckpointError: no checkpoint there, or a damaged one.
    """
    contents = open_contents(directory, config)
    inspection, modules = describe(contents), contents.modules
    checkpoint, architecture = contents.checkpoint, contents.architecture
    naming = Naming(modules, [row.name for row in inspection.rows])
    report = Report(
        name=directory.resolve().name or str(directory),
        inspection=inspection,
        family=None if architecture.family is None else architecture.family.name,
        family_note=architecture.reason,
        parts=_parts(modules, lambda module: _part_of(module)),
        layers=_layers(modules),
        modules=[],
        warnings=list(inspection.warnings),
    )
    figures: dict[str, float] = {}
    try:
        record = read_record(checkpoint.directory)
    except CheckpointError:  # said among inspection's warnings
        record = None
    if record is not None:
        figures = _read_record(report, record, naming)
    report.modules = _module_rows(inspection, modules, naming, figures)
    if not report.unquantised:
        report.unquantised = _kept(inspection, naming, recorded=record is not None)
    report.warnings += _engine_warnings(contents)
    scaled = {name: [m for m in group if m.stored.quantised] for name, group in naming.groups.items()}
    try:
        report.scales, notes = count_scales(checkpoint, scaled)
        report.warnings += notes
    except CheckpointError as error:
        report.warnings.append(f"the scales cannot be read: {error}")
    report.warnings = list(dict.fromkeys(report.warnings))
    report.unknown += _unknown(report, figures)
    return report


def _read_record(report: Report, record: Mapping[str, Any], naming: Naming) -> dict[str, float]:
    """Fill in what modelexport.json tells; returns the SQNR of each linear that it has."""
    report.source = None if record.get("source") is None else str(_pruned(record["source"]))
    for key in ("recipe", "producer", "versions", "calibration", "evaluation"):
        setattr(report, key, _mapping(record, key, report.warnings))
    noted = record.get("warnings")
    report.warnings += [str(_pruned(text)) for text in noted] if isinstance(noted, list) else []
    figures = _figures(record["sqnr_db"], "sqnr_db", report.warnings)
    report.sqnr = make_grid(figures, naming)
    report.outliers = outliers(figures, naming)
    errors = _mapping(record, "output_error", report.warnings)
    before, after = (_figures(errors.get(key) or {}, f"output_error.{key}", report.warnings) for key in _SIDES)
    both = {name: (before[name], after[name]) for name in after if before.get(name, 0) > 0 and after[name] > 0}
    report.output_errors = output_errors(both, naming)
    report.output_sqnr = make_grid({name: -10 * math.log10(value) for name, (_, value) in both.items()}, naming)
    report.unquantised = _by_reason(_mapping(record, "unquantised", report.warnings), naming)
    report.left_out = _by_reason(_mapping(record, "left_out", report.warnings), naming)
    return figures


_SIDES = ("before", "after")


def _mapping(record: Mapping[str, Any], key: str, warnings: list[str]) -> dict[str, Any]:
    value = record.get(key)
    if value is not None and not isinstance(value, dict):
        warnings.append(f"{RECORD}: '{key}' is not an object: left out of this report")
    pruned: dict[str, Any] = _pruned(value) if isinstance(value, dict) else {}
    return pruned


def _pruned(value: Any, depth: int = 5) -> Any:
    """A stranger's JSON without what could not be written as such, and no deeper than a reader goes."""
    if isinstance(value, (dict, list)) and not depth:
        return "..."
    if isinstance(value, dict):
        return {key: _pruned(part, depth - 1) for key, part in value.items()}
    if isinstance(value, list):
        return [_pruned(part, depth - 1) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _figures(values: Any, key: str, warnings: list[str]) -> dict[str, float]:
    """Those of a record's figures that are numbers."""
    values = values if isinstance(values, dict) else {}
    good = {name: float(value) for name, value in values.items() if _is_number(value)}
    if len(good) < len(values):
        warnings.append(f"{RECORD}: {len(values) - len(good)} of {key} are no finite numbers: left out of this report")
    return good


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30


def _by_reason(reasons: Mapping[str, Any], naming: Naming) -> list[Group]:
    """Modules grouped by the reason, and by kind within it."""
    groups: dict[str, dict[str, int]] = {}
    for name, reason in reasons.items():
        kinds = groups.setdefault(str(reason), {})
        kind = naming.of_name(name)
        kinds[kind] = kinds.get(kind, 0) + 1
    return [Group(reason, dict(list(kinds.items())[:MOST_ROWS])) for reason, kinds in list(groups.items())[:MOST_ROWS]]


def _kept(inspection: Inspection, naming: Naming, *, recorded: bool) -> list[Group]:
    """Linears without scales in a checkpoint whose record does not say why; none where nothing is quantised."""
    if not inspection.quantised:
        return []
    why = "kept as it is" if recorded else "stored without scales; why is not recorded"
    return _by_reason(dict.fromkeys(inspection.kept, why), naming)


def _part_of(module: StoredModule) -> str:
    if module.kind in ("embedding", "head", "router"):
        return module.kind
    if module.kind == "norm" or module.name.rpartition(".")[2].endswith("norm"):
        return "norms"
    path = module.path.lower()
    return next((part for part, words in _PARTS if any(word in path for word in words)), "other")


def _parts(modules: Sequence[StoredModule], name_of: Callable[[StoredModule], str]) -> list[Part]:
    sums: dict[str, tuple[int, dict[str, int]]] = {}
    for module in modules:
        name = name_of(module)
        parameters, formats = sums.get(name, (0, {}))
        number_format = module.stored.number_format
        formats[number_format] = formats.get(number_format, 0) + module.nbytes
        sums[name] = parameters + module.parameters, formats
    order = {name: number for number, name in enumerate(_ORDER)}
    return [
        Part(name, parameters, sum(formats.values()), dict(sorted(formats.items(), key=lambda item: -item[1])))
        for name, (parameters, formats) in sorted(sums.items(), key=lambda item: order.get(item[0], 0))
    ]


def _layers(modules: Sequence[StoredModule]) -> list[Part]:
    """The decoder layers, by number; those of several stacks one after the other."""
    stacked = [module for module in modules if module.index is not None]
    ordered = sorted(stacked, key=lambda module: (module.stack, module.index or 0))
    return _parts(ordered, lambda module: f"{module.stack}.{module.index}")


def _module_rows(
    inspection: Inspection, modules: Sequence[StoredModule], naming: Naming, figures: Mapping[str, float]
) -> list[ModuleRow]:
    by_kind: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for module in modules:
        if module.name in figures:
            key = naming.of(module), module.stored.number_format
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


def _engine_warnings(contents: Contents) -> list[str]:
    """What engines are known to refuse of it; empty where the family or the format is not known."""
    quantization, stored = contents.quantization, contents.checkpoint.format
    if quantization is None or contents.architecture.family is None:
        return []
    try:
        spelled = of_method(quantization.method).FORMAT
    except PlanError:
        return []
    from modelexport.models.engines import warnings

    name = stored if stored != "hf" else spelled
    found = _linears(contents.architecture, quantization, contents.modules)
    return [] if name is None else warnings(name, found)


def _linears(
    architecture: Architecture, quantization: QuantizationConfig, modules: Sequence[StoredModule]
) -> Iterator[Any]:
    """One of each kind of quantised linear, as the table of engines asks for it."""
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
    """What is not told, and what to do to learn it."""
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
    if not report.evaluation.get("comparison") and quantised:
        yield (
            "Perplexity and KL divergence are not recorded: "
            "modelexport eval CKPT --against SOURCE measures them on held-out text."
        )
    if report.inspection.tensor_parallel_sizes is None:
        yield f"Tensor-parallel sizes are not known: {report.inspection.tensor_parallel_note}."


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
