"""Runs cases and counts what came of them. A case is a seed and a number, which decide everything about it.

To see cases again, or to look for new ones: ``python -m tests.fuzz._campaign SEED FIRST LAST``.
"""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from modelexport.errors import ModelExportError, RankFailedError
from tests.fuzz._operations import Operation, Seed, damaged, make_operations, quiet, undamaged

SLOW = 2.0
"""Seconds that a case may take."""
LARGE = 300 << 20
"""Bytes that a case may take for itself."""
LONG = 1500
"""Characters that a message may have."""
_ENDLESS = 20.0
_LIST = "\n  "  # between the items of a short list
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@dataclass
class Campaign:
    """Counts of what came of cases, and an example of each kind of fault.

    Attributes:
        counts: ``refused`` (an error of ours) and ``done``, and every kind of fault.
        examples: fault -> how to see it again.
    """

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def faults(self) -> int:
        """How many cases ended as none may."""
        return sum(count for kind, count in self.counts.items() if kind not in ("refused", "done"))

    def add(self, other: Campaign) -> None:
        """Take in another campaign's counts."""
        self.counts += other.counts
        self.examples = {**other.examples, **self.examples}

    def forget(self, *kinds: str) -> None:
        """Count none of these."""
        for kind in kinds:
            self.counts.pop(kind, None)
            self.examples.pop(kind, None)

    def note(self, kind: str, example: str) -> None:
        """Count a fault."""
        self.counts[kind] += 1
        self.examples.setdefault(kind, example)

    def __str__(self) -> str:
        lines = [f"{kind}: {count:,}" for kind, count in sorted(self.counts.items())]
        return "\n".join((*lines, *(f"{kind}, e.g. {example}" for kind, example in self.examples.items())))


class EndlessError(BaseException):
    """A case was ended because it took too long; no handler of errors takes it for one."""


def run_cases(root: Path, seed: int, numbers: Iterable[int], memory: int | None = None) -> Campaign:
    """Make the seeds, do everything once with each, and run cases one after the other.

    Args:
        root: an empty directory.
        seed: of the random generator, with the case's number.
        memory: bytes that this process may take beyond what it has then, so that asking for more is an error.
    """
    campaign, place = Campaign(), root / "cases"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seeds = make_operations(root)
        place.mkdir()
        for sound in seeds:  # what is imported on first use is not counted as a case's time
            for name, operation in sound.operations.items():
                with undamaged(sound, place / "sound") as directory:
                    _observe(campaign, operation, sound, directory, Random(0), f"{name} of the sound {sound.name}")
        campaign.forget("done", "refused", "slow", "large")
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + memory,) * 2)
        for number in numbers:
            rng = Random(f"{seed}/{number}")
            chosen = rng.choice(seeds)
            name, operation = rng.choice(list(chosen.operations.items()))
            with damaged(chosen, place / str(number), rng) as directory:
                label = f"seed {seed}, case {number} ({name} of {chosen.name})"
                _observe(campaign, operation, chosen, directory, rng, label)
    return campaign


def _observe(campaign: Campaign, operation: Operation, seed: Seed, directory: Path, rng: Random, label: str) -> None:
    """Do one thing with a directory, and note what came of it."""
    with contextlib.suppress(OSError):  # where there is no such file, the peak is that of the whole campaign
        _CLEAR.write_text("5")
    before, began = _status("VmRSS"), time.perf_counter()
    try:
        with quiet() as printed, _limited():
            operation(directory, seed, rng)
        campaign.counts["done"] += 1
        printed.seek(0)
        _check_output(campaign, printed.read(), label)
    except ModelExportError as error:
        campaign.counts["refused"] += 1
        _check_message(campaign, error, label)
    except EndlessError:
        pass  # counted below, by its time
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
        campaign.note(f"exception: {what}", f"{label}: {str(error)[:200]!r}")
    seconds, grown = time.perf_counter() - began, _status("VmHWM") - before
    if seconds > SLOW:
        campaign.note("slow", f"{label}: {seconds:.1f} s")
    if grown > LARGE:
        campaign.note("large", f"{label}: {grown >> 20} MiB")


def _check_message(campaign: Campaign, error: ModelExportError, label: str) -> None:
    """One line, or a short list, of printable characters."""
    text = str(error)
    if isinstance(error, RankFailedError) and not error.user_error:
        last = re.findall(r"(\w+\.py)\", line (\d+)", error.rank_traceback)[-1:]
        campaign.note(f"exception in a rank: {last}", f"{label}: {error.summary!r}")
    elif len(text) > LONG:
        campaign.note(f"long message: {_shape(text)}", f"{label}: {len(text):,} characters, {text[:300]!r}")
    elif _is_unprintable(text.replace(_LIST, "")):
        campaign.note(f"unprintable message: {_shape(text)}", f"{label}: {text[:300]!r}")


def _check_output(campaign: Campaign, text: str, label: str) -> None:
    """Lines of printable characters."""
    wrong = next(filter(_is_unprintable, text.split("\n")), None)
    if wrong is not None:
        campaign.note("unprintable output", f"{label}: {wrong[:300]!r}")


def _is_unprintable(text: str) -> bool:
    return any(unicodedata.category(each) in ("Cc", "Cf", "Cs", "Zl", "Zp") for each in text)


def _shape(text: str) -> str:
    """The words of a message, without what it quotes."""
    return " ".join(re.findall(r"[a-zA-Z]{2,}", re.sub(r"/\S+|'[^']*'", "", text))[:9])


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Ends what takes far too long."""

    def end(*_: object) -> None:
        raise EndlessError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, _ENDLESS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _status(key: str) -> int:
    """Bytes that the system counts for this process: ``VmRSS`` now, ``VmHWM`` at most, ``VmSize`` of addresses."""
    return next(int(line.split()[1]) << 10 for line in _STATUS.read_text().splitlines() if line.startswith(key))


def main(arguments: list[str]) -> None:
    """Run the cases ``FIRST`` to ``LAST`` of a ``SEED`` and print what came of them."""
    seed, first, last = map(int, arguments)
    with tempfile.TemporaryDirectory() as root:
        print(run_cases(Path(root), seed, range(first, last + 1), memory=4 << 30))


if __name__ == "__main__":
    main(sys.argv[1:])
