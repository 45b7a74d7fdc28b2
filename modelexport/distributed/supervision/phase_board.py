"""A page of memory that a rank shares with its launcher: what the rank is doing, and that it lives.

Why not messages: a rank says what it does thousands of times, and the newest text must be known even when the
rank is killed in that very moment. A store into shared memory costs a microsecond and survives its writer.

The file behind it is anonymous (a memfd, or an unlinked temporary file). Its first page is the board; what
follows is where the rank's faulthandler writes the stacks of a crash or of a hang.

Page 0, in 64-bit words: [0] the slot that is valid, [1] the last heartbeat (monotonic ns), [2] resident bytes,
[3] whether the main thread is inside a collective. Two slots: count, time of progress (monotonic ns), waiting,
length of the text, the text, count again. A slot is valid where both counts agree.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from dataclasses import dataclass

PAGE = 4096
_SLOT_START = 64
_SLOT_SIZE = 1024
_TEXT_LIMIT = _SLOT_SIZE - 5 * 8
_COUNT, _PROGRESS, _WAITING, _LENGTH, _TEXT, _COUNT_AGAIN = 0, 1, 2, 3, 4, _SLOT_SIZE // 8 - 1


@dataclass(frozen=True)
class BoardState:
    """The state on a board. ``count`` rises with every sign of progress, and so does ``moved``, the bytes of weights
    read and written; times are monotonic nanoseconds."""

    count: int
    progress_ns: int
    waiting: bool
    text: str
    beat_ns: int
    resident_bytes: int
    moved: int = 0


def new_board_file(name: str) -> int:
    """Descriptor of a fresh, anonymous file with one empty page."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, PAGE)
    return fd


class PhaseBoard:
    """One process writes (:meth:`write`, :meth:`beat`), another reads (:meth:`read`); no locks between them."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, PAGE)
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("Q")
        self._count = 0

    def write(self, text: str, waiting: bool) -> None:
        """Notes progress. One writing thread at a time."""
        data = text.encode("utf-8", "replace")[:_TEXT_LIMIT]
        self._count += 1
        slot = self._count & 1
        start = _SLOT_START + slot * _SLOT_SIZE
        words, first = self._words, start // 8
        words[first + _COUNT] = self._count
        words[first + _PROGRESS] = time.monotonic_ns()
        words[first + _WAITING] = waiting
        words[first + _LENGTH] = len(data)
        text_start = start + 8 * _TEXT
        self._bytes[text_start : text_start + len(data)] = data
        words[first + _COUNT_AGAIN] = self._count
        words[3] = 0  # where the last beat saw the main thread is out of date, and a hang may allow no other beat
        words[0] = slot

    def beat(self, resident_bytes: int, blocked: bool, moved: int = 0) -> None:
        """A sign of life from the rank's watcher thread, which is no sign of progress but where ``moved`` has risen."""
        self._words[4] = moved
        self._words[2] = resident_bytes
        self._words[3] = blocked
        self._words[1] = time.monotonic_ns()

    def read(self) -> BoardState:
        """The newest consistent state. A writer killed half-way leaves the former slot, which is returned."""
        for attempt in range(6):
            # After a few clashes look at the other slot: the writer may have died while writing this one.
            slot = (self._words[0] + (attempt >= 4)) & 1
            state = self._read_slot(slot)
            if state is not None:
                return state
        return BoardState(0, 0, False, "", self._words[1], self._words[2], self._words[4])

    def _read_slot(self, slot: int) -> BoardState | None:
        start = _SLOT_START + slot * _SLOT_SIZE
        words, first = self._words, start // 8
        count = words[first + _COUNT_AGAIN]
        length = min(words[first + _LENGTH], _TEXT_LIMIT)
        text_start = start + 8 * _TEXT
        text = bytes(self._bytes[text_start : text_start + length])
        progress, waiting = words[first + _PROGRESS], bool(words[first + _WAITING])
        if words[first + _COUNT] != count:
            return None
        return BoardState(
            count,
            progress,
            waiting or bool(words[3]),
            text.decode("utf-8", "ignore"),
            words[1],
            words[2],
            words[4],
        )

    def stacks(self) -> str:
        """The output of the rank's faulthandler (at a crash, or on a signal); "" where there is none."""
        data = os.pread(self.fd, 1 << 16, PAGE).decode("utf-8", "replace")
        blocks = data.split("\n\n")
        # The watcher's own stack is always the same and says nothing.
        return "\n\n".join(block for block in blocks if " in _watch\n" not in block + "\n").strip()

    def close(self) -> None:
        """Lets go of the memory and the descriptor."""
        self._words.release()
        self._bytes.release()
        self._map.close()
        os.close(self.fd)
