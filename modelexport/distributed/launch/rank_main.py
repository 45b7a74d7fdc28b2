"""The main function of a rank process that the launcher started.

The fork server imports this module before it forks, so it imports torch only inside functions: whether torch
is preloaded is the caller's choice.
"""

from __future__ import annotations

import ctypes
import multiprocessing.forkserver
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

from modelexport.distributed.config import MultiprocessConfig
from modelexport.distributed.environment import share_cores
from modelexport.distributed.launch.process_group import process_group
from modelexport.distributed.supervision.status import RankStatus, phase, phase_scope, use
from modelexport.errors import UsageError
from modelexport.system.run_log import RunLog
from modelexport.system.terminal import flush

KILL_AFTER = 5.0  # seconds between SIGTERM and SIGKILL
_PR_SET_PDEATHSIG = 1


class InheritedFd:
    """A file descriptor that goes along when a process is started, by whatever start method."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Callable, tuple]:
        return _inherited_fd, (reduction.DupFd(self.fd),)


def _inherited_fd(duplicate: Any) -> InheritedFd:
    return InheritedFd(duplicate.detach())


class RankCall:
    """The function and its arguments. Unpickled late, so that what fails then is reported like any failure."""

    def __init__(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        self._call: tuple[Callable, tuple, dict[str, Any]] | None = (func, args, kwargs)
        self._data = b""

    def __reduce__(self) -> tuple[Callable, tuple]:
        assert self._call is not None
        func, args, kwargs = self._call
        self.check()
        try:
            return _late_call, (bytes(reduction.ForkingPickler.dumps(self._call)),)
        except Exception as error:
            # pickle raises PicklingError, AttributeError or TypeError as it likes, and names no argument.
            parts = {f"argument {i}": value for i, value in enumerate(args)}
            parts |= {f"argument {name!r}": value for name, value in kwargs.items()}
            for name, value in parts.items():
                if not _can_be_sent(value):
                    what = f"{name} of {function_name(func)}, of type {type(value).__qualname__},"
                    raise UsageError(f"{what} cannot be sent to the rank processes: {error}") from error
            raise UsageError(_put_in_module(func, str(error))) from error

    def check(self) -> None:
        """Raises UsageError where it is plain, before anything is started, that no rank could import the function."""
        refusal = "" if self._call is None else _why_unreachable(self._call[0])
        if refusal:
            raise UsageError(refusal)

    def load(self) -> tuple[Callable, tuple, dict[str, Any]]:
        """(func, args, kwargs)"""
        if self._call is None:
            self._call = pickle.loads(self._data)  # from our own launcher: multiprocessing's way to say what to run
        assert self._call is not None
        return self._call


def _late_call(data: bytes) -> RankCall:
    call = RankCall.__new__(RankCall)
    call._call, call._data = None, data
    return call


def _can_be_sent(value: Any) -> bool:
    try:
        reduction.ForkingPickler.dumps(value)
    except Exception:
        return False
    return True


def function_name(func: Callable) -> str:
    """The name of a function for messages."""
    return getattr(func, "__qualname__", None) or repr(func)


def _put_in_module(func: Callable, reason: str) -> str:
    return (
        f"{function_name(func)} cannot be sent to the rank processes ({reason}). Put it in a module, at its top "
        f"level: save it as, say, my_ranks.py beside this program and pass my_ranks.{_bare_name(func)}"
    )


def _bare_name(func: Callable) -> str:
    name = getattr(func, "__name__", "run")
    return name if name.isidentifier() else "run"


def _why_unreachable(func: Callable) -> str:
    """The reason for which a fresh process could not import ``func``; "" where none is known."""
    while hasattr(func, "func") and callable(func.func):  # functools.partial
        func = func.func
    name = getattr(func, "__qualname__", "")
    if "<lambda>" in name or "<locals>" in name:
        return _put_in_module(func, "it is a lambda or defined inside another function")
    if getattr(func, "__module__", None) != "__main__":
        return ""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    path = getattr(main, "__file__", None)
    if spec is not None:
        reachable = not (spec.name == "__main__" or spec.name.endswith(".__main__"))
    else:
        reachable = path is not None and os.path.isfile(path)
    return "" if reachable else _put_in_module(func, "it is defined in a notebook, a prompt or a __main__.py")


@dataclass
class RankSpec:
    """The arguments of a rank process.

    Attributes:
        channel: its end of the socket to the launcher.
        board: the file of its phase board.
        listener: rank 0 where it hosts the store: the socket that listens on the master port.
        environ, unset: the launcher's environment now; a fork server still has the one of its own start.
        close_fds: with ``fork``: the launcher's own ends, which a forked child inherits.
    """

    config: MultiprocessConfig
    call: RankCall
    channel: InheritedFd
    board: InheritedFd
    listener: InheritedFd | None
    environ: dict[str, str]
    unset: tuple[str, ...]
    close_fds: tuple[int, ...] = ()


def main(spec: RankSpec) -> None:
    """Joins the group, runs the function, reports the outcome."""
    for fd in spec.close_fds:
        os.close(fd)
    _end_with_launcher(spec.config.launch_method)
    # Ctrl-C reaches the whole terminal; the launcher handles it for all. SIGTERM must end a rank at once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # blocked until here, see starting
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name in spec.unset:
        os.environ.pop(name, None)
    os.environ.update(spec.environ)
    status = RankStatus.opened(socket.socket(fileno=spec.channel.fd), spec.board.fd)
    use(status)
    phase("starting")
    status.start()
    try:
        if spec.config.log is not None:
            status.log = RunLog(spec.config.log, spec.config.rank)
        func, args, kwargs = spec.call.load()
        share_cores(spec.config.local_world_size)
        listener = None if spec.listener is None else socket.socket(fileno=spec.listener.fd)
        alone = spec.config.local_world_size == spec.config.world_size  # the launcher sees all ranks
        with process_group(spec.config, listener, watch=not alone) as watch:
            # Reported in here: once the connections are closed the peers' echoes of it set out as well.
            try:
                with phase_scope(f"running {function_name(func)}"):
                    func(*args, **kwargs)
                status.finish()
            except BaseException as error:
                _report_and_end(status, error if watch is None else watch.fail(error))
        status.send({"type": "done"})
    except BaseException as error:
        _report_and_end(status, error)
    phase("waiting for its background threads to end")


def _report_and_end(status: RankStatus, error: BaseException) -> None:
    status.fail(error)
    flush()
    # Keep the connections open until the launcher ends all ranks: the peers then never fail themselves.
    time.sleep(KILL_AFTER)
    os._exit(1)


def _end_with_launcher(launch_method: str) -> None:
    """Makes the kernel kill this process with its parent, even where no Python code can run here.

    With a fork server that is the parent. It ends when all copies of one pipe's end are closed; this process
    holds a copy (to start processes of its own, for which it would start another fork server anyway).
    """
    if launch_method == "forkserver":
        server: Any = multiprocessing.forkserver._forkserver
        fd, server._forkserver_alive_fd = server._forkserver_alive_fd, None
        if fd is not None:
            os.close(fd)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
