"""Memory that the C library keeps for the process."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from modelexport.system.allocator import return_freed_memory


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim")
def test_freed_blocks_go_back_to_the_system() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    size, count = 64 << 10, 1024  # below the least size that is mapped by itself
    blocks = [libc.malloc(size) for _ in range(count)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks[:-1]:  # the last one keeps the heap from shrinking by itself
        libc.free(block)
    before = _resident()
    assert return_freed_memory()
    assert before - _resident() > size * count // 2
    assert not return_freed_memory(seldom=True)  # so soon after it
    libc.free(blocks[-1])
