"""Imported by the fork server, once: it imports the modules that the ranks will share, and calls what prepares them.

Their names come in an environment variable: ``module``, or ``module:function:argument:...``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal

from modelexport.distributed.launch.starting import PRELOAD_VARIABLE
from modelexport.errors import ModelExportError
from modelexport.system.startup import exempt_everything, without_collector

# Ctrl-C is the launcher's: the fork server itself ignores it, but only once this is imported. Its children get back
# what was there before.
former = signal.signal(signal.SIGINT, signal.SIG_IGN)
try:
    with without_collector():
        for name in os.environ.pop(PRELOAD_VARIABLE, "").split(","):
            if name:
                # A rank that needs what cannot be imported says so, with its name.
                with contextlib.suppress(ImportError, OSError, MemoryError, ModelExportError):
                    module, *call = name.split(":")
                    imported = importlib.import_module(module)
                    if call:
                        getattr(imported, call[0])(*call[1:])
finally:
    signal.signal(signal.SIGINT, former)
exempt_everything()
