"""The tensors that a plan writes for quantised linears, and for the scales of a KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from modelexport.checkpoints.safetensors.file import TensorInfo, tensor_nbytes
from modelexport.errors import CheckpointError, PlanError, shown
from modelexport.exporting.plan.steps import OutputTensor, TensorTask
from modelexport.models.families.base import Family
from modelexport.models.matching import cache_place
from modelexport.quantization.methods import Method, QuantizationConfig, of_method
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


def check_cache_scheme(source: QuantizationConfig | None) -> None:
    """Refuse a KV cache whose numbers cannot be announced as they are.

    Raises:
        PlanError: they are not FP8.
    """
    scheme = None if source is None else source.kv_cache_scheme
    if scheme is not None and (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
        raise PlanError(
            f"the source's KV cache has {shown(scheme.get('num_bits'))}-bit {shown(scheme.get('type'))} numbers, "
            "and only those of FP8 can be written: --quant none leaves its scales out"
        )


def made_cache_scales(family: Family, method: Method, layer: int) -> list[TensorTask]:
    """The scales of a layer's cached keys and values that are to be made, one float32 number each.

    Raises:
        PlanError: the method or the family has no place for them.
    """
    if not method.KV_SCALES:
        raise PlanError(f"--kv-cache: quant_method '{method.METHOD}' has no place for its scales; --format hf has")
    if not family.attention:
        raise PlanError(f"--kv-cache: the layers of {family.name} models have no attention whose keys are cached")
    return [_cache_scale(family, method, layer, which, None) for which in ("k", "v")]


def kept_cache_scales(
    family: Family,
    source: QuantizationConfig,
    method: Method,
    layer: int,
    found: Mapping[str, TensorInfo],
) -> list[TensorTask]:
    """The scales of a layer's cached keys and values as the source has them, one number each.

    Args:
        source: the source's quantization config.
        found: the source's scales of the layer's cache, by their full name.

    Raises:
        CheckpointError: one is no floating-point number.
        PlanError: the method has no place for one.
    """
    prefix = family.layer_prefix.format(i=layer)
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
        tasks.append(_cache_scale(family, method, layer, which, info))
    return tasks


def _cache_scale(family: Family, method: Method, layer: int, which: str, kept: TensorInfo | None) -> TensorTask:
    path, _, parameter = f"{family.attention}.{method.KV_SCALES[which]}".rpartition(".")
    place = cache_place(family.layer_prefix.format(i=layer), path, parameter, layer)
    info = kept or TensorInfo(place.tensor(parameter), "F32", method.KV_SHAPE, Path(), 0, 4)
    output = OutputTensor(parameter, info.dtype, method.KV_SHAPE, (), info.nbytes)
    cached = which if kept is None else None
    return TensorTask(info, place, parameter, (0, 1), UNCUT, None, (output,), cached=cached)
