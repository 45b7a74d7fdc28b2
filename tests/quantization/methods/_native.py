"""Random native tensors of any scheme, parts of them, and a number format that consists of its arguments alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelexport.quantization.methods.base import Axes, Scheme, StoredTensorSpec, WeightSlice
from modelexport.quantization.methods.compressed_tensors import tensor_specs
from modelexport.system.dtypes import torch_dtype


def arguments(kind: str, bits: int, strategy: str, dynamic: bool | str = False, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": dynamic, **more}


@dataclass(frozen=True)
class Numbers:
    """What a method asks of a number format."""

    name: str
    checkpoint_format: str
    weights: tuple[tuple[str, Any], ...]
    inputs: tuple[tuple[str, Any], ...] | None = None
    group_size: int | None = None

    @classmethod
    def of(cls, name: str, layout: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> Numbers:
        size = weights.get("group_size") if weights["type"] == "int" else None
        return cls(name, layout, tuple(weights.items()), None if inputs is None else tuple(inputs.items()), size)

    def weight_arguments(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in self.weights}

    def input_arguments(self) -> dict[str, Any] | None:
        return None if self.inputs is None else dict(self.inputs)

    def scheme(self) -> Scheme:
        found = self.weight_arguments(), self.input_arguments()
        return Scheme(self.name, ("Linear",), self.checkpoint_format, *found, None)

    @property
    def has_static_inputs(self) -> bool:
        return self.scheme().has_static_inputs


FP8 = arguments("float", 8, "tensor")
INT8_ROW = arguments("int", 8, "channel")
MX = {"group_size": 32, "scale_dtype": "torch.uint8"}
NV = {"group_size": 16}
ALL = {
    number_format.name: number_format
    for number_format in (
        Numbers.of("fp8", "float-quantized", arguments("float", 8, "channel"), arguments("float", 8, "token", True)),
        Numbers.of("fp8-static", "float-quantized", FP8, FP8),
        Numbers.of(
            "fp8-block",
            "float-quantized",
            arguments("float", 8, "block", block_structure=(128, 128)),
            arguments("float", 8, "group", True, group_size=128),
        ),
        Numbers.of("int8", "int-quantized", INT8_ROW, arguments("int", 8, "token", True)),
        Numbers.of("int8-static", "int-quantized", INT8_ROW, arguments("int", 8, "tensor")),
        Numbers.of("int8-wo", "pack-quantized", INT8_ROW),
        Numbers.of("int4", "pack-quantized", arguments("int", 4, "group", group_size=128)),
        Numbers.of("int4-64", "pack-quantized", arguments("int", 4, "group", group_size=64)),
        Numbers.of(
            "w4a8",
            "pack-quantized",
            arguments("int", 4, "group", group_size=128),
            arguments("float", 8, "token", True),
        ),
        Numbers.of(
            "nvfp4",
            "nvfp4-pack-quantized",
            arguments("float", 4, "tensor_group", **NV),
            arguments("float", 4, "tensor_group", "local", **NV),
        ),
        Numbers.of("nvfp4-wo", "nvfp4-pack-quantized", arguments("float", 4, "tensor_group", **NV)),
        Numbers.of(
            "mxfp4",
            "mxfp4-pack-quantized",
            arguments("float", 4, "group", **MX),
            arguments("float", 4, "group", True, **MX),
        ),
        Numbers.of("mxfp4-wo", "mxfp4-pack-quantized", arguments("float", 4, "group", **MX)),
        Numbers.of(
            "mxfp8",
            "mxfp8-quantized",
            arguments("float", 8, "group", **MX),
            arguments("float", 8, "group", True, **MX),
        ),
    )
}


def native_tensors(
    number_format: Numbers, shape: tuple[int, int], scales: str = "F32", seed: int = 0
) -> dict[str, Any]:
    """Every byte there is in the weights; scales of random magnitudes, global ones of a random bfloat16 amax."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    for suffix, promise in tensor_specs(number_format.scheme(), shape).items():
        dtype, extent = torch_dtype(scales if scales in promise.dtypes else promise.dtypes[0]), promise.shapes[0]
        if suffix == "weight_shape":
            made[suffix] = torch.tensor(shape, dtype=torch.int64)
        elif suffix.endswith("global_scale"):
            amax = (torch.rand(extent, generator=generator) * 3 + 0.01).to(torch.bfloat16)
            made[suffix] = torch.full(extent, 2688.0) / amax.float()
        elif suffix.endswith("scale") and dtype.is_floating_point and dtype.itemsize > 1:
            made[suffix] = (torch.rand(extent, generator=generator) + 2**-7).to(dtype)
        else:
            words = (*extent[:-1], extent[-1] * dtype.itemsize)
            made[suffix] = torch.randint(0, 256, words, generator=generator, dtype=torch.uint8).view(dtype)
    if number_format.checkpoint_format == "pack-quantized" and shape[1] % 4:  # what fills the last word of a row up
        made["weight_packed"].view(torch.uint8)[:, shape[1] :] = 0
    return made


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Whether two sets of tensors are equal to the byte, in whatever order (also single numbers, without a dim)."""
    return set(left) == set(right) and all(
        (left[key].dtype, left[key].shape) == (right[key].dtype, right[key].shape)
        and torch.equal(_octets(left[key]), _octets(right[key]))
        for key in left
    )


def _octets(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def cut(
    tensors: Mapping[str, Tensor], promises: Mapping[str, StoredTensorSpec], part: WeightSlice
) -> dict[str, Tensor]:
    """The part of stored tensors that belongs to a part of the weight."""
    return {suffix: _cut(tensor, promises[suffix].axes, part) for suffix, tensor in tensors.items()}


def _cut(tensor: Tensor, axes: Axes, part: WeightSlice) -> Tensor:
    for dim, axis in enumerate(axes):
        if axis is not None:
            along, unit = axis
            begin, end = part.origin[along], part.origin[along] + part.extent[along]
            assert begin % unit == 0
            assert end % unit == 0 or end == part.shape[along]
            tensor = tensor.narrow(dim, begin // unit, -(-end // unit) - begin // unit)
    return tensor
