"""Checks of a checkpoint's tensors against its config.json, from headers alone.

Engines do not look: with one ``weight_scale`` missing, one serves wrong probabilities and another NaN.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from modelexport.checkpoints.safetensors.file import Checkpoint, TensorInfo, dtype_names
from modelexport.errors import CheckpointError
from modelexport.models.architecture import Dimensions, Family
from modelexport.models.modules import Architecture, StoredModule
from modelexport.models.rules import KV_SCALES, places
from modelexport.quantization.methods import (
    FLOATS,
    QuantizationConfig,
    Scheme,
    StoredTensorSpec,
    extras,
    methods,
    tensor_specs,
)

_PLAIN = ("weight", "bias")
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
    promises: dict[str, dict[str, StoredTensorSpec]] = {}
    if architecture.family is not None and architecture.dimensions is not None:
        dims, count = architecture.dimensions, len(checkpoint.infos)
        if dims.most_blocks > count:  # before any loop over a number that a stranger wrote
            each = f" of {dims.experts} experts" if dims.experts else ""
            problems.append(f"config.json says {dims.layers} layers{each}, but there are only {count} tensors")
        else:
            promises = family_promises(architecture.family, dims)
            problems += _family_problems(architecture, quantization, modules, promises)
    for module in modules:
        own = promises.get(module.name, {})
        vectors = {name: promise for name, promise in own.items() if name != "weight"}
        expected = own["weight"].shapes[0] if "weight" in own else None
        problems += module_problems(module, quantization, expected, vectors)
    return list(dict.fromkeys(problems))


def family_promises(family: Family, dims: Dimensions) -> dict[str, dict[str, StoredTensorSpec]]:
    """Every module of the model -> what config.json makes its weight, unquantised, and its vectors; not its bias."""
    promises: dict[str, dict[str, StoredTensorSpec]] = {}
    for place in places(family, dims):
        dtypes = dtype_names() if place.module.kind == "other" else (*FLOATS, "F64")
        shapes = dims.stored_shapes(place.module)
        promises.setdefault(place.name, {})[place.module.parameter] = StoredTensorSpec(dtypes, shapes)
    return promises


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


def _family_problems(
    architecture: Architecture,
    quantization: QuantizationConfig | None,
    modules: Sequence[StoredModule],
    shapes: Mapping[str, object],
) -> Iterator[str]:
    """Modules that the family has and the checkpoint lacks, and the other way round."""
    family, dims = architecture.family, architecture.dimensions
    assert family is not None
    assert dims is not None
    present = {module.name for module in modules}
    missing = [name for name in shapes if name not in present]
    for name in missing[:5]:
        yield f"{name} is missing: config.json makes this a {family.name} model of {dims.layers} layers"
    if len(missing) > 5:
        yield f"{len(missing) - 5} more modules are missing"
    kv_scales = quantization is not None and quantization.kv_cache_scheme is not None
    for module in modules:
        if module.name in shapes:
            continue
        if all(family.left_out(f"{module.name}.{s}", dims) for s in module.tensors):
            continue
        if kv_scales and set(module.tensors) <= set(KV_SCALES):
            continue
        if dims.tied_embeddings and module.kind == "head":
            continue  # a second copy of tied embeddings: wasteful, but every engine takes it
        yield f"{module.name}: a {family.name} model of {dims.layers} layers has no such module ({_listed(module)})"


def module_problems(
    module: StoredModule,
    quantization: QuantizationConfig | None,
    expected: tuple[int, ...] | None,
    vectors: Mapping[str, StoredTensorSpec],
) -> Iterator[str]:
    """Yields the problems of one module.

    Args:
        expected: its weight's shape by config.json, None if not known.
        vectors: its parameters that are neither weight nor bias: name -> what it must be.
    """
    yield from _vector_problems(module, vectors)
    cached = quantization is not None and quantization.kv_cache_scheme is not None
    known = {*vectors, *(KV_SCALES if cached and module.kind not in ("linear", "head") else ())}
    module = replace(module, tensors={s: info for s, info in module.tensors.items() if s not in known})
    if not module.tensors:
        return
    shape, stored = expected or module.stored.shape, module.stored
    if expected is not None and stored.shape is not None and stored.shape != expected:
        flat = stored.quantised and stored.shape == (math.prod(expected),)  # bitsandbytes': no rows, no columns
        if not flat:
            yield f"{module.name}: its weight is {list(stored.shape)}, config.json makes it {list(expected)}"
        shape = stored.shape
    if quantization is not None and quantization.method not in methods():
        if stored.quantised and not stored.scale:
            yield f"{module.name}: {stored.number_format} weights without scales"
        return
    scheme = None
    if module.kind in ("linear", "head") and quantization is not None:
        scheme = quantization.scheme_of(module.name)
    if scheme is not None and shape is not None and len(shape) == 2:
        cache = quantization is not None and quantization.kv_cache_scheme is not None
        yield from _promise_problems(module, scheme, (shape[0], shape[1]), quantised_cache=cache)
    elif expected is not None or module.kind != "other":
        yield from _plain_problems(module, quantization, shape, known=expected is not None)


def _promise_problems(
    module: StoredModule, scheme: Scheme, shape: tuple[int, int], *, quantised_cache: bool
) -> Iterator[str]:
    try:
        wanted = tensor_specs(scheme, shape)
    except CheckpointError as error:
        yield str(error)
        return
    for suffix, promise in wanted.items():
        info = module.tensors.get(suffix)
        if info is None:
            yield f"{module.name}.{suffix} is missing: {scheme.name} ({scheme.describe()}) promises {promise}"
        elif info.dtype not in promise.dtypes or info.shape not in promise.shapes:
            yield (
                f"{info.name} is {info.dtype} {list(info.shape)}, "
                f"{scheme.name} ({scheme.describe()}) promises {promise}"
            )
    cached = (*(KV_SCALES if quantised_cache else ()), *extras(scheme, shape))
    yield from _extra_problems(
        module, {*wanted, "bias", *cached}, f"{scheme.name} ({scheme.format}) does not promise it"
    )
    yield from _bias_problems(module, shape)


def _plain_problems(
    module: StoredModule, quantization: QuantizationConfig | None, shape: tuple[int, ...] | None, *, known: bool
) -> Iterator[str]:
    """A module that is not quantised: a floating-point weight, perhaps a bias, and nothing else.

    Modules of an architecture that is not ``known`` may have further tensors (a router's correction, running
    means), but none that belong to quantisation.
    """
    why = "config.json has no quantization_config" if quantization is None else "config.json does not quantise it"
    weight = module.tensors.get("weight")
    if weight is None:
        yield f"{module.name}.weight is missing, and {why} ({_listed(module)})"
    elif weight.dtype not in (*FLOATS, "F64"):
        yield f"{weight.name} is {weight.dtype}, but {why}"
    cached = KV_SCALES if quantization is not None and quantization.kv_cache_scheme is not None else ()
    others = {s for s in module.tensors if not known and not any(word in s for word in _OF_QUANTISATION)}
    yield from _extra_problems(module, {*_PLAIN, *others, *cached}, why)
    yield from _bias_problems(module, shape)


def _vector_problems(module: StoredModule, vectors: Mapping[str, StoredTensorSpec]) -> Iterator[str]:
    for name, promise in vectors.items():
        info = module.tensors.get(name)
        if info is None:
            yield f"{module.name}.{name} is missing"
        elif info.shape not in promise.shapes or info.dtype not in promise.dtypes:
            makes = " or ".join(str(list(shape)) for shape in promise.shapes)
            of = ", of floats" if info.dtype not in promise.dtypes else ""
            yield f"{info.name} is {info.dtype} {list(info.shape)}, config.json makes it {makes}{of}"


def _extra_problems(module: StoredModule, allowed: set[str], why: str) -> Iterator[str]:
    for suffix, info in module.tensors.items():
        if suffix not in allowed:
            yield f"{info.name} ({info.dtype} {list(info.shape)}) is not expected: {why}"


def _bias_problems(module: StoredModule, shape: tuple[int, ...] | None) -> Iterator[str]:
    bias = module.tensors.get("bias")
    if bias is not None and shape is not None and bias.shape != shape[:1]:
        yield f"{bias.name} is {list(bias.shape)}, its weight has {shape[0]} rows"


def _listed(module: StoredModule) -> str:
    def text(suffix: str, info: TensorInfo) -> str:
        return f"{suffix} {info.dtype} {list(info.shape)}"

    return ", ".join(text(suffix, info) for suffix, info in sorted(module.tensors.items()))
