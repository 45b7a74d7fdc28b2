"""What a number format is: how a linear's weight becomes stored tensors, and what engines are told about them.

A weight is always ``[out_features, in_features]`` (or a shard of one), in bfloat16, float16 or float32. Scales are
stored in the weight's dtype, as compressed-tensors checkpoints have them, and the weight is divided by the scale
as *stored*, in float32: the quantised values are then the nearest ones to what an engine will multiply out.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelexport.errors import CheckpointError, PlanError, UsageError
from modelexport.quantization import kernels

__all__ = ["NumberFormat", "RowScaledFormat", "TensorSpec"]

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that a quantised linear stores.

    Attributes:
        suffix: its name after the module's, e.g. ``"weight_scale"``.
        dtype: as stored.
        shape: of the whole linear, as stored.
        units: ``units[d]`` is how many elements of the weight along its dim d one element of this tensor along
            its dim d covers; None where it does not vary with the weight's dim d, so that it is the same on all
            ranks when the weight is cut there.
    """

    suffix: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    units: tuple[int | None, ...]

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class NumberFormat(ABC):
    """A number format; subclasses say the class attributes below and the methods that raise here.

    Attributes:
        group_size: columns that share a scale, None where the format has no groups.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    weight_bits: ClassVar[int]
    checkpoint_format: ClassVar[str]
    quantised: ClassVar[bool] = True
    needs_row_amax: ClassVar[bool] = False
    group_sizes: ClassVar[tuple[int, ...]] = ()
    default_group_size: ClassVar[int | None] = None

    group_size: int | None = None

    @classmethod
    def create(cls, group_size: int | None = None) -> NumberFormat:
        """The format with that group size, or with its default.

        Raises:
            UsageError: the format has no groups, or not of that size.
        """
        if group_size is not None and group_size not in cls.group_sizes:
            if not cls.group_sizes:
                raise UsageError(
                    f"{cls.name} has no groups, but a group size of {group_size} was given: leave it out"
                )
            raise UsageError(
                f"{cls.name} has no group size {group_size}; choose one of {', '.join(map(str, cls.group_sizes))}"
            )
        return cls(group_size=cls.default_group_size if group_size is None else group_size)

    @property
    def alignment(self) -> tuple[int, int]:
        """A cut of the weight along dim 0 / dim 1 must be on a multiple of this."""
        return (1, 1)

    @abstractmethod
    def specs(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[TensorSpec, ...]:
        """The tensors stored for a weight of that shape (``(out, in)``) and source dtype."""

    @abstractmethod
    def _fill(self, weight: Tensor, amax: Tensor | None, out: Mapping[str, Tensor]) -> int:
        """Quantises into ``out``; the first row that holds NaN or Inf, or -1."""

    @abstractmethod
    def _parts(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The stored values and their scales, for the kernels."""

    @abstractmethod
    def config_group(self) -> dict[str, Any] | None:
        """The entry of ``quantization_config.config_groups`` (compressed-tensors), None where nothing is quantised."""

    def fake_quantise_activations(self, x: Tensor) -> Tensor:
        """What an engine's rounding of a linear's input does to it; the input itself for weight-only formats."""
        return x

    def check_shape(self, module: str, shape: Sequence[int]) -> None:
        """Refuses a linear that the format cannot hold, before anything is read.

        Raises:
            PlanError: with both numbers and the choices there are.
        """
        if len(shape) != 2:
            raise PlanError(
                f"{module}: a weight of shape {tuple(shape)} is not a matrix; {self.name} holds [out, in] weights: "
                f"leave this module out"
            )

    def row_amax(self, weight: Tensor) -> Tensor:
        """Largest magnitude of each row of this shard: float32 ``[rows]``, non-finite where there is NaN or Inf."""
        self._check_weight(weight, "weight")
        return kernels.row_amax(weight)

    def quantise(
        self,
        weight: Tensor,
        *,
        amax: Tensor | None = None,
        global_shape: Sequence[int] | None = None,
        out: Mapping[str, Tensor] | None = None,
        name: str = "weight",
    ) -> dict[str, Tensor]:
        """Rounds a weight, or a shard of one, to nearest; returns the stored tensors by suffix.

        Args:
            weight: ``[rows, cols]`` bf16, fp16 or float32, any strides.
            amax: float32 ``[rows]``, the whole rows' largest magnitudes, where ``needs_row_amax`` and the weight
                was cut along dim 1. None: the rows' own.
            global_shape: of the whole weight, where this is a shard.
            out: tensors to fill (shapes as :meth:`specs` gives them for this shard, any strides); fresh if None.
            name: the tensor's name, for errors.

        Raises:
            CheckpointError: the weight holds NaN or Inf (how many, and where the first is), or is not a matrix of
                floating-point numbers.
            PlanError: the shard's columns do not end on a group boundary.
        """
        self._check_weight(weight, name)
        self.check_shape(name, tuple(weight.shape))
        if amax is not None and tuple(amax.shape) != (weight.shape[0],):
            raise ValueError(
                f"{name}: amax has shape {tuple(amax.shape)}, but the weight has {weight.shape[0]} rows"
            )
        specs = self.specs(tuple(weight.shape), weight.dtype)
        tensors = _allocate(specs, weight) if out is None else _checked(specs, out, name)
        bad = self._fill(weight, amax, tensors)
        if bad >= 0:
            raise CheckpointError(_describe_non_finite(weight, amax, bad, name))
        self._fill_constants(tuple(weight.shape if global_shape is None else global_shape), tensors)
        return tensors

    def _fill_constants(self, global_shape: tuple[int, ...], out: Mapping[str, Tensor]) -> None:
        """Fills what does not depend on the values."""

    def dequantise(self, tensors: Mapping[str, Tensor], *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight that the stored tensors stand for: ``[rows, cols]``, multiplied in float32, then rounded."""
        q, scale = self._parts(tensors)
        if scale is None:
            return q.to(dtype, copy=True)
        out = torch.empty(self._stored_shape(q), dtype=dtype, device=q.device)
        kernels.dequantise(q, scale, out)
        return out

    def _stored_shape(self, q: Tensor) -> tuple[int, int]:
        return (q.shape[0], q.shape[1])

    def squared_error(self, weight: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Per row sum((w - dequantised)^2) and sum(w^2): float64 ``[rows, 2]``.

        Added in an order that depends on nothing but the row (not on threads, nor on where rows were cut).
        """
        self._check_weight(weight, "weight")
        q, scale = self._parts(tensors)
        out = torch.empty(weight.shape[0], 2, dtype=torch.float64, device=weight.device)
        kernels.squared_error(weight, q, scale, out)
        return out

    def bits_per_weight(self, shape: Sequence[int], dtype: torch.dtype) -> float:
        """Bits stored per weight, scales and all; 0.0 for an empty weight."""
        weights = math.prod(shape)
        return 8 * sum(spec.nbytes for spec in self.specs(shape, dtype)) / weights if weights else 0.0

    def _check_weight(self, weight: Tensor, name: str) -> None:
        if weight.dtype not in SUPPORTED_DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUPPORTED_DTYPES)
            raise CheckpointError(
                f"{name}: its dtype is {str(weight.dtype).removeprefix('torch.')}, but {self.name} is made from "
                f"{known}: convert the checkpoint first, or leave this module out"
            )
        if weight.dim() != 2:
            raise CheckpointError(
                f"{name}: its shape is {tuple(weight.shape)}, but a linear's weight is [out, in]"
            )


@dataclass(frozen=True)
class RowScaledFormat(NumberFormat):
    """8-bit formats with one scale per output channel: ``weight`` ``[out, in]`` and ``weight_scale`` ``[out, 1]``.

    Activations are rounded by the engine, one scale per token, so nothing about them is stored.
    """

    weight_bits: ClassVar[int] = 8
    needs_row_amax: ClassVar[bool] = True
    storage: ClassVar[torch.dtype]
    limit: ClassVar[float]
    """Magnitude in the stored dtype onto which a row's amax is laid."""
    number_type: ClassVar[str]
    """compressed-tensors' word for the stored numbers: "int" or "float"."""

    def specs(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[TensorSpec, ...]:
        rows, cols = shape
        return (
            TensorSpec("weight", self.storage, (rows, cols), (1, 1)),
            TensorSpec("weight_scale", dtype, (rows, 1), (1, None)),
        )

    def _fill(self, weight: Tensor, amax: Tensor | None, out: Mapping[str, Tensor]) -> int:
        return kernels.quantise_rows(weight, amax, out["weight"], out["weight_scale"], self.limit)

    def _parts(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        return tensors["weight"], tensors["weight_scale"]

    def config_group(self) -> dict[str, Any]:
        common = {"num_bits": 8, "type": self.number_type, "symmetric": True, "group_size": None}
        return {
            "targets": ["Linear"],
            "format": self.checkpoint_format,
            "weights": {**common, "strategy": "channel", "dynamic": False},
            "input_activations": {**common, "strategy": "token", "dynamic": True},
            "output_activations": None,
        }

    def fake_quantise_activations(self, x: Tensor) -> Tensor:
        """Rounds each token (the last dim) to the format with a scale of its own, amax / limit in float32.

        That is what vLLM's dynamic kernels compute, but for the order of a multiplication and a division.
        """
        wide = x.float()
        amax = wide.abs().amax(dim=-1, keepdim=True) if x.shape[-1] else wide.new_zeros(*x.shape[:-1], 1)
        scale = amax / amax.new_full((1,), self.limit)
        scale = torch.where(
            amax == 0, torch.ones_like(scale), scale.clamp(min=torch.finfo(torch.float32).tiny)
        )
        ratio = (wide / scale).clamp(-self.limit, self.limit)
        rounded = ratio.round() if self.storage == torch.int8 else ratio.to(self.storage).float()
        return (rounded * scale).to(x.dtype)


def _allocate(specs: Sequence[TensorSpec], weight: Tensor) -> dict[str, Tensor]:
    return {spec.suffix: torch.empty(spec.shape, dtype=spec.dtype, device=weight.device) for spec in specs}


def _checked(specs: Sequence[TensorSpec], out: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The given tensors in the specs' order, once they are seen to fit."""
    wanted = {spec.suffix: spec for spec in specs}
    if set(wanted) != set(out):
        raise ValueError(f"{name}: out holds {sorted(out)}, but the format stores {sorted(wanted)}")
    for suffix, spec in wanted.items():
        given = out[suffix]
        if tuple(given.shape) != spec.shape or given.dtype != spec.dtype:
            raise ValueError(
                f"{name}: out[{suffix!r}] is {given.dtype} {tuple(given.shape)}, but {spec.dtype} {spec.shape} is stored"
            )
    return {suffix: out[suffix] for suffix in wanted}


def _describe_non_finite(weight: Tensor, amax: Tensor | None, row: int, name: str) -> str:
    """Counts what is wrong with a weight of which ``row`` is the first bad one."""
    nans = infs = 0
    first: tuple[int, int] | None = None
    for index in range(row, weight.shape[0]):
        values = weight[index].float()
        bad = (~torch.isfinite(values)).nonzero()
        if bad.numel():
            first = first or (index, int(bad[0, 0]))
            nans += int(values.isnan().sum())
            infs += int(values.isinf().sum())
    if first is None:
        assert amax is not None
        return (
            f"{name}: the largest magnitude of row {row} is {float(amax[row])}, though this shard's part of the row is "
            f"finite: another shard holds NaN or Inf. Repair the source checkpoint"
        )
    return (
        f"{name}: {nans} NaN and {infs} Inf among {weight.numel()} values, the first at row {first[0]}, "
        f"column {first[1]}: such a model cannot be exported. Repair the source checkpoint"
    )


def refuse_indivisible(number_format: NumberFormat, module: str, in_features: int) -> None:
    """Refuses an input width that the groups do not divide, with the choices there are.

    Raises:
        PlanError: always said with the width, the group size, the sizes that would do and the formats without groups.
    """
    group = number_format.group_size
    assert group is not None
    if in_features % group == 0:
        return
    fitting = [size for size in number_format.group_sizes if in_features % size == 0]
    sizes = (
        f"--group-size {' or '.join(map(str, fitting))}"
        if fitting
        else "no group size that it has divides it"
    )
    raise PlanError(
        f"{module}: in_features {in_features} is not divisible by the group size {group} of {number_format.name} "
        f"({in_features} = {in_features // group} * {group} + {in_features % group}): {sizes}; "
        f"or a format without groups (--quant fp8, --quant int8); or leave this module out"
    )


def fields_of(number_format: NumberFormat) -> dict[str, Any]:
    """The format as JSON-able data: its name and fields."""
    return {"name": number_format.name, **dataclasses.asdict(number_format)}
