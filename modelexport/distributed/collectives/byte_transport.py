"""Tensors in the form in which a back end takes them.

Back ends refuse some dtypes (gloo: 16-bit and unsigned integers, 8-bit floats), memory that is not contiguous, other
devices, and gloo's messages must not be empty. A :class:`Parcel` is the tensor itself wherever that will do, and else
a staged copy: as bytes where the dtype is refused, as one byte where there is nothing to carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from modelexport.errors import UsageError
from modelexport.system.dtypes import torch_name

_NATIVE = frozenset(
    (
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.int8, torch.uint8, torch.int32, torch.int64,
    )
)  # fmt: skip


class Parcel:
    """A tensor on its way: ``wire`` is what the back end sends or fills, ``unpack`` brings it home.

    Args:
        tensor: what is sent or received; any dtype and strides.
        device: where the back end takes it from.
        filled: False where the tensor is only received into, so that nothing need be copied before.
        private: ``wire`` shares no memory with ``tensor``, whatever the back end does to it.
    """

    __slots__ = ("_stage", "_tensor", "wire")

    def __init__(
        self, tensor: torch.Tensor, device: torch.device, *, filled: bool = True, private: bool = False
    ) -> None:
        self._tensor = tensor.detach()
        self._stage: torch.Tensor | None = None
        if private or not _shareable(self._tensor, device):
            self._stage = _copy(self._tensor, device) if filled else _blank(self._tensor, device)
        self.wire = as_wire(self._tensor if self._stage is None else self._stage)

    def unpack(self) -> None:
        """Puts what has arrived into the tensor."""
        if self._stage is not None and self._stage.numel():
            copy_into(self._tensor, self._stage)


def check_tensor(value: object, name: str) -> torch.Tensor:
    """``value``, which must be a dense tensor."""
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"{name} is {type(value).__name__}; it must be a tensor")
    if value.layout != torch.strided:
        raise UsageError(f"{name} is sparse ({value.layout}); only all_reduce takes sparse tensors: use .to_dense()")
    return value


def check_list(values: Any, count: int, like: torch.Tensor, name: str, per: str = "rank") -> list[torch.Tensor]:
    """``values``: ``count`` tensors of the shape and dtype of ``like``."""
    if not isinstance(values, Sequence):
        raise UsageError(f"{name} is {type(values).__name__}; it must be a list of tensors, one per {per}")
    found = [check_tensor(value, f"{name}[{index}]") for index, value in enumerate(values)]
    if len(found) != count:
        raise UsageError(f"{name} has {len(found)} tensors; it must have {count}, one per {per}")
    for index, value in enumerate(found):
        if value.shape != like.shape or value.dtype != like.dtype:
            raise UsageError(f"{name}[{index}] is {describe(value)}; it must be {describe(like)}")
    return found


def describe(tensor: torch.Tensor) -> str:
    """``"float32[2, 3]"``."""
    return f"{torch_name(tensor.dtype)}{list(tensor.shape)}"


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)``, also where the target is a parameter or was made in inference mode."""
    with torch.inference_mode():  # only there may be written into tensors that were made there
        target.detach().copy_(source.detach())


def can_travel(tensor: torch.Tensor, device: torch.device) -> bool:
    """Returns whether a back end that serves ``device`` takes the tensor's own memory, element for element."""
    exact = tensor.dtype in _NATIVE or tensor.dtype == torch.bool or tensor.is_complex()
    return exact and _shareable(tensor, device)


def as_wire(tensor: torch.Tensor) -> torch.Tensor:
    """A dense contiguous tensor in a dtype that every back end moves; shares its memory."""
    if not tensor.numel():
        return torch.zeros(1, dtype=torch.uint8, device=tensor.device)
    if tensor.dtype in _NATIVE:
        return tensor
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8)
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return flat_bytes(tensor)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A dense contiguous tensor's bytes, ``uint8 [bytes]``; shares its memory."""
    # Not reshape(-1): a tensor of one element counts as contiguous with any stride, and keeps it.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _shareable(tensor: torch.Tensor, device: torch.device) -> bool:
    contiguous = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    # gloo writes some of its results by copy_, which tensors made in inference mode refuse elsewhere.
    writable = not tensor.is_inference() or torch.is_inference_mode_enabled()
    return contiguous and writable and tensor.numel() > 0 and tensor.device == device


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    stage = _blank(tensor, device)
    stage.copy_(tensor)
    return stage


def _blank(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
