"""A checkpoint beside the source it was made from: the pairs of tensors to compare, found from headers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from modelexport.checkpoints.safetensors.file import Checkpoint, TensorInfo
from modelexport.errors import CheckpointError, ModelExportError, shown
from modelexport.inspection.record.reading import ExportRecord
from modelexport.models.architecture import ties_embeddings
from modelexport.models.derived import KEY as STRUCTURE
from modelexport.models.draft_layers import draft_tensors
from modelexport.models.families.drafts import draft_counts, without_counts
from modelexport.models.matching import KV_SCALES
from modelexport.models.modules import Architecture, StoredModule
from modelexport.quantization.methods import (
    FLOATS,
    QuantizationConfig,
    Scheme,
    extras,
    read_quantization_config,
    tensor_specs,
)

if TYPE_CHECKING:
    from modelexport.inspection.verify.items import AuditItem
    from modelexport.quantization.formats.base import NumberFormat

_NOT_THE_MODEL = {STRUCTURE, "quantization_config", "transformers_version", "_name_or_path", "torch_dtype", "dtype"}
_AT_MOST = 5


@dataclass
class HeaderComparison:
    """Tensors of a checkpoint with their counterparts in its source.

    Attributes:
        sources: full name of a tensor here, or the name of a quantised module -> the tensor of the source.
        problems: differences from the source; notes: what cannot be compared, and why.
    """

    sources: dict[str, TensorInfo] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare_headers(
    checkpoint: Checkpoint,
    modules: Sequence[StoredModule],
    architecture: Architecture,
    record: ExportRecord | None,
    source: Checkpoint | None,
) -> HeaderComparison:
    """Pairs the tensors of a checkpoint with those of its source; empty where there is none."""
    result = HeaderComparison()
    if source is None:
        return result
    changed: frozenset[str] = frozenset() if record is None else record.changed
    left_out = {} if record is None else record.left_out
    head = _untied_head(checkpoint, modules, architecture, source)
    differences = list(_config_differences(checkpoint.config or {}, source.config or {}, untied=head is not None))
    result.problems += _clipped(differences, "keys differ")
    left = dict(source.infos)
    quantization = read_quantization_config(checkpoint.config)
    cached = quantization is not None and quantization.kv_cache_scheme is not None
    unequal, other_values = [], 0
    for module in modules:
        untied = None if head is None or module.kind != "head" else head
        if module.stored.quantised:
            weight = left.pop(f"{module.name}.weight", untied)
            names = {suffix: info for suffix, info in module.tensors.items() if suffix == "bias"}
            if weight is None:
                unequal.append(f"{module.name}.weight is not in {source.directory}")
            elif module.stored.shape is not None and weight.shape != module.stored.shape:
                unequal.append(f"{module.name} is {list(module.stored.shape)}, the source's {list(weight.shape)}")
            elif changed & {module.name, f"{module.name}.weight"}:
                other_values += 1
            elif weight.dtype not in FLOATS:
                result.notes.append(f"{weight.name} of the source is {weight.dtype}: not compared")
            else:
                result.sources[module.name] = weight
        else:
            names = dict(module.tensors)
        for suffix, info in names.items():
            if suffix in KV_SCALES and cached:
                continue
            is_changed = bool(changed & {module.name, info.name})
            other = left.pop(info.name, untied if suffix == "weight" else None)
            if other is None and not is_changed:
                unequal.append(f"{info.name} is not in {source.directory}")
            elif other is not None and (info.dtype, info.shape) != (other.dtype, other.shape):
                unequal.append(
                    f"{info.name} is {info.dtype} {list(info.shape)}, the source's {other.dtype} {list(other.shape)}"
                )
            elif is_changed:
                other_values += 1
            elif other is not None:
                result.sources[info.name] = other
    if other_values:
        assert record is not None
        algorithm = shown(record.recipe.get("algorithm"))
        result.notes.append(
            f"{other_values} tensors hold other values than the source's, since {algorithm} scaled or rotated them so "
            f"that the model computes the same: not compared here; modelexport eval {checkpoint.directory} "
            f"--against {source.directory} compares what the two compute"
        )
    family, dims = architecture.family, architecture.dimensions
    without = not draft_counts(checkpoint.config or {}) and not _drafts_of(checkpoint)
    dropped = _drafts_of(source) if without else set()
    tied = ties_embeddings(checkpoint.config, checkpoint.infos)
    for name in left:
        if name in left_out or name in dropped or (tied and name == "lm_head.weight"):
            continue
        if family is not None and dims is not None and family.left_out(name, dims) is not None:
            continue
        unequal.append(f"{name} of {source.directory} is not in the checkpoint")
    result.problems += _clipped(unequal, "tensors differ: is it another model?")
    return result


def _drafts_of(source: Checkpoint) -> set[str]:
    """The tensors of a source's draft layers; none of a model that is not known."""
    try:
        return set(draft_tensors(source.config, source.infos))
    except ModelExportError:
        return set()


def _untied_head(
    checkpoint: Checkpoint, modules: Sequence[StoredModule], architecture: Architecture, source: Checkpoint
) -> TensorInfo | None:
    """Returns the source's embedding, where it serves as the head too but the checkpoint has a head of its own."""
    if ties_embeddings(checkpoint.config, checkpoint.infos) or not ties_embeddings(source.config, source.infos):
        return None
    if not any(module.kind == "head" for module in modules):
        return None
    before = () if architecture.family is None else architecture.family.before
    names = [f"{module.path}.weight" for module in before if module.kind == "embedding"]
    return next((source.infos[name] for name in (*names, "model.embed_tokens.weight") if name in source.infos), None)


def plan_items(
    modules: Sequence[StoredModule],
    comparison: HeaderComparison,
    quantization: QuantizationConfig | None,
    fused: Mapping[str, str],
) -> list[AuditItem]:
    """Returns what is read together: a quantised linear with its source, and every other tensor by itself.

    Linears that cannot be decoded are noted in ``comparison``.

    Args:
        fused: path of a module within its layer -> what engines fuse it into.
    """
    from modelexport.inspection.verify.items import AuditItem

    items = []
    for module in modules:
        rest = dict(module.tensors)
        weight = comparison.sources.get(module.name)
        decoder = None if weight is None else _decoder(module, weight, quantization)
        if weight is not None and decoder is not None:
            scheme, number_format = decoder
            shared = f"{module.stack}.{module.index}.{fused.get(module.path, module.path)}"
            item = AuditItem(module.name, {}, weight, number_format, scheme.method, scheme, shared)
            items.append(replace(item, tensors={suffix: rest.pop(suffix) for suffix in item.axes}))
        elif weight is not None:
            comparison.notes.append(
                f"{module.name}: {_stored_text(module)} cannot be decoded here, its error was not measured"
            )
        for suffix, info in rest.items():
            items.append(AuditItem(info.name, {suffix: info}, comparison.sources.get(info.name), None))
    return sorted(items, key=lambda item: -sum(info.nbytes for info in item.tensors.values()))


def _decoder(
    module: StoredModule, weight: TensorInfo, quantization: QuantizationConfig | None
) -> tuple[Scheme, NumberFormat] | None:
    """Returns the scheme of a module's tensors and the number format that decodes them; None where none does."""
    from modelexport.quantization import formats

    scheme = None if quantization is None else quantization.scheme_of(module.name)
    if scheme is None or len(weight.shape) != 2:
        return None
    try:
        specs = tensor_specs(scheme, (weight.shape[0], weight.shape[1]))
        number_format = formats.of_scheme(scheme)
    except CheckpointError:  # what is wrong with it is said elsewhere; here it only cannot be decoded
        return None
    for suffix, spec in specs.items():
        info = module.tensors.get(suffix)
        if info is None or info.dtype not in spec.dtypes or not spec.has_shape(info.shape):
            return None
    if any(suffix in module.tensors for suffix in extras(scheme, (weight.shape[0], weight.shape[1]))):
        return None  # its inputs are multiplied by them: the weight is not the source's
    return scheme, number_format


def _stored_text(module: StoredModule) -> str:
    scales = module.tensors.get(module.stored.scale)
    beside = f" with scales {scales.dtype} {list(scales.shape)}" if scales is not None else ""
    return f"{module.stored.number_format}{beside}"


def _config_differences(config: Mapping[str, Any], source: Mapping[str, Any], *, untied: bool) -> Iterator[str]:
    missing = object()
    if not draft_counts(config):  # exports do without draft layers
        source = without_counts(source)
    for key in dict.fromkeys((*source, *config)):
        if key in _NOT_THE_MODEL or (untied and key == "tie_word_embeddings"):
            continue
        here, there = config.get(key, missing), source.get(key, missing)
        if here != there:
            texts = ["absent" if value is missing else repr(value) for value in (here, there)]
            yield f"config.json: {key} is {texts[0]}, the source's is {texts[1]}"


def _clipped(texts: list[str], what: str) -> list[str]:
    """Returns the first few texts and the number of the others: of another model nearly everything differs."""
    if len(texts) <= _AT_MOST:
        return texts
    return [*texts[: _AT_MOST - 1], f"and {len(texts) - _AT_MOST + 1} more {what}"]
