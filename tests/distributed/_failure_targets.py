"""What the rank processes of the failure matrix run: layers are handed to the first rank, and one rank goes wrong."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from modelexport.distributed import gather, workspace
from modelexport.distributed.launch import phase_scope, report
from modelexport.distributed.transport import memory, payload, whole_files
from modelexport.distributed.transport.tree import register_config
from modelexport.errors import GatherError

ORDER = {2: [0, 1], 4: [1, 2, 0, 3]}  # of the gather: where there are four, the first rank is not rank 0
SENDER = {2: 1, 4: 2}  # the culprit where it is a sender: neither rank 0 nor, of four, the last
STEPS = 3
FATAL = 1  # the step at which it happens
TENSORS = 200
MEGABYTE = 1 << 20


def hand_over(fault: str, culprit: int, path: str | None, seconds: float, culprits_path: str | None = None) -> None:
    """Every rank hands its layers to the first one; ``culprit`` commits ``fault``.

    Nothing here says who waits for whom: that a rank which waits is not blamed is up to the package.

    Args:
        path: the workspace, None for shared memory.
        seconds: a gather's time-out.
        culprits_path: where the culprit takes the workspace to be.
    """
    rank, ranks = dist.get_rank(), ORDER[dist.get_world_size()]
    if rank == culprit and culprits_path is not None:
        path = culprits_path
    gather.set_timeout(seconds)
    os.environ["MODELEXPORT_GATHER_BUFFERS"] = "1" if fault in TIGHT else "4"
    with phase_scope("meeting the other ranks"):
        dist.barrier()
        if rank == culprit:
            report({"at": time.monotonic()})
        gather.connect(ranks, None, path)
        dist.barrier()
    for step in range(STEPS):
        fatal = rank == culprit and step == (0 if fault in LIMITS else FATAL)
        with phase_scope(f"making layer {step}"):
            layer = make_layer(rank, step)
            if step <= FATAL:
                dist.barrier()  # after the fatal step only the gather connects the ranks
            if fatal:
                report({"at": time.monotonic()})
                if fault == "returns early":
                    return
                FAULTS.get(fault, lambda: None)()
        with phase_scope(f"handing over layer {step}"):
            if fault in AROUND:
                AROUND[fault](fatal, layer, ranks, path)
            else:
                gather_layer(layer, ranks, path)
    with phase_scope("waiting for the first rank"):
        gather.drain()


def make_layer(rank: int, step: int) -> dict[str, Any]:
    """Many small tensors and one that is large, larger from step to step."""
    layer: dict[str, Any] = {str(i): torch.full((100,), i + step) for i in range(TENSORS)}
    layer["large"] = torch.full(((6 + step) * MEGABYTE,), rank, dtype=torch.uint8)
    return {"rank": rank, "tensors": layer}


def gather_layer(layer: dict[str, Any], ranks: list[int], path: str | None) -> None:
    with gather.get_configs_parallel(layer, ranks, None, path) as layers:
        for rank, found in zip(ranks, layers, strict=False):
            assert found["rank"] == rank
            assert bool((found["tensors"]["large"] == rank).all())


# --- at the fatal step, right before the culprit would hand over its layer -----------------------------------------


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_error() -> None:
    raise KeyError("no such weight")


def keep_busy() -> None:
    for i in itertools.count():
        with phase_scope(f"polishing layer {FATAL}, round {i}"):
            time.sleep(0.05)


def let_them_wait_then_die() -> None:
    """The senders have no room left by then."""
    time.sleep(0.3)
    kill()


def die_half_way() -> None:
    """In the middle of placing the payload's tensors, or of writing them into the workspace."""
    calls = itertools.count()
    allocate, write_parts = memory.Arena.allocate, whole_files._write_parts

    def allocate_or_die(self: memory.Arena, nbytes: int) -> memory.Region:
        if next(calls) == TENSORS // 2:
            kill()
        return allocate(self, nbytes)

    def write_half_and_die(fd: int, parts: Any) -> int:
        write_parts(fd, parts[: TENSORS // 2])
        kill()
        raise AssertionError

    memory.Arena.allocate = allocate_or_die  # type: ignore[method-assign]
    whole_files._write_parts = write_half_and_die


FAULTS: dict[str, Callable[[], object]] = {
    "raises": raise_error,
    "calls sys.exit(0)": lambda: sys.exit(0),
    "calls os._exit(0)": lambda: os._exit(0),
    "is killed": kill,
    "is killed while others wait for room": let_them_wait_then_die,
    "is killed half-way through its tensors": die_half_way,
    "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hangs": lambda: time.sleep(600),
    "is busy elsewhere": keep_busy,
}
TIGHT = ("is killed while others wait for room", "writes more than fits")  # one payload may lie unread


# --- other ways to gather, in which the culprit dies ---------------------------------------------------------------


def in_nested(fatal: bool, layer: dict[str, Any], ranks: list[int], path: str | None) -> None:
    """A gather inside a gather; the culprit has taken part in the outer one."""
    with gather.get_tensors_parallel(torch.tensor([7]), ranks, workspace_path=path) as outer:
        if fatal:
            kill()
        gather_layer(layer, ranks, path)
        assert [int(tensor) for tensor in outer] in ([], [7] * len(ranks))


def in_crossed(fatal: bool, layer: dict[str, Any], ranks: list[int], path: str | None) -> None:
    """Two gathers of the same ranks with different first ranks; the second begins before the first has ended."""
    first = gather.get_tensors_parallel(torch.tensor([7]), ranks, workspace_path=path)
    second = gather.get_configs_parallel(layer, ranks[::-1], None, path)
    first.__enter__()
    if fatal:
        kill()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)


def in_with(fatal: bool, layer: dict[str, Any], ranks: list[int], path: str | None) -> None:
    """While it looks at what it got."""
    with gather.get_configs_parallel(layer, ranks, None, path):
        if fatal:
            kill()


def without_a_codec(fatal: bool, layer: dict[str, Any], ranks: list[int], path: str | None) -> None:
    """The culprit's layer holds what cannot travel."""
    gather_layer({**layer, "hook": object()} if fatal else layer, ranks, path)


def more_than_fits(fatal: bool, layer: dict[str, Any], ranks: list[int], path: str | None) -> None:
    """The culprit's layer is larger than the workspace. The others' lie there by then, and they wait for room."""
    if fatal:
        time.sleep(0.3)
        layer = {**layer, "more": torch.zeros(64 * MEGABYTE, dtype=torch.uint8)}
    gather_layer(layer, ranks, path)


AROUND: dict[str, Callable[[bool, dict[str, Any], list[int], str | None], None]] = {
    "is killed in a nested gather": in_nested,
    "is killed in crossed gathers": in_crossed,
    "is killed inside the with": in_with,
    "passes what cannot travel": without_a_codec,
    "writes more than fits": more_than_fits,
}


# --- before the first gather, when nothing is reserved yet: no memory to be had ------------------------------------


def limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


def limit_address_space() -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limit(resource.RLIMIT_AS, used + 4 * MEGABYTE)


def limit_descriptors() -> None:
    while True:  # leave no gap below the limit
        held = os.dup(0)
        if held == len(os.listdir("/proc/self/fd")) - 2:
            break
    limit(resource.RLIMIT_NOFILE, held + 1)


def use_small_shared_memory() -> None:
    """As where the kernel has no memfd, with the small file system that the test has mounted."""
    os.environ.update(MODELEXPORT_SHM="file", MODELEXPORT_SHM_DIR=os.environ["SMALL_SHARED_MEMORY"])


LIMITS: dict[str, Callable[[], object]] = {
    "has little shared memory": use_small_shared_memory,
    "may make no large file": lambda: limit(resource.RLIMIT_FSIZE, MEGABYTE),
    "may map no more memory": limit_address_space,
    "may open no more files": limit_descriptors,
}


# --- a workspace in disorder: what the culprit writes is not what arrives ------------------------------------------


def spoil(change: Callable[[Path], None]) -> Callable[[], None]:
    """From now on ``change`` happens to each payload between its writing and that of its manifest."""

    def begin() -> None:
        write_whole = workspace.write_whole

        def write_and_spoil(directory: Path, name: str, parts: Any) -> int:
            crc = write_whole(directory, name, parts)
            if name.endswith(".safetensors"):
                change(directory / name)
            return crc

        workspace.write_whole = write_and_spoil

    return begin


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def drop_manifests() -> None:
    workspace.NFSWorkspace._write_manifest = lambda self, manifest: None  # type: ignore[method-assign]


def of_another_run() -> None:
    write = workspace.NFSWorkspace._write_manifest

    def write_in_disguise(self: workspace.NFSWorkspace, manifest: workspace.Manifest) -> None:
        write(self, workspace.Manifest(**{**manifest.__dict__, "run": "0123456789abcdef"}))

    workspace.NFSWorkspace._write_manifest = write_in_disguise  # type: ignore[method-assign]


def refuse_to_write() -> None:
    """Nothing more can be written, not even what would tell the first rank of that."""

    def refuse(directory: Path, name: str, parts: Any) -> int:
        raise GatherError(f"cannot write {name}: Input/output error")

    workspace.write_whole = refuse


DISORDER: dict[str, Callable[[], None]] = {
    "manifest without data": spoil(lambda path: path.unlink()),
    "data without manifest": drop_manifests,
    "truncated data": spoil(lambda path: os.truncate(path, path.stat().st_size - 1000)),
    "a flipped byte": spoil(flip),
    "another run's files": of_another_run,
    "a broken disk": refuse_to_write,
}
FAULTS |= {**LIMITS, **DISORDER}


def come_too_late(rank: int, path: str) -> str:
    """The first rank has failed, and closed the workspace, before the other one looks for it there."""
    text = ""
    if rank == 1:
        dist.barrier()
    try:
        with gather.get_configs_parallel({"hook": None if rank else object()}, [0, 1], None, path):
            pass
    except (TypeError, GatherError) as error:
        text = f"{type(error).__name__}: {error}"
    if rank == 0:
        dist.barrier()
    dist.barrier()
    return text


# --- nothing goes wrong: all that a gather must carry, in all ways at once -----------------------------------------


@register_config
@dataclasses.dataclass
class Weights:
    rank: int
    tensors: dict[str, Any]
    inner: Any = None


def of_every_dtype(rank: int) -> dict[str, torch.Tensor]:
    """Every dtype that torch can copy: dense, strided, broadcast, a slice, 0-dim and empty."""
    found: dict[str, torch.Tensor] = {}
    for dtype in sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str):
        if re.fullmatch(r"torch\.(q.*|u?int[1-7])", str(dtype)):
            continue  # with a scale of their own (a config refuses them by name); without a copy in torch
        data = torch.arange(60 * dtype.itemsize, dtype=torch.uint8).add(rank)
        dense = (data & 1 if dtype is torch.bool else data).view(dtype).view(3, -1)
        views = dense, dense[::2].t(), dense[:1].expand(4, -1), dense[:, 3:], dense[0, 0], dense[:0]
        found.update({f"{dtype}.{i}": view for i, view in enumerate(views)})
    assert len(found) >= 6 * 18
    return found


def everything(rank: int) -> Weights:
    small = {str(i): torch.full((i % 5,), rank + i, dtype=torch.int16) for i in range(1000)}
    plain = {"layers": [rank, None, (1.5, "text")], rank: Weights(rank, {})}
    return Weights(rank, of_every_dtype(rank), inner=[small, plain])


def equal(a: Any, b: Any) -> bool:
    """Equal in type and value; tensors in dtype, shape and every byte."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(payload.as_bytes(a), payload.as_bytes(b))
    if isinstance(a, Weights):
        return equal(vars(a), vars(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def gather_everything(path: str | None) -> None:
    """Through one transport; ends with a kept tensor that is still what it was."""
    rank, ranks = dist.get_rank(), ORDER[dist.get_world_size()]
    place = ranks.index(rank)
    for delay in (place, len(ranks) - place):  # the reader first, then last; it looks around every 0.1 s
        time.sleep(0.15 * delay)
        with gather.get_configs_parallel(everything(rank), ranks, None, path) as configs:
            assert equal(list(configs), [everything(r) for r in ranks] if place == 0 else [])
    kept = None
    for silent in [*ranks, None]:
        value = None if rank == silent else torch.tensor([rank])
        with gather.get_tensors_parallel(value, ranks, workspace_path=path) as tensors:
            assert [int(t) for t in tensors] == ([r for r in ranks if r != silent] if place == 0 else [])
            kept = tensors[-1] if tensors else None
    for depth in range(3):
        AROUND["is killed in a nested gather"](False, make_layer(rank, depth), ranks, path)
        AROUND["is killed in crossed gathers"](False, make_layer(rank, depth), ranks, path)
    gather.drain()
    assert kept is None or kept.tolist() == [ranks[-1]]


def gather_everything_twice(path: str) -> None:
    gather_everything(None)
    gather_everything(path)
    report({"rank": dist.get_rank()})
