"""torch's own tests of torch.distributed, with modelexport.distributed.collectives in its place.

They come with torch's wheel (``torch/testing/_internal/distributed/distributed_test.py``) and run on three ranks over
gloo; which of them, and why not the others, is in ``_torch_distributed_selection``. For the count and torch's reasons
to skip: ``python -m pytest -m slow -s tests/conformance/test_torch_distributed.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from modelexport.distributed import collectives
from tests.conformance._torch_distributed_adapter import OURS, TORCHS
from tests.conformance._torch_distributed_broken import FOUND_BY
from tests.conformance._torch_distributed_ranks import Outcome, run_tests
from tests.conformance._torch_distributed_selection import (
    DEVIATIONS,
    QUICK,
    TOPICS,
    UNCHECKED_ONLY,
    Selection,
    select,
    suite_tests,
    topic_of,
)

pytestmark = pytest.mark.usefixtures("tests")
PASSED_BEFORE = {False: 82, True: 79}  # with torch 2.13; fewer would mean that tests have got lost


@pytest.fixture(scope="module")
def tests() -> list[str]:
    names = suite_tests()
    if names is None:
        pytest.skip("this build of torch comes without torch.testing._internal.distributed.distributed_test")
    return names


@pytest.fixture(scope="module")
def selection(tests: list[str]) -> Selection:
    return select(tests)


def test_nothing_is_left_out_silently(tests: list[str], selection: Selection) -> None:
    assert selection.unknown == []
    assert sorted([*selection.run, *selection.left_out, *selection.others]) == sorted(tests)
    assert set(QUICK) | set(DEVIATIONS) <= set(selection.run)
    assert {topic_of(name) for name in selection.run} == {topic_of(name) for name in QUICK} == set(TOPICS)
    assert not set(OURS) & set(TORCHS)
    foreign = [name for name in OURS if not getattr(collectives, name).__module__.startswith("modelexport.")]
    assert foreign == []


@pytest.mark.extended
@pytest.mark.timeout(200)
def test_some_of_every_topic(tests: list[str], tmp_path: Path) -> None:
    known = [name for name in QUICK if name in tests]
    outcome = run_tests(known, tmp_path)
    assert outcome.passed == known, "\n".join(outcome.lines())
    check_that_ours_was_called(outcome)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("checked", [False, True])
def test_the_whole(selection: Selection, tmp_path: Path, checked: bool) -> None:
    names = [name for name in selection.run if name not in DEVIATIONS]
    if checked:
        names = [name for name in names if not UNCHECKED_ONLY.match(name)]
    outcome = run_tests(names, tmp_path, checked=checked)
    count, *reasons = outcome.lines()
    print(f"\ntorch's distributed_test.py on modelexport's collectives, gloo, 3 ranks, checked={checked}: {count}")
    for why in dict.fromkeys(selection.left_out.values()):
        left_out = [name for name, reason in selection.left_out.items() if reason == why]
        reasons.append(f"left out {len(left_out)}, {why}: {', '.join(left_out)}")
    print("\n".join(reasons))
    assert outcome.failed == {}
    assert len(outcome.passed) >= PASSED_BEFORE[checked]
    check_that_ours_was_called(outcome)
    assert set(OURS) == {name for calls in outcome.calls.values() for name in calls}


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_deviations_are_what_the_document_says(tmp_path: Path) -> None:
    outcome = run_tests(list(DEVIATIONS), tmp_path)
    assert set(outcome.failed) == set(DEVIATIONS)
    for name, (message, words) in DEVIATIONS.items():
        assert message in outcome.failed[name].summary
        print(f"\ndeviates: {name}: {words}")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_faults_are_found_and_named_by_their_tests(tmp_path: Path) -> None:
    names = ["test_get_rank", *FOUND_BY, "test_all_gather_cuda", "test_destroy_group"]
    outcome = run_tests(names, tmp_path, "tests.conformance._torch_distributed_broken", hung_after=15.0)
    assert outcome.passed == ["test_get_rank", "test_destroy_group"]
    assert outcome.skipped == {"test_all_gather_cuda": "Only Nccl supports CUDA all gather"}
    assert list(outcome.failed) == list(FOUND_BY)
    for name, error in outcome.failed.items():
        assert re.search(FOUND_BY[name], error.summary), f"{name}: {error.summary}"
    assert (outcome.failed["test_gather"].rank, outcome.failed["test_scatter"].rank) == (1, 2)
    assert outcome.lines()[0] == f"2 passed of {len(FOUND_BY) + 2} run, 1 skipped"


def check_that_ours_was_called(outcome: Outcome) -> None:
    """Every test that passed did so on functions of its topic that were ours."""
    idle = {
        name: topic
        for name in outcome.passed
        if (topic := topic_of(name)) is None or not any(outcome.calls[name][ours] for ours in TOPICS[topic][1])
    }
    assert idle == {}
