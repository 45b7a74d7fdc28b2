"""The log of a run, drawn by the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelexport.errors import UsageError
from modelexport.inspection.report.charts import timeline
from modelexport.inspection.report.timeline import BINS, read_log


def line(seconds: float, rank: int | None, phase: str, moved: int = 0, **more: Any) -> str:
    fields = {"seconds": seconds, "rank": rank, "phase": phase, "read": moved, "written": 0, **more}
    return json.dumps(fields) + "\n"


def test_bytes_are_spread_over_the_time_in_which_they_moved(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        line(0, None, "begin")
        + line(5.0, 0, "reading <b>", 0)
        + line(10.0, 0, "reading <b>", 1000, beat=True)
        + line(10.0, None, "done")
    )
    run = read_log(log)
    [rank] = run.ranks
    assert (run.state, run.seconds, rank.nbytes, rank.phase, rank.since) == ("done", 10.0, 1000, "reading <b>", 5.0)
    assert rank.rates == pytest.approx([0.0] * (BINS // 2) + [200.0] * (BINS // 2))
    assert timeline(rank, run.largest, run.seconds).count("<rect") == BINS // 2


def test_the_last_run_counts_and_half_a_line_does_not(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        line(0, None, "begin") + line(9.0, 0, "old") + line(0, None, "begin") + line(2.0, 3, "new") + '{"seconds": 7'
    )
    run = read_log(log)
    assert (run.state, run.seconds, [rank.rank for rank in run.ranks]) == ("running", 2.0, [3])


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('["no log"]\n{"rank": "0"}\n{"seconds": -1, "rank": 0}\n')
    with pytest.raises(UsageError, match="holds no line of a run"):
        read_log(tmp_path / "file")
