"""Raising an error in the main thread from outside of it: on another thread's demand, or when asked by SIGTERM."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from modelexport.distributed.supervision.failures import EndedByLauncherError

_SIGNAL = signal.SIGUSR2


class Interrupter:
    """Lets ``error()`` be raised in the main thread, once.

    Signals are Python's only way into a main thread that sleeps or waits for a lock; they do not reach one that is
    inside native code, which is what :meth:`overdue` is for. In any other thread, and where somebody else handles
    SIGTERM, that part does nothing.

    Args:
        error: makes the error to raise; None for "there is none".
        on_sigterm: SIGTERM raises as well: that error, which it gives ``patience`` seconds to turn up, or else
            :class:`~modelexport.distributed.supervision.failures.EndedByLauncherError`.
        known: set once ``error()`` is there.
    """

    def __init__(
        self, error: Callable[[], BaseException | None], known: threading.Event, *, on_sigterm: bool, patience: float
    ) -> None:
        self._error, self._known, self._patience = error, known, patience
        self._main = threading.main_thread()
        self._formers: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._asked: float | None = None
        self.raised = False
        if threading.current_thread() is not self._main:
            return
        self._formers[_SIGNAL] = signal.signal(_SIGNAL, self._on_demand)
        if on_sigterm and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._pipe = os.pipe()
            for fd in self._pipe:
                os.set_blocking(fd, False)
            if signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False) != -1:
                raise RuntimeError("this process already waits for signals (asyncio?): start ranks outside of it")
            self._formers[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._on_sigterm)

    def interrupt(self) -> None:
        """Raises in the main thread, if it can be reached."""
        if self._formers:
            signal.pthread_kill(self._main.ident or 0, _SIGNAL)

    def overdue(self, seconds: float) -> bool:
        """Returns whether SIGTERM came ``seconds`` ago and the main thread has not handled it. To be polled."""
        if self._pipe is None:
            return False
        with contextlib.suppress(BlockingIOError):
            if signal.SIGTERM in os.read(self._pipe[0], 64) and self._asked is None:
                self._asked = time.monotonic()
        return self._asked is not None and not self.raised and time.monotonic() - self._asked > seconds

    def close(self) -> None:
        """Puts the former handlers back."""
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            for fd in self._pipe:
                os.close(fd)
            self._pipe = None
        for number, former in self._formers.items():
            signal.signal(number, former)
        self._formers.clear()

    def _on_demand(self, number: int, frame: FrameType | None) -> None:
        error = self._error()
        if error is not None and not self.raised:
            self.raised = True
            raise error

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self.raised:  # it is on its way out
            return
        self._known.wait(self._patience)
        self.raised = True
        raise self._error() or EndedByLauncherError()
