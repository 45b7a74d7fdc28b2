"""The command line: parse, dispatch, print. Nothing heavy is imported before the arguments are known.

Every command takes ``--json``: its result is then JSON on stdout, and an error is one line of JSON on stderr,
``{"error": {"kind": ..., "message": ..., "exit_status": ...}}``, with nothing on stdout.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

from modelexport.cli.parsers import COMMANDS, export_parser, parser_of
from modelexport.errors import ModelExportError, RankFailedError, UsageError
from modelexport.system.limits import limit_error
from modelexport.system.startup import exempt_everything, interrupt_no_import
from modelexport.system.terminal import flush, note, open_standard_streams

__all__ = ["COMMANDS", "export_parser", "main", "parser_of", "run"]

_OTHERS_FIRST = 1.0  # seconds for rank 0 to say what is wrong: torchrun ends all when the first has ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0 done, 1 failed or nobody reads, 2 usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments
    try:
        return _run(arguments)
    except ModelExportError as error:
        return _failed(limit_error(error) or error, as_json=as_json)
    except KeyboardInterrupt:
        _say("Interrupted", "interrupted; the same command resumes", 130, as_json=as_json)
        return 130
    except BrokenPipeError:  # "| head": nobody reads on
        return 1
    except Exception as error:
        limit = limit_error(error)
        if limit is None:
            raise
        return _failed(limit, as_json=as_json)


def _failed(error: ModelExportError, *, as_json: bool) -> int:
    """Say what is wrong, if no other rank does; returns the exit status."""
    if _is_ours_to_say(error):
        _say(type(error).__name__, str(error), error.exit_status, as_json=as_json)
    else:
        time.sleep(_OTHERS_FIRST)
    return error.exit_status


def _say(kind: str, message: str, status: int, *, as_json: bool) -> None:
    """An error on stderr: a sentence, or an object for machines."""
    if as_json:
        text = json.dumps({"error": {"kind": kind, "message": message, "exit_status": status}})
    else:
        text = f"modelexport: {message}"
    note(text)


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        command, given = "export", export_parser().parse_strictly(arguments)
    else:
        command, given = arguments[0], parser_of(arguments[0]).parse_strictly(arguments[1:])
    status: int = importlib.import_module(f"modelexport.cli.{command}").run(given)
    return status


def _is_ours_to_say(error: ModelExportError) -> bool:
    """Returns whether this process prints ``error``: under torchrun and the like the first rank does, and the
    culprit; all the others where the first rank is gone without a word."""
    rank = _external_rank()
    if isinstance(error, RankFailedError) and error.rank == 0 and not error.phase:
        return True
    return rank in (None, 0) or not isinstance(error, (UsageError, RankFailedError))


def _external_rank() -> int | None:
    from modelexport.distributed.environment import external_rank  # only where something failed: sockets, and more

    return external_rank()


def run() -> NoReturn:
    """Entry point of the program: :func:`main`, and a quick end."""
    open_standard_streams()
    interrupt_no_import()
    try:
        status = main()
    except Exception:  # a defect of ours
        if _external_rank() is None:
            raise
        traceback.print_exc()
        status = 1
    exempt_everything()
    if status and _external_rank() is not None:
        # Without waiting for threads that still wait for ranks that will not come.
        flush()
        os._exit(status)
    sys.exit(status)
