"""Collectives: the argument check, groups, messages, errors, and life without a process group."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from modelexport.distributed import collectives as c
from modelexport.distributed.collectives import argument_check, collective_mode, operations, streams
from modelexport.distributed.collectives.groups import Members
from modelexport.distributed.launch import all_to_all
from modelexport.errors import UsageError
from tests.distributed import _collectives_rules as targets
from tests.distributed._launch_helpers import launch

pytestmark = pytest.mark.timeout(90)


def test_a_mistake_is_the_same_error_on_every_rank_and_the_group_lives_on() -> None:
    events = launch(targets.mistakes, 3)
    first, *others = [event["errors"] for _, event in events]
    assert len(first) == len(targets.MISTAKES)
    assert others == [first, first]


def test_the_check_by_environment() -> None:
    events = launch(targets.checked_by_environment, 2)
    text = "all_reduce: rank 1 brings shape (2,) and rank 0 brings (1,); every rank of the group must bring the same"
    assert [event["error"] for _, event in events] == [text] * 2


@pytest.mark.parametrize(("value", "on"), [(None, False), ("", False), ("0", False), ("1", True), ("yes", True)])
def test_what_turns_the_check_on(value: str | None, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODELEXPORT_DEBUG", raising=False)
    if value is not None:
        monkeypatch.setenv("MODELEXPORT_DEBUG", value)
    assert argument_check.checking(None) == on
    assert argument_check.checking(True)
    assert not argument_check.checking(False)


def test_groups() -> None:
    events = launch(targets.groups, 4, model_parallelism=2)
    assert sorted(event["rank"] for _, event in events) == [0, 1, 2, 3]


@pytest.mark.parametrize("world_size", [2, 4])
def test_messages(world_size: int) -> None:
    launch(targets.messages, world_size)


def test_a_request_that_is_polled_raises_what_made_it_fail() -> None:
    events = launch(targets.nothing_comes, 2)
    assert len(events) == 2


def test_errors_of_arguments() -> None:
    launch(targets.argument_errors, 2)


def test_other_beginnings(tmp_path: Path) -> None:
    events = launch(targets.other_beginnings, 2, str(tmp_path))
    assert sorted(event["rank"] for _, event in events) == [0, 1]


# --- in this process -------------------------------------------------------------------------------


def test_without_a_process_group_this_is_rank_0_of_1() -> None:
    assert c.is_available()
    assert not c.is_initialized()
    assert (c.get_rank(), c.get_world_size()) == (0, 1)
    group = c.new_group()
    assert group.ranks == c.new_group([0]).ranks == (0,)
    for handle in (c.group.WORLD, None, group):
        value = torch.arange(3)
        for call in (
            lambda t, g: c.broadcast(t, 0, g),
            lambda t, g: c.all_reduce(t, group=g),
            lambda t, g: c.reduce(t, 0, c.reduce_op.MIN, g),
            lambda t, g: c.broadcast_multigpu([t], 0, g),
            lambda t, g: c.all_reduce_multigpu([t], group=g),
            lambda t, g: c.reduce_multigpu([t], 0, group=g),
        ):
            assert call(value, handle) is None
            assert value.tolist() == [0, 1, 2]
        room = torch.zeros(3, dtype=torch.int64)
        for call in (
            lambda t, r, g: c.all_gather([r], t, g),
            lambda t, r, g: c.gather(t, gather_list=[r], group=g),
            lambda t, r, g: c.scatter(r, scatter_list=[t], group=g),
            lambda t, r, g: c.all_to_all([r], [t], g),
            lambda t, r, g: c.all_to_all_single(r, t, group=g),
            lambda t, r, g: c.all_gather_multigpu([[r]], [t], g),
        ):
            call(value, room.zero_(), handle)
            assert room.tolist() == [0, 1, 2]
        c.barrier(handle)
    lists = [torch.tensor([2]), torch.tensor([3])]
    c.all_reduce_multigpu(lists, c.reduce_op.PRODUCT)
    assert [int(each) for each in lists] == [6, 6]
    request = c.all_reduce(value, async_op=True)
    assert isinstance(request, c._DistributedRequest)
    assert request.is_completed()
    request.wait()
    for call in (c.send, c.isend):
        with pytest.raises(UsageError, match="there is no process group, so this rank has nobody to send to"):
            call(value, 0)
    for call in (c.recv, c.irecv):
        with pytest.raises(UsageError, match="nobody to receive from"):
            call(value)
    with pytest.raises(UsageError, match=r"src=1 is not in the group of ranks \[0\]"):
        c.broadcast(value, 1)
    with pytest.raises(UsageError, match="rank 1 does not exist; there are ranks 0 to 0"):
        c.new_group([0, 1])
    with pytest.raises(RuntimeError, match=r"^gather_list is a required argument in gather destination$"):
        c.gather(value)
    for call in (c.gather, c.scatter):
        with pytest.raises(RuntimeError, match=r"^got unexpected kwargs$"):
            call(value, destination=0)
    with pytest.raises(RuntimeError, match=r"^torch\.distributed needs to be initialized first$"):
        c._register_stream(None)
    c._clear_group_cache()
    c.destroy_process_group()
    assert not dist.is_initialized()


def test_wrong_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match=r"^got unexpected keyword arguments: ranks,size$"):
        c.init_process_group("gloo", ranks=1, size=2)
    with pytest.raises(RuntimeError, match=r"^Invalid distributed backend name: carrier pigeon$"):
        c.init_process_group("carrier pigeon")
    for name in ("mpi", "nccl"):
        if not dist.is_backend_available(name):
            with pytest.raises(RuntimeError, match=f"has no {name}; use 'gloo'"):
                c.init_process_group(name)
    monkeypatch.setattr(dist, "is_available", lambda: False)
    assert not c.is_available()
    assert not c.is_initialized()
    assert c.get_world_size() == 1
    with pytest.raises(RuntimeError, match=r"^PyTorch built without distributed support$"):
        c.init_process_group("gloo")


@pytest.mark.parametrize(
    ("config", "device", "expected"),
    [
        ("cpu:gloo,cuda:gloo", "cpu", "cpu"),
        ("cpu:gloo,cuda:gloo", "cuda:1", "cpu"),
        ("cuda:nccl", "cpu", "cuda:3"),
        ("cuda:nccl", "cuda:1", "cuda:1"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda:1", "cuda:1"),
        ("cpu:gloo,cuda:nccl", "xpu:0", "cpu"),
        ("cpu:mpi,cuda:mpi", "cuda:1", "cuda:1"),
    ],
)
def test_tensors_go_to_a_device_that_the_back_end_serves(
    config: str, device: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    team = Members((0, 1), 0, object())  # type: ignore[arg-type]
    assert team.carrier(torch.device(device)) == torch.device(expected)
    assert Members((0,), 0, None).carrier(torch.device(device)) == torch.device(device)


def test_streams_are_ordered_with_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, str]] = []

    class Stream:
        device = None

        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            order.append((self.name, other.name))

    current = Stream("current")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(operations, "initialized", lambda: True)
    with pytest.raises(UsageError, match=r"7 is not a torch\.cuda\.Stream"):
        c._register_stream(7)
    side = Stream("side")
    try:
        c._register_stream(side)
        c._register_stream(side)
        c.all_reduce(torch.ones(1))
        assert order == [("current", "side"), ("side", "current")]
    finally:
        streams.forget()


class Recorder:
    """A driver that keeps what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple, dict]] = []

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append((name, args, kwargs))
        return len(self.calls)


def test_a_driver_gets_every_call_as_it_was_made() -> None:
    driver = Recorder()
    local = {"is_available", "is_initialized", "init_process_group", "init_master_worker"}
    functions = {name: getattr(c, name) for name in c.__all__ if inspect.isfunction(getattr(c, name))}
    assert len(functions) == 27
    assert collective_mode.set_driver(driver) is None
    try:
        for name in functions.keys() - local:
            sentinel = object()
            assert functions[name](sentinel, group=c.group.WORLD) == len(driver.calls), name
            assert driver.calls[-1] == (name, (sentinel,), {"group": c.group.WORLD})
        assert not c.is_initialized()
        with pytest.raises(RuntimeError, match=r"^trying to initialize torch\.distributed twice!$"):
            c.init_process_group("gloo")
    finally:
        assert collective_mode.set_driver(None) is driver
    assert c.get_rank() == 0


def test_launchs_all_to_all_takes_a_group_of_ours() -> None:
    source = torch.arange(3.0, requires_grad=True)
    assert all_to_all(source, c.new_group()).tolist() == [0.0, 1.0, 2.0]
