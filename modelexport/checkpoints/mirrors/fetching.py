"""Fills a mirror: a few connections at once, what readers wait for first, then what they will want, within a budget."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from modelexport.checkpoints import raw_io
from modelexport.checkpoints.mirrors.mirror import CHUNK, Extent, Mirror
from modelexport.errors import CheckpointError, ModelExportError, error_text

__all__ = ["CONNECTIONS", "Fetcher", "Interrupted", "Stream", "persistent"]

CONNECTIONS = 8
AT_ONCE = 4
"""Chunks that one request asks for."""
LEAST_AHEAD = 256 << 20
STEPS_AHEAD = 3
RETRIES = 8
_FIRST_PAUSE, _LONGEST_PAUSE, _IDLE, _PATIENCE = 0.5, 30.0, 0.01, 2.0


class Interrupted(Exception):
    """A part that did not come, and may when it is asked for again.

    Args:
        reason: in words.
        pause: seconds after which to ask; None: a while that grows.
    """

    def __init__(self, reason: str, pause: float | None = None) -> None:
        super().__init__(reason)
        self.pause = pause


Stream = Callable[[str, int, int], Iterator[bytes]]
"""Gives bytes ``[start, stop)`` of a file, by its name, piece by piece; raises :class:`Interrupted`, or a
CheckpointError where there is no use in asking again."""


def persistent(stream: Stream, name: str, start: int, stop: int, ended: threading.Event) -> Iterator[bytes]:
    """Bytes ``[start, stop)`` of a file, asked for again from where they broke off, until ``ended`` is set.

    Raises:
        CheckpointError: there is no use in asking, or it has been done :data:`RETRIES` times and nothing came.
    """
    at, tries = start, 0
    while at < stop and not ended.is_set():
        try:
            for piece in stream(name, at, stop):
                at += len(piece)
                tries = 0
                yield piece
            if at < stop:
                raise Interrupted("the connection was closed")
        except Interrupted as error:
            tries += 1
            if tries > RETRIES:
                raise CheckpointError(
                    f"{name}: {error}, {tries} times: when the hub answers again, run the same command again: it goes "
                    "on where it was"
                ) from error
            ended.wait(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (tries - 1)) if error.pause is None else error.pause)


class Fetcher:
    """Threads that fill a mirror, until it is closed.

    Args:
        stream: see :data:`Stream`.
        kept: bytes at the beginning of files that are never let go: name -> how many.
        guess: whether to begin with the first file, before anybody has said what is read.

    Attributes:
        fetched: bytes that have come since it was made.
    """

    def __init__(self, mirror: Mirror, stream: Stream, kept: Mapping[str, int], *, guess: bool = True) -> None:
        self.mirror, self.fetched = mirror, 0
        self._stream, self._kept = stream, kept
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._running: set[int] = set()
        first = [file for file in mirror.files if guess and file.name.startswith("model")][:1]
        self._ahead = deque(
            c for file in first for c in _numbers(mirror.chunks(mirror.directory / file.name, 0, file.size))
        )
        self._budget = LEAST_AHEAD
        self._held = int((mirror.versions % 2).sum()) * CHUNK
        self._steps: list[list[int]] = []  # chunks that each step needs, of steps that are not passed yet
        self._users: dict[int, int] = {}  # steps that are yet to read a chunk
        self._passing: Callable[[], list[int]] = list
        self._fds = {file.name: os.open(mirror.directory / file.name, os.O_RDWR) for file in mirror.files}
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(CONNECTIONS)]
        for thread in self._threads:
            thread.start()

    def follow(
        self, steps: Sequence[Sequence[Extent]], done: Collection[int], ranks: int, *, keep: bool = False
    ) -> None:
        """From now on fetches what these steps read, in their order, ahead of the ranks, and lets it go behind them.

        Args:
            steps: what each reads. What else is asked for stays.
            done: those of which nothing is read, unless it is asked for.
            ranks: how many read it here; each says what it has passed in :meth:`Mirror.passing`.
            keep: whether steps come back to what they have read: nothing is let go.
        """
        chunks = [sorted({c for extent in step for c in _numbers(self.mirror.chunks(*extent))}) for step in steps]
        with self._lock:
            self._ahead = deque(dict.fromkeys(c for i, step in enumerate(chunks) if i not in done for c in step))
            self._budget = max(LEAST_AHEAD, STEPS_AHEAD * CHUNK * max(map(len, chunks), default=0))
            if keep:
                self._budget = 1 << 62
                return
            table = self.mirror.passing(ranks, len(steps))
            self._steps, self._users = chunks, {}
            for step in chunks:
                for chunk in step:
                    self._users[chunk] = self._users.get(chunk, 0) + 1
            left = set(range(len(steps)))

            def passed() -> list[int]:
                found = [step for step in left if table[:, step].all()]
                left.difference_update(found)
                return found

            self._passing = passed

    def close(self) -> None:
        """Ends the threads. What has not come is not waited for."""
        self._closing.set()
        until = time.monotonic() + _PATIENCE
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):  # else one waits for the network, and may yet write
            while self._fds:
                os.close(self._fds.popitem()[1])

    # ------------------------------------------------------------------ threads

    def _run(self) -> None:
        while not self._closing.is_set():
            with self._lock:
                self._let_go()
                chunks = self._next()
            if not chunks:
                self._closing.wait(_IDLE)
                continue
            try:
                self._fetch(chunks)
            except ModelExportError as error:
                self.mirror.fail(str(error))
                self._closing.set()
            finally:
                with self._lock:
                    self._running.difference_update(chunks)

    def _next(self) -> list[int]:
        """Chunks that lie side by side in a file, to be fetched now; none if there is nothing to do."""
        mirror = self.mirror
        wanted = [int(c) for c in mirror.wanted.nonzero()[0]]
        first = next((chunk for chunk in wanted if self._is_missing(chunk)), None)
        if first is None:
            while self._ahead and (mirror.versions[self._ahead[0]] % 2 == 1 or not self._users.get(self._ahead[0], 1)):
                self._ahead.popleft()
            if self._held + len(self._running) * CHUNK >= self._budget:
                return []
            wanted = [chunk for chunk in self._ahead if self._users.get(chunk, 1)]
            first = next((chunk for chunk in wanted if self._is_missing(chunk)), None)
            if first is None:
                return []
        file, _ = mirror.place(first)
        may, chunks = set(wanted), [first]
        while len(chunks) < AT_ONCE:
            after = chunks[-1] + 1
            if after not in may or not self._is_missing(after) or mirror.place(after)[0] != file:
                break
            chunks.append(after)
        self._running.update(chunks)
        return chunks

    def _is_missing(self, chunk: int) -> bool:
        return chunk not in self._running and self.mirror.versions[chunk] % 2 == 0

    def _let_go(self) -> None:
        """Empties the chunks that no step will read any more."""
        for step in self._passing():
            for chunk in self._steps[step]:
                self._users[chunk] -= 1
                if not self._users[chunk] and self.mirror.versions[chunk] % 2 == 1:
                    self._empty(chunk)

    def _empty(self, chunk: int) -> None:
        file, start = self.mirror.place(chunk)
        stop = min(start + CHUNK, file.size)
        start = max(start, self._kept.get(file.name, 0))
        self.mirror.wanted[chunk] = 0
        self.mirror.versions[chunk] += 1
        raw_io.punch_hole(
            self._fds[file.name], start, stop - start
        )  # where it cannot be, the disk fills as by a download
        self._held -= CHUNK

    def _fetch(self, chunks: Sequence[int]) -> None:
        """Fetches chunks that lie side by side.

        Raises:
            CheckpointError: they cannot be had, or there is no room for them.
        """
        file, at = self.mirror.place(chunks[0])
        stop = min(at + len(chunks) * CHUNK, file.size)
        path, left = self.mirror.directory / file.name, deque(chunks)
        for piece in persistent(self._stream, file.name, at, stop, self._closing):
            if self._closing.is_set():
                return
            try:
                raw_io.write_exactly(self._fds[file.name], memoryview(piece), at)
            except OSError as error:
                if error.errno in raw_io.DISK_FULL:
                    raise raw_io.disk_full(path, stop - at, error) from error
                raise CheckpointError(f"{path}: cannot be written: {error_text(error)}") from error
            at += len(piece)
            self._arrived(left, at, len(piece))

    def _arrived(self, left: deque[int], at: int, count: int) -> None:
        """Marks the chunks that are whole, now that the file has come up to ``at``."""
        with self._lock:
            self.fetched += count
            while left:
                file, start = self.mirror.place(left[0])
                if at < min(start + CHUNK, file.size):
                    break
                chunk = left.popleft()
                self.mirror.versions[chunk] += 1
                self.mirror.wanted[chunk] = 0
                self._held += CHUNK


def _numbers(chunks: slice) -> range:
    return range(chunks.start, chunks.stop)
