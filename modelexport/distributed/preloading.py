"""Imported by the fork server, once: it imports the modules that the ranks will share.

Their names come in an environment variable.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import threading

from modelexport.distributed.starting import PRELOAD_VARIABLE
from modelexport.startup import exempt_everything, without_collector

if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the fork server itself does, but only once this is imported

with without_collector():
    for name in os.environ.pop(PRELOAD_VARIABLE, "").split(","):
        if name:
            with contextlib.suppress(ImportError):  # the rank that needs it will say so, with its name
                importlib.import_module(name)
exempt_everything()
