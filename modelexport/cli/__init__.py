"""The command line: parse, dispatch, print. Nothing heavy is imported before the arguments are known.

Every command takes ``--json``: its result is then JSON on stdout, and an error is one line of JSON on stderr,
``{"error": {"kind": ..., "message": ..., "exit_status": ...}}``, with nothing on stdout.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from modelexport.cli.parsers import COMMANDS, export_parser, parser_of
from modelexport.distributed.environment import external_rank
from modelexport.errors import HubError, ModelExportError, RankFailedError, UsageError
from modelexport.recipe import ExportRecipe
from modelexport.resharding.recipe import ReshardRecipe
from modelexport.settings import parse_assignments
from modelexport.system.limits import limit_error
from modelexport.system.startup import exempt_everything, interrupt_no_import, process_seconds
from modelexport.system.terminal import flush, note, open_standard_streams, show

if TYPE_CHECKING:
    from modelexport.exporting.record import ExportResult

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
        return _export(arguments)
    command = arguments[0]
    given = parser_of(command).parse_strictly(arguments[1:])
    return _HANDLERS[command](given)


def _is_ours_to_say(error: ModelExportError) -> bool:
    """Whether this process prints ``error``: under torchrun and the like the first rank does, and the culprit."""
    rank = external_rank()
    return rank in (None, 0) or not isinstance(error, (UsageError, RankFailedError))


def run() -> NoReturn:
    """Entry point of the program: :func:`main`, and a quick end."""
    open_standard_streams()
    interrupt_no_import()
    try:
        status = main()
    except Exception:  # a defect of ours
        if external_rank() is None:
            raise
        traceback.print_exc()
        status = 1
    exempt_everything()
    if status and external_rank() is not None:
        # Without waiting for threads that still wait for ranks that will not come.
        flush()
        os._exit(status)
    sys.exit(status)


def _export(arguments: list[str]) -> int:
    given = vars(export_parser().parse_strictly(arguments))
    path = given.pop("recipe", None)
    overrides = {**parse_assignments(given.pop("set", [])), **given}
    if path is not None:
        recipe = ExportRecipe.load(path, overrides)
    else:
        recipe = ExportRecipe.from_mapping(overrides, where="command line")
    return _exported(recipe)


def _convert(given: Namespace) -> int:
    return _exported(ExportRecipe.from_mapping({**vars(given), "quant": "keep"}, where="command line"))


def _exported(recipe: ExportRecipe) -> int:
    from modelexport.exporting import export

    try:
        result = export(recipe)
    except HubError as error:  # what was exported stands: its summary is printed before what went wrong
        if error.result is not None and not recipe.json:
            _show_export(error.result, recipe)
        raise
    if external_rank() in (None, 0):
        _show_export(result, recipe)
    return 0


def _show_export(result: ExportResult, recipe: ExportRecipe) -> None:
    """Prints a result; its seconds are the process's, as whoever typed the command counts them: with the imports."""
    if recipe.quiet and not recipe.json:
        return
    if not recipe.dry_run:
        result = replace(result, seconds=process_seconds())
    stands = "" if recipe.dry_run else f"{recipe.out} is complete"
    if recipe.json:
        show(json.dumps(result.as_json(), indent=1), stands=stands)
    else:
        from modelexport.cli.summary import summary

        show(summary(result), stands=stands)


def _reshard(given: Namespace) -> int:
    recipe = ReshardRecipe.from_mapping(vars(given), where="command line")
    from modelexport.resharding import reshard

    result = reshard(recipe)
    if external_rank() not in (None, 0):
        return 0
    stands = "" if recipe.dry_run else f"{recipe.out} is complete"
    if recipe.json:
        show(json.dumps(result.as_json(), indent=1), stands=stands)
    elif not recipe.quiet:
        from modelexport.cli.summary import reshard_summary

        show(reshard_summary(result), stands=stands)
    return 0


def _diff(given: Namespace) -> int:
    from modelexport.inspection.diff import print_diff

    return print_diff(given.a, given.b, given.config, as_json=given.json)


def _eval(given: Namespace) -> int:
    from modelexport.inspection.evaluate.command import print_evaluation

    settings = vars(given)
    return print_evaluation(settings.pop("checkpoint"), as_json=settings.pop("json"), **settings)


def _inspect(given: Namespace) -> int:
    from modelexport.inspection.inspect import print_inspection

    return print_inspection(given.checkpoint, given.config, as_json=given.json)


def _verify(given: Namespace) -> int:
    from modelexport.inspection.verify import print_verification

    return print_verification(given.checkpoint, given.against, given.config, as_json=given.json)


def _report(given: Namespace) -> int:
    from modelexport.inspection.report import print_report

    return print_report(given.checkpoint, given.html, given.config, as_json=given.json)


def _models(given: Namespace) -> int:
    from modelexport.inspection.listings.models import print_models

    return print_models(given.name, as_json=given.json)


def _formats(given: Namespace) -> int:
    from modelexport.inspection.listings.formats import print_formats

    return print_formats(given.name, as_json=given.json)


def _push(given: Namespace) -> int:
    from modelexport.jobs.hub import push

    quiet = given.quiet or given.json
    url = push(given.checkpoint, given.repository, private=given.private, quiet=quiet)
    stands = f"{given.checkpoint} is pushed"
    if given.json:
        show(json.dumps({"checkpoint": str(given.checkpoint), "pushed": url}, indent=1), stands=stands)
    elif not quiet:
        show(f"pushed {given.checkpoint} to {url}", stands=stands)
    return 0


_HANDLERS: dict[str, Callable[[Namespace], int]] = {
    "convert": _convert,
    "diff": _diff,
    "eval": _eval,
    "formats": _formats,
    "inspect": _inspect,
    "models": _models,
    "push": _push,
    "report": _report,
    "reshard": _reshard,
    "verify": _verify,
}
