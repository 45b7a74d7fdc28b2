"""The C library's memory that was freed, and that it keeps for the process."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import cache

__all__ = ["return_freed_memory"]

_SELDOM = 1.0  # seconds: the pages that are asked for again cost some milliseconds

_last = -_SELDOM


def return_freed_memory(*, seldom: bool = False) -> bool:
    """Returns the pages of freed memory to the system; True if there were any.

    glibc's allocator keeps what each thread has freed in blocks of up to 32 MiB, for that thread to use again: of the
    activations of a layer, hundreds of megabytes that lie idle while its weights are rounded. False, and nothing done,
    under C libraries without ``malloc_trim``.

    Args:
        seldom: do nothing within a second of the last time, for callers in a loop.
    """
    global _last
    trim, now = _malloc_trim(), time.monotonic()
    if trim is None or (seldom and now - _last < _SELDOM):
        return False
    _last = now
    return bool(trim(0))


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim
