"""The ranks that carry out an export or a resharding."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from modelexport.checkpoints.raw_io import reserve
from modelexport.checkpoints.staging.journal import boot_id, boot_ids
from modelexport.distributed import launch
from modelexport.distributed.launch import MultiprocessConfig
from modelexport.errors import LimitError, RankFailedError
from modelexport.jobs.hosts import is_spread
from modelexport.jobs.progress import ProgressHandler
from modelexport.jobs.target_directory import TargetDirectory
from modelexport.system.run_log import LogFile

T = TypeVar("T")
Results = list[dict[str, Any]]
_STORE_BYTES, _STORE_BYTES_PER_RANK = 1 << 20, 16 << 10
"""Of the store: 2 ranks have been seen to write 40 kB to it, and 32 ranks 140 kB."""


@contextmanager
def own_ranks(
    world: int, timeout: float, preload: Sequence[str], on_event: ProgressHandler, log: LogFile | None
) -> Iterator[MultiprocessConfig]:
    """The group of ranks that this process starts on this machine, inside the ``with``.

    They meet in a file that has no name, in memory: a store behind a TCP port obeys whoever connects.

    Raises:
        LimitError: there is no memory for it.
    """
    fd = os.memfd_create("modelexport-store", os.MFD_CLOEXEC) if world > 1 and hasattr(os, "memfd_create") else None
    try:
        if fd is not None:
            _reserve(fd, _STORE_BYTES + world * _STORE_BYTES_PER_RANK)
        yield MultiprocessConfig(
            world_size=world,
            local_world_size=world,
            model_parallelism=world,
            init_method="env://" if fd is None else f"file:///proc/{os.getpid()}/fd/{fd}",
            backend="gloo",
            timeout=timeout,
            preload=tuple(preload),
            on_event=on_event,
            log=log,
        )
    finally:
        if fd is not None:
            os.close(fd)


def _reserve(fd: int, size: int) -> None:
    """Takes the store's memory before ranks write to it.

    A write that fails in its middle leaves half an entry, which torch's store reads for ever; one that fails as the
    store is closed aborts the process.
    """
    try:
        reserve(fd, size)
    except OSError as error:
        raise LimitError(
            f"there is no memory for the store in which the ranks meet ({size:,} bytes: {error.strerror}): end other "
            "programs, and run the same command again"
        ) from error


def single(results: Results) -> dict[str, Any]:
    """The one result that the first rank reported.

    Raises:
        RankFailedError: it is not there, or not alone.
    """
    if len(results) != 1:
        raise RankFailedError(0, "reporting the result", f"{len(results)} results arrived instead of 1")
    return results[0]


def run_under_launcher(
    config: MultiprocessConfig,
    target: TargetDirectory,
    work: Callable[[dict[str, Any]], None],
    collect: Callable[[dict[str, Any], dict[str, Any]], T],
    progress: Callable[[Mapping[str, Any], LogFile | None], AbstractContextManager[ProgressHandler]],
    log: str | None,
    all_write: bool,
) -> T:
    """Does this rank's part of the work where another launcher started it; rank 0 opens and publishes the target.

    Args:
        work: this rank's part, given the steps that are done.
        collect: makes the value that every rank returns from the record and the first rank's result; runs on rank 0.
        progress: makes the context manager of :func:`~modelexport.jobs.progress.show_progress` from the steps that are
            done and the log.
        log: the file that ranks append to what they do; on machines other than the first, its name ends in ``.`` and
            the number of the machine's first rank, since two machines cannot append to one file of a network.
        all_write: whether every rank writes weights, not the first alone.

    Returns:
        The value of ``collect``, on every rank.
    """
    from modelexport.distributed import ranks

    boot = ranks.reduce_and_broadcast(boot_id, boot_ids) if all_write else None

    def begin() -> tuple[dict[str, Any], float]:
        with launch.phase_scope("opening the target"):
            return target.begin(boot), time.time()

    done, began = ranks.compute_and_broadcast(begin)
    name = log_of(config, log)
    own = None if name is None else LogFile.begin(name, began)
    with progress(done, own) as handler, launch.local_status(handler, config.rank, own):
        work(done)

    def finish() -> T:
        with launch.phase_scope("publishing the checkpoint"):
            result = single(handler.results)
            return collect(target.finish(result), result)

    return ranks.compute_and_broadcast(finish)


def log_of(config: MultiprocessConfig, log: str | None) -> str | None:
    """Returns the log of the ranks on this machine: of several machines' ranks, each but the first has its own."""
    first = config.rank - config.local_rank
    return f"{log}.{first}" if log is not None and first and is_spread(config) else log
