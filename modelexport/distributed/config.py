"""MultiprocessConfig: how many ranks there are, where they meet and how they are started."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from modelexport.errors import UsageError
from modelexport.system.run_log import LogFile

MISSING: Any = "???"
"""Marks a field that :meth:`MultiprocessConfig.resolve` fills in (OmegaConf's spelling of "missing")."""

LAUNCH_METHODS = ("forkserver", "spawn", "fork")
DEFAULT_TIMEOUT = 1800.0


def is_missing(value: object) -> bool:
    """Returns whether a field still waits for :meth:`MultiprocessConfig.resolve`."""
    return value is None or value == MISSING


def is_loopback(address: str) -> bool:
    """Returns whether an address means this machine and nothing else."""
    return address in ("localhost", "::1") or address.startswith("127.")


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port that nothing listens on at this moment (for a launch the socket itself is kept, see launch)."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


@dataclass
class MultiprocessConfig:
    """Describes a group of rank processes. ``???`` and None mean "missing": see :meth:`resolve`.

    Attributes:
        rank, local_rank: this process's place; set in the copy that each rank receives, -1 elsewhere.
        world_size: ranks altogether, all machines counted.
        local_world_size: ranks on this machine.
        master_addr, master_port: where the ranks find each other's addresses (a TCP store on global rank 0).
        init_method: ``env://`` for that store, or another of torch.distributed's (``file://...``, ``tcp://...``).
        model_parallelism, pipeline_parallelism: sizes of those axes of the grid; data parallelism is the rest.
        backend: of the default group; None for :func:`get_distributed_backend`'s.
        model_parallel_backend, pipeline_parallel_backend, data_parallel_backend: of the groups along each axis.
        launch_method: ``forkserver``, ``spawn``, or ``fork`` (refused once this process has threads).
        timeout: seconds without progress after which a rank counts as hung, and the group's own time-out.
        preload: modules that the fork server imports once, before it forks the ranks; of
            ``module:function:argument:...`` it calls the function too, with these texts.
        on_event: called in the launcher as ``on_event(rank, event)`` for every :func:`report` of a rank;
            never sent to the ranks.
        log: the file that every rank appends its phases to; None: none does.
    """

    rank: int = -1
    local_rank: int = -1
    world_size: int = MISSING
    local_world_size: int = MISSING
    master_addr: str = "127.0.0.1"
    master_port: int = MISSING
    init_method: str = "env://"
    model_parallelism: int = 1
    pipeline_parallelism: int = 1
    backend: str | None = None
    model_parallel_backend: str | None = None
    pipeline_parallel_backend: str | None = None
    data_parallel_backend: str | None = None
    launch_method: str = "forkserver"
    timeout: float = DEFAULT_TIMEOUT
    preload: tuple[str, ...] = ("torch", "safetensors")
    on_event: Callable[[int, dict], None] | None = None
    log: LogFile | None = None
    _chosen_port: ClassVar[int] = -1  # on an instance: the port that resolve chose

    @classmethod
    def resolve(cls, config: MultiprocessConfig) -> None:
        """Fills in what is missing, in place, and checks the rest.

        ``world_size``: the number of CUDA devices, or 1. ``local_world_size``: ``world_size``.
        ``master_port``: a port that is free now (a launch on this machine holds on to it, or takes another).

        Raises:
            UsageError: a size is not a positive whole number, the grid's sizes do not divide ``world_size``,
                the launch method is unknown, or several machines are to meet at a port that nobody named.
        """
        if is_missing(config.world_size):
            config.world_size = _device_count()
        _check_size("world_size", config.world_size)
        if is_missing(config.local_world_size):
            config.local_world_size = config.world_size
        _check_size("local_world_size", config.local_world_size)
        if config.local_world_size > config.world_size:
            raise UsageError(
                f"local_world_size {config.local_world_size} is larger than world_size {config.world_size}"
            )
        check_grid(config.world_size, config.model_parallelism, config.pipeline_parallelism)
        if config.launch_method not in LAUNCH_METHODS:
            raise UsageError(f"launch_method {config.launch_method!r} is none of {', '.join(LAUNCH_METHODS)}")
        if not config.timeout > 0:
            raise UsageError(f"timeout must be a positive number of seconds, not {config.timeout!r}")
        if is_missing(config.master_port):
            _choose_port(config)
        elif not 0 < int(config.master_port) < 65536:
            raise UsageError(f"master_port {config.master_port} is not between 1 and 65535")

    def for_rank(self, rank: int, local_rank: int) -> MultiprocessConfig:
        """The copy that one rank receives."""
        return replace(self, rank=rank, local_rank=local_rank, on_event=None)

    def choose_port(self, port: int) -> None:
        """Sets a port that nobody asked for."""
        self.master_port = port
        self.__dict__["_chosen_port"] = port

    @property
    def port_was_chosen(self) -> bool:
        """True if :meth:`resolve` chose the port (then a launch may choose another in its place)."""
        return self._chosen_port == self.master_port


def check_grid(world_size: int, model_parallelism: int, pipeline_parallelism: int) -> None:
    """Raises UsageError unless ``world_size`` is a multiple of the two axes' product."""
    _check_size("model_parallelism", model_parallelism)
    _check_size("pipeline_parallelism", pipeline_parallelism)
    cell = model_parallelism * pipeline_parallelism
    if world_size % cell:
        raise UsageError(
            f"world_size {world_size} is not divisible by model_parallelism {model_parallelism} x "
            f"pipeline_parallelism {pipeline_parallelism} = {cell}; start a multiple of {cell} ranks"
        )


def _check_size(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")


def _choose_port(config: MultiprocessConfig) -> None:
    if config.local_world_size < config.world_size:
        raise UsageError(
            f"{config.local_world_size} of {config.world_size} ranks start here: give master_port (and "
            f"master_addr), the same on every machine, so that they can meet"
        )
    config.choose_port(free_port())


def _device_count() -> int:
    import torch

    return max(1, torch.cuda.device_count())
