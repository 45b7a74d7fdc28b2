"""Start and end of a process that imports torch: without the cyclic garbage collector, and safe from Ctrl-C.

The collector walks every object made so far again and again while torch is imported, and once more when the
interpreter ends: 0.35 s and 0.5 s, measured, out of three seconds for a whole export. None of it frees anything.

Native code of torch imports numpy, and takes a KeyboardInterrupt there for a machine without numpy: the interrupt is
lost, and the program goes on with half of numpy, which ends in a RecursionError, an ImportError, or a crash. Elsewhere
in that import C++ meets an exception that it does not expect, and aborts. Before Python 3.12 a class body may turn an
interrupt into a RuntimeError (``__set_name__``).
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_LATER = 0.02  # seconds
_IMPORTED = time.perf_counter()


def process_seconds() -> float:
    """Returns the seconds since this process began; where the system does not tell, since this module was imported."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return time.perf_counter() - _IMPORTED


@contextmanager
def without_collector() -> Iterator[None]:
    """Pauses the garbage collector: for imports, and for plans of a hundred thousand small objects.

    What was made meanwhile is among the oldest objects afterwards: as young ones it would be walked at once.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if gc.get_freeze_count() == 0:
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()


def exempt_everything() -> None:
    """Exempts all present objects from the collector, for good: only in a process that is ours alone.

    Called last, it lets the interpreter's own end find nothing to walk; called before ranks are forked, it keeps
    the collector from touching, and so copying, the pages that they share. Where Triton was imported (transformers does
    where it is installed), the end of the process walks all the same: Triton's bindings print forty lines about what is
    not freed by then.
    """
    gc.freeze()
    if "triton" in sys.modules:
        atexit.register(gc.unfreeze)


def interrupt_no_import() -> None:
    """Defers Ctrl-C, from now on, until a running import has ended: only in a process that is ours alone.

    A process that ignores SIGINT, as one in the background does, goes on to ignore it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGALRM, _interrupt)
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            signal.setitimer(signal.ITIMER_REAL, _LATER)  # look again then
            return
        frame = frame.f_back
    raise KeyboardInterrupt
