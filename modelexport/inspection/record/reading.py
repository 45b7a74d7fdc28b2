"""modelexport.json as it is read: checked as far as commands rely on it, and typed, whoever wrote it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelexport.checkpoints.card_metadata import known_fields
from modelexport.checkpoints.formats.hf import RECORD
from modelexport.checkpoints.safetensors.file import tensor_nbytes
from modelexport.errors import CheckpointError, shown
from modelexport.system.small_files import has_file, read_json

__all__ = ["EvaluationFigures", "ExportRecord", "RecordedModel", "RecordedModule", "is_figure", "read_record"]

Kind = type | tuple[type, ...]
_NEEDED = {"recipe": dict, "sha256": dict, "sqnr_db": dict, "layers": list, "producer": dict, "versions": dict}
_OPTIONAL = dict.fromkeys(("file_sha256", "model", "calibration", "output_error", "left_out"), dict)
_OF_CALIBRATION = {"samples": int, "length": int, "text": str, "unseen_experts": list}
_OF_CALIBRATION_OPTIONAL = {"notes": dict, "rare_experts": dict}
_KINDS = {
    dict: "an object",
    list: "a list",
    int: "a whole number",
    str: "a text",
    float: "a number",
    bool: "true or false",
}


def read_record(directory: Path) -> dict[str, Any] | None:
    """Returns the content of modelexport.json; None where there is none.

    Raises:
        CheckpointError: it cannot be read, or is not what an export writes.
    """
    path = directory / RECORD
    if not has_file(directory, RECORD):
        return None
    record = read_json(path)
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
    if record.get("calibration") is not None:
        _check_calibration(path, record["calibration"])
    return record


def _check_calibration(path: Path, calibration: Mapping[str, Any]) -> None:
    """Checks what the summary of an export that keeps the numbers prints again."""
    _check(path, calibration, _OF_CALIBRATION, "calibration.", needed=True)
    _check(path, calibration, _OF_CALIBRATION_OPTIONAL, "calibration.")
    unseen = dict(enumerate(calibration["unseen_experts"]))
    _check(path, unseen, dict.fromkeys(unseen, str), "calibration.unseen_experts.", needed=True)
    notes = calibration.get("notes") or {}
    _check(path, notes, dict.fromkeys(notes, str), "calibration.notes.", needed=True)


def _check(path: Path, values: Mapping[Any, Any], kinds: Mapping[Any, Kind], where: str, needed: bool = False) -> None:
    """Checks the kinds of values; unless ``needed``, one may be missing or null."""
    for key, kind in kinds.items():
        value = values.get(key)
        if not isinstance(value, kind) and (needed or value is not None):
            found = _KINDS.get(type(value), "missing")
            wanted = "a number" if isinstance(kind, tuple) else _KINDS[kind]
            raise CheckpointError(f"{path}: '{where}{shown(key)}' is {found}, not {wanted}; the record is damaged")


# ---------------------------------------------------------------------- typed

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
class RecordedModule:
    """A module as it was written.

    Attributes:
        name: its full name; ``path``: within its decoder layer, ``*`` for an expert's number.
        number_format: None where it is not quantised.
        shape: of its weight; ``(0,)`` where not recorded.
        tensors: dtype and bytes of each tensor; 0 bytes where no such dtype is known.
    """

    name: str
    path: str
    role: str
    partition: str
    number_format: str | None
    group_size: int | None
    shape: tuple[int, ...]
    tensors: tuple[tuple[str, int], ...]

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
    def all_of(cls, layers: object) -> Iterator[RecordedModule]:
        """Reads the record's ``layers``."""
        for layer in layers if isinstance(layers, list) else ():
            if isinstance(layer, Mapping):
                for path, module in _mapping(layer.get("modules")).items():
                    if isinstance(module, Mapping):
                        name = ".".join(part for part in (str(layer.get("name", "")), path) if part)
                        yield cls._of(name, path if layer.get("index") is not None else name, module)

    @classmethod
    def _of(cls, name: str, path: str, module: Mapping[str, Any]) -> RecordedModule:
        number_format, size = module.get("number_format"), module.get("group_size")
        tensors = [_mapping(tensor) for tensor in _mapping(module.get("tensors")).values()]
        return cls(
            name=name,
            path=_NUMBER_IN_PATH.sub(".*", path),
            role=str(module.get("role", "")),
            partition=str(module.get("partition", "replicated")),
            number_format=number_format if isinstance(number_format, str) and number_format != "none" else None,
            group_size=size if isinstance(size, int) else None,
            shape=_shape(module),
            tensors=tuple(
                (dtype, _nbytes(dtype, _shape(tensor)))
                for tensor in tensors
                if isinstance(dtype := tensor.get("dtype"), str)
            ),
        )


@dataclass(frozen=True)
class EvaluationFigures:
    """Figures measured on text; None where they were not, or not against the source.

    Attributes:
        text: what the text is called; ``windows`` of ``window`` tokens of it were evaluated in ``dtype``.
        perplexity, reference_perplexity: of the checkpoint, and of its source.
        loss_difference, mean_kl: in nats a token, each with its standard error.
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
    has_reference: bool = False

    @classmethod
    def of(cls, evaluation: Mapping[str, Any]) -> EvaluationFigures:
        """Reads the record's ``evaluation``."""
        comparison = _mapping(evaluation.get("comparison"))
        model, reference = comparison.get("model") or evaluation.get("model"), comparison.get("reference")
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
            perplexity=_figure(_mapping(model).get("perplexity")),
            reference_perplexity=_figure(_mapping(reference).get("perplexity")),
            has_reference=bool(comparison),
        )


@dataclass(frozen=True)
class ExportRecord:
    """The content of modelexport.json: keys that are missing, or of another kind than an export writes, are empty.

    Attributes:
        source: name of the model; None where not recorded.
        recipe, producer, versions, calibration, evaluation: as recorded.
        sqnr_db: module -> SQNR in dB; output_error_before, output_error_after: module -> error of its outputs.
        unquantised, left_out: name of a module or tensor -> the reason.
        changed: tensors, or modules, whose values differ from the source's on purpose.
        tensor_parallel_sizes, warnings: as recorded.
        tensors: number of tensors whose SHA-256 is recorded.
        problems: key -> what of it was left out, and why.
    """

    source: str | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    producer: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    model: RecordedModel = field(default_factory=RecordedModel)
    modules: tuple[RecordedModule, ...] = ()
    sqnr_db: dict[str, float] = field(default_factory=dict)
    output_error_before: dict[str, float] = field(default_factory=dict)
    output_error_after: dict[str, float] = field(default_factory=dict)
    unquantised: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()
    tensor_parallel_sizes: tuple[Any, ...] = ()
    warnings: tuple[Any, ...] = ()
    tensors: int = 0
    problems: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> ExportRecord:
        """Reads a record, of this version or another, whoever wrote it."""
        problems: dict[str, str] = {}

        def mapping(key: str) -> dict[str, Any]:
            value = content.get(key)
            if value is not None and not isinstance(value, dict):
                problems[key] = f"'{key}' is not an object"
            return value if isinstance(value, dict) else {}

        def figures(key: str, values: object) -> dict[str, float]:
            found = _mapping(values)
            good = {name: float(value) for name, value in found.items() if is_figure(value)}
            if len(good) < len(found):
                problems[key] = f"{len(found) - len(good)} of {key} are no finite numbers"
            return good

        changed = content.get("changed", [])
        if not isinstance(changed, list) or not all(isinstance(name, str) for name in changed):
            problems["changed"], changed = f"'changed' is not a list of names: {shown(changed)}", []
        errors = mapping("output_error")
        plain = {key: mapping(key) for key in ("recipe", "producer", "versions", "calibration", "evaluation")}
        return cls(
            **plain,
            source=_text(content.get("source")),
            model=RecordedModel.of(mapping("model")),
            modules=tuple(RecordedModule.all_of(content.get("layers"))),
            sqnr_db=figures("sqnr_db", content.get("sqnr_db")),
            output_error_before=figures("output_error.before", errors.get("before")),
            output_error_after=figures("output_error.after", errors.get("after")),
            unquantised={name: str(reason) for name, reason in mapping("unquantised").items()},
            left_out={name: str(reason) for name, reason in mapping("left_out").items()},
            changed=frozenset(changed),
            tensor_parallel_sizes=_items(content.get("tensor_parallel_sizes")),
            warnings=_items(content.get("warnings")),
            tensors=len(mapping("sha256")),
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


def _figure(value: Any) -> float | None:
    return float(value) if is_figure(value) else None


def _shape(value: Mapping[str, Any]) -> tuple[int, ...]:
    shape = value.get("shape")
    return tuple(shape) if isinstance(shape, list) and all(isinstance(n, int) and n >= 0 for n in shape) else (0,)


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    try:
        return tensor_nbytes(dtype, shape)
    except CheckpointError:
        return 0


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _items(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else ()


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
