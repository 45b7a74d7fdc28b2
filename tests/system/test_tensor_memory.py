"""Bytes of tensors, and the buffer that tensors are carved from."""

from __future__ import annotations

import weakref

import pytest
import torch

from modelexport.system.tensor_memory import ReusableBuffer, tensor_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int32])
def test_the_bytes_are_the_tensor_s_own_memory(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 5, dtype=dtype)
    found = tensor_bytes(tensor[1:])
    assert len(found) == 10 * dtype.itemsize
    found[:] = 1
    assert tensor.view(torch.uint8).sum(1).tolist() == [0, *[5 * dtype.itemsize] * 2]


def test_the_bytes_keep_the_memory() -> None:
    tensor = torch.zeros(4)
    alive = weakref.ref(tensor)
    found = tensor_bytes(tensor)[4:].view("<f4")
    del tensor
    assert alive() is not None
    del found
    assert alive() is None


def test_a_tensor_without_elements_has_no_bytes() -> None:
    assert len(tensor_bytes(torch.empty(0, 4))) == 0


def test_carved_tensors_share_no_bytes_and_the_next_step_has_the_same_memory() -> None:
    buffer = ReusableBuffer()
    buffer.reserve(192)
    first, second = buffer.take((3, 2), torch.bfloat16), buffer.take((4,), torch.float32)
    first.fill_(1)
    second.fill_(2)
    assert (first.shape, first.dtype, first.is_contiguous()) == ((3, 2), torch.bfloat16, True)
    assert first.unique().tolist() == [1]
    assert second.unique().tolist() == [2]
    assert second.data_ptr() - first.data_ptr() == 64
    buffer.reserve(100)
    assert buffer.take((2,), torch.int8).data_ptr() == first.data_ptr()


def test_a_larger_step_has_more_memory() -> None:
    buffer = ReusableBuffer()
    buffer.reserve(64)
    buffer.take((16,), torch.float32)
    buffer.reserve(1 << 12)
    assert buffer.take((1 << 10,), torch.float32).fill_(3).sum() == 3 << 10
