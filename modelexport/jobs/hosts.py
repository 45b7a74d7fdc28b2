"""An export, or a resharding, whose ranks torchrun, accelerate, srun or mpirun started, on one machine or on several.

Every process runs the whole of :func:`~modelexport.exporting.export`. They find the source and plan each by
themselves, compare what they found, and from then on each is one rank; global rank 0 opens and publishes the target.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from modelexport.checkpoints.safetensors.file import Checkpoint
from modelexport.distributed import launch, ranks
from modelexport.distributed.environment import share_cores
from modelexport.distributed.launch import MultiprocessConfig
from modelexport.errors import CheckpointError, UsageError
from modelexport.settings import Settings

T = TypeVar("T")

_NOT_COHERENT = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs")


def is_spread(config: MultiprocessConfig) -> bool:
    """Returns whether the ranks are on several machines."""
    return bool(config.local_world_size < config.world_size)


def check_coherent(out: str | None, instead: str) -> None:
    """Refuses ``direct`` onto file systems that lose one of two clients' writes to the same page."""
    kind = None if out is None else filesystem_type(Path(out).resolve().parent)
    if kind in _NOT_COHERENT:
        raise UsageError(
            f"--out {out} is on {kind}, where the writes of two machines into one file may undo each "
            f"other: use {instead}"
        )


def filesystem_type(path: Path) -> str | None:
    """``"ext4"``, ``"nfs4"``, ...: of the file system that holds ``path`` or its nearest parent that is there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
            for line in table:
                before, _, after = line.partition(" - ")
                if before.split()[2] == wanted:
                    return after.split()[0]
    except FileNotFoundError:  # not Linux
        pass
    return None


def agree(checkpoint: Checkpoint, recipe: Settings) -> None:
    """Checks that all ranks see the same source and were given the same settings.

    Raises:
        RankFailedError: on every rank, where two of them see different sources or were given different settings.
    """
    ranks.reduce_and_broadcast(lambda: _local_view(checkpoint, recipe), _compare)


def _local_view(checkpoint: Checkpoint, recipe: Settings) -> dict[str, str]:
    """Digests of the source and of the settings, which must be equal on every rank, and the names of this machine."""
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())
    for name, info in sorted(checkpoint.infos.items()):
        digest.update(f"{name} {info.dtype} {info.shape} {info.path.name} {info.offset}\n".encode())
    for name, places in sorted(checkpoint.placements.items()):
        lies = [(place.box, place.path.name, place.offset, place.strides) for place in places]
        digest.update(f"{name} {lies}\n".encode())
    for name, tensor in sorted(checkpoint.computed.items()):  # decoded, or with adapters, whose files count as well
        parts = [(info.dtype, info.shape, info.path.name, info.offset) for info in tensor.sources]
        digest.update(f"{name} {parts}\n".encode())
    settings = {key: value for key, value in vars(recipe).items() if key not in ("quiet", "json")}
    return {
        "host": socket.gethostname(),
        "source": f"{checkpoint.directory} ({digest.hexdigest()[:12]})",
        "digest": digest.hexdigest(),
        "recipe": str(sorted((key, str(value)) for key, value in settings.items())),
    }


def _compare(views: list[dict[str, str]]) -> None:
    first = views[0]
    for rank, other in enumerate(views):
        if other["digest"] != first["digest"]:
            raise CheckpointError(
                f"rank {rank} on {other['host']} sees another model in {other['source']} than rank 0 on "
                f"{first['host']} in {first['source']}: give a directory with the same files on every machine"
            )
        if other["recipe"] != first["recipe"]:
            raise UsageError(
                f"rank {rank} on {other['host']} was started with other settings than rank 0 on {first['host']}: "
                "run the same command on every machine"
            )


def run_as_rank(config: MultiprocessConfig, work: Callable[[], T]) -> T:
    """The result of ``work()``, run in the group as the rank that ``config`` names."""
    results: list[T] = []

    def export() -> None:
        results.append(work())

    share_cores(config.local_world_size)  # srun and mpirun leave every rank all of them
    launch.init_and_run(export, config)
    return results[0]
