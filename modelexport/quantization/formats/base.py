"""What a number format is: how a linear's weight becomes stored tensors, and what engines are told of them.

A weight is always ``[out_features, in_features]`` (or a shard of one), in bfloat16, float16 or float32.
Scales are stored in the weight's dtype, as compressed-tensors checkpoints have them, and the weight is
divided by the scale as *stored*, in float32: its values are then nearest to what an engine multiplies out.
"""

from __future__ import annotations

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
_ROWS_AT_A_TIME = 256


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that a quantised linear stores.

    Attributes:
        suffix: its name after the module's, e.g. ``"weight_scale"``.
        dtype: as stored.
        shape: of the whole linear, as stored.
        units: ``units[d]`` is how many elements of the weight along its dim d one element of this tensor
            along its dim d covers; None where it does not vary with the weight's dim d, so that all ranks
            have the same when the weight is cut there.
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
    """A number format: subclasses give the class attributes without a value, and the abstract methods.

    Attributes:
        name: as ``--quant`` has it.
        description: one line for people.
        weight_bits: bits of a stored weight, scales not counted.
        checkpoint_format: compressed-tensors' name for how the tensors are laid out.
        quantised: whether anything is rounded.
        needs_row_amax: whether a scale spans a whole row, so that ranks that hold parts of a row must agree
            on the row's largest magnitude first (:meth:`row_amax`, then the maximum over ranks).
        group_sizes, default_group_size: of the formats with groups.
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
        if group_size is None:
            return cls(group_size=cls.default_group_size)
        if not cls.group_sizes:
            raise UsageError(
                f"number format {cls.name} has no groups, but group size {group_size} was given: leave it out"
            )
        if group_size not in cls.group_sizes:
            sizes = ", ".join(map(str, cls.group_sizes))
            raise UsageError(f"number format {cls.name} has no group size {group_size}; choose from {sizes}")
        return cls(group_size=group_size)

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
        """The entry of compressed-tensors' ``quantization_config.config_groups`` (or None)."""

    def fake_quantise_activations(self, x: Tensor) -> Tensor:
        """A linear's input as an engine rounds it; the input itself for weight-only formats."""
        return x

    def check_shape(self, module: str, shape: Sequence[int]) -> None:
        """Refuses a linear that the format cannot hold, before anything is read.

        Raises:
            PlanError: with both numbers and the choices there are.
        """
        if len(shape) != 2:
            raise PlanError(
                f"{module}: a weight of shape {tuple(shape)} is not a matrix; number format {self.name} "
                f"holds [out, in]: export it with --quant none"
            )

    def row_amax(self, weight: Tensor) -> Tensor:
        """Largest magnitude of each row of this shard: float32 ``[rows]``, non-finite for NaN or Inf."""
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
            amax: float32 ``[rows]``, the whole rows' largest magnitudes, where ``needs_row_amax`` and the
                weight was cut along dim 1. None: the rows' own.
            global_shape: of the whole weight, where this is a shard.
            out: tensors to fill (shapes as :meth:`specs` gives them for this shard, any strides); None: new.
            name: the tensor's name, for errors.

        Raises:
            CheckpointError: the weight holds NaN or Inf (how many, and where the first is), or is not a
                matrix of floating-point numbers. What is in ``out`` then is undefined.
            PlanError: the shard's columns do not end on a group boundary.
            ValueError: ``amax`` or ``out`` does not fit the weight or the format.
        """
        self._check_weight(weight, name)
        shape = (weight.shape[0], weight.shape[1])
        self.check_shape(name, shape)
        if amax is not None:
            self._check_amax(amax, shape[0], name)
        specs = self.specs(shape, weight.dtype)
        tensors = _allocate(specs, weight) if out is None else _checked(specs, out, name)
        bad = self._fill(weight, amax, tensors)
        if bad >= 0:
            raise CheckpointError(_describe_non_finite(weight, amax, bad, name))
        self._fill_constants(shape if global_shape is None else tuple(global_shape), tensors)
        return tensors

    def _fill_constants(  # noqa: B027  (most formats have none)
        self, global_shape: tuple[int, ...], out: Mapping[str, Tensor]
    ) -> None:
        """Fills what does not depend on the values."""

    def dequantise(self, tensors: Mapping[str, Tensor], *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight that stored tensors stand for, ``[rows, cols]``: computed in float32, then rounded."""
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
        if self._stored_shape(q) != tuple(weight.shape):
            raise ValueError(f"the weight is {tuple(weight.shape)}, but {self._stored_shape(q)} is stored")
        out = torch.empty(weight.shape[0], 2, dtype=torch.float64, device=weight.device)
        kernels.squared_error(weight, q, scale, out)
        return out

    def bits_per_weight(self, shape: Sequence[int], dtype: torch.dtype) -> float:
        """Bits stored per weight, scales and all; 0.0 for an empty weight."""
        weights = math.prod(shape)
        return 8 * sum(spec.nbytes for spec in self.specs(shape, dtype)) / weights if weights else 0.0

    def _check_weight(self, weight: Tensor, name: str) -> None:
        if weight.dtype not in SUPPORTED_DTYPES:
            given, *known = (str(dtype).removeprefix("torch.") for dtype in (weight.dtype, *SUPPORTED_DTYPES))
            raise CheckpointError(
                f"{name}: its dtype is {given}, but number format {self.name} is made from {', '.join(known)}"
                f": convert the checkpoint first, or export it with --quant none"
            )
        if weight.dim() != 2:
            shape = tuple(weight.shape)
            raise CheckpointError(f"{name}: its shape is {shape}, but a linear's weight is [out, in]")

    def _check_amax(self, amax: Tensor, rows: int, name: str) -> None:
        if not self.needs_row_amax:
            raise ValueError(f"{name}: amax was given, but no scale of number format {self.name} spans a row")
        if tuple(amax.shape) != (rows,) or amax.dtype != torch.float32:
            raise ValueError(f"{name}: amax is {amax.dtype} {tuple(amax.shape)}, not torch.float32 ({rows},)")


@dataclass(frozen=True)
class RowScaledFormat(NumberFormat):
    """8-bit formats with one scale per output channel: amax / limit.

    ``weight`` is ``[out, in]``, ``weight_scale`` ``[out, 1]``. Activations are rounded by the engine, one
    scale per token, so nothing about them is stored.

    Attributes:
        storage: dtype of the stored weight.
        limit: the magnitude in it onto which a row's largest is laid.
        number_type: compressed-tensors' word for such numbers, "int" or "float".
    """

    weight_bits: ClassVar[int] = 8
    needs_row_amax: ClassVar[bool] = True
    storage: ClassVar[torch.dtype]
    limit: ClassVar[float]
    number_type: ClassVar[str]

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
        scale = torch.where(amax == 0, torch.ones_like(scale), scale.clamp(min=2.0**-126))
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
        shape, dtype = tuple(out[suffix].shape), out[suffix].dtype
        if (shape, dtype) != (spec.shape, spec.dtype):
            raise ValueError(f"{name}: out[{suffix!r}] is {dtype} {shape}, but {spec.dtype} {spec.shape} is stored")
    return {suffix: out[suffix] for suffix in wanted}


def _describe_non_finite(weight: Tensor, amax: Tensor | None, row: int, name: str) -> str:
    """Counts what is wrong with a weight of which ``row`` is the first bad one."""
    nans = infs = 0
    first: tuple[int, int] | None = None
    for start in range(row, weight.shape[0], _ROWS_AT_A_TIME):
        values = weight[start : start + _ROWS_AT_A_TIME]
        bad = (~torch.isfinite(values)).nonzero()
        if bad.numel():
            first = first or (start + int(bad[0, 0]), int(bad[0, 1]))
            nans += int(values.isnan().sum())
            infs += int(values.isinf().sum())
    if first is None:
        assert amax is not None
        return (
            f"{name}: the largest magnitude of row {row} is {float(amax[row])}, though this shard's part "
            f"of it is finite: another shard holds NaN or Inf. Repair the source checkpoint"
        )
    return (
        f"{name}: {nans} NaN and {infs} Inf among {weight.numel()} values, the first at row {first[0]}, "
        f"column {first[1]}: such a model cannot be exported. Repair the source checkpoint"
    )


def refuse_indivisible(number_format: NumberFormat, module: str, in_features: int) -> None:
    """Refuses an input width that the groups do not divide, with the choices there are.

    Raises:
        PlanError: with the width, the group size, the sizes that would do and the formats without groups.
    """
    group = number_format.group_size
    assert group is not None
    if in_features % group == 0:
        return
    choices = [f"--group-size {size}" for size in number_format.group_sizes if in_features % size == 0]
    known = ", ".join(map(str, number_format.group_sizes))
    why = "" if choices else f" (nor by any other that it has: {known})"
    choices.append("a format without groups (--quant fp8, --quant int8)")
    raise PlanError(
        f"{module}: in_features {in_features} is not divisible by the group size {group} of number format "
        f"{number_format.name}{why}: {', or '.join(choices)}"
    )
