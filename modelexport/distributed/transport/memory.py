"""This process's shared arena: memory that other ranks can map, without a name and without a copy.

Filling fresh pages is many times slower than copying into pages that were used before, so the arena keeps its
pages and hands the same ones out again. It is made of segments: sparse anonymous files (a sealed memfd), mapped
whole, whose pages are reserved from the front as they are first needed. A region is a piece of a segment; it
returns to the arena when nobody holds it any more: not the tensor made of it, not a payload on its way.

Pages are reserved with ``posix_fallocate`` before anyone writes through the mapping. Where memory or a limit does
not suffice that call fails and the caller gets an error; the write would have been a SIGBUS.

A segment has no name in any file system, so whatever kills the process leaves nothing behind. Where the kernel has
no memfd the segment is a file that is unlinked before it holds anything.
"""

from __future__ import annotations

import bisect
import errno
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from modelexport.distributed.transport.segments import Segment, open_segment, reserve
from modelexport.errors import GatherError
from modelexport.system.limits import advice

__all__ = ["Arena", "ArenaStats", "Region", "arena", "shared_empty", "shared_view"]

_SEGMENT_BYTES = 256 << 20  # address space, not memory
_ALIGN_SMALL = 64  # a cache line, and every dtype's alignment
_ALIGN_LARGE = 4096
_LARGE = 64 << 10


@dataclass(eq=False)
class Region:
    """``nbytes`` bytes at ``offset`` of a segment; ``holders`` counts those who still need them."""

    segment: Segment
    offset: int
    nbytes: int
    extent: int  # bytes taken from the segment: nbytes rounded up
    holders: int = 1
    guard: object = None  # weak reference to the view that a tensor holds

    def view(self) -> memoryview:
        return self.segment.memory[self.offset : self.offset + self.nbytes]


@dataclass(frozen=True)
class ArenaStats:
    """Bytes of pages reserved, and of regions in use."""

    reserved: int
    used: int


@dataclass(eq=False)
class _Book:
    """The free and the taken ranges of one segment. Offsets in bytes, lists sorted."""

    segment: Segment
    reserved: int = 0  # pages below this offset exist
    free: list[tuple[int, int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    regions: dict[int, Region] = field(default_factory=dict)

    def find_room(self, extent: int, align: int, limit: int) -> tuple[int, int] | None:
        """The lowest (index of a free interval, offset) where ``extent`` bytes fit below ``limit``."""
        for index, (start, end) in enumerate(self.free):
            offset = -(-start // align) * align
            if offset + extent <= min(end, limit):
                return index, offset
        return None

    def take(self, index: int, offset: int, nbytes: int, extent: int) -> Region:
        start, end = self.free[index]
        self.free[index : index + 1] = [
            piece for piece in ((start, offset), (offset + extent, end)) if piece[0] < piece[1]
        ]
        region = Region(self.segment, offset, nbytes, extent)
        bisect.insort(self.starts, offset)
        self.regions[offset] = region
        return region

    def give_back(self, region: Region) -> None:
        del self.regions[region.offset]
        self.starts.pop(bisect.bisect_left(self.starts, region.offset))
        start, end = region.offset, region.offset + region.extent
        index = bisect.bisect_left(self.free, (start, end))
        if index < len(self.free) and self.free[index][0] == end:
            end = self.free.pop(index)[1]
        if index and self.free[index - 1][1] == start:
            index -= 1
            start = self.free.pop(index)[0]
        self.free.insert(index, (start, end))


class Arena:
    """Allocator over segments. Thread-safe; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._books: list[_Book] = []
        # Finalizers run at any moment, in any thread, even inside our own locked code: they only append here.
        self._dropped: deque[Region] = deque()
        self._reclaimers: list[Callable[[], None]] = []

    def allocate(self, nbytes: int) -> Region:
        """A region of ``nbytes`` > 0 with one holder, its pages reserved, its contents undefined.

        Raises:
            GatherError: memory, shared memory or a limit of the process does not suffice.
        """
        align = _ALIGN_LARGE if nbytes >= _LARGE else _ALIGN_SMALL
        extent = -(-nbytes // align) * align
        region = self._reuse(nbytes, extent, align)
        if region is None and self._reclaimers:
            for reclaim in tuple(self._reclaimers):
                reclaim()
            region = self._reuse(nbytes, extent, align)
        return region if region is not None else self._extend(nbytes, extent, align)

    def release(self, region: Region) -> None:
        """One holder less. Safe in a finalizer: the region returns to the arena at the next allocation."""
        self._dropped.append(region)

    def find(self, address: int, nbytes: int) -> tuple[Region, int] | None:
        """The live region that contains ``nbytes`` at ``address``, retained, and their offset in its segment."""
        with self._lock:
            for book in self._books:
                offset = address - book.segment.address
                if not 0 <= offset < book.segment.size:
                    continue
                index = bisect.bisect_right(book.starts, offset) - 1
                if index < 0:
                    return None
                region = book.regions[book.starts[index]]
                if offset + nbytes > region.offset + region.nbytes:
                    return None
                region.holders += 1
                return region, offset
        return None

    def add_reclaimer(self, reclaim: Callable[[], None]) -> None:
        """``reclaim`` is called before the arena grows; it releases what it can and must not wait."""
        self._reclaimers.append(reclaim)

    def remove_reclaimer(self, reclaim: Callable[[], None]) -> None:
        if reclaim in self._reclaimers:
            self._reclaimers.remove(reclaim)

    def stats(self) -> ArenaStats:
        with self._lock:
            self._collect()
            regions = [region for book in self._books for region in book.regions.values()]
            return ArenaStats(
                reserved=sum(book.reserved for book in self._books),
                used=sum(region.extent for region in regions),
            )

    def _collect(self) -> None:
        while self._dropped:
            region = self._dropped.popleft()
            region.holders -= 1
            if region.holders == 0:
                region.guard = None
                next(book for book in self._books if book.segment is region.segment).give_back(region)

    def _reuse(self, nbytes: int, extent: int, align: int) -> Region | None:
        with self._lock:
            self._collect()
            for book in self._books:
                found = book.find_room(extent, align, book.reserved)
                if found is not None:
                    return book.take(*found, nbytes, extent)
        return None

    def _extend(self, nbytes: int, extent: int, align: int) -> Region:
        with self._lock:
            for book in self._books:
                found = book.find_room(extent, align, book.segment.size)
                if found is not None:
                    break
            else:
                book = self._new_book(extent)
                found = (0, 0)
            end = found[1] + extent
            if end > book.reserved:
                book.reserved += reserve(book.segment, book.reserved, end)
            return book.take(*found, nbytes, extent)

    def _new_book(self, extent: int) -> _Book:
        size = max(_SEGMENT_BYTES, extent)
        while True:
            try:
                segment = open_segment(size)
                break
            except OSError as error:
                # A limit on file size or address space may still leave room for what is needed now.
                if size > extent and error.errno in (errno.EFBIG, errno.ENOMEM, errno.ENOSPC):
                    size = max(extent, size // 4)
                    continue
                what = f"no shared memory for a buffer of {extent} bytes: {error}{advice(error)}"
                raise GatherError(what) from error
        book = _Book(segment, free=[(0, segment.size)])
        self._books.append(book)
        return book


_arena: Arena | None = None
_arena_lock = threading.Lock()


def arena() -> Arena:
    """The arena of this process."""
    global _arena
    with _arena_lock:
        if _arena is None:
            _arena = Arena()
        return _arena


def _forget_after_fork() -> None:
    # The child shares the parent's pages and would hand out the same ones: it starts with an arena of its own.
    global _arena, _arena_lock
    _arena = None
    _arena_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)


def shared_empty(shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised, contiguous CPU tensor of ``shape`` in this process's shared arena.

    A gather sends it, or any contiguous slice or reinterpretation of it, without a copy. From then on the first
    rank reads this very memory: write to it again only after :func:`modelexport.distributed.gather.drain`, or
    better, drop it and allocate anew; the arena reuses the memory once the tensor and all receivers let go.

    Raises:
        GatherError: memory, shared memory or a limit of the process does not suffice.
    """
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    nbytes = math.prod(dims) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(dims, dtype=dtype)
    return torch.frombuffer(shared_view(nbytes), dtype=dtype).view(dims)


def shared_view(nbytes: int) -> memoryview:
    """``nbytes`` > 0 of this process's shared arena; they return to it when the view and its tensors are gone.

    ``torch.frombuffer`` keeps the view it was given alive; a slice of the view does not.
    """
    owner = arena()
    region = owner.allocate(nbytes)
    view = region.view()

    def let_go(_: object) -> None:
        owner.release(region)

    region.guard = weakref.ref(view, let_go)
    return view
