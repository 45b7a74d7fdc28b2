"""The jobs of ``test_watch.py``: processes that find their places in srun's environment, forked where torch is there.

One job a line of stdin: the environment of each rank and the file for what it says, what goes wrong, the rank that it
happens to, the time-out in seconds. One line of stdout for it: the ranks' exit statuses.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from modelexport.distributed import launch
from modelexport.distributed.supervision import heartbeat
from modelexport.errors import RankFailedError


def work(kind: str, culprit: int) -> None:
    rank, ones = dist.get_rank(), torch.ones(3)
    launch.phase(f"step {rank}")
    heart = heartbeat.Heart(Path(os.environ["TEST_WORKSPACE"]), rank)
    dist.all_reduce(ones)
    launch.report({"rank": rank})
    if kind == "fine":
        heart.stop()
        return time.sleep(0.2 * rank)
    if kind == "stuck":
        if rank == 1:
            threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGTERM)).start()
            dist.all_reduce(ones)
        return time.sleep(60)
    if rank == culprit:
        time.sleep(0.4)
        fail(kind)
    if kind == "late" or rank == (culprit + 1) % 3:
        launch.phase("waiting in a collective", waiting=True)
        dist.all_reduce(ones)  # in native code, where no signal reaches Python
    if rank == (culprit + 2) % 3:
        threading.Event().wait(60)
    return time.sleep(60)


def fail(kind: str) -> None:
    if kind == "raise":
        raise ValueError("no luck")
    if kind.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "leave":
        os._exit(0)
    if kind == "exit":
        sys.exit(0)
    if kind == "term":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    if kind == "late":
        time.sleep(9)


def run_rank(place: dict[str, str], out: str, kind: str, culprit: int, seconds: float) -> None:
    os.environ.update(place)
    events: list[list[Any]] = []

    def say(**what: object) -> None:
        with open(out, "w") as file:
            json.dump({"time": time.time(), "events": events, **what}, file)

    cfg = launch.external_config(launch.MultiprocessConfig(timeout=seconds, backend="gloo"))
    assert cfg is not None
    try:
        with launch.local_status(lambda rank, event: events.append([rank, event]), cfg.rank):
            launch.init_and_run(work, cfg, kind, culprit)
        say(end="fine")
    except RankFailedError as error:
        say(end="caught", rank=error.rank, phase=error.phase, summary=error.summary)
    except BaseException as error:
        say(end=type(error).__name__, summary=str(error))


def run_job(places: list[tuple[dict[str, str], str]], kind: str, culprit: int, seconds: float) -> list[int | None]:
    """Returns the exit statuses of the ranks; negative is a signal."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(*place, kind, culprit, seconds)) for place in places]
    for process in ranks:
        process.start()
    if kind == "kill+term":  # torchrun sends it to all once one has ended
        ranks[culprit].join(60)
        for process in ranks:
            process.terminate()
    for process in ranks:
        process.join(60)
        process.kill()
        process.join()
    return [process.exitcode for process in ranks]


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run_job(*json.loads(line))), flush=True)
