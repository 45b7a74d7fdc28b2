"""Plain torch kernels for what vLLM's CPU build has none of, so that its own config parsing and weight loading run.

Runs inside the environment that holds vLLM, and imports nothing of ours: the arithmetic is written once more from the
formats' descriptions (compressed-tensors', and OCP's Microscaling Formats specification), as an oracle of its own.
Weights are decoded when they have been loaded. Inputs are rounded as the format says, unless told otherwise.

vLLM picks the first of a list of kernels, by platform, that says it can do a weight. Ours are put into the lists for
the CPU, and say so of what its own cannot.

With them a model can be run in float32, where an engine that reads a checkpoint as we do differs from our reference by
no more than the order of sums: quantisation methods that only admit 16 bits are made to admit it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import vllm._custom_ops as operations
import vllm.model_executor.kernels.linear as registry
from torch import Tensor
from torch.nn.functional import linear
from vllm.model_executor.kernels.linear import (
    Fp8BlockScaledMMLinearKernel,
    FP8ScaledMMLinearKernel,
    MPLinearKernel,
    MxFp4LinearKernel,
    Mxfp8LinearKernel,
    NvFp4LinearKernel,
)
from vllm.model_executor.layers.quantization import auto_gptq, get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.modelopt import ModelOptQuantConfigBase
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

E4M3_MAX = 448.0
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

USED: set[str] = set()
"""Kernels of ours that decoded a weight."""
_settings = {"round_inputs": True}


# ------------------------------------------------------------------- arithmetic


def e4m3(x: Tensor) -> Tensor:
    """Nearest float8_e4m3fn, saturating."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def e2m1(x: Tensor) -> Tensor:
    """Nearest FP4 value, ties to the even code, saturating."""
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.int64)
    for lower in range(7):
        middle = (E2M1[lower] + E2M1[lower + 1]) / 2
        code += (magnitude >= middle) if lower % 2 else (magnitude > middle)
    return E2M1[code].copysign(x)


def e2m1_codes(packed: Tensor) -> Tensor:
    """Values of ``[rows, cols // 2]`` bytes, the low nibble first: ``[rows, cols]``."""
    code = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()
    return torch.where(code >= 8, -E2M1[code & 7], E2M1[code & 7])


def blocks(x: Tensor, size: int) -> Tensor:
    """``[..., cols]`` as ``[..., cols / size, size]``."""
    return x.unflatten(-1, (-1, size))


def largest(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True)


def by_scale(x: Tensor, scale: Tensor) -> Tensor:
    """FP8 with a scale that divides; all-zero rows stay zero."""
    return e4m3(x / scale.where(scale > 0, torch.ones(()))) * scale


def nvfp4(x: Tensor, divisor: Tensor) -> Tensor:
    """NVFP4 activations: a scale for 16 values in FP8, and over all of them one number that multiplies it."""
    x = blocks(x, 16)
    scale = e4m3(largest(x) / 6 * divisor) / divisor
    return torch.where(scale > 0, e2m1(x / scale) * scale, torch.zeros(())).flatten(-2)


def shared_exponent(x: Tensor, of_largest: int) -> Tensor:
    """The power of two that a block is divided by: of its largest magnitude, which counts as twice it from 1.75 on."""
    mantissa, exponent = torch.frexp(largest(x))  # mantissa in [0.5, 1)
    exponent = exponent - 1 + (mantissa >= 0.875).int()
    return torch.exp2((exponent - of_largest).clamp(-127, 127).float())


def mxfp4(x: Tensor) -> Tensor:
    x = blocks(x, 32)
    scale = shared_exponent(x, 2)
    return (e2m1(x / scale) * scale).flatten(-2)


def mxfp8(x: Tensor) -> Tensor:
    x = blocks(x, 32)
    scale = shared_exponent(x, 8)
    return (e4m3(x / scale) * scale).flatten(-2)


# ---------------------------------------------------------------------- kernels


class Reference:
    """What all have in common: a weight in float32 ``[out, in]``, and how the inputs are rounded."""

    weight: Tensor

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    def decoded(self, layer: Any) -> Tensor:
        raise NotImplementedError

    def rounded(self, x: Tensor, layer: Any) -> Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: Any) -> None:
        USED.add(type(self).__name__)
        self.weight = self.decoded(layer)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
        wide = x.float()
        if _settings["round_inputs"]:
            wide = self.rounded(wide, layer)
        return linear(wide, self.weight, None if bias is None else bias.float()).to(x.dtype)


class ReferenceNvFp4(Reference, NvFp4LinearKernel):
    def decoded(self, layer: Any) -> Tensor:
        scales = layer.weight_scale.float() * layer.weight_global_scale.float()
        return (blocks(e2m1_codes(layer.weight), 16) * scales[..., None]).flatten(-2)

    def rounded(self, x: Tensor, layer: Any) -> Tensor:
        divisor = getattr(layer, "input_global_scale_inv", None)  # not there for weight-only
        return x if divisor is None else nvfp4(x, divisor.float())


class ReferenceMxFp4(Reference, MxFp4LinearKernel):
    def decoded(self, layer: Any) -> Tensor:
        scales = torch.exp2(layer.weight_scale.float() - 127)
        return (blocks(e2m1_codes(layer.weight), 32) * scales[..., None]).flatten(-2)

    def rounded(self, x: Tensor, layer: Any) -> Tensor:
        return mxfp4(x)


class ReferenceMxFp8(Reference, Mxfp8LinearKernel):
    def decoded(self, layer: Any) -> Tensor:
        scales = torch.exp2(layer.weight_scale.float() - 127)
        return (blocks(layer.weight.float(), 32) * scales[..., None]).flatten(-2)

    def rounded(self, x: Tensor, layer: Any) -> Tensor:
        return mxfp8(x)


class ReferenceFp8PerTensor(Reference, FP8ScaledMMLinearKernel):
    """One scale for the weight, one for the inputs, given."""

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        scales = (config.weight_quant_key.scale, config.activation_quant_key.scale)
        fits = all(scale.static and scale.group_shape.is_per_tensor() for scale in scales)
        return fits, None if fits else "one static scale each is needed"

    def decoded(self, layer: Any) -> Tensor:
        return layer.weight.float().t().contiguous() * layer.weight_scale.float()  # it is kept as [in, out]

    def rounded(self, x: Tensor, layer: Any) -> Tensor:
        return by_scale(x, layer.input_scale.float())

    def apply_scaled_mm(self, **_: Any) -> Tensor:
        raise AssertionError("apply_weights does not call it")


class ReferenceFp8Block(Reference, Fp8BlockScaledMMLinearKernel):
    def decoded(self, layer: Any) -> Tensor:
        params = self._get_layer_params(layer)
        (rows, cols), block = params.weight.shape, self.weight_group_shape
        scales = params.block_scale.float().repeat_interleave(block.row, 0).repeat_interleave(block.col, 1)
        return params.weight.float() * scales[:rows, :cols]

    def rounded(self, x: Tensor, layer: Any) -> Tensor:
        x = blocks(x, self.config.activation_quant_key.scale.group_shape.col)
        return by_scale(x, largest(x) / E4M3_MAX).flatten(-2)

    def apply_block_scaled_mm(self, *_: Any) -> Tensor:
        raise AssertionError("apply_weights does not call it")


class ReferencePacked(Reference, MPLinearKernel):
    """4 and 8 bit integers in int32 words, with groups; inputs in 16 bits, or FP8 per token."""

    BITS: ClassVar = {
        scalar_types.int4: 4,  # W4A8 says so of what is stored with an offset of 8
        scalar_types.uint4b8: 4,
        scalar_types.uint4: 4,
        scalar_types.uint8b128: 8,
        scalar_types.uint8: 8,
    }

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        native = config.weight_type in (scalar_types.uint4b8, scalar_types.uint4) and config.act_type != torch.float32
        fits = config.weight_type in cls.BITS and not native
        return fits, None if fits else "there is another kernel for it, or none at all"

    def decoded(self, layer: Any) -> Tensor:
        packed, scale, zero_point = self._get_weight_params(layer)
        bits = self.BITS[self.config.weight_type]
        # compressed-tensors packs [out, in / n], GPTQ [in / n, out].
        words, scales = (packed, scale) if packed.input_dim == 1 else (packed.t(), scale.t())
        codes = unpacked(words.data, bits)
        if self.config.zero_points:
            zeros = unpacked(zero_point.data.t(), bits).t()
        else:
            zeros = torch.full_like(scales.data, 1 << (bits - 1), dtype=torch.int64)
        group = codes.shape[1] // scales.shape[1]
        values = blocks(codes, group) - zeros[..., None]
        return (values.float() * scales.data.float()[..., None]).flatten(-2)

    def rounded(self, x: Tensor, layer: Any) -> Tensor:
        return by_scale(x, largest(x) / E4M3_MAX) if self.config.act_type == torch.float8_e4m3fn else x


def unpacked(words: Tensor, bits: int) -> Tensor:
    """``[rows, words]`` int32 as ``[rows, words * 32 / bits]``, low bits first."""
    shifts = torch.arange(0, 32, bits)
    return ((words.long()[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


# ------------------------------------------------------------------- installing


def scaled_fp8_quant(input: Tensor, scale: Tensor | None = None, **_: Any) -> tuple[Tensor, Tensor]:
    """What vLLM's operation of this name does where the scale is given; the CPU build has the name only.

    With it weights that were fused are put on one scale. Where they share theirs already, as ours do, that must change
    nothing.
    """
    assert scale is not None, "only with a scale"
    return (input.float() / scale.float()).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def install(*, round_inputs: bool = True) -> None:
    """Offer the kernels to vLLM, before a model is loaded.

    Args:
        round_inputs: False: weights alone are tried, as vLLM itself does for some formats on older GPUs.
    """
    _settings["round_inputs"] = round_inputs
    for kernels, ours in (
        (registry._POSSIBLE_NVFP4_KERNELS, ReferenceNvFp4),
        (registry._POSSIBLE_MXFP4_KERNELS, ReferenceMxFp4),
        (registry._POSSIBLE_MXFP8_KERNELS, ReferenceMxFp8),
        (registry._POSSIBLE_FP8_KERNELS, ReferenceFp8PerTensor),
        (registry._POSSIBLE_FP8_BLOCK_KERNELS, ReferenceFp8Block),
        (registry._POSSIBLE_KERNELS, ReferencePacked),
    ):
        kernels[PlatformEnum.CPU] = [ours, *kernels.get(PlatformEnum.CPU, [])]
    registry.MarlinNvFp4LinearKernel = ReferenceNvFp4  # weight-only NVFP4 asks for it by name
    operations.scaled_fp8_quant = scaled_fp8_quant
    get_quantization_config("compressed-tensors")  # imports all methods there are
    for method in QuantizationConfig.__subclasses__() + ModelOptQuantConfigBase.__subclasses__():
        method.get_supported_act_dtypes = classmethod(lambda cls: [torch.float32, torch.bfloat16, torch.float16])
    auto_gptq.verify_marlin_supported = lambda *_, **__: None  # asks for a GPU, for 8 bits
    # 4-bit weights with FP8 inputs are recognised on one kind of GPU only.
    CompressedTensorsConfig._is_fp8_w4a8_sm90 = staticmethod(CompressedTensorsConfig._is_fp8_w4a8)
