"""Which failure is the root cause, how it reads, and what other launchers' environments mean."""

from __future__ import annotations

import itertools
import os
import signal
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from modelexport.distributed import environment
from modelexport.distributed.launch import MultiprocessConfig, external_config
from modelexport.distributed.supervision import failures
from modelexport.errors import GatherError, UsageError

# --- root causes -----------------------------------------------------------------------------------


def error_from(*chain: BaseException, explicit: bool = False) -> BaseException:
    """The last error, raised while the ones before it were being handled."""
    for former, later in itertools.pairwise(chain):
        later.__context__ = former
        if explicit:
            later.__cause__ = former
    return chain[-1]


CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:5120"
TIMED_OUT = "Timed out waiting 1800000ms for recv operation to complete"


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (ValueError("shape (3, 2)"), failures.OWN),
        (ValueError("timed out of range"), failures.OWN),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), failures.OWN),
        (RuntimeError(CLOSED), failures.ECHO),
        (RuntimeError(TIMED_OUT), failures.ECHO),
        (dist.DistBackendError("NCCL communicator was aborted: remote process exited"), failures.ECHO),
        (dist.DistNetworkError("The server socket has failed to listen: address in use"), failures.OWN),
        (GatherError("rank 2 timed out"), failures.ECHO),
        (GatherError("no space left in shared memory"), failures.OWN),
        (ConnectionResetError(104, "reset"), failures.ECHO),
        (error_from(RuntimeError(CLOSED), KeyError("state"), explicit=True), failures.ECHO),
        (error_from(RuntimeError(CLOSED), KeyError("state")), failures.ECHO),
        (error_from(ValueError("real"), RuntimeError(CLOSED)), failures.UNCLEAR),
    ],
)
def test_which_errors_are_echoes(error: BaseException, level: int) -> None:
    assert failures.level_of(error) == level


def test_a_connection_that_breaks_by_itself_is_said_in_a_sentence() -> None:
    place = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:339]"
    message = failures.exception_message(RuntimeError(f"{place} writev [127.0.0.1]:53393: No route to host"))
    assert message["summary"] == "the connection to another rank (127.0.0.1:53393) broke: No route to host"
    assert (message["user_error"], message["level"]) == (True, failures.OWN)
    for echo in (CLOSED, f"{place} Read error [127.0.0.1]:7081: Connection reset by peer. This is typically"):
        message = failures.exception_message(RuntimeError(echo))
        assert message["summary"] == f"RuntimeError: {echo}"
        assert (message["user_error"], message["level"]) == (False, failures.ECHO)


def test_an_error_may_say_that_it_is_an_echo() -> None:
    error = ValueError("rank 3 is gone")
    error.peer_failure = True  # type: ignore[attr-defined]
    assert failures.level_of(error) == failures.ECHO
    own = RuntimeError("timed out")
    own.peer_failure = False  # type: ignore[attr-defined]
    assert failures.level_of(own) == failures.OWN


@given(st.permutations(range(5)))
def test_the_root_cause_does_not_depend_on_the_order_of_arrival(order: list[int]) -> None:
    base = failures.Failure(0, 1.0, failures.ECHO, "", "closed")
    known = [
        base,
        replace(base, rank=1, time=2.0, level=failures.UNCLEAR),
        replace(base, rank=2, time=3.0, level=failures.OWN),
        replace(base, rank=3, time=2.5, level=failures.OWN),
        replace(base, rank=4, time=0.5, level=failures.ECHO),
    ]
    assert failures.root_cause([known[i] for i in order]).rank == 3


@pytest.mark.parametrize(
    ("exitcode", "was_up", "was_done", "words"),
    [
        (-signal.SIGKILL, True, False, ["SIGKILL", "ran out of memory", "12,346 MB"]),
        (-signal.SIGBUS, True, False, ["killed by SIGBUS"]),
        (-63, True, False, ["killed by signal 63"]),
        (0, True, False, ["exit status 0", "without having finished"]),
        (1, False, False, ["exit status 1 before it had started", "if __name__ == '__main__':"]),
        (7, True, True, ["exit status 7 after its work was done"]),
    ],
)
def test_how_an_end_reads(exitcode: int, was_up: bool, was_done: bool, words: list[str]) -> None:
    text = failures.describe_exit(exitcode, 12_345_678_901, was_up=was_up, was_done=was_done)
    for word in words:
        assert word in text


# --- other launchers -------------------------------------------------------------------------------


def set_environment(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name in os.environ:
        if name.startswith(("SLURM", "OMPI", "PMI", "MPI", "MASTER")) or name.endswith(("RANK", "WORLD_SIZE")):
            monkeypatch.delenv(name)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_no_other_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch)
    assert external_config() is None
    # A batch script of SLURM is one process, though it carries a rank.
    set_environment(monkeypatch, SLURM_PROCID="0", SLURM_NTASKS="4", SLURM_LOCALID="0", SLURM_JOB_ID="7")
    assert external_config() is None
    set_environment(monkeypatch, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    assert external_config() is None


def test_torchrun_and_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    address = {"MASTER_ADDR": "node7", "MASTER_PORT": "4321"}
    set_environment(monkeypatch, RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4", **address)
    found = external_config(MultiprocessConfig(model_parallelism=4, timeout=60.0))
    assert found is not None
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == (5, 1, 8, 4)
    assert (found.master_addr, found.master_port, found.model_parallelism) == ("node7", 4321, 4)
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    mpi = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(names, "3412", strict=True)}
    set_environment(monkeypatch, **mpi)
    with pytest.raises(UsageError, match="set MASTER_ADDR and MASTER_PORT"):
        external_config()
    set_environment(monkeypatch, **mpi, **address)
    found = external_config()
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 4, 1, 2)


def test_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {
        "SLURM_PROCID": "4",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "2",
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
        "SLURM_STEP_NODELIST": "gpu[03-04,9]",
        "SLURM_JOB_ID": "123456",
        "SLURM_STEP_ID": "0",
    }
    set_environment(monkeypatch, **step)
    found = external_config()
    assert found is not None
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == (4, 0, 5, 1)
    assert found.master_addr == "gpu03"
    assert 12000 <= found.master_port < 32000


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("a,b", "a"),
        ("node[03-05,9],other", "node03"),
        ("n[7,9]", "n7"),
        ("r[1-2]-ib", "r1-ib"),
    ],
)
def test_first_slurm_host(nodes: str, first: str) -> None:
    assert environment.first_slurm_host(nodes) == first


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(environment, "cores", lambda: 12)
    try:
        for asked, ranks, expected in ((None, 4, 3), (None, 16, 1), ("2", 4, 2), ("2,1", 4, 2)):
            monkeypatch.delenv("OMP_NUM_THREADS")
            if asked is not None:
                monkeypatch.setenv("OMP_NUM_THREADS", asked)
            environment.share_cores(ranks)
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_cores() -> None:
    assert 1 <= environment.cores() <= (os.cpu_count() or 1)
