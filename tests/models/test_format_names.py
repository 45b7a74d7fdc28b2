"""Checkpoint formats are listed without importing them, and the list is the one that importing all of them gives."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

from modelexport.checkpoints import formats as modules
from modelexport.models import checkpoint_formats as formats


def test_the_list_is_that_of_the_modules_that_say_their_name() -> None:
    found = {}
    for module in pkgutil.iter_modules(modules.__path__, f"{modules.__name__}."):
        name = getattr(importlib.import_module(module.name), "NAME", None)
        if name is not None:
            found[name] = module.name
    assert formats.containers() == found
    assert list(formats.formats()) == sorted(found)
    assert {"hf", "dcp", "gguf"} < set(found)


def test_help_imports_no_container() -> None:
    program = (
        "import sys\n"
        "from modelexport.models import checkpoint_formats as formats\n"
        "from modelexport.cli import parser_of\n"
        "parser_of('').format_help()\n"
        "print([name for name in formats.containers().values() if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
