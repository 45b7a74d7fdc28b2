"""An export whose ranks torchrun, accelerate, srun or mpirun started, on one machine or on several.

Every process runs the whole of :func:`~modelexport.exporter.export`. They find the source and plan each by
themselves, compare what they found, and from then on each is one rank; global rank 0 opens and publishes the target.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from modelexport.distributed import launch, ranks
from modelexport.distributed.environment import share_cores
from modelexport.distributed.launch import MultiprocessConfig
from modelexport.errors import CheckpointError, UsageError
from modelexport.export_target import Prepared
from modelexport.recipe import ExportRecipe

T = TypeVar("T")

_NOT_COHERENT = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs")


def external_config(recipe: ExportRecipe) -> MultiprocessConfig | None:
    """This process's place among the ranks that another launcher started; None where none did.

    Raises:
        UsageError: it started another number of ranks than ``--tp`` says, or ranks on several machines that
            nothing connects; a workspace is given that nobody needs.
    """
    found = launch.external_config(MultiprocessConfig(backend="gloo", timeout=recipe.timeout))
    if recipe.workspace is not None and recipe.transport == "direct" and not (found and is_spread(found)):
        raise UsageError(
            "--workspace is of use to --gather direct only for ranks on several machines, and these are on one: drop it"
        )
    if found is None:
        return None
    if found.world_size != recipe.tp:
        raise UsageError(f"the launcher started {found.world_size} ranks, and --tp is {recipe.tp}: make both the same")
    found.model_parallelism = recipe.tp
    if is_spread(found):
        if recipe.workspace is None:
            raise UsageError(
                f"{found.local_world_size} of {found.world_size} ranks are on this machine, and shared memory does not "
                "reach the others: add --workspace DIR, a directory that all machines see"
            )
        _check_coherent(recipe)
    return found


def is_spread(config: MultiprocessConfig) -> bool:
    """Whether the ranks are on several machines."""
    return bool(config.local_world_size < config.world_size)


def _check_coherent(recipe: ExportRecipe) -> None:
    """Refuse ``direct`` onto file systems that lose one of two clients' writes to the same page."""
    if recipe.transport != "direct" or recipe.out is None:
        return
    kind = filesystem_type(Path(recipe.out).resolve().parent)
    if kind in _NOT_COHERENT:
        raise UsageError(
            f"--out {recipe.out} is on {kind}, where the writes of two machines into one file may undo each other: "
            "use --gather nfs"
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


def agree(prepared: Prepared) -> None:
    """Let all ranks compare what they are about to export.

    Raises:
        RankFailedError: on every rank, where two of them see different sources or were given different settings.
    """
    ranks.reduce_and_broadcast(lambda: _sight(prepared), _compare)


def _sight(prepared: Prepared) -> dict[str, str]:
    """What must be equal on every rank, and where this one is."""
    digest = hashlib.sha256((prepared.source.directory / "config.json").read_bytes())
    for name, info in sorted(prepared.checkpoint.infos.items()):
        digest.update(f"{name} {info.dtype} {info.shape} {info.path.name} {info.offset}\n".encode())
    for name, places in sorted(prepared.checkpoint.placements.items()):
        lies = [(place.box, place.path.name, place.offset, place.strides) for place in places]
        digest.update(f"{name} {lies}\n".encode())
    recipe = {key: value for key, value in vars(prepared.recipe).items() if key not in ("quiet", "json")}
    return {
        "host": socket.gethostname(),
        "source": f"{prepared.source.directory} ({digest.hexdigest()[:12]})",
        "digest": digest.hexdigest(),
        "recipe": str(sorted((key, str(value)) for key, value in recipe.items())),
    }


def _compare(sights: list[dict[str, str]]) -> None:
    first = sights[0]
    for rank, other in enumerate(sights):
        if other["digest"] != first["digest"]:
            raise CheckpointError(
                f"rank {rank} on {other['host']} sees another model in {other['source']} than rank 0 on "
                f"{first['host']} in {first['source']}: give --model a directory with the same files on every machine"
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
