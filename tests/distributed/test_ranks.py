"""The rank helpers: exact values, errors that reach every rank, order, and life without a process group."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from modelexport.distributed import ranks
from modelexport.distributed.rendezvous import agreement
from modelexport.distributed.transport import mailbox
from modelexport.errors import GatherError, RankFailedError, UsageError
from tests.distributed import _ranks_failures as failures
from tests.distributed import _ranks_programs as programs
from tests.distributed import _ranks_targets as targets
from tests.distributed._gather_targets import run_ranks
from tests.distributed._launch_helpers import ROOT, failing, launch
from tests.helpers.marks import few

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("world_size", few([1, 2, 4], 1, 4))
def test_values_come_back_exactly_and_order_is_kept(world_size: int) -> None:
    events = launch(targets.works, world_size)
    assert sorted(event["rank"] for _, event in events) == list(range(world_size))


def test_without_a_process_group() -> None:
    assert not dist.is_initialized()
    targets.everything_once()
    ranks.barrier()
    assert not dist.is_initialized()


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request: pytest.FixtureRequest) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """For each kind of failure: what it is, and the error on each rank."""
    events = launch(failures.fails, request.param)
    table: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for rank, event in sorted(events, key=lambda item: item[0]):
        table.setdefault((event["kind"], event["name"], event["culprit"]), []).append({**event, "on": rank})
    assert {len(errors) for errors in table.values()} == {request.param}
    return [
        ({"kind": kind, "name": name, "culprit": culprit}, errors) for (kind, name, culprit), errors in table.items()
    ]


def test_a_failure_reaches_every_rank(outcomes: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> None:
    causes = {"all": "ValueError", "unfit": "TypeError", "not callable": "TypeError", "phase": "CheckpointError"}
    for case, errors in outcomes:
        if case["kind"] != "failure":
            continue
        name = case["name"]
        culprit = 0 if name in failures.ALWAYS_RANK_0 else case["culprit"]
        raised = [error for error in errors if error["type"] == "RankFailedError"]
        if name in ("exit", "interrupt"):  # these stay what they are on their own rank
            (own,) = [error for error in errors if error["on"] == culprit]
            assert own["type"] == {"exit": "SystemExit", "interrupt": "KeyboardInterrupt"}[name]
            assert len(raised) == len(errors) - 1
        else:
            assert len(raised) == len(errors), (case, errors)
            if name in causes:
                assert errors[culprit]["cause"] == causes[name]
        assert {error["rank"] for error in raised} == {culprit}, (case, errors)
        assert len({error["text"] for error in raised}) == 1, (case, errors)
        assert [error["of_peer"] for error in raised] == [error["on"] != culprit for error in raised]


def test_what_the_error_of_a_failure_says(outcomes: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> None:
    def error_of(name: str) -> dict[str, Any]:
        return next(errors[0] for case, errors in outcomes if case["name"] == name and case["culprit"] == last)

    last = len(outcomes[0][1]) - 1
    text = error_of("gather")["text"]
    assert text.startswith(
        f"rank {last} failed while running <lambda> for gather_from_all_ranks(rank=0): ValueError: bad"
    )
    assert "_ranks_failures.py" in text  # the rank's traceback
    more = f"(and {last} more {'rank' if last == 1 else 'ranks'} failed)"
    assert f"ValueError: bad 0 {more}" in error_of("all")["text"]
    phase = error_of("phase")
    assert phase["text"] == f"rank {last} failed while quantising layer 3, in reduce_and_broadcast(): it is damaged"
    assert (phase["user_error"], phase["exit_status"]) == (True, 1)
    assert "but a config cannot carry builtins.object at 'a'" in error_of("unfit")["text"]
    assert "while running the body of zero_first()" in error_of("zero_first main")["text"]
    assert "while running a block of zero_only: ValueError: in the block" in error_of("zero_only block")["text"]
    for name in ("compute", "fn2", "zero_only", "zero_first"):
        assert "where the other ranks do not call it" in error_of(f"inside {name}")["text"]


def test_misuse_is_said_on_every_rank(outcomes: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> None:
    world = len(outcomes[0][1])
    size = f"world_size is 7, but the process group has {world}; leave it out, or start 7 ranks"
    texts = {
        "world_size": size,
        "world_size of one": size,
        "rank": f"rank is -1, but there are {world} ranks; name one of 0 to {world - 1}",
        "timeout": "timeout must be a positive number of seconds, got 0",
        "function": "is_main is a function; call it",
        "helpers": f"rank {world - 1} in gather_from_all_ranks(rank=0); every rank must make the same calls",
        "arguments": f"rank {world - 1} in compute_and_broadcast(rank=1); every rank must make the same calls",
    }
    for case, errors in outcomes:
        if case["kind"] == "misuse" and case["culprit"] == world - 1:
            assert {error["type"] for error in errors} == {"UsageError"}, (case, errors)
            assert len({error["text"] for error in errors}) == 1, (case, errors)
            assert texts[case["name"]] in errors[0]["text"]


def test_a_rank_that_does_not_come_is_named(outcomes: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> None:
    late = [(case, errors) for case, errors in outcomes if case["kind"] == "late"]
    assert len(late) == 2
    for case, errors in late:
        came = [rank for rank in range(len(errors)) if rank != case["culprit"]]
        assert {error["type"] for error in errors} == {"LostPeerError"}
        assert all(error["of_peer"] and error["blamed"] == [case["culprit"]] for error in errors)
        assert len({error["text"] for error in errors}) == 1
        assert f"waited 1 s in barrier(); came: {came}; missing: [{case['culprit']}]" in errors[0]["text"]


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_the_launcher_names_the_rank_that_fails_in_a_helper(how: str) -> None:
    error, _ = failing(failures.dies, 4, how)
    assert error.rank == 3
    assert "running work for gather_from_all_ranks(rank=0)" in str(error)
    assert ("ZeroDivisionError: by this rank" if how == "raise" else "SIGKILL") in str(error)


def test_under_torch_distributed_alone(tmp_path: Path) -> None:
    assert run_ranks(failures.plain, 3, tmp_path / "ranks") == [True] * 3


def test_a_rank_that_died_is_named_at_the_time_out(tmp_path: Path) -> None:
    first, second, dead = run_ranks(failures.dies_by_itself, 3, tmp_path / "ranks", alive=False)
    assert dead is None
    assert first["type"] == second["type"] == "LostPeerError"
    assert "missing: [2]" in first["text"]
    assert first["text"] == second["text"]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_the_rank_that_hosts_the_store_may_leave_at_once(tmp_path: Path) -> None:
    assert run_ranks(failures.host_leaves_first, 3, tmp_path / "ranks", _free_port()) == [9 << 20] * 3
    errors = run_ranks(failures.host_fails_first, 3, tmp_path / "again", _free_port())
    assert {error["rank"] for error in errors} == {0}


def test_a_store_that_goes_is_said(tmp_path: Path) -> None:
    _, error = run_ranks(failures.store_dies, 2, tmp_path / "ranks", _free_port(), alive=False)
    assert error["type"] == "StoreGoneError"
    assert "its host (rank 0, usually) has ended" in error["text"]


def test_groups_made_anew(tmp_path: Path) -> None:
    assert run_ranks(failures.groups_come_and_go, 2, tmp_path / "ranks", str(tmp_path)) == [[0, 1, 2]] * 2


def test_one_thread_at_a_time(tmp_path: Path) -> None:
    (text,), other = run_ranks(failures.threads_are_told_apart, 2, tmp_path / "ranks")
    assert "barrier() was called while another thread is in such a call" in text
    assert other == []


def _group_over(store: Any, world: int) -> list[Any]:
    """What torch gives each rank of a new process group as its store."""
    return [dist.PrefixStore("default_pg", store) for _ in range(world)]


@pytest.mark.parametrize("world", few([2, 3], 3))
@pytest.mark.parametrize("seed", range(4))
def test_random_programs_stay_in_step(world: int, seed: int) -> None:
    steps = programs.random_steps(seed, world, 40)
    store = dist.HashStore()
    with programs.ranks_in_threads(_group_over(store, world)) as run:
        by_rank = run(lambda rank: programs.perform(steps, rank))
        for number, (step, (kind, wanted)) in enumerate(zip(steps, programs.expected(steps, world), strict=True)):
            got = [results[number] for results in by_rank]
            if kind == "values":
                assert got == wanted, (number, step)
            else:
                assert all(value == got[0] for value in got), (number, step, got)
                assert got[0]["rank"] in wanted, (number, step, got)
        run(lambda rank: [_any_outcome(ranks.barrier) for _ in range(2)])
        assert store.num_keys() == world  # one each, from joining


def _any_outcome(helper: Callable[[], None]) -> None:
    with contextlib.suppress(RankFailedError):  # of the program's last step
        helper()


def test_a_group_over_the_store_of_a_former_one_reads_nothing_of_that() -> None:
    store = dist.HashStore()
    for attempt in range(3):
        with programs.ranks_in_threads(_group_over(store, 2)) as run:
            assert run(lambda rank, attempt=attempt: ranks.compute_and_broadcast(lambda: attempt)) == [attempt] * 2
            run(lambda rank: ranks.gather_from_all_ranks(lambda: 1 // 0))  # leaves its outcome for those who come late
            assert store.num_keys() > 2


def test_a_rank_that_fails_after_the_others_have_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a value that it cannot read; the others hear of that in their next helper."""

    def decode(data: bytes) -> Any:
        if programs.my_rank() == 1:
            raise GatherError("no such class here")
        return mailbox.decode(data)

    monkeypatch.setattr(agreement, "decode", decode)
    with programs.ranks_in_threads(_group_over(dist.HashStore(), 3)) as run:
        one, broken, other = run(lambda rank: ranks.compute_and_broadcast(lambda: 5))
        assert one == other == 5
        assert isinstance(broken, GatherError)
        errors = run(lambda rank: ranks.barrier())
        assert {error.rank for error in errors} == {1}
        assert "no such class here" in str(errors[0])
        assert run(lambda rank: ranks.barrier()) == [None] * 3


def test_a_store_that_cannot_delete_is_left_alone() -> None:
    class Undeletable:
        def __init__(self, store: Any) -> None:
            self._store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        def delete_key(self, key: str) -> bool:
            raise RuntimeError("deleteKey is not implemented")

    stores = [Undeletable(store) for store in _group_over(dist.HashStore(), 3)]
    with programs.ranks_in_threads(stores) as run:
        began = time.monotonic()
        got = run(lambda rank: [ranks.reduce_and_broadcast(lambda: rank, sum) for _ in range(10)])
        assert got == [[3] * 10] * 3
        assert time.monotonic() - began < 40  # rank 0 does not wait for deletions that never come


def test_errors_of_a_process_that_is_alone() -> None:
    with pytest.raises(
        RankFailedError, match=r"rank 0 failed while running <lambda> for compute.*: ZeroDivision"
    ) as it:
        ranks.compute_and_broadcast(lambda: 1 // 0)
    assert isinstance(it.value.__cause__, ZeroDivisionError)
    with pytest.raises(RankFailedError, match=r"cannot carry builtins\.set"):
        ranks.gather_from_all_ranks(lambda: {1})
    with pytest.raises(RankFailedError, match="ValueError: in the body"), ranks.zero_first(True):
        raise ValueError("in the body")
    with pytest.raises(ValueError, match="in another body"), ranks.zero_first(False):
        raise ValueError("in another body")
    with pytest.raises(KeyError), ranks.zero_only():
        raise KeyError(1)
    ranks.barrier()  # alone, nobody has to be told
    with pytest.raises(KeyboardInterrupt), ranks.zero_first(True):
        raise KeyboardInterrupt
    with pytest.raises(UsageError, match="world_size is 2, but this process is alone, as 1; leave it out, or start 2"):
        ranks.gather_scalar_from_all_ranks(int, 2)
    with pytest.raises(UsageError, match="rank is 1, but there are 1 ranks"):
        ranks.compute_and_broadcast(int, 1)


def test_what_zero_only_cannot_skip() -> None:
    async def coroutine() -> None: ...

    def generator() -> Any:
        yield 1

    for func in (coroutine, generator, classmethod(generator), 3):
        with pytest.raises(TypeError, match="cannot skip"):
            ranks.zero_only(func)  # type: ignore[call-overload]


def test_predicates_and_lone_helpers_import_no_torch() -> None:
    code = """
import sys
from modelexport.distributed import ranks
from modelexport.distributed.rendezvous import agreement
from modelexport.distributed.transport import mailbox
assert ranks.is_main_process() and not ranks.is_distributed()
ranks.barrier()
with ranks.zero_first(True), ranks.zero_only() as is_main:
    assert is_main
assert ranks.zero_only(lambda: 5)() == 5
assert "torch" not in sys.modules
import torch
assert ranks.is_main_process() and not ranks.is_distributed()
assert not torch.distributed.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
