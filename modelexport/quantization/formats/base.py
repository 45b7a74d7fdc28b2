"""The base class of number formats: they turn a linear's weight into stored tensors, and describe these to engines.

A weight is always ``[out_features, in_features]`` (or a shard of one), in bfloat16, float16 or float32.
Scales are stored in the weight's dtype, as compressed-tensors checkpoints have them, and the weight is
divided by the scale as *stored*, in float32: its values are then nearest to what an engine multiplies out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from modelexport.errors import CheckpointError, PlanError, UsageError, ValuesError
from modelexport.quantization import kernels
from modelexport.quantization.formats._checks import (
    TensorSpec,
    allocate,
    checked,
    describe_non_finite,
    refuse_indivisible,
)
from modelexport.quantization.formats._grid import Grid
from modelexport.quantization.methods import compressed_tensors, of_method
from modelexport.quantization.methods.base import Scheme
from modelexport.system.dtypes import FLOATS, dtype_name, torch_dtype, torch_name

__all__ = ["Grid", "NumberFormat", "TensorSpec"]

ScaleGranularity = Literal["block", "row", "tensor"]
OBSERVERS = ("amax", "mse", "exact")
_BLOCK_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class NumberFormat(ABC):
    """A number format: subclasses give the class attributes without a value, and the abstract methods.

    Attributes:
        name: as ``--quant`` has it.
        description: one line for people.
        weight_bits: bits of a stored weight, scales not counted.
        checkpoint_format: compressed-tensors' name for how the native tensors are laid out.
        quantised: whether anything is rounded.
        scale_granularity: of the widest scale: a block of the weight; a whole row, so that ranks that hold parts of
            a row must agree on its largest magnitude first; or the whole weight and the modules that engines fuse with
            it, of which all ranks must know the largest magnitude. See :meth:`amax`.
        group_sizes, default_group_size: of the formats with groups; -1 is a whole row.
        fits_products: whether its scales can be fitted to the products of a linear's inputs, see :meth:`quantise`.
        group_size: columns that share a scale, None where the format has no groups.
        observer: how scales are chosen: "amax" lays the largest magnitude onto the largest number, "mse" takes, of a
            grid of scales below that, the one with the smallest squared error; "exact" takes powers of two, which keep
            the values of MXFP4 as they are, of the formats that :meth:`holds_mxfp4`.
        scale_dtype: of the scales that are stored in the weight's dtype; None: that.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    weight_bits: ClassVar[int]
    checkpoint_format: ClassVar[str]
    quantised: ClassVar[bool] = True
    group_sizes: ClassVar[tuple[int, ...]] = ()
    default_group_size: ClassVar[int | None] = None
    fits_products: ClassVar[bool] = False

    group_size: int | None = None
    observer: str = "amax"
    scale_dtype: torch.dtype | None = None

    @classmethod
    def create(
        cls, group_size: int | None = None, *, observer: str = "amax", scale_dtype: torch.dtype | None = None
    ) -> NumberFormat:
        """The format with that group size, or with its default.

        Raises:
            UsageError: the format has no groups, or not of that size; or the observer is unknown.
        """
        if observer not in OBSERVERS:
            raise UsageError(f"unknown observer {observer!r}; choose from {', '.join(OBSERVERS)}")
        if observer == "exact" and not cls.holds_mxfp4():
            raise UsageError(f"number format {cls.name} has no scales that are powers of two: choose another observer")
        if group_size is None:
            group_size = cls.default_group_size
        elif not cls.group_sizes:
            raise UsageError(
                f"number format {cls.name} has no groups, but group size {group_size} was given: leave it out"
            )
        elif group_size not in cls.group_sizes:
            sizes = ", ".join(map(str, cls.group_sizes))
            raise UsageError(f"number format {cls.name} has no group size {group_size}; choose from {sizes}")
        return cls(group_size=group_size, observer=observer, scale_dtype=scale_dtype)

    @classmethod
    def holds_mxfp4(cls) -> bool:
        """Returns whether scales that are powers of two can hold the values of MXFP4 as they are."""
        return cls._fill_powers is not NumberFormat._fill_powers

    @property
    def is_mxfp4(self) -> bool:
        """True where its weights are those of MXFP4."""
        return False

    @property
    def kernels(self) -> tuple[str, ...]:
        """The modules of compiled kernels that it needs, besides those of every format."""
        return ("compiled_search",) if self.observer == "mse" else ()

    @property
    def scale_granularity(self) -> ScaleGranularity:
        """See the class."""
        return "block"

    @property
    def whole_rows(self) -> bool:
        """True where a weight must not be cut within a row, though largest magnitudes are exchanged."""
        return self.scale_granularity != "block" and self.observer == "mse"

    def stacks(self, shape: Sequence[int]) -> bool:
        """Returns whether weights of that shape, one below the other, are quantised as each is by itself: no scale and
        no stored word is of two of them. Where a scale is of a whole weight that holds for weights that share it, and
        are given its ``amax``."""
        if self.has_static_inputs:
            return False
        along = [spec.axes[0] if spec.axes else None for spec in self.specs(shape, torch.bfloat16)]
        return all(axis is None or (axis[0] == 0 and shape[0] % axis[1] == 0) for axis in along)

    @property
    def choices(self) -> int:
        """The number of scales among which :meth:`quantise` can be told to choose for each block of a row: those that
        observer "mse" tries. 0 where a scale is of more than a row."""
        return 0

    def choose(self, values: Tensor, products: Tensor) -> Tensor | None:
        """Returns the number of the scale with which each block of a row has the least d G d^T, uint8
        ``[rows, blocks]``, d being what rounding does to the block. None where scales have to be tried one by one.

        Args:
            values: float32 ``[rows, cols]``.
            products: G, float32 ``[blocks, width, width]``.
        """
        return None

    def blocks(self, columns: int) -> int:
        """Returns how many scales a row of so many columns has."""
        return next(spec.shape[1] for spec in self.specs((1, columns), torch.bfloat16) if spec.suffix == "weight_scale")

    @property
    def alignment(self) -> tuple[int, int]:
        """A cut of the weight along dim 0 / dim 1 must be on a multiple of this, or at its end."""
        units = [1, 1]
        for spec in self.specs((4096, 4096), torch.bfloat16):
            for axis in spec.axes:
                if axis is not None:
                    units[axis[0]] = math.lcm(units[axis[0]], axis[1])
        return (units[0], units[1])

    @abstractmethod
    def weight_arguments(self) -> dict[str, Any]:
        """compressed-tensors' arguments for the weights (``num_bits``, ``type``, ``symmetric``, ``strategy``, ...)."""

    def input_arguments(self) -> dict[str, Any] | None:
        """The same for the activations; None where they are not rounded."""
        return None

    def config_group(self) -> dict[str, Any] | None:
        """The entry of compressed-tensors' ``quantization_config.config_groups``; None where nothing is rounded."""
        return {
            "targets": ["Linear"],
            "format": self.checkpoint_format,
            "weights": self.weight_arguments(),
            "input_activations": self.input_arguments(),
            "output_activations": None,
        }

    def scheme(self, method: str = compressed_tensors.METHOD) -> Scheme:
        """The same as what a quantisation method promises tensors by."""
        layout = getattr(of_method(method), "layout", None)
        word = None if layout is None else layout(self)
        return Scheme(
            self.name,
            ("Linear",),
            word or self.checkpoint_format,
            self.weight_arguments(),
            self.input_arguments(),
            None,
            method,
        )

    @cached_property
    def has_static_inputs(self) -> bool:
        """True where it stores a number by which a linear's inputs are scaled, which calibration measures."""
        return self.quantised and self.scheme().has_static_inputs

    def specs(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[TensorSpec, ...]:
        """The native tensors stored for a weight of that shape (``(out, in)``) and source dtype."""
        scales = dtype_name(self.scale_dtype or dtype)
        found = []
        for suffix, promise in compressed_tensors.tensor_specs(self.scheme(), (shape[0], shape[1])).items():
            name = scales if scales in promise.dtypes else promise.dtypes[0]
            found.append(TensorSpec(suffix, torch_dtype(name), promise.shapes[0], promise.axes))
        return tuple(found)

    @abstractmethod
    def _fill(self, weight: Tensor, amax: Tensor | None, out: Mapping[str, Tensor]) -> int:
        """Quantises into ``out``; the first row that holds NaN or Inf, or -1."""

    def _fill_powers(self, weight: Tensor, amax: Tensor | None, out: Mapping[str, Tensor]) -> int:
        """As :meth:`_fill`, with scales that are powers of two; see observer "exact"."""
        raise NotImplementedError(f"{self.name} has no scales that are powers of two")

    def _fill_chosen(self, weight: Tensor, amax: Tensor | None, choice: Tensor, out: Mapping[str, Tensor]) -> int:
        """As :meth:`_fill`, with the scale of each block by its number."""
        raise NotImplementedError(f"{self.name} has no choice of scales")

    def _fill_fitted(self, weight: Tensor, products: Tensor, out: Mapping[str, Tensor]) -> int:
        """As :meth:`_fill`, with scales that are fitted to the products of the inputs."""
        raise NotImplementedError(f"{self.name} is not fitted to the products of inputs")

    @abstractmethod
    def _dequantise(self, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        """Fills ``out``, ``[rows, cols]``."""

    @abstractmethod
    def _squared_error(self, weight: Tensor, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        """Fills ``out``, float64 ``[rows, 2]``; see :meth:`squared_error`."""

    @abstractmethod
    def stored_shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """The shape of the weight, or part of one, that native tensors hold."""

    def input_scale(self, amax: float) -> float:
        """The number stored for inputs whose largest magnitude is ``amax``, where ``has_static_inputs``."""
        raise NotImplementedError(f"{self.name} stores no scale of inputs")

    def fake_quantise_activations(self, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """A linear's input as an engine rounds it, given its native tensors; itself for weight-only formats."""
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
        if self.group_size is not None and self.group_size > 0:
            refuse_indivisible(self.name, self.group_size, self.group_sizes, module, shape[1])

    def amax(self, weight: Tensor) -> Tensor:
        """Returns the magnitudes that the widest scale follows from: float32 ``[rows]`` ("row") or ``[1]`` ("tensor").

        The largest of this shard; non-finite for NaN or Inf. The maximum over shards is that of the whole.

        Raises:
            ValueError: no scale reaches beyond a block.
        """
        self._check_weight(weight, "weight")
        if self.scale_granularity == "block":
            raise ValueError(f"no scale of number format {self.name} reaches beyond a block")
        rows = kernels.row_amax(weight)
        return rows if self.scale_granularity == "row" else rows.max().reshape(1) if rows.numel() else rows.new_zeros(1)

    @property
    def searches_whole(self) -> bool:
        """True where its observer needs the errors of the whole weight before a scale is chosen; see :meth:`search`."""
        return False

    def search_errors(self, weight: Tensor, amax: Tensor) -> Tensor:
        """Returns each row's squared error at each scale tried, float64 ``[rows, tried]``, if ``searches_whole``."""
        raise NotImplementedError(f"{self.name} searches nothing that reaches beyond a row")

    def search(self, amax: Tensor, errors: Tensor) -> Tensor:
        """The ``amax`` to quantise with, given the rows' errors of all weights that share it, one below the other."""
        raise NotImplementedError(f"{self.name} searches nothing that reaches beyond a row")

    def quantise(
        self,
        weight: Tensor,
        *,
        amax: Tensor | None = None,
        inputs: float | None = None,
        global_shape: Sequence[int] | None = None,
        out: Mapping[str, Tensor] | None = None,
        choice: Tensor | None = None,
        products: Tensor | None = None,
        name: str = "weight",
    ) -> dict[str, Tensor]:
        """Rounds a weight, or a shard of one, to nearest; returns the native tensors by suffix.

        Args:
            weight: ``[rows, cols]`` bf16, fp16 or float32, any strides.
            amax: of the whole, where a scale reaches beyond this shard: float32 ``[rows]`` or ``[1]``, see
                :meth:`amax`. None: the weight's own.
            inputs: largest magnitude of the linear's inputs, where ``has_static_inputs``.
            global_shape: of the whole weight, where this is a shard.
            out: tensors to fill (shapes as :meth:`specs` gives them for this shard, any strides); None: new.
            choice: uint8 ``[rows, blocks]``: the number of the scale that each block of a row takes, of ``choices``, 0
                being the largest. None: as the observer has it.
            products: G, float32 ``[cols / width, width, width]``, where ``fits_products``, the width being that of the
                weights that share a scale: an error d of these counts d G d^T, not its square. None: that.
            name: the tensor's name, for errors.

        Raises:
            CheckpointError: the weight holds NaN or Inf (how many, and where the first is), or is not a
                matrix of floating-point numbers. What is in ``out`` then is undefined.
            PlanError: the shard's columns do not end on a group boundary.
            ValueError: ``amax``, ``inputs`` or ``out`` does not fit the weight or the format.
        """
        self._check_weight(weight, name)
        shape = (weight.shape[0], weight.shape[1])
        self.check_shape(name, shape)
        if amax is not None:
            self._check_amax(amax, shape[0], name)
            amax = amax.to(weight.device)
        specs = self.specs(shape, weight.dtype)
        tensors = allocate(specs, weight) if out is None else checked(specs, out, name)
        if choice is not None:
            bad = self._fill_chosen(weight, amax, choice, tensors)
        elif products is not None:
            bad = self._fill_fitted(weight, products, tensors)
        elif self.observer == "exact":
            bad = self._fill_powers(weight, amax, tensors)
        else:
            bad = self._fill(weight, amax, tensors)
        if bad >= 0:
            raise ValuesError(describe_non_finite(weight, amax, bad, name))
        self._fill_constants(shape if global_shape is None else tuple(global_shape), inputs, tensors, name)
        return tensors

    def nearest(
        self, weight: Tensor, *, amax: Tensor | None = None, inputs: float | None = None, name: str = "weight"
    ) -> Tensor:
        """Returns the values that :meth:`quantise` rounds a weight to, float32 ``[rows, cols]``.

        Args and errors: as of :meth:`quantise`.
        """
        return self.dequantise(self.quantise(weight, amax=amax, inputs=inputs, name=name))

    def _fill_constants(
        self, global_shape: tuple[int, ...], inputs: float | None, out: Mapping[str, Tensor], name: str
    ) -> None:
        """Fills what does not depend on the values of the weight."""
        if "weight_shape" in out:
            out["weight_shape"].copy_(torch.tensor(global_shape, dtype=torch.int64))
        if not self.has_static_inputs:
            return
        if inputs is None or not math.isfinite(inputs) or inputs < 0:
            raise ValueError(f"{name}: number format {self.name} needs the inputs' largest magnitude, not {inputs}")
        key = "input_global_scale" if "input_global_scale" in out else "input_scale"
        out[key].fill_(self.input_scale(inputs))

    def dequantise(
        self, tensors: Mapping[str, Tensor], *, dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Tensor:
        """The weight that native tensors stand for, ``[rows, cols]``: computed in float32, then rounded.

        Args:
            tensors: suffix -> native tensor.
            dtype: of what is made where there is no ``out``.
            out: filled and returned; bf16, fp16 or float32.
        """
        if out is None:
            device = next(iter(tensors.values())).device
            out = torch.empty(self.stored_shape(tensors), dtype=dtype, device=device)
        self._dequantise(tensors, out)
        return out

    def squared_error(self, weight: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Per row sum((w - dequantised)^2) and sum(w^2): float64 ``[rows, 2]``.

        Added in an order that depends on nothing but the row (not on threads, nor on where rows were cut).
        """
        self._check_weight(weight, "weight")
        stored = self.stored_shape(tensors)
        if stored != tuple(weight.shape):
            raise ValueError(f"the weight is {tuple(weight.shape)}, but {stored} is stored")
        out = torch.empty(weight.shape[0], 2, dtype=torch.float64, device=weight.device)
        self._squared_error(weight, tensors, out)
        return out

    def error_sums(self, weight: Tensor, tensors: Mapping[str, Tensor]) -> tuple[float, float]:
        """The sums over all rows of what :meth:`squared_error` has for each, correctly rounded: in any order of rows
        the same."""
        return self.error_sums_of(weight, tensors, 1)[0]

    def error_sums_of(self, weights: Tensor, tensors: Mapping[str, Tensor], count: int) -> list[tuple[float, float]]:
        """The same of each of ``count`` weights that lie one below the other; see :meth:`stacks`."""
        noise, signal = self.squared_error(weights, tensors).t().tolist()
        rows = len(noise) // count
        own = [slice(number * rows, (number + 1) * rows) for number in range(count)]
        return [(math.fsum(noise[part]), math.fsum(signal[part])) for part in own]

    def grid(self, tensors: Mapping[str, Tensor]) -> Grid:
        """Returns the values that a weight can have, from native tensors' scales and zero points alone.

        Raises:
            ValueError: the format rounds nothing.
        """
        raise ValueError(f"number format {self.name} has no scales")

    def _put(self, numbers: Tensor, rows: slice, tensors: Mapping[str, Tensor]) -> None:
        """Writes the rows' numbers, float32 as :meth:`Grid.numbers` has them, as they are stored."""
        raise ValueError(f"number format {self.name} has no scales")

    @property
    def without_grid(self) -> tuple[str, ...]:
        """Names of the methods that a format lacks for :meth:`store`, which not every algorithm needs."""
        names = ("grid", "_put")
        return tuple(name for name in names if getattr(type(self), name) is getattr(NumberFormat, name))

    def store(self, values: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Fills native tensors whose scales are there with what is nearest to ``values``, float32 ``[rows, cols]``.

        :meth:`dequantise` gives values of the grid back as they were (a zero as +0 or -0).

        Raises:
            ValueError: they have another shape than is stored, or the format rounds nothing.
        """
        grid, stored = self.grid(tensors), self.stored_shape(tensors)
        if tuple(values.shape) != stored:
            raise ValueError(f"the values are {tuple(values.shape)}, but {stored} is stored")

        def work(part: slice) -> None:
            step = max(1, _BLOCK_ELEMENTS // max(1, values.shape[1]))
            for start in range(part.start, part.stop, step):
                rows = slice(start, min(part.stop, start + step))
                self._put(grid.part(rows).numbers(values[rows]), rows, tensors)

        if values.numel():
            kernels.split_rows(values, work)

    def bits_per_weight(self, shape: Sequence[int], dtype: torch.dtype) -> float:
        """Bits stored per weight, scales and all; 0.0 for an empty weight."""
        weights = math.prod(shape)
        return 8 * sum(spec.nbytes for spec in self.specs(shape, dtype)) / weights if weights else 0.0

    def _check_weight(self, weight: Tensor, name: str) -> None:
        given, known = torch_name(weight.dtype), [torch_name(dtype) for dtype in FLOATS]
        if given not in known:
            raise CheckpointError(
                f"{name}: its dtype is {given}, but number format {self.name} is made from {', '.join(known)}"
                f": convert the checkpoint first, or export it with --quant none"
            )
        if weight.dim() != 2:
            shape = tuple(weight.shape)
            raise CheckpointError(f"{name}: its shape is {shape}, but a linear's weight is [out, in]")

    def _check_amax(self, amax: Tensor, rows: int, name: str) -> None:
        if self.scale_granularity == "block":
            raise ValueError(f"{name}: amax was given, but no scale of number format {self.name} spans a row")
        wanted = (rows,) if self.scale_granularity == "row" else (1,)
        if tuple(amax.shape) != wanted or amax.dtype != torch.float32:
            raise ValueError(f"{name}: amax is {amax.dtype} {tuple(amax.shape)}, not torch.float32 {wanted}")
