"""The arithmetic of ``reduce`` and ``all_reduce``: which operation on which dtype, and how back ends come to do it.

Integers that back ends refuse are reduced in a wider type and wrap around as the narrow one would (exact for every
operation). bool is logic, as in torch over NCCL: SUM and MAX are "any", PRODUCT and MIN are "all". Complex numbers
have SUM only; 8-bit floats have nothing, since each partial result would be rounded.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from modelexport.distributed.collectives.byte_transport import Parcel, copy_into
from modelexport.errors import UsageError
from modelexport.system.dtypes import torch_name


class reduce_op(enum.Enum):
    """The operation by which a reduction combines the ranks' elements. torch's ``ReduceOp`` is taken as well."""

    SUM = "SUM"
    PRODUCT = "PRODUCT"
    MAX = "MAX"
    MIN = "MIN"


_BITWISE = ("BAND", "BOR", "BXOR")
_EXACT = ("SUM", "PRODUCT", "MAX", "MIN", *_BITWISE)
_OF_BOOL = {"SUM": "MAX", "PRODUCT": "MIN"}
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_SIGN = -(2**63)  # flipping this bit maps the order of unsigned numbers to that of signed ones


def torch_op(op: object) -> dist.ReduceOp:
    """torch's operation for one of ours or of torch's."""
    if isinstance(op, reduce_op):
        return getattr(dist.ReduceOp, op.name)
    if isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        return op  # type: ignore[return-value]
    raise UsageError(f"{op!r} is no reduction; give reduce_op.SUM, PRODUCT, MAX or MIN")


def op_name(op: object) -> str:
    """``"SUM"`` for either kind of SUM."""
    found: Any = torch_op(op)
    for name, value in dist.ReduceOp.RedOpType.__members__.items():
        if found == value:
            return name
    return "another"


class Operand:
    """A tensor on its way through a reduction, as :class:`Parcel` for plain transport.

    ``wire`` is what the back end reduces, with the operation ``op``.

    Args:
        call: the collective's name, for errors.
        private: the tensor itself stays untouched unless ``unpack`` is called.

    Raises:
        UsageError: the operation does not exist for the dtype.
    """

    __slots__ = ("_flipped", "_parcel", "_tensor", "_wide", "op", "wire")

    def __init__(
        self, call: str, tensor: torch.Tensor, op: object, device: torch.device, *, private: bool = False
    ) -> None:
        name = op_name(op)
        check_operation(call, tensor.dtype, name)
        self._tensor, self._wide = tensor.detach(), _widened(tensor.detach())
        self._flipped = tensor.dtype == torch.uint64 and name in ("MIN", "MAX")
        if self._wide is not None and self._flipped:
            self._wide.bitwise_xor_(_SIGN)
        carried = self._tensor if self._wide is None else self._wide
        self._parcel = Parcel(carried, device, private=private and self._wide is None)
        self.wire = self._parcel.wire
        self.op = torch_op(op) if tensor.dtype != torch.bool else getattr(dist.ReduceOp, _OF_BOOL.get(name, name))

    def unpack(self) -> None:
        """Puts the result into the tensor."""
        self._parcel.unpack()
        if self._wide is None:
            return
        if self._flipped:
            self._wide.bitwise_xor_(_SIGN)
        result = self._wide.view(torch.uint64) if self._tensor.dtype == torch.uint64 else self._wide
        copy_into(self._tensor, result)

    def combine(self, other: Operand) -> None:
        """Reduces another operand of this process into this one's ``wire``."""
        name = op_name(self.op)
        if name not in _COMBINE:
            raise UsageError(f"{name} is not defined over several tensors of one rank; use SUM, PRODUCT, MAX or MIN")
        _COMBINE[name](self.wire, other.wire.to(self.wire.device), out=self.wire)


_COMBINE: dict[str, Callable[..., Any]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def check_operation(call: str, dtype: torch.dtype, name: str) -> None:
    """Raises UsageError where the operation ``name`` is not defined for ``dtype``."""
    if dtype.is_complex and name not in ("SUM", "AVG"):
        raise UsageError(
            f"{call} does not support {name} on complex tensors ({torch_name(dtype)}); "
            f"reduce torch.view_as_real(tensor) if element by element is meant"
        )
    if dtype.is_floating_point and dtype.itemsize == 1:
        raise UsageError(
            f"{call} does not support {torch_name(dtype)}: every partial result would be rounded to 8 bits; "
            f"reduce tensor.to(torch.float32) and convert the result"
        )
    if dtype.is_floating_point and name in _BITWISE:
        raise UsageError(
            f"{call} does not support {name} on {torch_name(dtype)}; view the tensor as integers of its size"
        )
    wide = dtype in _WIDER or dtype in (torch.uint64, torch.bool)
    if wide and name not in _EXACT:
        raise UsageError(f"{call} does not support {name} on {torch_name(dtype)}; convert the tensor to torch.float32")


def _widened(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy in a type that back ends reduce, on the tensor's device; None where its own type will do."""
    if tensor.dtype == torch.uint64:
        return tensor.clone(memory_format=torch.contiguous_format).view(torch.int64)
    wider = _WIDER.get(tensor.dtype)
    return None if wider is None else tensor.to(wider).contiguous()
