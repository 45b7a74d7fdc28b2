"""Brings this process into the group of ranks and out again (torch.distributed: gloo on CPU, NCCL on GPU)."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from modelexport.distributed.config import DEFAULT_TIMEOUT, MultiprocessConfig
from modelexport.distributed.environment import external_config, interface_towards
from modelexport.distributed.launch.grid import forget_grid, init_grid
from modelexport.distributed.launch.store_connections import StoreConnections
from modelexport.distributed.listening import bind_towards
from modelexport.distributed.supervision.status import phase_scope
from modelexport.distributed.supervision.watch import PeerWatch
from modelexport.distributed.transport.link import LostPeerError
from modelexport.errors import GatherError, UsageError

if TYPE_CHECKING:
    from torch.distributed import Backend, Store, TCPStore  # type: ignore[attr-defined]

_BACKEND_VARIABLE = "TORCH_DISTRIBUTED_BACKEND"
_GROUP_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "INIT_METHOD",
    "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME",
)  # fmt: skip
_NAMED = 8  # of the ranks that are missing
_own_store: TCPStore | None = None


def default_backend() -> str:
    """``nccl`` where every rank of this machine can have a CUDA device to itself, else ``gloo``."""
    import torch
    import torch.distributed as dist

    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.is_available() and dist.is_nccl_available() and torch.cuda.device_count() >= local_ranks:
        return "nccl"
    return "gloo"


def get_distributed_backend() -> Backend:
    """The back end set by :func:`set_distributed_backend` or ``TORCH_DISTRIBUTED_BACKEND``, else the default."""
    import torch.distributed as dist

    return dist.Backend(os.environ.get(_BACKEND_VARIABLE) or default_backend())


def set_distributed_backend(backend: str) -> None:
    """Chooses the back end for process groups to come, in this process and in the ranks it starts.

    Args:
        backend: a name, or one per device as in ``"cpu:gloo,cuda:nccl"``.

    Raises:
        UsageError: this build of torch does not know the name.
    """
    import torch.distributed as dist

    known = [name for name in dist.Backend.backend_list if name != "undefined"]
    for part in backend.lower().split(","):
        if part.rpartition(":")[2] not in known:
            raise UsageError(f"unknown back end {backend!r}; known here: {', '.join(known)}")
    os.environ[_BACKEND_VARIABLE] = backend.lower()


def init_process_group_from_backend(backend: str | Backend | None = None, *, timeout: float | None = None) -> None:
    """Joins the group that the environment describes; in a plain process, makes a group of this one alone.

    Args:
        backend: None for :func:`get_distributed_backend`'s.
        timeout: seconds after which a collective gives up; None for ``MODELEXPORT_TIMEOUT`` or 1800.

    Raises:
        UsageError: the environment is incomplete (see :func:`external_config`).
    """
    config = external_config() or MultiprocessConfig(rank=0, local_rank=0, world_size=1)
    MultiprocessConfig.resolve(config)
    _join(config, backend, timeout, None)


def init_dist(
    rank: int,
    local_rank: int,
    world_size: int,
    local_world_size: int,
    master_addr: str,
    master_port: int,
    init_method: str,
    backend: str | Backend | None = None,
    *,
    timeout: float | None = None,
    listener: socket.socket | None = None,
) -> None:
    """Sets the environment that torchrun would set, and joins the group.

    Args:
        rank, local_rank, world_size, local_world_size: this process's place.
        master_addr, master_port: of the store on rank 0.
        init_method: ``env://`` for that store, or ``tcp://host:port``, ``file:///path`` as in torch.distributed.
        backend: None for :func:`get_distributed_backend`'s.
        timeout: seconds after which a collective gives up; None for ``MODELEXPORT_TIMEOUT`` or 1800.
        listener: rank 0 only: a socket already listening on ``master_port``, which the store takes over.

    Raises:
        UsageError: rank or sizes contradict each other.
        GatherError: ranks did not come in time, or cannot reach each other.
    """
    if not 0 <= rank < world_size or not 0 <= local_rank < local_world_size <= world_size:
        raise UsageError(f"rank {rank} of {world_size} (local rank {local_rank} of {local_world_size}) does not exist")
    config = MultiprocessConfig(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        master_addr=master_addr,
        master_port=master_port,
        init_method=init_method,
    )
    _join(config, backend, timeout, listener)


def _join(
    config: MultiprocessConfig,
    backend: str | Backend | None,
    timeout: float | None,
    listener: socket.socket | None,
) -> None:
    import torch.distributed as dist

    _set_environment(config)
    if timeout is None:
        timeout = float(os.environ.get("MODELEXPORT_TIMEOUT", DEFAULT_TIMEOUT))
    limit = timedelta(seconds=timeout)
    where = f"rank {config.rank} on {socket.gethostname()}"
    with StoreConnections(int(config.master_port)):
        try:
            store = _store(config, limit, listener)
        except dist.DistError as error:
            raise LostPeerError(
                f"{where} did not reach rank 0 at {config.master_addr}:{config.master_port} within {timeout:g} s: see "
                "whether rank 0 runs there, whether MASTER_ADDR and MASTER_PORT are the same for all ranks, and "
                "whether a firewall is between them",
                [0],
            ) from error
        try:
            store.set(_here(config.rank), socket.gethostname())
            dist.init_process_group(
                store=store,
                rank=config.rank,
                world_size=config.world_size,
                backend=_backend_per_device(backend, config),
                timeout=limit,
            )
        except RuntimeError as error:  # of gloo, or a DistError
            raise _not_together(config, store, timeout, error) from error


def _store(config: MultiprocessConfig, limit: timedelta, listener: socket.socket | None) -> Store:
    """The group's key-value store; rank 0 keeps it for the others where no other launcher does."""
    from torch.distributed import HashStore, TCPStore, rendezvous  # type: ignore[attr-defined]

    global _own_store
    if config.init_method == "env://" and config.world_size == 1:
        return HashStore()
    if config.init_method != "env://" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        found: Store = next(rendezvous(config.init_method, config.rank, config.world_size, timeout=limit))[0]
        found.set_timeout(limit)
        return found
    if listener is None and config.rank == 0:  # left to itself, torch's server listens on all interfaces
        listener = bind_towards(config.master_addr, int(config.master_port), reuse=True)
        listener.listen(max(128, config.world_size))
    # torch 2.6's libuv server cannot take over a listening socket.
    extra: dict[str, Any] = {"master_listen_fd": listener.detach(), "use_libuv": False} if listener else {}
    _own_store = TCPStore(
        config.master_addr,
        int(config.master_port),
        config.world_size,
        config.rank == 0,
        timeout=limit,
        wait_for_workers=False,
        **extra,
    )
    return _own_store


def _here(rank: int) -> str:
    return f"modelexport/here/{rank}"


def _not_together(config: MultiprocessConfig, store: Store, timeout: float, error: RuntimeError) -> LostPeerError:
    """The error of a group that has not come together: names the ranks that have not come, where the store knows."""
    try:
        missing = [rank for rank in range(config.world_size) if not store.check([_here(rank)])]
    except RuntimeError:  # it is rank 0 that is gone, and the store with it
        place = f"{config.master_addr}:{config.master_port}"
        return LostPeerError(f"rank 0 at {place} was lost before all {config.world_size} ranks had come", [0])
    if missing:
        one = len(missing) == 1
        names = ", ".join(map(str, missing[:_NAMED])) + (" and others" if len(missing) > _NAMED else "")
        return LostPeerError(
            f"{'rank' if one else 'ranks'} {names} of {config.world_size} did not come within {timeout:g} s: see "
            f"whether the launcher started {'it' if one else 'them'}, and whether MASTER_ADDR ({config.master_addr}) "
            "can be reached from there; --timeout waits longer",
            missing,
        )
    return LostPeerError(
        f"all {config.world_size} ranks came to MASTER_ADDR ({config.master_addr}), but rank {config.rank} on "
        f"{socket.gethostname()} cannot reach all others: {str(error).splitlines()[0]}; they must reach each other "
        f"over the interface {os.environ.get('GLOO_SOCKET_IFNAME', 'that leads there')} (GLOO_SOCKET_IFNAME)"
    )


def _set_environment(config: MultiprocessConfig) -> None:
    values = (
        config.rank, config.local_rank, config.world_size, config.local_world_size,
        config.master_addr, config.master_port, config.init_method,
    )  # fmt: skip
    for name, value in zip(_GROUP_VARIABLES, values, strict=False):
        os.environ[name] = str(value)
    # Otherwise gloo looks this machine's name up, which fails, stalls or leads elsewhere where names are unkept.
    interface = interface_towards(config.master_addr, local=config.local_world_size == config.world_size)
    if interface is not None:
        for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)


def _backend_per_device(backend: str | Backend | None, config: MultiprocessConfig) -> str:
    import torch

    chosen = str(backend or get_distributed_backend())
    if "nccl" in chosen:
        torch.cuda.set_device(config.local_rank % torch.cuda.device_count())
    # Sizes, headers and shards on their way to a file live on the CPU, which NCCL does not serve.
    return "cpu:gloo,cuda:nccl" if chosen == "nccl" and backend is None else chosen


@contextmanager
def process_group(
    config: MultiprocessConfig, listener: socket.socket | None = None, *, watch: bool = False
) -> Iterator[PeerWatch | None]:
    """This process as a rank of ``config``'s group, with its grid; leaves the group after.

    A group of one that exists already is used and left as it is. The environment is restored.

    Args:
        watch: the ranks watch each other (see watch), for want of a launcher that sees them all; yielded.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        if dist.get_world_size() != config.world_size:
            raise UsageError(
                f"this process already belongs to a group of {dist.get_world_size()} ranks, "
                f"and cannot also be one of {config.world_size}"
            )
        init_grid(config)
        try:
            yield None
        finally:
            forget_grid()
        return
    before = {name: os.environ.get(name) for name in _GROUP_VARIABLES}
    watching: PeerWatch | None = None
    try:
        with phase_scope("joining the process group", waiting=True):
            _join(config, config.backend, config.timeout, listener)
            if watch:
                watching = PeerWatch(config, dist.distributed_c10d._get_default_store())
            init_grid(config)
        yield watching
        if watching is not None:
            watching.finish()
    except BaseException as error:
        found = error if watching is None else watching.fail(error)
        # NCCL waits here for peers that may never come; the end of the process does as well.
        if dist.is_initialized() and "nccl" not in str(dist.get_backend()):
            _leave(watching, failed=True)
        if found is error:
            raise
        raise found from error
    else:
        _leave(watching)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _leave(watching: PeerWatch | None, *, failed: bool = False) -> None:
    import torch.distributed as dist

    global _own_store
    forget_grid()
    _close_gathers(failed)
    if dist.is_initialized():
        dist.destroy_process_group()
    if watching is not None:
        # On rank 0 this waits for the others, to which the store must answer meanwhile.
        watching.close(wait=not failed)
    _own_store = None


def _close_gathers(failed: bool) -> None:
    """Ends the gathers of this group, which otherwise last until the process ends."""
    gather: Any = sys.modules.get("modelexport.distributed.gather")
    if gather is not None:
        try:
            gather.close()
        except (OSError, GatherError):
            if not failed:  # else the error that is on its way says more
                raise
