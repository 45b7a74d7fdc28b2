"""The tensors that a plan writes for quantised linears, and for the scales of a KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport.checkpoints.safetensors.file import TensorInfo, tensor_nbytes
from modelexport.errors import CheckpointError, PlanError, shown
from modelexport.exporting.plan.steps import OutputTensor, TensorTask
from modelexport.models.families.base import Dimensions, Family
from modelexport.models.matching import cache_place
from modelexport.quantization import kv_caches
from modelexport.quantization.kv_caches import CacheFormat
from modelexport.quantization.methods import Method, QuantizationConfig, holding_cache, of_method
from modelexport.sharding.plan import replicated
from modelexport.system.dtypes import FLOATS

if TYPE_CHECKING:
    from modelexport.quantization.formats.base import NumberFormat

UNCUT = replicated(0, 1)  # until the whole layer is known


def linear_outputs(
    method: Method, number_format: NumberFormat, shape: tuple[int, int], dtype: str
) -> tuple[OutputTensor, ...]:
    """The tensors that a method writes for a linear whose weight has that shape and dtype."""
    from modelexport.checkpoints.safetensors.file import dtype_name

    scales = dtype if number_format.scale_dtype is None else dtype_name(number_format.scale_dtype)
    outputs = []
    for suffix, spec in method.tensor_specs(number_format.scheme(method.METHOD), shape).items():
        written = scales if scales in spec.dtypes else spec.dtypes[0]
        stored = spec.shapes[0]
        outputs.append(OutputTensor(suffix, written, stored, spec.axes, tensor_nbytes(written, stored)))
    return tuple(outputs)


def check_cache_scheme(source: QuantizationConfig | None, method: Method) -> None:
    """Refuse a KV cache whose numbers cannot be announced as they are.

    Raises:
        PlanError: nobody writes such, or the method has no words for them.
    """
    scheme = None if source is None else source.kv_cache_scheme
    cache = kv_caches.of_scheme(scheme)
    if scheme is None or (cache is not None and method in holding_cache(cache.name)):
        return
    numbers = f"{shown(scheme.get('num_bits'))}-bit {shown(scheme.get('type'))} numbers"
    strategy = "" if scheme.get("strategy") in (None, "tensor") else f" (strategy '{shown(scheme['strategy'])}')"
    held = [] if cache is None else [f"--format {other.FORMAT}" for other in holding_cache(cache.name)]
    instead = f"{' and '.join(held)} can, and " if held else ""
    raise PlanError(
        f"the source's KV cache has {numbers}{strategy}, which quant_method '{method.METHOD}' cannot say: "
        f"{instead}--quant none leaves its scales out"
    )


def made_cache_scales(
    family: Family, dimensions: Dimensions, method: Method, cache: CacheFormat, layer: int
) -> list[TensorTask]:
    """The scales of a layer's cached keys and values that are to be made, float32: one number each, or one for a head.

    Raises:
        PlanError: the method or the family has no place for them, or the engine has no such cache for its attention.
    """
    if method not in (holding := holding_cache(cache.name)):
        has = " and ".join(f"--format {other.FORMAT}" for other in holding)
        raise PlanError(
            f"--kv-cache {cache.name}: quant_method '{method.METHOD}' has no place for its scales; {has} "
            f"{'has' if len(holding) == 1 else 'have'}"
        )
    if not family.attention:
        raise PlanError(f"--kv-cache: the layers of {family.name} models have no attention whose keys are cached")
    return [_cache_scale(family, dimensions, method, cache, layer, which, None) for which in ("k", "v")]


def check_cached_heads(config: Mapping[str, Any], dimensions: Dimensions, cache: CacheFormat) -> None:
    """Refuse a cache that engines do not keep for an attention.

    Raises:
        PlanError: keys and values are kept as one latent, in anything but FP8, or heads are not whole groups.
    """
    if cache is not kv_caches.CACHES["fp8"] and config.get("kv_lora_rank"):
        raise PlanError(
            f"--kv-cache {cache.name}: latent attention keeps one latent of {shown(config['kv_lora_rank'])} numbers "
            "for all heads, and engines keep none of those so: choose --kv-cache fp8"
        )
    if cache.group and dimensions.head_dim % cache.group:
        raise PlanError(
            f"--kv-cache {cache.name}: {cache.group} numbers of a head share a scale, and heads have "
            f"{dimensions.head_dim}: choose --kv-cache fp8"
        )


def kept_cache_scales(
    family: Family,
    dimensions: Dimensions,
    source: QuantizationConfig,
    method: Method,
    layer: int,
    found: Mapping[str, TensorInfo],
) -> list[TensorTask]:
    """The scales of a layer's cached keys and values as the source has them: one number each, or one for a head.

    Args:
        source: the source's quantization config.
        found: the source's scales of the layer's cache, by their full name.

    Raises:
        CheckpointError: one is no floating-point number.
        PlanError: the method has no place for one.
    """
    prefix = family.layer_prefix.format(i=layer)
    cache = kv_caches.of_scheme(source.kv_cache_scheme)
    assert cache is not None, "check_cache_scheme has refused it"
    own = {f"{prefix}.{family.attention}.{where}": which for which, where in of_method(source.method).KV_SCALES.items()}
    tasks = []
    for name, info in found.items():
        which = own.get(name, "")
        if which not in method.KV_SCALES:
            raise PlanError(
                f"{name}: the source has the scales of its KV cache, and quant_method '{method.METHOD}' has no place "
                "for this one; --format hf has one for keys and values, and --quant none leaves them out"
            )
        if info.dtype not in FLOATS:
            raise CheckpointError(f"{name} is {info.dtype} {list(info.shape)}: a KV cache's scale is a number")
        tasks.append(_cache_scale(family, dimensions, method, cache, layer, which, info))
    return tasks


def _cache_scale(
    family: Family,
    dimensions: Dimensions,
    method: Method,
    cache: CacheFormat,
    layer: int,
    which: str,
    kept: TensorInfo | None,
) -> TensorTask:
    path, _, parameter = f"{family.attention}.{method.KV_SCALES[which]}".rpartition(".")
    place = cache_place(family.layer_prefix.format(i=layer), path, parameter, layer)
    shape = (dimensions.kv_heads, 1, 1) if cache.by_head else method.KV_SHAPE
    info = kept or TensorInfo(place.tensor(parameter), "F32", shape, Path(), 0, tensor_nbytes("F32", shape))
    output = OutputTensor(parameter, info.dtype, shape, (), info.nbytes)
    cached = which if kept is None else None
    rows = (0, info.shape[0] if info.shape else 1)
    return TensorTask(info, place, parameter, rows, UNCUT, None, (output,), cached=cached)
