"""The linears of a plan: how a quantised source has them, and which tensors are written for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modelexport.checkpoints.safetensors.file import Checkpoint, TensorInfo, tensor_nbytes
from modelexport.errors import CheckpointError, PlanError, UsageError, shown
from modelexport.exporting.plan.steps import OutputTensor, StoredLinear, TensorTask
from modelexport.models.architecture import Dimensions, Family, Module
from modelexport.quantization.methods import Method, Scheme, extras, of_method, read_quantization_config, tensor_specs
from modelexport.sharding.plan import replicated
from modelexport.system.dtypes import FLOATS, find_dtype

if TYPE_CHECKING:
    from modelexport.quantization.formats.base import NumberFormat

_SCALE_LIKE = ("scale", "scales", "scale_inv", "scaling_factor")
UNCUT = replicated(0, 1)  # until the whole layer is known


@dataclass(frozen=True)
class Found:
    """A linear that the source has quantised, and the weight that it stands for."""

    linear: StoredLinear
    weight: TensorInfo


class SourceLinears:
    """Finds the quantised linears of a source; takes their tensors out of ``infos``."""

    def __init__(self, checkpoint: Checkpoint, infos: dict[str, TensorInfo]) -> None:
        self.infos = infos
        self.config = checkpoint.config or {}
        self.quantization = read_quantization_config(checkpoint.config)
        method = None if self.quantization is None else of_method(self.quantization.method)  # raises where unknown
        if why := getattr(method, "NO_SOURCE", ""):
            raise PlanError(f"{checkpoint.directory}: {why}")

    @property
    def has_kv_scales(self) -> bool:
        """True if the source has the scales of a KV cache."""
        return self.quantization is not None and self.quantization.kv_cache_scheme is not None

    def take(self, name: str, module: Module, dimensions: Dimensions) -> Found | None:
        """The tensors of a module, if config.json says that it is quantised.

        Raises:
            CheckpointError: one of them is missing or not as config.json promises; or nothing here holds its numbers.
        """
        if self.quantization is None or module.kind not in ("linear", "head"):
            return None
        scheme = self.quantization.scheme_of(name)
        if scheme is None:
            return None
        shape = dimensions.weight_shape(module)
        tensors, problems = {}, []
        spare = extras(scheme, (shape[0], shape[1]))
        for suffix, promise in {**tensor_specs(scheme, (shape[0], shape[1])), **spare}.items():
            info = self.infos.pop(f"{name}.{suffix}", None)
            if info is None and suffix in spare:
                continue
            if info is None:
                problems.append(f"{name}.{suffix} is missing")
            elif info.dtype not in promise.dtypes or info.shape not in promise.shapes:
                problems.append(f"{info.name} is {info.dtype} {list(info.shape)} but config.json makes it {promise}")
            else:
                tensors[suffix] = info
        if problems:
            raise CheckpointError("; ".join(problems))
        number_format, exact = self._held(name, scheme, tensors)
        dtype = self.dtype()
        weight = TensorInfo(f"{name}.weight", dtype, shape, Path(), 0, tensor_nbytes(dtype, shape))
        return Found(StoredLinear(scheme.method, number_format, tensors, exact), weight)

    def _held(self, name: str, scheme: Scheme, tensors: Mapping[str, TensorInfo]) -> tuple[NumberFormat, bool]:
        """The number format of a linear's tensors; and whether it says all that the scheme does, or only the weights.

        Raises:
            CheckpointError: none holds such weights.
        """
        from modelexport.checkpoints.safetensors.file import torch_dtype
        from modelexport.quantization.formats import get, has_groups, meaning, names, of_scheme

        scales = {info.dtype for suffix, info in tensors.items() if suffix.endswith(_SCALE_LIKE)}
        floating = sorted(scales.intersection(FLOATS))
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
            if (
                found.quantised
                and not found.has_static_inputs
                and meaning(found.weight_arguments()) == meaning(weights)
            ):
                return found, False
        raise CheckpointError(f"{name}: {refused}")

    def kv_scale(self, attention: str, which: str) -> TensorInfo | None:
        """Takes the scale of a layer's cached keys ("k") or values ("v")."""
        if not self.has_kv_scales:
            return None
        assert self.quantization is not None
        where = of_method(self.quantization.method).KV_SCALES.get(which)
        info = None if where is None else self.infos.pop(f"{attention}.{where}", None)
        if info is not None and (info.shape not in ((), (1,)) or info.dtype not in FLOATS):
            raise CheckpointError(f"{info.name} is {info.dtype} {list(info.shape)}: a KV cache's scale is one number")
        return info

    def check_kv_scheme(self) -> None:
        """Refuse a KV cache whose numbers cannot be announced as they are.

        Raises:
            PlanError: they are not FP8.
        """
        scheme = None if self.quantization is None else self.quantization.kv_cache_scheme
        if scheme is not None and (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
            raise PlanError(
                f"the source's KV cache has {shown(scheme.get('num_bits'))}-bit {shown(scheme.get('type'))} numbers, "
                "and only those of FP8 can be written: --quant none leaves its scales out"
            )

    def dtype(self) -> str:
        """The dtype of the model's unquantised numbers, as config.json says or as its tensors are."""
        said = str(self.config.get("dtype") or self.config.get("torch_dtype") or "").removeprefix("torch.")
        found = [info.dtype for info in self.infos.values() if info.dtype in ("BF16", "F16")]
        named = find_dtype(said)
        return named if named in FLOATS else found[0] if found else "F32"


def linear_outputs(
    method: Method, number_format: NumberFormat, shape: tuple[int, int], dtype: str
) -> tuple[OutputTensor, ...]:
    """The tensors that a method writes for a linear whose weight has that shape and dtype."""
    from modelexport.checkpoints.safetensors.file import dtype_name

    scales = dtype if number_format.scale_dtype is None else dtype_name(number_format.scale_dtype)
    outputs = []
    for suffix, promise in method.tensor_specs(number_format.scheme(method.METHOD), shape).items():
        written = scales if scales in promise.dtypes else promise.dtypes[0]
        stored = promise.shapes[0]
        outputs.append(OutputTensor(suffix, written, stored, promise.axes, tensor_nbytes(written, stored)))
    return tuple(outputs)


def cache_tasks(family: Family, method: Method, layer: str, sources: SourceLinears, *, made: bool) -> list[TensorTask]:
    """The scales of a layer's cached keys and values, one number each.

    Args:
        made: whether they are to be made, in float32; else those of the source are taken over, where it has any.

    Raises:
        CheckpointError: what the source has is not one number.
        PlanError: the method or the family has no place for them.
    """
    attention = family.attention
    if made and not method.KV_SCALES:
        raise PlanError(f"--kv-cache: quant_method '{method.METHOD}' has no place for its scales; --format hf has")
    if made and not attention:
        raise PlanError(f"--kv-cache: the layers of {family.name} models have no attention whose keys are cached")
    tasks = []
    for which in ("k", "v"):
        info = sources.kv_scale(f"{layer}.{attention}", which)
        if not made and info is None:
            continue
        if which not in method.KV_SCALES:
            raise PlanError(
                f"{layer}: the source has the scales of its KV cache, and quant_method '{method.METHOD}' has no place "
                "for them; --format hf has, and --quant none leaves them out"
            )
        path, _, parameter = f"{attention}.{method.KV_SCALES[which]}".rpartition(".")
        shape = method.KV_SHAPE
        if made or info is None:
            info = TensorInfo(f"{layer}.{path}.{parameter}", "F32", shape, Path(), 0, 4)
        module = Module(path=path, kind="vector", role=f"attention.{which}_cache", parameter=parameter)
        output = OutputTensor(parameter, info.dtype, shape, (), info.nbytes)
        rows = (0, 1)
        cached = which if made else None
        tasks.append(TensorTask(info, module, path, parameter, rows, UNCUT, None, (output,), cached=cached))
    return tasks
