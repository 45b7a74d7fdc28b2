"""How long a resharding takes, against ``cp`` of the same bytes and torch's own DCP, in one run.

    python tests/benchmarks/bench_reshard.py                     a Llama of 1.24 B parameters: tp 4 -> 2 -> 8 -> 1
    python tests/benchmarks/bench_reshard.py --model DIR --ranks 1 2

Every command is a process of its own, run ``--repeat`` times in a row on warm page cache after an untimed run, into a
fresh directory on one disk, after a ``sync``; the median counts. Our commands read back what they wrote and compare it
with the source before they end, and what they publish is on the disk; ``cp`` does neither.

The peer: four processes that hold the model as DTensors of tp 4 save it with torch.distributed.checkpoint's
HuggingFaceStorageWriter and consolidate it into one safetensors file. It begins with its shards in memory, ours with
files; its time counts from the first save, without starting processes or loading.

Memory: Pss_Anon + Pss_Shmem of the largest process, sampled every 20 ms in the untimed run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from modelexport.system.tables import size_text, table
from tests.benchmarks._measuring import Run, add_write_option, become_reaper, run, written
from tests.benchmarks.bench_export import make_model, warm

REPOSITORY = sys.path[0]
PEER_RANKS = 4


# -------------------------------------------------------------------------------------------- the peer


def peer(model: Path, out: Path) -> None:
    """Save from four ranks through DCP, consolidate, and print the seconds that took."""
    import torch

    torch.multiprocessing.spawn(_peer_rank, (str(model), str(out), 29600 + os.getpid() % 1000), PEER_RANKS)


def _peer_rank(rank: int, model: str, out: str, port: int) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from safetensors import safe_open
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=PEER_RANKS)
    mesh = init_device_mesh("cpu", (PEER_RANKS,))
    state = {}
    with safe_open(Path(model) / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            part, shape = file.get_slice(name), file.get_slice(name).get_shape()
            dim = None if len(shape) < 2 else 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
            if dim is None:
                state[name] = DTensor.from_local(file.get_tensor(name), mesh, [Replicate()])
                continue
            step = shape[dim] // PEER_RANKS
            mine = slice(rank * step, (rank + 1) * step)
            local = part[mine] if dim == 0 else part[:, mine]
            state[name] = DTensor.from_local(local.contiguous(), mesh, [Shard(dim)])
    dist.barrier()
    began = time.perf_counter()
    where = dict.fromkeys(state, 1)
    writer = dcp.HuggingFaceStorageWriter(
        path=out, fqn_to_index_mapping=where, save_distributed=True, enable_consolidation=True
    )
    dcp.save(state, storage_writer=writer)
    dist.barrier()
    if rank == 0:
        print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------ measurement


@dataclass
class Case:
    """One command: ``{out}`` in it is replaced by a fresh directory. ``own``: it prints its seconds itself."""

    name: str
    source: Path
    command: list[str]
    own: bool = False
    walls: list[float] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    sampled: Run | None = None

    def wall(self) -> float:
        """Median over the timed runs."""
        return statistics.median(self.walls)


def reshard_command(source: Path, out: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "modelexport", "reshard", str(source), "--quiet", "--out", out, *options]


def measure(case: Case, scratch: Path, *, sample: bool, timeout: float) -> None:
    """One run of a case: settle the disk, warm the source, run, remove the target."""
    out, log = scratch / "out", scratch / "log"
    os.sync()
    warm(case.source)
    command = [str(out) if part == "{out}" else part for part in case.command]
    result = run(command, log, sample=sample, timeout=timeout)
    if result.status != 0:
        raise SystemExit(f"{' '.join(command)}\nended with status {result.status}:\n{log.read_text()[-3000:]}")
    if sample:
        case.sampled = result
    else:
        case.runs.append(result)
        case.walls.append(json.loads(log.read_text().splitlines()[-1])["seconds"] if case.own else result.wall)
    shutil.rmtree(out)


def cases(places: dict[str, Path], options: argparse.Namespace) -> Iterator[Case]:
    """``cp``, every resharding, and the peer."""
    four = places["tp 4"]
    yield Case("cp -r", four, ["cp", "-r", str(four), "{out}"])
    yield Case("cp -r, fsync", four, ["sh", "-c", 'cp -r "$1" "$2" && sync "$2"/*', "sh", str(four), "{out}"])
    for before, after, arguments in (
        ("tp 4", "tp 2", ["--tp", "2"]),
        ("tp 2", "tp 8", ["--tp", "8"]),
        ("tp 8", "tp 1", []),
        ("tp 4", "dcp, tp 2", ["--tp", "2", "--format", "dcp"]),
        ("dcp, tp 4", "tp 1", []),
    ):
        for ranks in options.ranks:
            command = reshard_command(places[before], "{out}", *arguments, "--ranks", str(ranks))
            yield Case(f"{before} -> {after}, {ranks} process{'es' if ranks > 1 else ''}", places[before], command)
    if not options.no_peer:
        script = [sys.executable, __file__, "--peer", "--model", str(places["model"]), "--out", "{out}"]
        yield Case("DCP: 4 ranks save, consolidated", places["model"], script, own=True)


def report(found: list[Case], repeat: int) -> Iterator[str]:
    """The table and how it is to be read."""
    cp = found[0].wall()
    rows = []
    for case in found:
        assert case.sampled is not None
        cpu = statistics.median(run.cpu for run in case.runs)
        rows.append(
            (
                case.name,
                f"{case.wall():.2f}",
                f"{min(case.walls):.2f}-{max(case.walls):.2f}",
                f"{case.wall() / cp:.2f}",
                f"{cpu:.2f}",
                size_text(case.sampled.process_peak),
            )
        )
    yield from table(("command", "wall s", "range", "x cp", "CPU s", "peak/process"), rows)
    others = [run.others for case in found for run in case.runs]
    yield (
        f"wall: median of {repeat}; busy with other work meanwhile: {statistics.median(others):.2f} of "
        f"{os.cpu_count()} cores (median; at most {max(others):.2f}); figures with much of it are too high"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of the model: used if there, made there if not")
    parser.add_argument("--layers", type=int, default=16, help="decoder layers of the model that is made")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="processes that reshard")
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each command")
    parser.add_argument("--scratch", type=Path, help="where everything goes (default: a temporary directory)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a run is ended")
    parser.add_argument("--no-peer", action="store_true")
    add_write_option(parser)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--make-model", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make_model:
        make_model(options.model, options.layers)
        return 0
    if options.peer:
        peer(options.model, options.out)
        return 0
    # The commands run this tree's package, wherever this is called from and whatever is installed.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (REPOSITORY, os.environ.get("PYTHONPATH"))))
    become_reaper()
    with tempfile.TemporaryDirectory(prefix="bench_reshard.", dir=options.scratch) as temporary:
        return _measure_all(Path(temporary), options)


def _measure_all(scratch: Path, options: argparse.Namespace) -> int:
    places = {"model": (options.model or scratch / "model").resolve()}
    if not (places["model"] / "model.safetensors").exists():
        _made(
            [sys.executable, __file__, "--make-model", "--model", str(places["model"]), "--layers", str(options.layers)]
        )
    for tp in (4, 2, 8):
        places[f"tp {tp}"] = scratch / f"tp{tp}"
        _made(reshard_command(places["model"], str(places[f"tp {tp}"]), "--tp", str(tp)))
    places["dcp, tp 4"] = scratch / "dcp4"
    _made(reshard_command(places["model"], str(places["dcp, tp 4"]), "--tp", "4", "--format", "dcp"))
    size = sum(path.stat().st_size for path in places["model"].glob("*.safetensors"))
    print(f"{places['model']}: {size_text(size)}; {os.cpu_count()} cores", flush=True)
    found = list(cases(places, options))
    for case in found:
        measure(case, scratch, sample=True, timeout=options.timeout)
        for _ in range(options.repeat):
            measure(case, scratch, sample=False, timeout=options.timeout)
        print(f"{case.name}: {case.wall():.2f} s", file=sys.stderr, flush=True)
    with written(__file__, options.write):
        print("\n".join(report(found, options.repeat)))
    return 0


def _made(command: list[str]) -> None:
    # In a process of its own: torch's threads and memory stay out of this one.
    print("making:", *command[2:], file=sys.stderr, flush=True)
    with tempfile.NamedTemporaryFile() as log:
        if run(command, Path(log.name), sample=False, timeout=1200).status != 0:
            raise SystemExit(Path(log.name).read_text()[-3000:])


if __name__ == "__main__":
    sys.exit(main())
