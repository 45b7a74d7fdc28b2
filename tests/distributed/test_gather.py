"""Gathering configs and tensors at the first rank, over shared memory and through a workspace."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from modelexport.distributed import gather
from modelexport.errors import GatherError
from tests.distributed import _gather_failures as failures
from tests.distributed import _gather_targets as targets
from tests.distributed._gather_targets import run_ranks

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["shm", "nfs"])
def workspace(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    """None for shared memory, else a directory; nothing may be left in it, or in /dev/shm."""
    before = _shm_names()
    path = tmp_path / "workspace"
    yield str(path) if request.param == "nfs" else None
    assert _shm_names() <= before
    if request.param == "nfs" and "dies" not in request.node.name:
        assert list(path.rglob("*")) == []


def _shm_names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "modelexport" in name}


def test_everything_arrives_with_the_same_bytes(workspace: str | None, tmp_path: Path) -> None:
    results = run_ranks(targets.gather_everything, 3, tmp_path / "ranks", 3, workspace)
    assert results[0] == [targets.digest(targets.everything(rank)) for rank in range(3)]


def test_none_is_left_out_whoever_passes_it(workspace: str | None, tmp_path: Path) -> None:
    results = run_ranks(targets.gather_with_nones, 3, tmp_path / "ranks", workspace)
    assert results[2] == [[{"rank": 2}, {"rank": 1}], [{"rank": 0}, {"rank": 1}], []]
    assert results[0] == results[1] == [[], [], []]


def test_gathers_nest_and_interleave(workspace: str | None, tmp_path: Path) -> None:
    assert run_ranks(targets.gather_nested, 2, tmp_path / "ranks", 2, workspace, 7) == [True, True]


def test_a_kept_tensor_keeps_its_bytes_and_other_buffers_are_reused(workspace: str | None, tmp_path: Path) -> None:
    first, second = run_ranks(targets.gather_and_keep, 2, tmp_path / "ranks", workspace)
    for sizes in (first["reserved"], second["reserved"]):
        assert sizes[-1] == sizes[4], sizes
    assert second["reserved"][-1] <= 6 << 20


def test_a_kept_tensor_outlives_its_senders_connections(tmp_path: Path) -> None:
    assert run_ranks(targets.keep_while_the_sender_closes, 2, tmp_path / "ranks") == [True, True]


def test_a_kept_buffer_is_reused_once_it_is_let_go(tmp_path: Path) -> None:
    results = run_ranks(targets.gather_after_letting_go, 2, tmp_path / "ranks")
    assert results[1]["used"][1] == 2
    assert results[1]["used"][-1] == 0


def test_tensors_in_the_arena_are_sent_from_where_they_lie(tmp_path: Path) -> None:
    for result in run_ranks(targets.addresses, 2, tmp_path / "ranks"):
        assert result["same"]
        assert result["extra"] < 8192  # the description, no tensor


def test_two_jobs_at_once_do_not_meet(workspace: str | None, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(run_ranks, targets.gather_everything, 2, tmp_path / f"job{i}", 2, workspace) for i in range(2)
        ]
        expected = [targets.digest(targets.everything(rank)) for rank in range(2)]
        assert [job.result()[0] for job in jobs] == [expected, expected]


def test_threads_with_groups_of_their_own(tmp_path: Path) -> None:
    assert run_ranks(targets.two_groups_in_threads, 3, tmp_path / "ranks") == [True] * 3


def test_disjoint_sets_of_ranks_and_ranks_outside(tmp_path: Path) -> None:
    assert run_ranks(targets.disjoint_subsets, 4, tmp_path / "ranks") == [[0, 1], [], [], [3, 2]]


def test_more_tensors_than_a_message_holds(tmp_path: Path) -> None:
    assert run_ranks(targets.many_tensors, 2, tmp_path / "ranks") == [True, True]


def test_senders_need_not_stay(workspace: str | None, tmp_path: Path) -> None:
    results = run_ranks(targets.leave_early, 3, tmp_path / "ranks", workspace)
    assert results[0] == [10, 20, 11, 21, 12, 22]


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_rank_that_dies_is_named(workspace: str | None, tmp_path: Path, how: str) -> None:
    first, second, dead = run_ranks(failures.die_in_gather, 3, tmp_path / "ranks", how, workspace, alive=False)
    assert dead is None
    assert "rank 2" in first["text"]
    if workspace is None:
        assert "closed its connection before it sent payload 1" in first["text"]
    else:
        assert "ranks [2] have ended or closed the workspace" in first["text"]
        assert "rank 2: missing" in first["text"]
        assert "last heartbeat" in first["text"]
    assert first["seconds"] < 10  # of a time-out of 20
    assert second["text"] == "nothing seen"


def test_the_first_rank_dies(tmp_path: Path) -> None:
    results = run_ranks(failures.first_dies, 2, tmp_path / "ranks", alive=False)
    assert "rank 0" in results[1]["text"]
    assert "closed its connection" in results[1]["text"]


def test_a_slow_receiver_is_named_by_a_sender_that_ran_ahead(workspace: str | None, tmp_path: Path) -> None:
    results = run_ranks(failures.slow_receiver, 2, tmp_path / "ranks", workspace)
    assert results[1]["sent"] == 2
    assert "which collects, has not" in results[1]["text"]
    assert "rank 0" in results[1]["text"]


def test_a_late_sender_is_named(workspace: str | None, tmp_path: Path) -> None:
    text = run_ranks(failures.late_sender, 3, tmp_path / "ranks", workspace)[0]["text"]
    assert "arrived: [1]" in text
    assert "rank 2" in text
    assert "missing" in text


def test_a_sender_that_fails_fails_the_first_rank_with_its_reason(workspace: str | None, tmp_path: Path) -> None:
    first, second = run_ranks(failures.cannot_pack, 2, tmp_path / "ranks", workspace)
    assert second["text"].startswith("TypeError: a config cannot carry builtins.object at 'a'")
    assert "rank 1 could not hand over" in first["text"]
    assert "cannot carry builtins.object" in first["text"]
    assert first["seconds"] < 10


def test_ranks_that_never_meet_are_named(tmp_path: Path) -> None:
    results = run_ranks(failures.never_meets, 3, tmp_path / "ranks")
    assert "missing: [2]" in results[0]["text"]


def test_no_room_at_a_sender(tmp_path: Path) -> None:
    first, second = run_ranks(failures.starved, 2, tmp_path / "ranks")
    assert "ulimit -f" in second["text"]
    assert "rank 1 could not hand over" in first["text"]


def test_a_group_made_anew(tmp_path: Path) -> None:
    assert run_ranks(targets.again_after_restart, 2, tmp_path / "ranks", str(tmp_path)) == [True, True]


def test_fallback_without_memfd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "shm"
    directory.mkdir()
    results = run_ranks(_with_files, 2, tmp_path / "ranks", str(directory))
    assert results[0] == [targets.digest(targets.everything(rank)) for rank in range(2)]
    assert list(directory.iterdir()) == []


def _with_files(rank: int, directory: str) -> object:
    os.environ.update(MODELEXPORT_SHM="file", MODELEXPORT_SHM_DIR=directory)
    return targets.gather_everything(rank, 2, None)


def test_without_a_process_group() -> None:
    config = {"a": torch.ones(3)}
    with gather.get_configs_parallel(config, [0], None) as configs:
        assert len(configs) == 1
        assert torch.equal(configs[0]["a"], config["a"])
    with gather.get_tensors_parallel(None, [0]) as tensors:
        assert tensors == []
    gather.connect([0])
    gather.drain()
    with pytest.raises(GatherError, match="no process group"), gather.get_configs_parallel(config, [0, 1], None):
        pass
    with pytest.raises(GatherError, match="different ranks"), gather.get_configs_parallel(config, [1, 1], None):
        pass
    with pytest.raises(TypeError, match="takes a tensor"), gather.get_tensors_parallel({"a": 1}, [0]):
        pass


def test_settings_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="positive"):
        gather.set_timeout(0)
    monkeypatch.setenv("MODELEXPORT_GATHER_BUFFERS", "none")
    with pytest.raises(GatherError, match="'none'"):
        gather._buffers()
    monkeypatch.setenv("MODELEXPORT_GATHER_TIMEOUT", "12.5")
    assert gather._seconds() == 12.5
    gather.set_timeout(3)
    try:
        assert gather._seconds() == 3
    finally:
        gather.set_timeout(None)


def test_forked_child_starts_without_connections() -> None:
    deadline = time.monotonic() + 20
    pid = os.fork()
    if pid == 0:
        os._exit(0 if not gather._channels else 1)
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert status == 0
            return
        time.sleep(0.01)
    raise AssertionError("the child hangs")


def test_a_rank_that_leaves_in_good_order_is_named_too(workspace: str | None, tmp_path: Path) -> None:
    first, second = run_ranks(failures.leave_without_sending, 2, tmp_path / "ranks", workspace)
    assert "rank 1" in first["text"]
    assert "closed" in first["text"]
    assert first["of_peer"] is True
    assert first["seconds"] < 10  # of a time-out of 20
    assert second["text"] == ""


def test_ranks_may_gather_again_after_a_failure(workspace: str | None, tmp_path: Path) -> None:
    first, second = run_ranks(failures.fail_and_go_on, 2, tmp_path / "ranks", workspace)
    assert first["errors"] == ["TypeError"]
    assert second["errors"] == ["LostPeerError"]


def test_ranks_meet_while_another_thread_reclaims_memory(tmp_path: Path) -> None:
    """The answer to a hello may be read by whichever thread looks for memory that has come free."""
    results = run_ranks(targets.meet_while_memory_is_reclaimed, 3, tmp_path)
    expected = [[3 if rank == first else 0 for first in range(3) for _ in range(10)] for rank in range(3)]
    assert results == expected
