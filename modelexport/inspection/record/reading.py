"""modelexport.json as it is read: checked as far as commands rely on it, and typed, whoever wrote it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelexport.checkpoints.card_metadata import known_fields
from modelexport.checkpoints.formats.hf import RECORD
from modelexport.checkpoints.safetensors.file import tensor_nbytes
from modelexport.errors import CheckpointError, shown
from modelexport.system.small_files import has_file, read_json

__all__ = [
    "EvaluationFigures",
    "ExportRecord",
    "RecordedAssignment",
    "RecordedModel",
    "RecordedModule",
    "RecordedTensor",
    "is_figure",
    "read_record",
]

Kind = type | tuple[type, ...]
_NEEDED = {"recipe": dict, "sha256": dict, "sqnr_db": dict, "layers": list, "producer": dict, "versions": dict}
_OPTIONAL = {
    **dict.fromkeys(("file_sha256", "model", "calibration", "evaluation", "output_error", "assignment"), dict),
    **dict.fromkeys(("unquantised", "left_out"), dict),
    **dict.fromkeys(("adapters", "changed", "tensor_parallel_sizes", "warnings", "rounded_before"), list),
}
_OF_CALIBRATION = {"samples": int, "length": int, "text": str, "unseen_experts": list}
_OF_CALIBRATION_OPTIONAL = {"notes": dict, "rare_experts": dict, "sources": list}
_OF_SOURCE: dict[str, Kind] = {"text": str, "weight": (int, float), "samples": int}
_OF_COMPARISON = {"model": dict, "reference": dict}
_OF_LAYER = {"name": str, "modules": dict}
_OF_MODULE = {"kind": str, "role": str, "partition": str, "number_format": str, "shape": list, "tensors": dict}
_OF_TENSOR = {"dtype": str, "shape": list}
_KINDS = {
    dict: "an object",
    list: "a list",
    int: "a whole number",
    str: "a text",
    float: "a number",
    bool: "true or false",
}


def read_record(directory: Path) -> ExportRecord | None:
    """Returns the content of modelexport.json; None where there is none.

    Raises:
        CheckpointError: it cannot be read, or is not what an export writes.
    """
    return ExportRecord.of(read_json(directory / RECORD), directory / RECORD) if has_file(directory, RECORD) else None


def _check_record(path: Path, record: Mapping[str, Any]) -> None:
    for key, kind in _NEEDED.items():
        if not isinstance(record.get(key), kind):
            raise CheckpointError(f"{path}: has no '{key}'; it is damaged, or of another version of modelexport")
    _check(path, record, _OPTIONAL, "")
    for module, value in record["sqnr_db"].items():
        if not isinstance(value, (int, float)):
            raise CheckpointError(f"{path}: sqnr_db of {shown(module)} is {shown(value)}, no number of decibels")
    errors = record.get("output_error") or {}
    _check(path, errors, dict.fromkeys(errors, dict), "output_error.")
    for when, values in errors.items():
        _check(path, values, dict.fromkeys(values, (int, float)), f"output_error.{shown(when)}.", needed=True)
    _check_items(path, record.get("changed") or [], str, "changed.")
    _check_items(path, record.get("adapters") or [], dict, "adapters.")
    _check_calibration(path, record.get("calibration"))
    evaluation = record.get("evaluation") or {}
    _check(path, evaluation, {"model": dict, "comparison": dict}, "evaluation.")
    _check(path, evaluation.get("comparison") or {}, _OF_COMPARISON, "evaluation.comparison.")
    _check_items(path, record["layers"], dict, "layers.")


def _check_calibration(path: Path, calibration: Mapping[str, Any] | None) -> None:
    """Checks what the summary of an export that keeps the numbers prints again."""
    if calibration is None:
        return
    _check(path, calibration, _OF_CALIBRATION, "calibration.", needed=True)
    _check(path, calibration, _OF_CALIBRATION_OPTIONAL, "calibration.")
    _check_items(path, calibration["unseen_experts"], str, "calibration.unseen_experts.")
    sources = calibration.get("sources") or []
    _check_items(path, sources, dict, "calibration.sources.")
    for number, source in enumerate(sources):
        _check(path, source, _OF_SOURCE, f"calibration.sources.{number}.", needed=True)
    notes = calibration.get("notes") or {}
    _check(path, notes, dict.fromkeys(notes, str), "calibration.notes.", needed=True)


def _check_items(path: Path, items: list[Any], kind: type, where: str) -> None:
    if not all(isinstance(item, kind) for item in items):
        _check(path, dict(enumerate(items)), dict.fromkeys(range(len(items)), kind), where, needed=True)


def _check(path: Path, values: Mapping[Any, Any], kinds: Mapping[Any, Kind], where: str, needed: bool = False) -> None:
    """Checks the kinds of values; unless ``needed``, one may be missing or null."""
    for key, kind in kinds.items():
        value = values.get(key)
        if not isinstance(value, kind) and (needed or value is not None):
            found = _KINDS.get(type(value), "missing")
            wanted = "a number" if isinstance(kind, tuple) else _KINDS[kind]
            raise CheckpointError(f"{path}: '{where}{shown(key)}' is {found}, not {wanted}; the record is damaged")


_MOST_POINTS = 256  # of a front
_DEFAULT_GROUP = 128  # of every number format that has groups of several sizes
_NUMBER_IN_PATH = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True)
class RecordedModel:
    """The model that was exported.

    Attributes:
        source_bytes: of its weights before the export; None where not recorded.
        card: fields of the source's model card, see :func:`~modelexport.checkpoints.card_metadata.known_fields`.
    """

    model_type: str | None = None
    architecture: str | None = None
    hub_id: str | None = None
    revision: str | None = None
    is_demo: bool = False
    source_bytes: int | None = None
    card: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> RecordedModel:
        """Reads the record's ``model``."""
        texts = {key: _text(model.get(key)) for key in ("model_type", "architecture", "hub_id", "revision")}
        size = model.get("source_bytes")
        nbytes = size if isinstance(size, int) else None
        return cls(**texts, is_demo=bool(model.get("is_demo")), source_bytes=nbytes, card=known_fields(model))


@dataclass(frozen=True)
class RecordedTensor:
    """A tensor as it was written."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, tensor: Mapping[str, Any], where: str, path: Path) -> RecordedTensor:
        """Reads one of a module's ``tensors``."""
        _check(path, tensor, _OF_TENSOR, where, needed=True)
        shape = _shape(path, tensor, where)
        try:
            return cls(tensor["dtype"], shape, tensor_nbytes(tensor["dtype"], shape))
        except CheckpointError as error:
            raise CheckpointError(f"{path}: '{where}dtype': {error}; the record is damaged") from error


@dataclass(frozen=True)
class RecordedModule:
    """A module as it was written.

    Attributes:
        name: its full name; ``path``: within its decoder layer, ``*`` for an expert's number.
        kind, role, partition: see :class:`~modelexport.layers.ModuleConfig`.
        number_format: None where it is not quantised.
        shape: of its weight.
        tensors: by their names within the module.
    """

    name: str
    path: str
    kind: str
    role: str
    partition: str
    number_format: str | None
    group_size: int | None
    shape: tuple[int, ...]
    tensors: Mapping[str, RecordedTensor]

    @property
    def label(self) -> str | None:
        """The number format as ``--quant`` spells it (``"int4"``, ``"int4:32"``); None where it is not quantised."""
        has_default = self.group_size in (None, _DEFAULT_GROUP)
        return (
            self.number_format
            if has_default or self.number_format is None
            else f"{self.number_format}:{self.group_size}"
        )

    @classmethod
    def all_of(cls, layers: Sequence[Mapping[str, Any]], path: Path) -> Iterator[RecordedModule]:
        """Reads the record's ``layers``."""
        for number, layer in enumerate(layers):
            where = f"layers.{number}."
            _check(path, layer, _OF_LAYER, where, needed=True)
            _check(path, layer["modules"], dict.fromkeys(layer["modules"], dict), f"{where}modules.", needed=True)
            for inner, module in layer["modules"].items():
                name = ".".join(part for part in (layer["name"], inner) if part)
                within = name if layer.get("index") is None else inner
                yield cls._of(name, within, module, f"{where}modules.{shown(inner)}.", path)

    @classmethod
    def _of(cls, name: str, within: str, module: Mapping[str, Any], where: str, path: Path) -> RecordedModule:
        _check(path, module, _OF_MODULE, where, needed=True)
        _check(path, module, {"group_size": int}, where)
        tensors, inside = module["tensors"], f"{where}tensors."
        _check(path, tensors, dict.fromkeys(tensors, dict), inside, needed=True)
        return cls(
            name=name,
            path=_NUMBER_IN_PATH.sub(".*", within),
            kind=module["kind"],
            role=module["role"],
            partition=module["partition"],
            number_format=None if module["number_format"] == "none" else module["number_format"],
            group_size=module.get("group_size"),
            shape=_shape(path, module, where),
            tensors={key: RecordedTensor.of(tensor, f"{inside}{shown(key)}.", path) for key, tensor in tensors.items()},
        )


@dataclass(frozen=True)
class RecordedAssignment:
    """The choice of number formats by autoquant, among the best ones for other sizes: bits per weight, and errors.

    Attributes:
        by: what the errors are, see :mod:`~modelexport.quantization.sensitivity`.
        chosen: bits and error of what was written.
        front: the same of the best choices, the smallest first.
        uniform: number format, see :attr:`RecordedModule.label` -> the same of all linears in it.
    """

    by: str
    chosen: tuple[float, float]
    front: tuple[tuple[float, float], ...]
    uniform: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, assignment: Mapping[str, Any]) -> RecordedAssignment | None:
        """Reads the record's ``assignment``; None where there is none, or its figures are none."""
        chosen = _pair([assignment.get("bits"), assignment.get("error")])
        front, uniform = assignment.get("front"), assignment.get("uniform")
        if chosen is None or not isinstance(front, list) or not isinstance(uniform, dict):
            return None
        points = tuple(pair for point in front[:_MOST_POINTS] if (pair := _pair(point)) is not None)
        usual = f":{_DEFAULT_GROUP}"
        apart = {
            name.removesuffix(usual): pair for name, point in uniform.items() if (pair := _pair(point)) is not None
        }
        return cls(str(assignment.get("by")), chosen, points, apart)


@dataclass(frozen=True)
class EvaluationFigures:
    """Figures measured on text; None where they were not, or not against the source.

    Attributes:
        text: what the text is called; ``windows`` of ``window`` tokens of it were evaluated in ``dtype``.
        perplexity, reference_perplexity: of the checkpoint, and of its source.
        loss_difference, mean_kl: in nats a token, each with its standard error.
        same_top: part of the tokens of which both expect the same next one most, with its standard error.
        worst_kl: mean KL of the 1 % of tokens where it is largest.
        has_reference: True if it was measured against the source.
    """

    text: str = "a text"
    windows: int | None = None
    window: int | None = None
    dtype: str = "float32"
    perplexity: float | None = None
    reference_perplexity: float | None = None
    loss_difference: float | None = None
    loss_standard_error: float | None = None
    mean_kl: float | None = None
    kl_standard_error: float | None = None
    same_top: float | None = None
    same_top_standard_error: float | None = None
    worst_kl: float | None = None
    has_reference: bool = False

    @classmethod
    def of(cls, evaluation: Mapping[str, Any]) -> EvaluationFigures:
        """Reads the record's ``evaluation``."""
        comparison = evaluation.get("comparison") or {}
        model, reference = comparison.get("model") or evaluation.get("model") or {}, comparison.get("reference") or {}
        windows, window = evaluation.get("windows"), evaluation.get("window")
        return cls(
            text=str(evaluation.get("text", cls.text)),
            windows=windows if isinstance(windows, int) else None,
            window=window if isinstance(window, int) else None,
            dtype=str(evaluation.get("dtype", cls.dtype)),
            loss_difference=_figure(comparison.get("loss_difference")),
            loss_standard_error=_figure(comparison.get("loss_standard_error")),
            mean_kl=_figure(comparison.get("mean_kl")),
            kl_standard_error=_figure(comparison.get("kl_standard_error")),
            same_top=_figure(comparison.get("same_top")),
            same_top_standard_error=_figure(comparison.get("same_top_standard_error")),
            worst_kl=_figure(comparison.get("worst_kl")),
            perplexity=_figure(model.get("perplexity")),
            reference_perplexity=_figure(reference.get("perplexity")),
            has_reference=bool(comparison),
        )


@dataclass(frozen=True)
class ExportRecord:
    """The content of modelexport.json.

    Attributes:
        content: all of it, as it was read, for whoever writes it again.
        source: name of the model; None where not recorded.
        recipe, producer, versions, calibration, evaluation: as recorded.
        sha256: name of a tensor -> of its bytes; file_sha256: the same of files beside the weights.
        sqnr_db: module -> SQNR in dB; output_error_before, output_error_after: module -> error of its outputs.
        unquantised, left_out: name of a module or tensor -> the reason.
        adapters: what was merged into the source's weights: name, rank, SHA-256 and more of each, unchecked.
        changed: tensors, or modules, whose values differ from the source's on purpose.
        tensor_parallel_sizes, warnings: as recorded.
        rounded_before: which numbers were rounded in the source already, a line each.
        assignment: autoquant's; None where the formats were given.
        problems: figures that were left out, and why: a line each.
    """

    content: Mapping[str, Any]
    source: str | None
    recipe: Mapping[str, Any]
    producer: Mapping[str, Any]
    versions: Mapping[str, Any]
    calibration: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    model: RecordedModel
    modules: tuple[RecordedModule, ...]
    sha256: Mapping[str, Any]
    file_sha256: Mapping[str, Any]
    sqnr_db: Mapping[str, float]
    output_error_before: Mapping[str, float]
    output_error_after: Mapping[str, float]
    unquantised: Mapping[str, str]
    left_out: Mapping[str, str]
    adapters: Sequence[Mapping[str, Any]]
    changed: frozenset[str]
    tensor_parallel_sizes: Sequence[Any]
    warnings: Sequence[Any]
    rounded_before: Sequence[str]
    assignment: RecordedAssignment | None
    problems: Sequence[str]

    @classmethod
    def of(cls, content: Mapping[str, Any], path: Path = Path(RECORD)) -> ExportRecord:
        """Reads the content of modelexport.json, whoever wrote it.

        Raises:
            CheckpointError: it is not what an export writes.
        """
        _check_record(path, content)
        problems: list[str] = []

        def figures(key: str, values: Mapping[str, Any]) -> dict[str, float]:
            good = {name: float(value) for name, value in values.items() if is_figure(value)}
            if len(good) < len(values):
                problems.append(f"{len(values) - len(good)} of {key} are no finite numbers")
            return good

        errors = content.get("output_error") or {}
        return cls(
            content=content,
            source=_text(content.get("source")),
            **{key: content.get(key) or {} for key in ("recipe", "producer", "versions", "calibration", "evaluation")},
            model=RecordedModel.of(content.get("model") or {}),
            modules=tuple(RecordedModule.all_of(content["layers"], path)),
            sha256=content["sha256"],
            file_sha256=content.get("file_sha256") or {},
            sqnr_db=figures("sqnr_db", content["sqnr_db"]),
            output_error_before=figures("output_error.before", errors.get("before") or {}),
            output_error_after=figures("output_error.after", errors.get("after") or {}),
            unquantised={name: str(reason) for name, reason in (content.get("unquantised") or {}).items()},
            left_out={name: str(reason) for name, reason in (content.get("left_out") or {}).items()},
            adapters=tuple(content.get("adapters") or ()),
            changed=frozenset(content.get("changed") or ()),
            tensor_parallel_sizes=content.get("tensor_parallel_sizes") or (),
            warnings=content.get("warnings") or (),
            rounded_before=tuple(map(str, content.get("rounded_before") or ())),
            assignment=RecordedAssignment.of(content.get("assignment") or {}),
            problems=problems,
        )

    @property
    def evaluation_figures(self) -> EvaluationFigures:
        """The figures of ``evaluation``."""
        return EvaluationFigures.of(self.evaluation)

    @property
    def algorithms(self) -> list[str]:
        """Names of the recipe's algorithms; empty where none is recorded."""
        return [name for name in str(self.recipe.get("algorithm", "")).split("+") if name]


def is_figure(value: object) -> bool:
    """Returns True for a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30


def _pair(value: Any) -> tuple[float, float] | None:
    if not isinstance(value, list) or len(value) != 2 or not all(is_figure(part) and part >= 0 for part in value):
        return None
    return float(value[0]), float(value[1])


def _figure(value: Any) -> float | None:
    return float(value) if is_figure(value) else None


def _shape(path: Path, value: Mapping[str, Any], where: str) -> tuple[int, ...]:
    shape = value["shape"]
    if not all(type(size) is int and size >= 0 for size in shape):
        raise CheckpointError(f"{path}: '{where}shape' is {shown(shape)}, not a list of sizes; the record is damaged")
    return tuple(shape)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
