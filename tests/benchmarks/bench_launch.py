"""Starting ranks and losing them: seconds to the first barrier, memory of a rank, seconds from a death to the error.

    python tests/benchmarks/bench_launch.py [--ranks 4] [--repeats 5] [--deaths 20]

Start-up: each figure comes from a program of its own, from the call of the launching function until every rank has
left its first barrier on gloo. "again" is a second launch in the same program. The programs take turns. The yardstick
is torch.multiprocessing.spawn. Memory is what a rank has to itself (Private_Clean + Private_Dirty) after the barrier.

Deaths: one rank of several raises, is killed by SIGKILL or calls os._exit(0), while the others wait for it in a
barrier; counted is the time from just before until launch_subprocesses has raised the error, which must name it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from modelexport.distributed.launch import MultiprocessConfig, launch_subprocesses, report
from modelexport.errors import RankFailedError
from tests.benchmarks._measuring import add_write_option, written

METHODS = {
    "forkserver": "forkserver, preload",
    "spawn": "spawn",
    "torch": "torch.multiprocessing.spawn",
}


def private_megabytes() -> float:
    """What this process has to itself."""
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines())
    return sum(int(fields[1]) for fields in lines if fields[0] in ("Private_Clean:", "Private_Dirty:")) / 1024


def meet() -> None:
    """What a launched rank does."""
    import torch.distributed as dist

    dist.barrier()
    report({"time": time.monotonic(), "private": private_megabytes()})


def meet_in_torch(rank: int, world: int, folder: str) -> None:
    """The same, started by torch."""
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{os.getppid()}", rank=rank, world_size=world)
    dist.barrier()
    found = {"time": time.monotonic(), "private": private_megabytes()}
    Path(folder, f"{os.getppid()}-{time.monotonic_ns()}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def launch_once(method: str, world: int, folder: str) -> list[dict[str, float]]:
    """What each rank says of one launch."""
    if method == "torch":
        import torch.multiprocessing

        torch.multiprocessing.spawn(meet_in_torch, args=(world, folder), nprocs=world)
        files = list(Path(folder).glob("*.json"))
        found = [json.loads(path.read_text()) for path in files]
        for path in [*files, *Path(folder).glob("store-*")]:
            path.unlink()
        return found
    events: list[dict[str, float]] = []
    config = MultiprocessConfig(
        world_size=world,
        launch_method=method,
        backend="gloo",
        preload=("torch", "torch.distributed", "safetensors"),
        on_event=lambda rank, event: events.append(event),
    )
    launch_subprocesses(meet, config)
    return events


def one_program(method: str, world: int, folder: str) -> None:
    """Two launches in this program, as JSON."""
    results = []
    for _ in range(2):
        began = time.monotonic()
        events = launch_once(method, world, folder)
        assert len(events) == world, events
        seconds = max(event["time"] for event in events) - began
        results.append({"seconds": seconds, "private": statistics.mean(event["private"] for event in events)})
    print(json.dumps(results))


def start_up(world: int, repeats: int) -> None:
    """Print the start-up table."""
    import tempfile

    found: dict[str, list[list[dict[str, float]]]] = {method: [] for method in METHODS}
    for _ in range(repeats):
        for method in METHODS:  # in turn, so that each meets the machine in the same moods
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, "--one", method, folder, "--ranks", str(world)]
                output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
            found[method].append(json.loads(output.splitlines()[-1]))
    yardstick = statistics.median(run[0]["seconds"] for run in found["torch"])
    print(
        f"{'start of ' + str(world) + ' ranks':30} {'first s':>8} {'range':>13} {'x torch':>8} {'again s':>8} "
        f"{'MB a rank':>10}"
    )
    for method, label in METHODS.items():
        firsts = [run[0]["seconds"] for run in found[method]]
        again = statistics.median(run[1]["seconds"] for run in found[method])
        private = statistics.median(run[0]["private"] for run in found[method])
        first = statistics.median(firsts)
        print(
            f"{label:30} {first:8.2f} {min(firsts):6.2f}-{max(firsts):6.2f} {first / yardstick:8.2f} {again:8.2f} "
            f"{private:10.1f}"
        )


def die(kind: str, culprit: int) -> None:
    """One rank dies and the others wait for it."""
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == culprit:
        time.sleep(0.2)  # so that the others do wait
        report({"time": time.monotonic()})
        if kind == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "os._exit(0)":
            os._exit(0)
        raise ValueError("died on purpose")
    dist.barrier()


def deaths(world: int, count: int) -> None:
    """Print the table of deaths."""
    print(f"\n{'death of 1 of ' + str(world) + ' ranks':30} {'runs':>5} {'median s':>9} {'worst s':>8}")
    for kind in ("raise", "SIGKILL", "os._exit(0)"):
        seconds = []
        for number in range(count):
            culprit = number % world
            events: list[dict[str, float]] = []
            config = MultiprocessConfig(
                world_size=world, backend="gloo", on_event=lambda rank, event, events=events: events.append(event)
            )
            try:
                launch_subprocesses(die, config, None, 0, kind, culprit)
            except RankFailedError as error:
                seconds.append(time.monotonic() - events[0]["time"])
                if error.rank != culprit:
                    raise SystemExit(f"rank {culprit} died, and the error names rank {error.rank}") from error
        assert len(seconds) == count
        print(f"{kind:30} {count:5} {statistics.median(seconds):9.3f} {max(seconds):8.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--deaths", type=int, default=20)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    add_write_option(parser)
    args = parser.parse_args()
    if args.one:
        one_program(args.one[0], args.ranks, args.one[1])
        return
    with written(__file__, args.write):
        print(f"{os.cpu_count()} cores")
        start_up(args.ranks, args.repeats)
        deaths(args.ranks, args.deaths)


if __name__ == "__main__":
    main()
