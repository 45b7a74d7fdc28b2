"""``modelexport inspect``: the content of a checkpoint, from its headers and config.json.

Any safetensors checkpoint, whoever wrote it. No tensor is read and torch is not imported, so that the answer
takes a fraction of a second whatever the size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from modelexport.checkpoints.safetensors.file import INDEX_NAME, Checkpoint
from modelexport.errors import CheckpointError, quoted
from modelexport.inspection.opened import OpenedCheckpoint, open_contents
from modelexport.inspection.record.reading import ExportRecord, read_record
from modelexport.inspection.verify.structure import check_structure
from modelexport.models.engines import loadable_tp
from modelexport.models.modules import Architecture, StoredModule
from modelexport.quantization.methods import QuantizationConfig
from modelexport.system.small_files import has_file, read_json


@dataclass(frozen=True)
class InspectionRow:
    """All modules of one path within a layer that are stored alike.

    Attributes:
        name: ``self_attn.q_proj``, or the full name outside the layers.
        shapes: the weights' shapes in elements, each once.
        scales: dtypes and shapes of their scales as stored, each once; empty where there are none.
        parameters: weights (packed ones counted one by one) and biases.
        bits: stored bits per parameter, everything of the module included.
    """

    name: str
    kind: str
    count: int
    number_format: str
    shapes: list[list[int]]
    scales: list[str]
    parameters: int
    nbytes: int
    bits: float


@dataclass(frozen=True)
class Inspection:
    """The content of a checkpoint.

    Attributes:
        format: the checkpoint format, as ``--format`` spells it.
        files: name, bytes and the number of tensors of which it holds a part.
        layers: decoder layers (or the longest stack of numbered ones), counted in the tensors.
        draft_layers: layers that only draft tokens (multi-token prediction), counted in the same way.
        quantization: quant_method, format, status, config groups in words, ignore, kv_cache_scheme; or None.
        quantised, kept: names of modules stored with scales, and names of linears and heads stored without.
        tensor_parallel_sizes: at which an engine can load it; None with ``tensor_parallel_note`` saying why not.
        ratio: bytes of all parameters in 16 bits each, divided by the bytes stored.
        record: from modelexport.json, if it is there: source, recipe, producer, versions, worst_sqnr.
        warnings: what looks wrong; ``modelexport verify`` says the rest.
        notes: what to know of how it is read.
    """

    directory: str
    format: str
    model_type: str | None
    architectures: list[str]
    layers: int
    tied_embeddings: bool | None
    rows: list[InspectionRow]
    parameters: int
    nbytes: int
    ratio: float
    tensors: int
    files: list[dict[str, Any]]
    quantization: dict[str, Any] | None
    quantised: list[str]
    kept: list[str]
    tensor_parallel_sizes: list[int] | None
    tensor_parallel_note: str
    record: dict[str, Any] | None
    warnings: list[str]
    draft_layers: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def bits(self) -> float:
        """Stored bits per parameter of the whole checkpoint."""
        return 8 * self.nbytes / self.parameters if self.parameters else 0.0

    @property
    def layers_text(self) -> str:
        """``"61 layers and 1 draft layer"``."""
        drafts = f" and {self.draft_layers} draft layer{'s' if self.draft_layers > 1 else ''}"
        return f"{self.layers} layers{drafts if self.draft_layers else ''}"

    def as_json(self) -> dict[str, Any]:
        """JSON-able form, for ``--json``."""
        return {**asdict(self), "bits": self.bits}


def inspect_checkpoint(directory: Path | str, config: Path | str | None = None) -> Inspection:
    """Describes a checkpoint from its headers and its config.json.

    Args:
        config: the model's config.json, where the checkpoint has none of its own.

    Raises:
        CheckpointError: no safetensors there, a damaged header or index, or a config.json that is no JSON.

    Example:
        ::

            >>> modelexport.inspect("ckpt").quantization["quant_method"]
            'compressed-tensors'
    """
    return describe(open_contents(directory, config))


def describe(contents: OpenedCheckpoint) -> Inspection:
    """Returns the inspection of a checkpoint that is open."""
    checkpoint, architecture = contents.checkpoint, contents.architecture
    quantization, modules = contents.quantization, contents.modules
    described = checkpoint.config or {}
    sizes, note = tensor_parallel_sizes(architecture, modules)
    warnings = check_structure(checkpoint, architecture, quantization, modules)
    warnings += _index_warnings(checkpoint)
    record = None
    try:
        record = _record_summary(read_record(checkpoint.directory))
    except CheckpointError as error:
        warnings.append(str(error))
    nbytes = sum(info.nbytes for info in checkpoint.infos.values())
    parameters = sum(module.parameters for module in modules)
    tied = described.get("tie_word_embeddings")
    return Inspection(
        directory=contents.directory,
        model_type=_text(described.get("model_type")),
        architectures=_texts(described.get("architectures")),
        layers=_layers(module for module in modules if not module.is_draft),
        draft_layers=len({(module.stack, module.index) for module in modules if module.is_draft and module.stack}),
        tied_embeddings=tied if isinstance(tied, bool) else None,
        rows=_rows(modules, architecture),
        parameters=parameters,
        nbytes=nbytes,
        ratio=2 * parameters / nbytes if nbytes else 1.0,
        format=checkpoint.format,
        tensors=len(checkpoint.infos),
        files=_files(checkpoint),
        quantization=None if quantization is None else _quantization_summary(quantization),
        quantised=[m.name for m in modules if m.stored.quantised],
        kept=[m.name for m in modules if m.kind in ("linear", "head", "router") and not m.stored.quantised],
        tensor_parallel_sizes=sizes,
        tensor_parallel_note=note,
        record=record,
        warnings=warnings,
        notes=list(checkpoint.notes),
    )


def tensor_parallel_sizes(architecture: Architecture, modules: Sequence[StoredModule]) -> tuple[list[int] | None, str]:
    """Returns the tensor-parallel sizes at which an engine can load it; or None, and why that is not known."""
    family, dims = architecture.family, architecture.dimensions
    if family is None or dims is None:
        return None, architecture.reason
    declared = {module.general_path: module for module in family.layer}
    limits, kv_units = set(), set()
    for module in modules:
        rule = declared.get(module.path)
        if rule is None or rule.kind != "linear" or module.stored.shape is None:
            continue
        if module.is_flat:
            return None, f"{module.name} is stored flat: a cut of it is none of its rows or columns"
        dim = rule.cut_dim
        if dim is None:
            continue
        for _, axis in rule.axes:
            if dims.axis(axis).shared:
                kv_units.add(module.stored.unit[dim])
                continue
            unit = math.lcm(dims.axis_unit(axis), module.stored.unit[dim])
            limits.add((dims.axis_size(axis) if rule.parts else module.stored.shape[dim], unit))
    return loadable_tp(limits, dims.kv_heads, dims.head_dim, kv_units), ""


def _rows(modules: Sequence[StoredModule], architecture: Architecture) -> list[InspectionRow]:
    """Returns one row per path and format, in the family's order where it is known, else in the file's."""
    groups: dict[tuple[str, str, str], list[StoredModule]] = {}
    for module in modules:  # a draft layer is a stack of its own
        stack = f"{module.stack}.{module.index}" if module.is_draft and module.stack else module.stack
        groups.setdefault((stack, module.path, module.stored.number_format), []).append(module)
    stacks = {module.stack for module in modules if module.stack and not module.is_draft}
    family = architecture.family
    order: dict[str, int] = {}
    if family is not None:
        order = {m.general_path: i for i, m in enumerate((*family.before, *family.layer, *family.after))}
    rows = []
    for (stack, path, number_format), group in sorted(
        groups.items(), key=lambda entry: (entry[1][0].is_draft, order.get(entry[0][1], len(order)))
    ):
        parameters, nbytes = sum(m.parameters for m in group), sum(m.nbytes for m in group)
        scales = {_scale_text(m) for m in group} - {""}
        rows.append(
            InspectionRow(
                _row_name(stack, path, several=len(stacks) > 1, is_draft=group[0].is_draft),
                group[0].kind,
                len(group),
                number_format,
                [list(shape) for shape in sorted({m.stored.shape for m in group if m.stored.shape is not None})],
                sorted(scales),
                parameters,
                nbytes,
                8 * nbytes / parameters if parameters else 0.0,
            )
        )
    return rows


def _row_name(stack: str, path: str, *, several: bool, is_draft: bool) -> str:
    if stack and is_draft:
        return f"{stack}.{path}"
    return f"{stack}.*.{path}" if stack and several else path


def _scale_text(module: StoredModule) -> str:
    info = module.tensors.get(module.stored.scale)
    return f"{info.dtype.lower()} {shape_text(info.shape)}" if info is not None else ""


def shape_text(shape: Sequence[int]) -> str:
    """``"[4096, 1024]"``."""
    return "[" + ", ".join(map(str, shape)) + "]"


def _layers(modules: Iterable[StoredModule]) -> int:
    stacks: dict[str, set[int]] = {}
    for module in modules:
        if module.index is not None:
            stacks.setdefault(module.stack, set()).add(module.index)
    return max(map(len, stacks.values()), default=0)


def _texts(value: Any) -> list[str]:
    """Returns the items of a list as text; none of any other value."""
    return [str(item) for item in value] if isinstance(value, list) else []


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _quantization_summary(quantization: QuantizationConfig) -> dict[str, Any]:
    return {
        "quant_method": quantization.method,
        "format": quantization.format,
        "quantization_status": quantization.status,
        "config_groups": {
            s.name: {"targets": list(s.targets), "format": s.format, "scheme": s.describe()}
            for s in quantization.schemes
        },
        "ignore": list(quantization.ignore),
        "kv_cache_scheme": None if quantization.kv_cache_scheme is None else dict(quantization.kv_cache_scheme),
    }


def _record_summary(record: ExportRecord | None) -> dict[str, Any] | None:
    if record is None:
        return None
    worst = min(((value, name) for name, value in record.sqnr_db.items()), default=None)
    return {
        "source": record.source,
        "recipe": record.recipe,
        "producer": record.producer,
        "versions": record.versions,
        "worst_sqnr": None if worst is None else {"module": worst[1], "db": worst[0]},
    }


def _index_warnings(checkpoint: Checkpoint) -> Iterator[str]:
    """Checks the index beyond the places of tensors, which ``open_checkpoint`` has compared."""
    if not has_file(checkpoint.directory, INDEX_NAME):
        return
    metadata = read_json(checkpoint.directory / INDEX_NAME).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    found = sum(info.nbytes for info in checkpoint.infos.values())
    if total is not None and total != found:
        said = f"{total:,}" if isinstance(total, int) else quoted(total)
        yield f"{INDEX_NAME}: total_size is {said}, the tensors take {found:,} bytes"


def _files(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    held: dict[Path, set[str]] = {path: set() for path in (*checkpoint.headers, *checkpoint.files)}
    for name, info in checkpoint.infos.items():
        for place in checkpoint.placements.get(name, ()):
            held[place.path].add(name)
        if name not in checkpoint.placements:
            held[info.path].add(name)
    return [{"name": path.name, "bytes": path.stat().st_size, "tensors": len(held[path])} for path in sorted(held)]
