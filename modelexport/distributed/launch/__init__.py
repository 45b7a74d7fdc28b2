"""Starts rank processes, each in a process group, and raises the first failure of any of them, with its rank.

::

    def work(path):                       # in a module, not in a notebook
        with phase_scope("quantising"):
            ...

    launch_subprocesses(work, MultiprocessConfig(world_size=4, model_parallelism=4), None, 0, "model")

A rank's end, whatever its form, ends the whole group within a second and raises RankFailedError with the rank
that failed first. A rank whose launcher vanishes ends itself. Ranks meet through a TCP store on global rank 0;
where that runs on this machine the launcher opens the listening socket and hands it over, so that no other
program can take the port in between. Ranks do not see Ctrl-C: the launcher does, and ends them.

Importing this module does not import torch; a launch with a known ``world_size`` above 1 does not either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec

from modelexport.distributed.config import MultiprocessConfig
from modelexport.distributed.environment import external_config
from modelexport.distributed.launch.grid import ParallelGroup, ProcessGrid, get_grid, grid_coordinates, init_grid
from modelexport.distributed.launch.process_group import (
    default_backend,
    get_distributed_backend,
    init_dist,
    init_process_group_from_backend,
    process_group,
    set_distributed_backend,
)
from modelexport.distributed.launch.rank_main import RankCall, function_name
from modelexport.distributed.launch.starting import prestart, start_ranks
from modelexport.distributed.launch.supervisor import RankHandle, Supervisor, end_ranks
from modelexport.distributed.supervision.failures import Failure, exception_message
from modelexport.distributed.supervision.status import (
    current_phase,
    in_rank,
    local_status,
    phase,
    phase_of_error,
    phase_scope,
    report,
)
from modelexport.errors import RankFailedError, UsageError
from modelexport.system.run_log import LogFile

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = [
    "MultiprocessConfig",
    "ParallelGroup",
    "ProcessGrid",
    "RankFailedError",
    "all_to_all",
    "current_phase",
    "default_backend",
    "external_config",
    "get_distributed_backend",
    "get_grid",
    "grid_coordinates",
    "in_rank",
    "init_and_run",
    "init_dist",
    "init_grid",
    "init_process_group_from_backend",
    "launch_subprocesses",
    "local_status",
    "phase",
    "phase_scope",
    "prestart",
    "report",
    "run_alone",
    "set_distributed_backend",
]

P = ParamSpec("P")


def init_and_run(func: Callable[P, None], cfg: MultiprocessConfig, *args: P.args, **kwargs: P.kwargs) -> None:
    """Joins the process group as rank ``cfg.rank``, lays the grid, runs ``func(*args, **kwargs)``, leaves.

    For processes that another launcher started: ``init_and_run(func, external_config(), ...)``. The ranks watch
    each other: where one raises, or its process ends, all of them raise.

    Raises:
        RankFailedError: another rank failed; it says which, and what it was doing.
        UsageError: ``cfg`` names no rank, or contradicts itself.
    """
    MultiprocessConfig.resolve(cfg)
    if not 0 <= cfg.rank < cfg.world_size:
        raise UsageError(f"cfg.rank is {cfg.rank}, with {cfg.world_size} ranks; set it to this process's rank")
    with process_group(cfg, watch=cfg.world_size > 1), phase_scope(f"running {function_name(func)}"):
        func(*args, **kwargs)


def launch_subprocesses(
    func: Callable[P, None],
    cfg: MultiprocessConfig,
    setup: Callable[[], None] | None = None,
    rank_offset: int = 0,
    *args: P.args,
    **kwargs: P.kwargs,
) -> None:
    """Runs ``func(*args, **kwargs)`` in ``cfg.local_world_size`` rank processes and waits for all of them.

    ``cfg`` is resolved in place. World size 1 runs inside this process. In a process that torchrun, accelerate,
    srun or mpirun started as one of several, ``func`` runs right here as that launcher's rank, its events go to
    this process's ``cfg.on_event``, and its errors are raised as they are (see :func:`init_and_run`).

    Args:
        func: importable by a fresh process, so defined at the top level of a module. Its result is dropped;
            :func:`report` sends results to ``cfg.on_event``.
        cfg: the group.
        setup: runs here before any rank starts.
        rank_offset: rank of the first process, for one launcher of several: machine ``k`` of several gives
            ``k * local_world_size``.
        args, kwargs: for ``func``; sent by multiprocessing's pickling.

    Raises:
        RankFailedError: a rank raised, ended early, was killed or hung. All ranks have been told to end, and
            are reaped (within five seconds, by a thread) if they resist.
        UsageError: ``cfg`` is inconsistent, the port is taken, or ``func`` or an argument cannot be sent.
    """
    if in_rank():
        raise UsageError("a rank process cannot launch ranks itself; launch from the program that started it")
    found = external_config(cfg)
    if found is not None:
        if setup is not None:
            setup()
        with local_status(found.on_event, found.rank, found.log):
            init_and_run(func, found, *args, **kwargs)
        return
    MultiprocessConfig.resolve(cfg)
    last = rank_offset + cfg.local_world_size
    if rank_offset < 0 or last > cfg.world_size:
        raise UsageError(f"ranks {rank_offset} to {last - 1} are to start here, but world_size is {cfg.world_size}")
    if setup is not None:
        setup()
    if cfg.world_size == 1:
        _run_here(func, cfg, args, kwargs)
    else:
        _run_ranks(RankCall(func, args, kwargs), cfg, rank_offset)


def all_to_all(input: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sends the i-th of W equal chunks of dim 0 to the group's i-th rank. Differentiable, any dtype.

    Args:
        input: ``[W * n, ...]``, the same shape and dtype on every rank of the group.
        group: None for all ranks.

    Returns:
        ``[W * n, ...]``: chunk i came from the group's i-th rank.

    Raises:
        UsageError: on every rank, where any rank's input is 0-dim, not divisible, or unlike the others'.
    """
    from modelexport.distributed.collectives.exchanges import exchange

    return exchange(input, group)


def run_alone(
    func: Callable[P, None],
    on_event: Callable[[int, dict], None] | None,
    log: LogFile | None,
    *args: P.args,
    **kwargs: P.kwargs,
) -> None:
    """Runs ``func(*args, **kwargs)`` here, as the only rank of a launch would run, but without a process group.

    Its phases and reports work as ever. torch is not imported.

    Raises:
        RankFailedError: as :func:`launch_subprocesses` would.
    """
    with local_status(on_event, log=log) as status:
        try:
            with phase_scope(f"running {function_name(func)}"):
                func(*args, **kwargs)
        except (Exception, SystemExit) as error:
            text, _ = phase_of_error(error) or status.current()
            fields = {"rank": 0, "phase": text, **exception_message(error)}
            raise Failure(time=0.0, **fields).error() from error


def _run_here(func: Callable, cfg: MultiprocessConfig, args: tuple, kwargs: dict) -> None:
    run_alone(init_and_run, cfg.on_event, cfg.log, func, cfg.for_rank(0, 0), *args, **kwargs)


def _run_ranks(call: RankCall, cfg: MultiprocessConfig, rank_offset: int) -> None:
    if cfg.launch_method != "fork":
        call.check()
    ranks: list[RankHandle] = []
    try:
        start_ranks(ranks, call, cfg, rank_offset)
        failure = Supervisor(ranks, cfg).run()
    finally:
        end_ranks(ranks)
    if failure is not None:
        raise failure.error()
