"""Rank entry points that misbehave on purpose. Named by ``FAULT``: ``kind rank step``, e.g. ``kill 1 2``."""

from __future__ import annotations

import os
import signal
import time

from modelexport.exporting.plan import ExportStep
from modelexport.exporting.rank import Quantised, RankExport, RankJob, Shards, run_rank


def misbehave(job: RankJob, patched: type[RankExport]) -> None:
    """:func:`run_rank`, but one rank fails while it quantises one step."""
    kind, rank, number = os.environ["FAULT"].split()
    original = patched.quantise

    def quantise(self: RankExport, step: ExportStep, shards: Shards) -> Quantised:
        if self.rank == int(rank) and self.steps[int(number)] is step:
            _fail(kind)
        return original(self, step, shards)  # type: ignore[arg-type]

    patched.quantise = quantise  # type: ignore[method-assign, assignment]
    try:
        run_rank(job, patched)
    finally:  # a single rank runs in the test's own process
        patched.quantise = original  # type: ignore[method-assign]


def _fail(kind: str) -> None:
    if kind == "raise":
        raise RuntimeError("a fault injected by the test")
    if kind == "kill":
        time.sleep(0.2)  # as a real layer takes: ranks tell other machines twenty times a second what they do
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        os._exit(0)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "hang":
        time.sleep(3600)
    raise AssertionError(kind)


if __name__ == "__main__":  # as the command line, under a launcher that starts programs
    from modelexport.cli import run
    from modelexport.exporting import rank as export_rank

    export_rank.run_rank = misbehave
    run()
