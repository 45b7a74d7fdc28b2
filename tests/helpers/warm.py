"""Programs that begin where torch, or another heavy package, is imported: forks of a process that has imported it.

For tests of what a program does in a process of its own, with its own environment, where importing is not the subject.
"""

from __future__ import annotations

import atexit
import functools
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_warm(
    *arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None, imported: str = "torch"
) -> subprocess.CompletedProcess[str]:
    """Runs ``python *arguments``, which begin with ``-c`` or ``-m``, where ``imported`` has been imported.

    Args:
        arguments: of Python.
        cwd: the directory to run in.
        env: its whole environment; this process's by default. PYTHONPATH is obeyed, what else Python reads is not.
        imported: a module.
    """
    with tempfile.TemporaryDirectory(prefix="warm-") as directory:
        outputs = [f"{directory}/stdout", f"{directory}/stderr"]
        asked = [arguments, str(cwd), dict(os.environ if env is None else env), *outputs]
        program = _program(imported)
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(json.dumps(asked) + "\n")
        program.stdin.flush()
        status = json.loads(program.stdout.readline())
        return subprocess.CompletedProcess(arguments, status, *(Path(name).read_text() for name in outputs))


@functools.cache
def _program(imported: str) -> subprocess.Popen[str]:
    """The process that has imported a module; it ends with this one."""
    command = [sys.executable, "-m", "tests.helpers.warm", imported]
    program = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def end() -> None:
        program.communicate()

    atexit.register(end)
    return program


def _run(arguments: list[str], cwd: str, env: dict[str, str], stdout: str, stderr: str) -> None:
    for number, name in ((1, stdout), (2, stderr)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    sys.path[:0] = ["", *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    how, what, *rest = arguments
    try:
        if how == "-m":
            sys.argv = [what, *rest]
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            assert how == "-c"
            sys.argv = ["-c", *rest]
            module: Any = types.ModuleType("__main__")
            sys.modules["__main__"] = module
            exec(compile(what, "<string>", "exec"), vars(module))
    finally:
        atexit._run_exitfuncs()


def _serve(imported: str) -> None:
    __import__(imported)
    context = multiprocessing.get_context("fork")
    for line in sys.stdin:
        process = context.Process(target=_run, args=json.loads(line))
        process.start()
        process.join()
        print(json.dumps(process.exitcode), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
