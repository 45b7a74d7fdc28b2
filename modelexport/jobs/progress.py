"""The progress of a job as the process sees it that started the ranks: the bar, the log, and the time that is left."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from modelexport import __version__
from modelexport.distributed import launch
from modelexport.system.run_log import LogFile, RunLog
from modelexport.system.tables import duration_text
from modelexport.system.terminal import note, progress_bar

__all__ = ["JobSteps", "ProgressHandler", "ReadBack", "StepCost", "TimeLeft", "show_progress"]

_RECENT = 16  # steps of a kind that its mean is taken of: a disk may become slower
_UNSEEN_RATE = 1e9  # bytes a second, of steps without calibration before any was seen
_FEW = 4  # steps to come of a kind, for which the first one, slow as it is, tells enough
_TELLING_PART = 0.05  # so much must have been read back before its rate is taken for the rest's
_EVERY_SECONDS = 0.5  # between two looks of the display at ranks that read back
_MEASURED_BYTES = 8 << 20
_LARGE_BYTES = 256 << 20  # less is read back too fast for a measurement to be worth its time


@dataclass(frozen=True)
class StepCost:
    """The measure of a step that its time depends on; steps of one cost are taken to be alike.

    Attributes:
        read: bytes of the source.
        written: bytes of the target.
        calibrated: whether samples run through the step's layer.
    """

    read: int
    written: int
    calibrated: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        return self.read + self.written


@dataclass(frozen=True)
class JobSteps:
    """The steps of a job, each with its cost, and those that an earlier run has done.

    Attributes:
        compared: whether the source is read once more at the end, beside what was written.
        along: whether what a step has written is read back beside the next ones, and only the rest at the end.
    """

    costs: Mapping[str, StepCost]
    done: Collection[str]
    compared: bool = False
    along: bool = False

    @property
    def left(self) -> dict[str, StepCost]:
        """The steps that are to be done."""
        return {name: cost for name, cost in self.costs.items() if name not in self.done}

    @property
    def read_back_bytes(self) -> int:
        """Bytes read at the end to check what was written."""
        costs = (cost for name, cost in self.costs.items() if not self.along or name in self.done)
        return sum(cost.nbytes if self.compared else cost.written for cost in costs)


class TimeLeft:
    """Estimates the seconds that a job still takes, from when its steps ended.

    A step takes what others of its cost have taken, the first of them apart (it warms up, and fills the pipeline of
    reading, quantising and writing); one that is like none before takes time in proportion to its bytes, at the rate of
    those that are calibrated as it is, or are not. Passes over the model before the first step, and reading back what
    was written, count as they go.

    Args:
        steps: name -> cost, of those that are to be done.
        read_back_bytes: bytes that are read when all steps are done.
    """

    def __init__(self, steps: Mapping[str, StepCost], read_back_bytes: int = 0) -> None:
        self._waiting = dict(steps)
        self._seen: dict[StepCost, deque[float]] = {}
        self._counts: Counter[StepCost] = Counter()
        self._read_back_bytes = read_back_bytes
        self._read_back_rate: float | None = None
        self._read_back: tuple[float, float] | None = None  # begun at, part done
        self._pass: tuple[float, int, int] | None = None  # begun at, layers done, of
        self._last = 0.0

    def begin(self, seconds: float) -> None:
        """The passes or the steps begin: what was before is no part of the first."""
        self._last = seconds

    def expect_read_back(self, bytes_per_second: float) -> None:
        """A rate at which to read back, which is taken until it is seen; without, the steps' is."""
        self._read_back_rate = bytes_per_second

    def in_pass(self, seconds: float, done: int, layers: int) -> None:
        """Of a pass over the model before the first step, ``done`` of ``layers`` layers are done."""
        if self._pass is None:
            self._pass = (self._last, done, layers)
        self._pass = (self._pass[0], done, layers)
        self._last = seconds

    def step(self, seconds: float, name: str) -> None:
        """A step is done."""
        cost = self._waiting.pop(name, None)
        if cost is not None:
            times = self._seen.setdefault(cost, deque(maxlen=_RECENT))
            if self._counts[cost] == 1:
                times.clear()  # of the first
            self._counts[cost] += 1
            times.append(seconds - self._last)
        self._last = seconds

    def in_read_back(self, seconds: float, part: float) -> None:
        """This part, 0 to 1, has been read back."""
        begun = self._last if self._read_back is None else self._read_back[0]
        self._read_back = (begun, part)
        self._last = seconds

    def left(self, seconds: float) -> float | None:
        """Returns the seconds left; None while nothing like what is to come was seen, or the first of many alone."""
        steps = self._steps_left()
        if steps is None:
            return None
        return max(0.0, self._pass_left() + steps + self._read_back_left() - (seconds - self._last))

    def _pass_left(self) -> float:
        if self._pass is None or not self._pass[1]:
            return 0.0
        begun, done, layers = self._pass
        return 0.0 if done >= layers else (self._last - begun) / done * (layers - done)

    def _steps_left(self) -> float | None:
        total = 0.0
        for cost, count in Counter(self._waiting.values()).items():
            if cost in self._seen:
                times = self._seen[cost]
                is_warm = any(n > 1 and seen.calibrated == cost.calibrated for seen, n in self._counts.items())
                if not is_warm and count > _FEW:
                    return None
                total += count * sum(times) / len(times)
                continue
            alike = [(sum(times) / len(times), seen) for seen, times in self._seen.items()]
            alike = [(mean, seen) for mean, seen in alike if seen.calibrated == cost.calibrated]
            nbytes = sum(seen.nbytes for _, seen in alike)
            if nbytes:
                total += count * cost.nbytes * sum(mean for mean, _ in alike) / nbytes
            elif cost.calibrated or (self._pass is None and not self._seen):
                return None
            else:
                total += count * cost.nbytes / _UNSEEN_RATE
        return total

    def _step_rate(self) -> float:
        warm = {cost for cost, count in self._counts.items() if count > 1 and not cost.calibrated}
        plain = {cost: sum(self._seen[cost]) / len(self._seen[cost]) for cost in warm}
        took = sum(mean * self._counts[cost] for cost, mean in plain.items())
        return sum(cost.nbytes * self._counts[cost] for cost in plain) / took if took else _UNSEEN_RATE

    def _read_back_left(self) -> float:
        begun, part = (0.0, 0.0) if self._read_back is None else self._read_back
        if part < _TELLING_PART:
            return (1 - part) * self._read_back_bytes / (self._read_back_rate or self._step_rate())
        return (self._last - begun) / part * (1 - part)


class ProgressHandler:
    """Handles the events of ranks: moves the bar, writes the log.

    Attributes:
        results: what the first rank reported as the result, once it has.
    """

    def __init__(self, job: JobSteps, world: int, bar: Any, log: RunLog | None) -> None:
        self.results: list[dict[str, Any]] = []
        self._job, self._world, self._bar, self._log = job, world, bar, log
        self._costs = job.left
        self._left = TimeLeft(self._costs, job.read_back_bytes)
        self._began = time.monotonic()
        self._steps_began: float | None = None
        self._read = self._written = self._done = 0
        self._text = ""
        self._read_back: dict[int, tuple[int, int]] = {}
        self._shown_at = 0.0

    def __call__(self, rank: int, event: dict[str, Any]) -> None:
        """Takes an event of a rank."""
        now = time.monotonic() - self._began
        kind = event.get("kind")
        if kind == "step":
            self._step(now, event["step"])
        elif kind == "begin" and rank == 0:
            self._begin(now, event["threads"])
        elif kind == "pass":
            self._left.in_pass(now, event["done"], event["layers"])
            self._show(now, f"calibrating: layer {event['done']} of {event['layers']}")
        elif kind == "read back":
            self._in_read_back(now, rank, event["bytes"], event["of"])
        elif kind == "working":
            self._text = event["text"]
            self._bar.set_postfix_str(self._postfix(now))
        elif kind == "result":
            self.results.append(event)

    def _begin(self, now: float, threads: int) -> None:
        self._left.begin(now)
        if not self._job.compared:
            is_large = self._job.read_back_bytes > _LARGE_BYTES
            cores = min(self._world * threads, len(os.sched_getaffinity(0)))
            self._left.expect_read_back(cores * (_hashing_rate() if is_large else _UNSEEN_RATE))

    def _step(self, now: float, name: str) -> None:
        self._steps_began = now if self._steps_began is None else self._steps_began
        self._left.step(now, name)
        cost = self._costs.get(name, StepCost(0, 0))
        self._read, self._written, self._done = self._read + cost.read, self._written + cost.written, self._done + 1
        self._text = name
        self._bar.set_postfix_str(self._postfix(now), refresh=False)
        self._bar.update(cost.written)
        self._write(now, "progress", name)

    def _in_read_back(self, now: float, rank: int, done: int, of: int) -> None:
        self._read_back[rank] = (done, of)
        parts = [done / of if of else 1.0 for done, of in self._read_back.values()]
        self._left.in_read_back(now, min(parts))
        self._show(now, "reading back")

    def _show(self, now: float, text: str) -> None:
        if now - self._shown_at < _EVERY_SECONDS:
            return
        self._shown_at, self._text = now, text
        self._bar.set_postfix_str(self._postfix(now))
        self._write(now, "progress", text)

    def _postfix(self, now: float) -> str:
        left = self._left.left(now)
        rate = f"{self._read / now / 1e9:.2f} GB/s" if self._read and now else None
        time_left = None if left is None else f"{duration_text(left)} left"
        return ", ".join(text for text in (self._text, rate, time_left) if text)

    def _write(self, now: float, phase: str, layer: str) -> None:
        if self._log is None:
            return
        left = self._left.left(now)
        self._log.write(
            phase,
            layer=layer,
            done=self._done,
            steps=len(self._costs),
            read=self._read,
            written=self._written,
            left=None if left is None else round(left, 1),
        )


class ReadBack:
    """Reports, in a rank, how much of its share of the files has been read back. Thread-safe.

    Args:
        nbytes: of its share.
    """

    def __init__(self, nbytes: int) -> None:
        self._done, self._all, self._reported_at = 0, nbytes, 0.0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """So many bytes more; a report of it goes out twice a second."""
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now - self._reported_at < _EVERY_SECONDS and self._done < self._all:
                return
            self._reported_at = now
            launch.report({"kind": "read back", "bytes": self._done, "of": self._all})


@contextmanager
def show_progress(
    description: str, job: JobSteps, world: int, *, quiet: bool, log: LogFile | None = None
) -> Iterator[ProgressHandler]:
    """Shows a progress bar inside the ``with``, unless ``quiet`` or stderr is no terminal.

    Args:
        description: the bar's label.
        world: the number of ranks.
        log: the file that the progress is written to as well.

    Yields:
        The handler of the ranks' events.
    """
    sizes = {step: cost.written for step, cost in job.costs.items()}
    resumed = sum(size for step, size in sizes.items() if step in job.done)
    if resumed and not quiet:
        note(f"resuming: {len(job.done)} of {len(sizes)} steps are done already")
    pen = None if log is None else RunLog(log, None, beats=False)
    with progress_bar(
        quiet=quiet,
        total=sum(sizes.values()),
        initial=resumed,
        unit="B",
        unit_scale=True,
        desc=description,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
    ) as bar:
        left = job.left.values()
        if pen is not None:
            pen.write(
                "begin",
                job=description,
                modelexport=__version__,
                ranks=world,
                began=round(log.began, 3) if log is not None else None,
                steps=len(left),
                to_read=sum(cost.read for cost in left),
                to_write=sum(cost.written for cost in left),
            )
        try:
            yield ProgressHandler(job, world, bar, pen)
        except BaseException as error:
            if pen is not None:
                pen.write("failed", error=f"{type(error).__name__}: {error}".partition("\n")[0][:500])
            raise
        else:
            if pen is not None:
                pen.write("done")
        finally:
            if pen is not None:
                pen.close()


def _hashing_rate() -> float:
    """Bytes a second at which a core of this machine takes the checksum and the hash of what is read back."""
    import hashlib
    import zlib

    data = bytes(_MEASURED_BYTES)
    began = time.perf_counter()
    hashlib.sha256(data)
    zlib.crc32(data)
    return _MEASURED_BYTES / max(1e-9, time.perf_counter() - began)
