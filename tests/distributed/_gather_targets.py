"""What the ranks of the gather tests run, and how they are started. Each target returns something JSON can hold."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import multiprocessing
import os
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from modelexport.distributed import gather
from modelexport.distributed.transport import memory, payload, tree

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
    torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.complex64, torch.complex128, *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []),
]  # fmt: skip


@tree.register_config
@dataclasses.dataclass
class Linear:
    role: str
    shape: tuple[int, ...]
    weight: torch.Tensor | None
    extra: Any = None


def run_ranks(target: Any, world: int, folder: Path, *args: Any, seconds: float = 60, alive: bool = True) -> list[Any]:
    """Run ``target(rank, *args)`` in ``world`` processes of one gloo group; its results by rank.

    A rank that raises gives ``{"error": type, "text": ...}``; one that leaves without a result gives None
    (``alive=False`` allows that).
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "modelexport.distributed.gather"])
    folder.mkdir(parents=True, exist_ok=True)
    processes = [context.Process(target=_main, args=(target, rank, world, str(folder), args)) for rank in range(world)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + seconds
    try:
        for process in processes:
            process.join(max(0.1, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        assert not hung, f"ranks {hung} hang"
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    results = []
    for rank in range(world):
        path = folder / f"result-{rank}.json"
        results.append(json.loads(path.read_text()) if path.exists() else None)
    if alive:
        failed = [result for result in results if result is None or (isinstance(result, dict) and "error" in result)]
        assert not failed, failed
    return results


def _main(target: Any, rank: int, world: int, folder: str, args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        result = target(rank, *args)
    except Exception as error:
        result = {"error": type(error).__name__, "text": str(error), "traceback": traceback.format_exc()}
    Path(folder, f"result-{rank}.json").write_text(json.dumps(result))


def digest(config: Any) -> str:
    """SHA-256 over a config's JSON and its tensors' bytes."""
    text, tensors = tree.split(config)
    total = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        total.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        total.update(bytes(payload.as_bytes(tensors[name]).tolist()))
    return total.hexdigest()


def everything(rank: int) -> dict[Any, Any]:
    """A config of rank ``rank`` with all that may travel; shapes differ between ranks."""
    generator = torch.Generator().manual_seed(rank)
    tensors: list[Any] = []
    for dtype in DTYPES:
        values = torch.randint(0, 2, (rank + 2, 3), generator=generator)
        tensors.append(values.to(torch.float32).to(dtype) if dtype.is_floating_point else values.to(dtype))
    shared = torch.full((5,), rank)
    return {
        "linear": Linear("up", (3, 4), torch.randn(4, 3, generator=generator).t(), extra=[None, True, 1.5]),
        rank: tuple(tensors),
        "zero_dim": torch.tensor(3.25, dtype=torch.bfloat16),
        "empty": torch.empty(0, 7, dtype=torch.float8_e4m3fn),
        "strided": torch.arange(24).view(4, 6)[::2, ::3],
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "broadcast": torch.tensor([rank]).expand(6),
        "twice": [shared, shared],
        "numbers": [float("inf"), -0.0, 2**70, "text \u00e9\ud800"],
        "dtype": torch.int16,
    }


def gather_everything(rank: int, world: int, workspace: str | None) -> list[str] | str:
    with gather.get_configs_parallel(everything(rank), list(range(world)), None, workspace) as configs:
        if rank:
            assert configs == []
            return []
        assert configs[1]["twice"][0] is configs[1]["twice"][1]
        assert isinstance(configs[1]["linear"], Linear)
        return [digest(config) for config in configs]


def gather_with_nones(rank: int, workspace: str | None) -> list[Any]:
    """Rank 0, then rank 2, then everybody passes None, over ranks in an order of their own."""
    seen = []
    for silent in ({0}, {2}, {0, 1, 2}):
        value = None if rank in silent else {"rank": rank}
        with gather.get_configs_parallel(value, [2, 0, 1], None, workspace) as configs:
            seen.append(list(configs))
    return seen


def gather_nested(rank: int, world: int, workspace: str | None, depth: int) -> bool:
    """Gathers inside gathers, deeper than the sender's buffers go, then two that end in the other order."""
    ranks = list(range(world))

    def descend(level: int) -> None:
        if level == depth:
            return
        tensor = torch.full((1000,), rank * 100 + level)
        with gather.get_tensors_parallel(tensor, ranks, workspace_path=workspace) as outer:
            descend(level + 1)
            if rank == 0:
                assert [int(t.unique()) for t in outer] == [r * 100 + level for r in ranks]

    descend(0)
    first = gather.get_tensors_parallel(torch.tensor([rank]), ranks, workspace_path=workspace)
    second = gather.get_tensors_parallel(torch.tensor([rank + 10]), ranks, workspace_path=workspace)
    a, b = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert a == []
    assert [int(t) for t in b] == ([r + 10 for r in ranks] if rank == 0 else [])
    second.__exit__(None, None, None)
    return True


def gather_and_keep(rank: int, workspace: str | None) -> dict[str, Any]:
    """The first rank keeps one tensor of an early gather; later gathers reuse every other buffer."""
    kept = None
    sizes = []
    for step in range(12):
        mine = memory.shared_empty((1 << 20,), torch.uint8)
        mine.fill_(step)
        small = torch.full((1 << 16,), step, dtype=torch.uint8)
        with gather.get_configs_parallel({"large": mine, "small": small}, [0, 1], None, workspace) as configs:
            if rank == 0:
                assert int(configs[1]["large"].sum()) == step << 20
                if step == 1:
                    kept = configs[1]["large"][5:]
            del configs
        del mine
        dist.barrier()  # so that at most one payload is under way, and reuse can be counted
        sizes.append(memory.arena().stats().reserved)
    if kept is not None:
        gather.close()
        gc.collect()
        assert bool((kept == 1).all())
        assert kept.numel() == (1 << 20) - 5
        kept.fill_(7)
    return {"reserved": sizes}


def keep_while_the_sender_closes(rank: int) -> bool:
    """A kept tensor's memory is not used again by a sender that has ended its connections."""
    mine = memory.shared_empty((1 << 20,), torch.uint8)
    mine.fill_(3)
    kept: list[torch.Tensor] = []
    with gather.get_tensors_parallel(mine, [0, 1]) as tensors:
        kept += tensors[1:]
    del mine, tensors
    dist.barrier()
    if rank == 1:
        gather.close()
        others = [memory.shared_empty((1 << 20,), torch.uint8).fill_(9) for _ in range(4)]
        assert len(others) == 4
    dist.barrier()
    return all(bool((tensor == 3).all()) for tensor in kept) and len(kept) == (rank == 0)


def gather_after_letting_go(rank: int) -> dict[str, Any]:
    """A kept tensor's buffer comes back to the sender once it is dropped."""
    used = []
    kept: list[torch.Tensor] = []
    for step in range(6):
        mine = memory.shared_empty((1 << 20,), torch.uint8)
        with gather.get_tensors_parallel(mine, [0, 1]) as tensors:
            if rank == 0 and step < 3:
                kept.append(tensors[1])
        del mine, tensors
        if step == 2:
            kept.clear()
        dist.barrier()
        if rank == 1:
            gather.drain()
            memory.shared_empty((1,), torch.uint8)  # takes in what the first rank has sent
            used.append(memory.arena().stats().used >> 20)
    return {"used": used}


def addresses(rank: int) -> dict[str, Any]:
    """Whether what lies in the arena is sent from where it lies."""
    before = memory.arena().stats()
    whole = memory.shared_empty((64, 1024), torch.float32)
    whole.copy_(torch.arange(64 * 1024, dtype=torch.float32).view(64, 1024))
    taken = memory.arena().stats().used - before.used
    with gather.get_configs_parallel(
        {"whole": whole, "rows": whole[8:16], "bits": whole.view(torch.int32)}, [0, 1]
    ) as c:
        extra = memory.arena().stats().used - taken
        same = bool(rank or (torch.equal(c[1]["whole"], whole) and torch.equal(c[1]["rows"], whole[8:16])))
        if rank == 0:
            c[1]["rows"].zero_()
            same = same and int(c[1]["whole"][8:16].abs().sum()) == 0  # one memory: the rows are in the whole
    dist.barrier()
    if rank == 1:
        same = same and int(whole[8:16].abs().sum()) == 0  # and it is the sender's own
    return {"extra": extra, "same": same}


def two_groups_in_threads(rank: int) -> bool:
    """Two threads gather over groups of their own, while the main thread runs collectives."""
    groups = [dist.new_group([0, 1, 2]) for _ in range(2)]
    failures: list[BaseException] = []
    for group in groups:
        gather.connect([0, 1, 2], group)

    def work(which: int) -> None:
        try:
            for step in range(30):
                tensor = torch.tensor([rank, which, step])
                with gather.get_tensors_parallel(tensor, [0, 1, 2], groups[which]) as tensors:
                    if rank == 0:
                        assert [t.tolist() for t in tensors] == [[r, which, step] for r in range(3)]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for step in range(20):
        total = torch.tensor([rank + step])
        dist.all_reduce(total, group=groups[step % 2])
        assert int(total) == 3 + 3 * step
    for thread in threads:
        thread.join()
    assert not failures, failures
    return True


def disjoint_subsets(rank: int) -> list[int]:
    """Ranks 0, 1 and ranks 2, 3 gather by themselves, rank 3 first; rank 0 asks about a gather it is not in."""
    with gather.get_tensors_parallel(torch.tensor([rank]), [1, 2]) as outside:
        assert rank == 1 or outside == []
    ranks = [0, 1] if rank < 2 else [3, 2]
    with gather.get_tensors_parallel(torch.tensor([rank]), ranks) as tensors:
        return [int(t) for t in tensors]


def many_tensors(rank: int) -> bool:
    """More tensors than fit in a message, all kept, then every other one let go."""
    config = [torch.full((3,), i) for i in range(6000)]
    for _ in range(2):
        with gather.get_configs_parallel(config, [0, 1]) as configs:
            kept = configs[1] if rank == 0 else []
        for i in range(0, len(kept), 2):
            kept[i] = None
        assert all(int(kept[i][0]) == i for i in range(1, len(kept), 2))
    return True


def again_after_restart(rank: int, folder: str) -> bool:
    """The group is destroyed and made anew: its ranks meet anew."""
    for i in range(3):
        with gather.get_tensors_parallel(torch.tensor([rank]), [0, 1]) as tensors:
            assert len(tensors) == (2 if rank == 0 else 0)
        del tensors
        dist.barrier()
        dist.destroy_process_group()
        if i == 2:
            break
        dist.init_process_group("gloo", init_method=f"file://{folder}/store-{i}", rank=rank, world_size=2)
    return True


def workspace_api(rank: int, path: str) -> list[Any]:
    """The document's workspace, the caller synchronising."""
    workspace = gather.NFSWorkspace(path)
    assert workspace.is_initialized
    if rank == 0:
        nothing = workspace.read_configs_and_weights_from_rank(1)
        assert nothing == (None, None)
    dist.barrier()
    for version in range(3):
        workspace.write_configs_and_weights({"version": version, "rank": rank}, {"w": torch.full((3,), rank + version)})
    dist.barrier()
    seen = []
    for target in range(3):
        config, weights = workspace.read_configs_and_weights_from_rank(target)
        assert config is not None
        assert weights is not None
        seen.append([config["version"], config["rank"], weights["w"].tolist()])
    dist.barrier()
    workspace.close()
    return seen


def leave_early(rank: int, workspace: str | None) -> list[int]:
    """The senders end at once; what they sent is still received, some of it after they have gone."""
    seen = []
    for step in range(3):
        with gather.get_tensors_parallel(
            torch.full((70000,), rank * 10 + step), [0, 1, 2], workspace_path=workspace
        ) as t:
            if rank == 0:
                time.sleep(0.3)
                seen += [int(x.unique()) for x in t[1:]]
    return seen


def meet_while_memory_is_reclaimed(rank: int) -> list[int]:
    """The main thread meets the other ranks anew again and again; another one allocates, and so reads the links."""
    stop = threading.Event()

    def allocate() -> None:
        kept: list[torch.Tensor] = []
        while not stop.is_set():
            kept.append(memory.shared_empty((len(kept) + 1,), torch.uint8))  # never room in what came free
            if len(kept) == 20000:
                kept.clear()

    thread = threading.Thread(target=allocate)
    thread.start()
    sums = []
    try:
        for first in range(3):
            for _ in range(10):
                ranks = [first, (first + 1) % 3, (first + 2) % 3]
                with gather.get_configs_parallel({"rank": rank}, ranks) as configs:
                    sums.append(sum(config["rank"] for config in configs))
                dist.barrier()
                gather.close()
                dist.barrier()
    finally:
        stop.set()
        thread.join()
    return sums
