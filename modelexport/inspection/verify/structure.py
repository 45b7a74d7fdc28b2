"""Checks of a checkpoint's tensors against its config.json, from headers alone.

Engines do not look: with one ``weight_scale`` missing, one serves wrong probabilities and another NaN.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from modelexport.checkpoints.safetensors.file import Checkpoint, TensorInfo
from modelexport.errors import CheckpointError
from modelexport.models.families.base import Dimensions, Family
from modelexport.models.matching import (
    KV_SCALES,
    PLAIN_DTYPES,
    ExpectedModule,
    ModelDescription,
    describe,
    fit,
    match,
    no_further,
    places,
    too_many_blocks,
)
from modelexport.models.modules import Architecture, StoredModule
from modelexport.quantization.methods import QuantizationConfig, StoredTensorSpec, extras, methods, tensor_specs

_LISTED = 5
_OF_QUANTISATION = ("scale", "zero", "packed", "qweight", "g_idx", "weight_shape", "absmax")


def check_structure(
    checkpoint: Checkpoint,
    architecture: Architecture,
    quantization: QuantizationConfig | None,
    modules: Sequence[StoredModule],
) -> list[str]:
    """Everything that is wrong, one line each; empty where all is as config.json says."""
    quantised = {module.name for module in modules if module.stored.quantised}
    problems = list(_config_problems(architecture, quantization, quantised))
    family, dimensions = architecture.family, architecture.dimensions
    if family is None or dimensions is None:
        for module in modules:
            problems += _module_problems(module, quantization)
    elif absurd := too_many_blocks(dimensions, len(checkpoint.infos)):
        problems.append(absurd)
    elif quantization is not None and quantization.method not in methods():
        problems += _shape_problems(family, dimensions, modules)
    else:
        model = ModelDescription(family.complete(checkpoint.config or {}), family, dimensions, quantization)
        matched = match(checkpoint, model.with_drafts(checkpoint))
        problems += _first(matched.missing, "tensors are missing")
        problems += matched.unfit
        problems += (f"{name} is not quantised, but config.json makes it {how}" for name, how in matched.plain.items())
        strange = (f"{_of(checkpoint.infos[name])} is not expected: {why}" for name, why in matched.unknown.items())
        problems += _first(list(strange), "tensors are not expected")
    return list(dict.fromkeys(problems))


def _first(problems: Sequence[str], what: str) -> list[str]:
    more = [f"{len(problems) - _LISTED} more {what}"] if len(problems) > _LISTED else []
    return [*problems[:_LISTED], *more]


def _config_problems(
    architecture: Architecture, quantization: QuantizationConfig | None, quantised: Collection[str]
) -> Iterator[str]:
    if quantization is None or not quantization.is_compressed_tensors:
        return
    if quantization.status != "compressed":
        found = "missing" if quantization.status is None else f"'{quantization.status}'"
        yield (
            f"config.json: quantization_status is {found}, not 'compressed': "
            "transformers loads random weights without a word"
        )
    if not quantization.schemes and quantization.kv_cache_scheme is None:
        yield "config.json: quantization_config has no config_groups with weights"
    heads = ["lm_head"]
    if architecture.family is not None:
        heads = [module.path for module in architecture.family.after if module.kind == "head"]
    for head in heads:
        if head not in quantised and quantization.scheme_of(head) is not None:
            yield f"config.json: {head} is not in quantization_config.ignore: transformers gives NaN"


def _shape_problems(family: Family, dimensions: Dimensions, modules: Sequence[StoredModule]) -> Iterator[str]:
    """Modules that are missing, too many or of another shape, where the tensors of quantised ones are not known."""
    present = {module.name: module for module in modules}
    shapes = {place.name: dimensions.weight_shape(place.module) for place in places(family, dimensions)}
    yield from _first([f"{name} is missing" for name in shapes if name not in present], "modules are missing")
    for name, module in present.items():
        stored = module.stored
        if name not in shapes:
            names = [f"{name}.{suffix}" for suffix in module.tensors]
            if any(
                family.draft_root(each, dimensions) is None and family.left_out(each, dimensions) is None
                for each in names
            ):
                yield f"{name} ({_listed(module)}) is not expected: {describe(family, dimensions)} has no such module"
        elif stored.shape is not None and stored.shape not in (shapes[name], (math.prod(shapes[name]),)):  # or flat
            yield f"{name}: its weight is {list(stored.shape)} but config.json makes it {list(shapes[name])}"
        if stored.quantised and not stored.scale:
            yield f"{name}: {stored.number_format} weights without scales"


def _module_problems(module: StoredModule, quantization: QuantizationConfig | None) -> Iterator[str]:
    """Yields the problems of one module of a model that nothing here knows."""
    scheme = None
    if quantization is not None and quantization.method not in methods():
        if module.stored.quantised and not module.stored.scale:
            yield f"{module.name}: {module.stored.number_format} weights without scales"
        return
    if quantization is not None:
        scheme = quantization.scheme_of_kind(module.name, module.kind)
    shape, tensors = module.stored.shape, dict(module.tensors)
    if scheme is None or shape is None or len(shape) != 2:
        yield from _plain_problems(module, quantization)
        return
    try:
        bias = {"bias": StoredTensorSpec(PLAIN_DTYPES, ((shape[0],),))}
        own = (shape[0], shape[1])
        expected = ExpectedModule(scheme, tensor_specs(scheme, own), {**extras(scheme, own), **bias})
    except CheckpointError as error:
        yield str(error)
        return
    found = fit(
        lambda suffix: f"{module.name}.{suffix}",
        expected,
        lambda name, _: tensors.pop(name.removeprefix(f"{module.name}."), None),
    )
    yield from found.missing.values()
    yield from found.unfit
    cached = () if quantization is None or quantization.kv_cache_scheme is None else KV_SCALES
    for suffix, info in tensors.items():
        if suffix not in cached:
            yield f"{_of(info)} is not expected: {no_further(scheme, quantization)}"


def _plain_problems(module: StoredModule, quantization: QuantizationConfig | None) -> Iterator[str]:
    """A module that is not quantised: a floating-point weight and perhaps a bias.

    It may have further tensors (a router's correction, running means), but none that belong to quantisation.
    """
    if module.kind == "other":
        return
    why, cached = no_further(None, quantization), set()
    if quantization is not None and quantization.kv_cache_scheme is not None and module.kind not in ("linear", "head"):
        cached = set(KV_SCALES)
    if not set(module.tensors) - cached:
        return
    weight, bias, shape = module.tensors.get("weight"), module.tensors.get("bias"), module.stored.shape
    if weight is None:
        yield f"{module.name}.weight is missing, and {why} ({_listed(module)})"
    elif weight.dtype not in PLAIN_DTYPES:
        yield f"{weight.name} is {weight.dtype}, but {why}"
    for suffix, info in module.tensors.items():
        if suffix not in {"weight", "bias", *cached} and any(word in suffix for word in _OF_QUANTISATION):
            yield f"{_of(info)} is not expected: {why}"
    if bias is not None and shape is not None and bias.shape != shape[:1]:
        yield f"{bias.name} is {list(bias.shape)}, its weight has {shape[0]} rows"


def _of(info: TensorInfo) -> str:
    return f"{info.name} ({info.dtype} {list(info.shape)})"


def _listed(module: StoredModule) -> str:
    def text(suffix: str, info: TensorInfo) -> str:
        return f"{suffix} {info.dtype} {list(info.shape)}"

    return ", ".join(text(suffix, info) for suffix, info in sorted(module.tensors.items()))
