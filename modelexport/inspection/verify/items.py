"""The modules that an audit reads, the pieces that ranks wrote of them, and the results for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from modelexport.checkpoints.safetensors.file import TensorInfo
from modelexport.errors import CheckpointError
from modelexport.quantization.methods import Scheme, WeightSlice, compressed_tensors, of_method
from modelexport.quantization.methods.base import Axes

if TYPE_CHECKING:
    from torch import Tensor

    from modelexport.quantization.formats.base import NumberFormat


class WrittenPiece(NamedTuple):
    """A rectangle of a tensor as a rank wrote it, and the CRC-32 of its bytes in row-major order. In JSON it is a list,
    of which :meth:`from_json` makes it again."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    crc32: int

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> WrittenPiece:
        """The piece that a list of JSON stands for."""
        name, offset, shape, crc = value
        return cls(name, tuple(offset), tuple(shape), crc)


@dataclass(frozen=True)
class AuditItem:
    """One module of an audit: its written tensors and the weight they were made from.

    Attributes:
        tensors: name within the module -> where it lies in the checkpoint.
        source: the unquantised weight, or None where only hashes are wanted.
        number_format: what ``tensors`` hold; None for a module that was passed through, or that is only hashed.
        method: the quantisation method that spells them.
        scheme: the encoding that config.json names; None: that of our own files.
        shared: names what its scale is shared with, where that reaches over whole weights.
    """

    name: str
    tensors: Mapping[str, TensorInfo]
    source: TensorInfo | None
    number_format: NumberFormat | None
    method: str = compressed_tensors.METHOD
    scheme: Scheme | None = None
    shared: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of its written tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    @cached_property
    def axes(self) -> dict[str, Axes]:
        """The dims of the weight along which each tensor of the number format runs."""
        if self.number_format is None or self.source is None:
            return {}
        method, shape = of_method(self.method), (self.source.shape[0], self.source.shape[1])
        specs = method.tensor_specs(self.scheme or self.number_format.scheme(self.method), shape)
        return {suffix: spec.axes for suffix, spec in specs.items()}

    @property
    def rows_together(self) -> int | None:
        """Rows of the weight that must be read together; None: all, since its tensors do not run along its rows."""
        rows = 1
        for axes in self.axes.values():
            for dim, axis in enumerate(axes):
                if axis is not None and axis[0] == 0:
                    if dim:
                        return None
                    rows = math.lcm(rows, axis[1])
        return rows

    def native(self, tensors: Mapping[str, Tensor], rows: tuple[int, int]) -> Mapping[str, Tensor]:
        """The number format's own tensors, of these rows."""
        assert self.source is not None
        assert self.number_format is not None
        stored = {suffix: tensor for suffix, tensor in tensors.items() if suffix in self.axes}
        whole = (self.source.shape[0], self.source.shape[1])
        part = WeightSlice(whole, (rows[0], 0), (rows[1] - rows[0], whole[1]))
        try:
            return of_method(self.method).decode(self.number_format, stored, part)
        except CheckpointError as error:  # of one among hundreds
            raise CheckpointError(f"{self.name}: {error}") from error


@dataclass(frozen=True)
class ModuleCheck:
    """Result for one module.

    Attributes:
        sha256: full tensor name -> SHA-256 of its bytes as they lie in the file.
        noise, signal: sums over the weight of (w - dequantised)^2 and w^2; None if not compared.
        damaged: pieces whose bytes are not those that were written.
        nearest_noise: the noise that rounding the source to nearest would leave; None if not asked for.
        unlike: native tensor -> elements that rounding the source to nearest makes others; None if not asked for.
        identical: whether a module that was passed through equals its source to the byte; None if not compared.
        faults: values that no checkpoint may hold (NaN, Inf, scales that are not positive), in words.
    """

    name: str
    sha256: dict[str, str]
    noise: float | None
    signal: float | None
    damaged: tuple[str, ...]
    nearest_noise: float | None = None
    unlike: Mapping[str, int] | None = None
    identical: bool | None = None
    faults: tuple[str, ...] = ()

    @property
    def sqnr_db(self) -> float | None:
        """Signal to quantisation noise in dB; infinite where nothing was lost, None if not compared."""
        return decibels(self.noise, self.signal)

    @property
    def nearest_db(self) -> float | None:
        """The same for rounding the source to nearest in this number format."""
        return decibels(self.nearest_noise, self.signal)


def decibels(noise: float | None, signal: float | None) -> float | None:
    """The ratio of signal to noise in dB; infinite where there is no noise, None where either is not known."""
    if noise is None or signal is None:
        return None
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
