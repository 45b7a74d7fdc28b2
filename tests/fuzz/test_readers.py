"""Damaged files of every kind: each is read, or refused in a line; in time, in little memory, without a traceback."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.fuzz._campaign import Campaign, run_cases
from tests.helpers.marks import extended

_MEMORY = 2 << 30


def _check(campaign: Campaign, cases: int) -> None:
    print(campaign)
    assert campaign.faults == 0, str(campaign)
    assert campaign.counts["refused"] > cases // 10, "most damage must be such that it is noticed"
    assert campaign.counts["done"] > cases // 10, "and some such that what is left can be looked at"


@pytest.mark.parametrize("cases", [range(30), extended(range(30, 2000))], ids=str)
def test_damaged_files_are_read_or_refused(tmp_path: Path, cases: range) -> None:
    _check(run_cases(tmp_path, 0, cases), len(cases))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_very_many_damaged_files(tmp_path: Path) -> None:
    cases, workers, total = 200_000, 2, Campaign()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        jobs = []
        for worker in range(workers):
            root = tmp_path / str(worker)
            root.mkdir()
            jobs.append(pool.submit(run_cases, root, 1, range(worker, cases, workers), _MEMORY))
        for job in jobs:
            total.add(job.result())
    _check(total, cases)
