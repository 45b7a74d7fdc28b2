"""Starts rank processes: the fork server and its preloaded modules, sockets, boards, the store's port."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

from modelexport.distributed.config import MultiprocessConfig
from modelexport.distributed.launch.rank_main import InheritedFd, RankCall, RankSpec
from modelexport.distributed.launch.rank_main import main as rank_main
from modelexport.distributed.launch.supervisor import CHILDREN, RankHandle
from modelexport.distributed.listening import bind_towards
from modelexport.distributed.supervision.phase_board import PhaseBoard, new_board_file
from modelexport.errors import UsageError
from modelexport.system.limits import address_space_note

PRELOADING = "modelexport.distributed.launch.preloading"  # by name: importing it here would do its work here
PRELOAD_VARIABLE = "MODELEXPORT_PRELOAD"
_STARTING_FDS = 12  # that starting a process and watching it opens for a moment, beside the one that stays
_server_environ: dict[str, str] = {}  # what the fork server was started with
_environ_lock = threading.RLock()  # while this process's environment is another for a moment: launches may be several


def prestart(preload: Sequence[str] = ("torch", "safetensors")) -> None:
    """Starts the fork server, which imports ``preload`` meanwhile; returns at once.

    Later launches use it as it is: modules that they would preload beyond these, the ranks import themselves.
    It lives as long as this process. Nothing happens where a fork server runs already; nor where address space is
    limited: a library that finds too little of it ends the process that imports it, which is to be this one, later.
    """
    if not address_space_note():
        _start_server(preload)


def _start_server(preload: Sequence[str]) -> None:
    server: Any = multiprocessing.forkserver._forkserver
    former = server._preload_modules
    # Imported once for all ranks: what runs in them first, and what they would all import next.
    modules = dict.fromkeys([*preload, rank_main.__module__])
    with _start_environment(",".join(modules)) as environ:
        multiprocessing.forkserver.set_forkserver_preload([PRELOADING])
        pid = server._forkserver_pid
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            multiprocessing.forkserver.set_forkserver_preload(former)
        if server._forkserver_pid != pid:
            _server_environ.clear()
            _server_environ.update(environ)


@contextmanager
def _start_environment(preload: str = "") -> Iterator[dict[str, str]]:
    """The environment for processes that import torch and later wait a lot.

    OpenMP reads its policy when it is loaded. The fork server of Python 3.11 and older finds only modules on
    the default path unless told otherwise. Ctrl-C is this process's business, from their first moment on.
    """
    with _environ_lock:
        yield from _changed_environment(preload)


def _changed_environment(preload: str) -> Iterator[dict[str, str]]:
    changed = {
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        PRELOAD_VARIABLE: preload,
    }
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield dict(os.environ)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def start_ranks(ranks: list[RankHandle], call: RankCall, cfg: MultiprocessConfig, rank_offset: int) -> None:
    """Starts the processes and appends their handles to ``ranks``, also those of a start that fails half-way."""
    method = cfg.launch_method
    context: Any = multiprocessing.get_context(method)
    with _environ_lock:
        environ = dict(os.environ)
    unset: tuple[str, ...] = ()
    if method == "fork":
        _check_fork()
    elif method == "forkserver":
        _start_server(cfg.preload)
        unset = tuple(_server_environ.keys() - environ.keys())
    count = cfg.local_world_size
    pairs: list[tuple[socket.socket, socket.socket]] = []
    boards: list[int] = []
    used = 0
    listener = _open_listener(cfg) if rank_offset == 0 else None
    try:
        for i in range(count):
            pairs.append(socket.socketpair())
            boards.append(new_board_file(f"modelexport-rank-{rank_offset + i}"))
        _check_descriptors(count + _STARTING_FDS)
        for i, (ours, theirs) in enumerate(pairs):
            rank = rank_offset + i
            spec = RankSpec(
                config=cfg.for_rank(rank, i),
                call=call,
                channel=InheritedFd(theirs.fileno()),
                board=InheritedFd(boards[i]),
                listener=InheritedFd(listener.fileno()) if listener is not None and i == 0 else None,
                environ=environ,
                unset=unset,
                close_fds=tuple(pair[0].fileno() for pair in pairs) if method == "fork" else (),
            )
            process = context.Process(target=rank_main, args=(spec,), name=f"modelexport-rank-{rank}")
            if method == "spawn":
                with _start_environment():
                    _start_process(process, cfg)
            else:
                _start_process(process, cfg)
            ours.setblocking(False)
            ranks.append(RankHandle(rank, process, ours, PhaseBoard(boards[i])))
            used += 1
    finally:
        for ours, _ in pairs[used:]:
            ours.close()
        for _, theirs in pairs:
            theirs.close()
        for fd in boards[used:]:
            os.close(fd)
        if listener is not None:
            listener.close()


def _check_descriptors(count: int) -> None:
    """Raises OSError (EMFILE) where this process cannot open so many files: half-way through starting a process, that
    would end the fork server, with a traceback of its own."""
    fds: list[int] = []
    try:
        fds.extend(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(count))
    finally:
        for fd in fds:
            os.close(fd)


def _start_process(process: BaseProcess, cfg: MultiprocessConfig) -> None:
    try:
        with CHILDREN:
            process.start()
    except (ConnectionError, EOFError) as error:
        raise UsageError(
            f"the fork server died while it imported its preload modules ({', '.join(cfg.preload)}); its output "
            f"above says why. Does each of them import by itself (python -c 'import ...')?{address_space_note()}"
        ) from error


def _open_listener(cfg: MultiprocessConfig) -> socket.socket | None:
    """The store's listening socket, where rank 0 starts here and hosts a store."""
    if cfg.init_method != "env://":
        return None
    try:
        listener = bind_towards(cfg.master_addr, int(cfg.master_port), reuse=True)
    except OSError as error:
        if not cfg.port_was_chosen:
            raise UsageError(
                f"port {cfg.master_port} is not free on this machine ({error.strerror}): give another "
                f"master_port, or leave it out to have one chosen where all ranks run here"
            ) from error
        listener = bind_towards(cfg.master_addr, 0, reuse=True)
        cfg.choose_port(listener.getsockname()[1])
    listener.listen(max(128, cfg.world_size))
    return listener


def _check_fork() -> None:
    """Refuses to fork a process with threads: the child has their locks but not them, and hangs.

    Raises:
        UsageError: says how many threads there are.
    """
    try:
        threads = len(os.listdir("/proc/self/task"))
    except OSError:
        threads = 2 if "torch" in sys.modules else 1
    if threads > 1:
        raise UsageError(
            f"launch_method 'fork' would hang: this process has {threads} threads (OpenMP's count). "
            f"Use 'forkserver', which is as fast"
        )
