"""Base of NVFP4 and the MX formats: small floats in groups along the input, each group with a scale of one byte.

e2m1, e4m3 and E8M0 are those of the OCP Microscaling Formats (MX) specification v1.0; NVFP4 is NVIDIA's. Tensors and
rules are compressed-tensors' ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelexport.errors import PlanError
from modelexport.quantization import kernels
from modelexport.quantization.formats.base import Grid, NumberFormat, ScaleGranularity
from modelexport.quantization.kernels import microscaling, microscaling_reference, reference
from modelexport.quantization.methods.mxfp4 import BLOCK as MXFP4_GROUP

__all__ = ["MicroscalingFormat", "MxActivationsFormat", "MxFormat", "NvFormat", "global_scale"]

_NUMERATOR = 448.0 * 6.0
_LARGEST_GLOBAL = 2.0**126
_SCALE_OF_ZEROS = 0.125
_SMALLEST_LOCAL = 2.0**-9  # of e4m3
_LARGEST_AMAX = torch.finfo(torch.float32).max * (1 - 2.0**-20)


def global_scale(amax: Tensor) -> Tensor:
    """NVFP4's global scale, a divisor: 448 * 6 / amax; 1 for amax 0.

    To the bit as compressed-tensors makes it of float32: the reciprocal is rounded, then its product with 2688.

    At most 2^126, whose reciprocal is still a normal float32: engines turn it over when they load, and a smaller amax
    would make it infinite (compressed-tensors then takes 1, and all values become zero). The amax counts as slightly
    less than float32's largest number at most: no value then overflows.
    """
    scale = torch.ones_like(amax) / amax.clamp(max=_LARGEST_AMAX) * _NUMERATOR
    return torch.where(amax == 0, torch.ones_like(scale), scale.clamp(max=_LARGEST_GLOBAL))


@dataclass(frozen=True)
class MicroscalingFormat(NumberFormat):
    """Formats whose scales are a byte per ``group`` values of a row.

    Attributes:
        group: how many values.
        storage: dtype of the stored values, uint8 where there are two e2m1 in a byte.
        values: the native tensor that holds them.
    """

    group: ClassVar[int]
    storage: ClassVar[torch.dtype] = torch.uint8
    values: ClassVar[str] = "weight_packed"
    weight_bits: ClassVar[int] = 4

    @property
    def kernels(self) -> tuple[str, ...]:
        """See the base; they search for scales as well."""
        return ("microscaling_fused",)

    def check_shape(self, module: str, shape: Sequence[int]) -> None:
        """See the base; the groups must divide a row, whatever the size of the format.

        Raises:
            PlanError: with the width, the group and the formats that would do.
        """
        super().check_shape(module, shape)
        width = shape[1]
        if width % self.group == 0:
            return
        choices = "a format without groups (--quant fp8, --quant int8)"
        if width % 16 == 0:
            choices = f"--quant nvfp4 or nvfp4-wo (groups of 16), or {choices}"
        raise PlanError(
            f"{module}: in_features {width} is not divisible by {self.group}, the group of number format "
            f"{self.name}: {choices}"
        )

    def _factor(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """The divisor of the scales."""
        return None

    def _fill(self, weight: Tensor, amax: Tensor | None, out: Mapping[str, Tensor]) -> int:
        search = self.observer == "mse"
        return microscaling.quantise(weight, out[self.values], out["weight_scale"], self._factor(out), search=search)

    def _fill_chosen(self, weight: Tensor, amax: Tensor | None, choice: Tensor, out: Mapping[str, Tensor]) -> int:
        return microscaling.quantise_chosen(weight, out[self.values], out["weight_scale"], self._factor(out), choice)

    def grid(self, tensors: Mapping[str, Tensor]) -> Grid:
        """See the base."""
        step = microscaling_reference.decode_scales(tensors["weight_scale"], self._factor(tensors))
        most = microscaling_reference.E2M1_MAX if self.storage == torch.uint8 else reference.FP8_MAX
        return Grid(step, None, self.group, self.storage, -most, most)

    def _put(self, numbers: Tensor, rows: slice, tensors: Mapping[str, Tensor]) -> None:
        codes = microscaling_reference.encode(numbers, torch.ones_like(numbers), self.storage)
        tensors[self.values][rows] = microscaling_reference.pack(codes) if self.storage == torch.uint8 else codes

    def _dequantise(self, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        microscaling.dequantise(tensors[self.values], tensors["weight_scale"], out, self._factor(tensors))

    def _squared_error(self, weight: Tensor, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        microscaling.squared_error(weight, tensors[self.values], tensors["weight_scale"], out, self._factor(tensors))

    def stored_shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        rows, cols = tensors[self.values].shape
        return (rows, cols * (2 if self.storage == torch.uint8 else 1))


def _decoded_exponents(exponents: Tensor) -> Tensor:
    return microscaling_reference.decode_scales(exponents, None)


@dataclass(frozen=True)
class NvFormat(MicroscalingFormat):
    """NVFP4: ``weight_packed`` uint8 ``[out, in / 2]``, ``weight_scale`` e4m3fn ``[out, in / 16]``,
    ``weight_global_scale`` float32 ``[1]``; a value is e2m1 * (scale / global scale).

    The global scale is 448 * 6 / the largest magnitude of the weight, and of those that engines fuse with it; a
    group's is e4m3(global * amax / 6), 0.125 where that is 0. In a byte the low half is the even column; the sign bit
    is set for whatever is below zero, also where it rounds to zero, but not for -0.

    With observer "mse" the group's scale is searched for, among the next six e4m3 above that and the two below.

    With observer "exact" the scale of 32 is that of MXFP4, and the global scale lays the largest of these onto 2^8:
    those down to 2^-17 of it are powers of two in e4m3, too. Values of MXFP4 keep their bits so, as by NVIDIA's own
    cast (ModelOpt). What lies further below takes the smallest scale. Parts of a weight are cut between the 32.
    """

    group: ClassVar[int] = 16
    checkpoint_format: ClassVar[str] = "nvfp4-pack-quantized"

    @property
    def scale_granularity(self) -> ScaleGranularity:
        return "tensor"

    @property
    def choices(self) -> int:
        """See the base."""
        return microscaling_reference.NV_TRIED

    def _factor(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        return tensors["weight_global_scale"]

    def _fill(self, weight: Tensor, amax: Tensor | None, out: Mapping[str, Tensor]) -> int:
        bad = self._fill_factor(weight, amax, out)
        return super()._fill(weight, amax, out) if bad < 0 else bad

    def _fill_chosen(self, weight: Tensor, amax: Tensor | None, choice: Tensor, out: Mapping[str, Tensor]) -> int:
        bad = self._fill_factor(weight, amax, out)
        return super()._fill_chosen(weight, amax, choice, out) if bad < 0 else bad

    def _fill_factor(self, weight: Tensor, amax: Tensor | None, out: Mapping[str, Tensor]) -> int:
        """Fills the global scale; the first row that holds NaN or Inf, or -1."""
        used = self.amax(weight) if amax is None else amax.to(weight.device)
        if not bool(torch.isfinite(used).all()):
            bad = (~torch.isfinite(kernels.row_amax(weight))).nonzero()
            return int(bad[0, 0]) if bad.numel() else 0
        out["weight_global_scale"].copy_(global_scale(used))
        return -1

    def _fill_powers(self, weight: Tensor, amax: Tensor | None, out: Mapping[str, Tensor]) -> int:
        rows, cols = weight.shape
        exponents = torch.empty(rows, cols // MXFP4_GROUP, dtype=torch.uint8, device=weight.device)
        packed = out["weight_packed"]
        bad = microscaling.quantise(weight, packed, exponents)
        if bad >= 0:
            return bad
        used = (self.amax(weight) if amax is None else amax).to(weight.device)
        factor = torch.where(used > 0, 2.0**8 / _decoded_exponents(microscaling.exponents(used)), 1.0)
        factor.clamp_(max=_LARGEST_GLOBAL)
        out["weight_global_scale"].copy_(factor)
        scale, numbers = _decoded_exponents(exponents) * factor, packed.unflatten(1, (-1, MXFP4_GROUP // 2))
        far = (scale < _SMALLEST_LOCAL) | (exponents == 0)
        scale.clamp_(min=_SMALLEST_LOCAL)
        if bool(far.any()):
            groups = weight.unflatten(1, (-1, MXFP4_GROUP))[far].float()
            step = (_SMALLEST_LOCAL / factor).expand(groups.shape[0], 1)
            numbers[far] = microscaling_reference.pack(microscaling_reference.encode(groups, step, torch.uint8))
            scale[far] = torch.where((groups != 0).any(dim=1), _SMALLEST_LOCAL, _SCALE_OF_ZEROS)
        out["weight_scale"].copy_(scale.repeat_interleave(MXFP4_GROUP // self.group, dim=1))
        return -1

    def _arguments(self) -> dict[str, Any]:
        return {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "tensor_group",
            "group_size": self.group,
            "scale_dtype": "torch.float8_e4m3fn",
        }

    def weight_arguments(self) -> dict[str, Any]:
        return {**self._arguments(), "dynamic": False}


@dataclass(frozen=True)
class MxFormat(MicroscalingFormat):
    """MX: ``weight_scale`` uint8 ``[out, in / 32]`` holds exponents (E8M0); a value is element * 2^(byte - 127).

    The byte is 127 + floor(log2(amax)) - 2 for e2m1 or - 8 for e4m3, where a mantissa of 1.75 or more counts as the
    next power of two; 0 for a group of zeros; and no more than leaves the largest element finite in the weight's dtype.
    With observer "mse" it is that, one more or one less.
    """

    group: ClassVar[int] = MXFP4_GROUP

    @property
    def is_mxfp4(self) -> bool:
        """See the base."""
        return self.storage == torch.uint8

    @property
    def choices(self) -> int:
        """See the base."""
        return microscaling_reference.MX_TRIED

    def _arguments(self) -> dict[str, Any]:
        return {
            "num_bits": self.weight_bits,
            "type": "float",
            "symmetric": True,
            "strategy": "group",
            "group_size": self.group,
            "scale_dtype": "torch.uint8",
        }

    def weight_arguments(self) -> dict[str, Any]:
        return {**self._arguments(), "dynamic": False}


@dataclass(frozen=True)
class MxActivationsFormat(MxFormat):
    """MX formats that round activations as they round weights, with scales made at run time."""

    def input_arguments(self) -> dict[str, Any] | None:
        return {**self._arguments(), "dynamic": True}

    def fake_quantise_activations(self, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Rounds each 32 of the last dim with a scale of their own."""
        return microscaling.fake_quantise(x, self.group, None, self.storage)
