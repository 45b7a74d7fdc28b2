"""What the ranks of the gather's failure tests run: each says what it saw. Started by ``_gather_targets.run_ranks``."""

from __future__ import annotations

import os
import resource
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from modelexport.distributed import gather
from modelexport.errors import GatherError


def die_in_gather(rank: int, how: str, workspace: str | None) -> dict[str, Any]:
    """Rank 2 leaves between its first and its second gather; the others say what they saw, and how fast."""
    gather.set_timeout(20)
    ranks = [0, 1, 2]
    with gather.get_tensors_parallel(torch.tensor([rank]), ranks, workspace_path=workspace):
        pass
    dist.barrier()
    if rank == 2:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    start = time.monotonic()
    try:
        with gather.get_tensors_parallel(torch.tensor([rank]), ranks, workspace_path=workspace):
            text = "nothing seen"
    except GatherError as error:
        text = str(error)
    return {"text": text, "seconds": time.monotonic() - start}


def first_dies(rank: int) -> dict[str, Any]:
    gather.set_timeout(20)
    with gather.get_tensors_parallel(torch.tensor([rank]), [0, 1]):
        pass
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(10):
            with gather.get_tensors_parallel(torch.tensor([rank]), [0, 1]):
                time.sleep(0.01)
        text = "nothing seen"
    except GatherError as error:
        text = str(error)
    return {"text": text}


def slow_receiver(rank: int, workspace: str | None) -> dict[str, Any]:
    """The first rank does not come: the sender may run ahead by its buffers, then says who is late."""
    os.environ["MODELEXPORT_GATHER_BUFFERS"] = "2"
    gather.connect([0, 1], None, workspace)
    dist.barrier()
    sent, text = 0, ""
    if rank == 1:
        gather.set_timeout(0.5)
        try:
            for _ in range(5):
                with gather.get_tensors_parallel(torch.tensor([1]), [0, 1], workspace_path=workspace):
                    sent += 1
        except GatherError as error:
            text = str(error)
    dist.barrier()
    return {"sent": sent, "text": text}


def late_sender(rank: int, workspace: str | None) -> dict[str, Any]:
    gather.connect([0, 1, 2], None, workspace)
    dist.barrier()
    text = ""
    if rank == 0:
        gather.set_timeout(0.5)
        try:
            with gather.get_tensors_parallel(None, [0, 1, 2], workspace_path=workspace):
                pass
        except GatherError as error:
            text = str(error)
    elif rank == 1:
        with gather.get_tensors_parallel(torch.tensor([1]), [0, 1, 2], workspace_path=workspace):
            pass
    dist.barrier()
    return {"text": text}


def cannot_pack(rank: int, workspace: str | None) -> dict[str, Any]:
    """Rank 1's config holds an object that cannot travel: it raises, and the first rank says why at once."""
    gather.set_timeout(20)
    start = time.monotonic()
    try:
        with gather.get_configs_parallel({"a": object() if rank else 1}, [0, 1], None, workspace):
            text = "nothing seen"
    except (GatherError, TypeError) as error:
        text = f"{type(error).__name__}: {error}"
    dist.barrier()
    return {"text": text, "seconds": time.monotonic() - start}


def never_meets(rank: int) -> dict[str, Any]:
    gather.set_timeout(0.5)
    text = ""
    if rank != 2:
        try:
            gather.connect([0, 1, 2])
        except GatherError as error:
            text = str(error)
    dist.barrier()
    return {"text": text}


def starved(rank: int) -> dict[str, Any]:
    """Rank 1 may not make files of more than 8 MB; the first rank hears of it."""
    gather.set_timeout(20)
    gather.connect([0, 1])
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))
    text = ""
    try:
        with gather.get_tensors_parallel(torch.zeros(16 << 20, dtype=torch.uint8), [0, 1]):
            pass
    except GatherError as error:
        text = str(error)
    return {"text": text}


def leave_without_sending(rank: int, workspace: str | None) -> dict[str, Any]:
    """Rank 1 gathers once less than the first rank and ends in good order."""
    gather.set_timeout(20)
    start, text, of_peer = time.monotonic(), "", None
    try:
        for step in range(3 if rank == 0 else 2):
            with gather.get_tensors_parallel(torch.tensor([step]), [0, 1], workspace_path=workspace):
                pass
    except GatherError as error:
        text, of_peer = str(error), getattr(error, "peer_failure", None)
    return {"text": text, "of_peer": of_peer, "seconds": time.monotonic() - start}


def fail_and_go_on(rank: int, workspace: str | None) -> dict[str, Any]:
    """The first rank's own config cannot travel; after its error the same ranks gather again."""
    gather.set_timeout(20)
    errors = []
    for step in range(2):
        try:
            value = object() if rank == 0 and step == 0 else step
            with gather.get_configs_parallel({"step": value}, [0, 1], None, workspace) as configs:
                assert configs == ([{"step": step}] * 2 if rank == 0 else [])
            gather.drain()
        except (TypeError, GatherError) as error:
            errors.append(type(error).__name__)
        dist.barrier()
    return {"errors": errors}
