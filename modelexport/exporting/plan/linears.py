"""The quantised linears of a plan: how a source has them, and which tensors are written for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modelexport.checkpoints.safetensors.file import TensorInfo, tensor_nbytes
from modelexport.errors import CheckpointError, PlanError, UsageError, shown
from modelexport.exporting.plan.steps import OutputTensor, StoredLinear, TensorTask
from modelexport.models.families.base import Family
from modelexport.models.matching import Matched, MatchedModule, cache_place
from modelexport.quantization.methods import Method, QuantizationConfig, Scheme, of_method
from modelexport.sharding.plan import replicated

if TYPE_CHECKING:
    from modelexport.quantization.formats.base import NumberFormat

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_SCALE_LIKE = ("scale", "scales", "scale_inv", "scaling_factor")
UNCUT = replicated(0, 1)  # until the whole layer is known


@dataclass(frozen=True)
class SourceLinear:
    """A linear that the source has quantised, and the weight that it stands for, which lies nowhere."""

    linear: StoredLinear
    weight: TensorInfo


def model_dtype(matched: Matched) -> str:
    """The dtype of a model's unquantised numbers, as config.json says or as its tensors are."""
    config = matched.model.config
    said = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    if said in _DTYPES:
        return _DTYPES[said]
    plain = (info.dtype for module in matched.modules if module.scheme is None for info in module.tensors.values())
    return next((dtype for dtype in plain if dtype in ("BF16", "F16")), "F32")


def source_linear(matched: MatchedModule, scheme: Scheme, shape: tuple[int, int], dtype: str) -> SourceLinear:
    """A quantised linear of the source.

    Args:
        shape: of its weight.
        dtype: of the model's unquantised numbers.

    Raises:
        CheckpointError: no number format of ours holds such weights.
    """
    number_format, exact = _held(matched.place.name, scheme, matched.tensors)
    tensors = {suffix: info for suffix, info in matched.tensors.items() if suffix != "bias"}
    name = matched.place.tensor("weight")
    weight = TensorInfo(name, dtype, shape, Path(), 0, tensor_nbytes(dtype, shape))
    return SourceLinear(StoredLinear(scheme.method, number_format, tensors, exact), weight)


def _held(name: str, scheme: Scheme, tensors: Mapping[str, TensorInfo]) -> tuple[NumberFormat, bool]:
    """The number format of a linear's tensors; and whether it says all that the scheme does, or only the weights.

    Raises:
        CheckpointError: none holds such weights.
    """
    from modelexport.checkpoints.safetensors.file import torch_dtype
    from modelexport.quantization.formats import get, has_groups, meaning, names, of_scheme

    scales = {info.dtype for suffix, info in tensors.items() if suffix.endswith(_SCALE_LIKE)}
    floating = sorted(scales.intersection(_DTYPES.values()))
    dtype = floating[0] if len(floating) == 1 else "F32" if floating else of_method(scheme.method).SCALES
    kept = None if dtype is None else torch_dtype(dtype)
    try:
        return of_scheme(scheme, scale_dtype=kept), True
    except CheckpointError as error:
        refused = error
    weights = {key: value for key, value in scheme.weights.items() if key != "actorder"}
    size = weights.get("group_size") if weights.get("strategy") == "group" else -1
    for known in names():
        try:
            found = get(known, group_size=size if has_groups(known) else None, scale_dtype=kept)
        except UsageError:  # has not groups of that size
            continue
        if found.quantised and not found.has_static_inputs and meaning(found.weight_arguments()) == meaning(weights):
            return found, False
    raise CheckpointError(f"{name}: {refused}")


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
        if info.dtype not in _DTYPES.values():
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
