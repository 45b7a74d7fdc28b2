"""The command line: parse, dispatch, print. Nothing heavy is imported before the arguments are known."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from modelexport import __version__
from modelexport.distributed.environment import external_rank
from modelexport.errors import ModelExportError, RankFailedError, UsageError, nearest
from modelexport.recipe import ALGORITHM_SETTINGS, CALIBRATION, ExportRecipe
from modelexport.reshard_recipe import ReshardRecipe
from modelexport.settings import Settings, parse_assignments
from modelexport.startup import exempt_everything

COMMANDS = ("convert", "diff", "eval", "inspect", "reshard", "verify")
_OTHERS_FIRST = 1.0  # seconds for rank 0 to say what is wrong: torchrun ends all when the first has ended
_EXAMPLES = """\
examples:
  modelexport --tp 4 --out ckpt/                             the embedded demo model, FP8
  modelexport --model DIR --quant int4 --tp 4 --out ckpt/    any Llama-architecture checkpoint
  modelexport --model DIR --quant int8 --dry-run             plan, sizes and memory; writes nothing
  torchrun --nnodes 2 --nproc-per-node 4 -m modelexport --tp 8 --workspace DIR --model DIR --out DIR
                                                             ranks on two machines, all DIRs seen by both
  modelexport reshard ckpt/ --tp 8 --pp 2 --out DIR          the same for another parallelism, quantised or not
  modelexport convert ckpt/ --format awq --out DIR           quantised as it is, in another spelling
  modelexport diff ckpt/ DIR                                 same tensors, same values? any formats
  modelexport inspect ckpt/                                  layers, dtypes, bits per weight
  modelexport verify ckpt/ --against DIR                     hashes, structure, error per layer
  modelexport eval ckpt/ --against DIR                       perplexity, KL divergence on held-out text
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0 done, 1 failed, 2 usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _run(arguments)
        sys.stdout.flush()  # a reader that has gone is noticed here, not by the interpreter as it ends
        return status
    except ModelExportError as error:
        if _is_ours_to_say(error):
            print(f"modelexport: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(_OTHERS_FIRST)
        return error.exit_status
    except KeyboardInterrupt:
        print("modelexport: interrupted; the same command resumes", file=sys.stderr)
        return 130
    except BrokenPipeError:  # "| head": nobody reads on; what is still buffered must not raise again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(arguments: list[str]) -> int:
    if arguments and arguments[0] in COMMANDS:
        return _subcommand(arguments[0], arguments[1:])
    if arguments and not arguments[0].startswith("-"):
        raise UsageError(f"unknown command '{arguments[0]}'{nearest(arguments[0], COMMANDS)}")
    return _export(arguments)


def _is_ours_to_say(error: ModelExportError) -> bool:
    """Whether this process prints ``error``: under torchrun and the like the first rank does, and the culprit."""
    rank = external_rank()
    return rank in (None, 0) or not isinstance(error, (UsageError, RankFailedError))


def run() -> NoReturn:
    """Entry point of the program: :func:`main`, and a quick end."""
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
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


class _Parser(argparse.ArgumentParser):
    """argparse, with its errors as ours: one line that says what to type next."""

    def parse_strictly(self, arguments: Sequence[str]) -> argparse.Namespace:
        """As ``parse_args``, but an unknown flag is answered with the nearest one that there is."""
        given, unknown = self.parse_known_args(arguments)
        for word in unknown:
            flag = word.partition("=")[0]
            if flag.startswith("--"):
                close = difflib.get_close_matches(flag, self._option_string_actions, n=1)
                self.error(f"unknown flag {flag}{f'; did you mean {close[0]}?' if close else ''}")
        if unknown:
            self.error(f"unexpected argument '{unknown[0]}'")
        return given

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see: {self.prog} --help)")


def export_parser() -> _Parser:
    """The parser of the export command: one flag for every field of ExportRecipe, and --recipe, --set."""
    parser = _Parser(
        prog="modelexport",
        description="Quantise a language model in tensor-parallel rank processes and write one checkpoint.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"modelexport {__version__}")
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="YAML file of settings; flags win over it")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="one setting, as in a recipe")
    _add_settings(parser, ExportRecipe)
    return parser


def convert_parser() -> _Parser:
    """The parser of ``modelexport convert``: the flags of an export that keeps the source's numbers."""
    parser = _Parser(
        prog="modelexport convert",
        description="Write a quantised checkpoint in another format, without rounding anything again.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="CKPT", help="a quantised checkpoint: directory or hub id")
    decided = ("quant", "group_size", "algorithm", "kv_cache", "evaluate")
    skip = ("model", *decided, *CALIBRATION, *(name for names in ALGORITHM_SETTINGS.values() for name in names))
    _add_settings(parser, ExportRecipe, skip=skip)
    return parser


def reshard_parser() -> _Parser:
    """The parser of ``modelexport reshard``: one flag for every field of ReshardRecipe."""
    parser = _Parser(
        prog="modelexport reshard",
        description="Write a checkpoint for another parallelism or in another format; its values stay as they are.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint directory: any format, any parallelism")
    _add_settings(parser, ReshardRecipe, skip=("checkpoint",))
    return parser


def _add_settings(parser: _Parser, settings: type[Settings], skip: Sequence[str] = ()) -> None:
    from modelexport.contents.formats import names as checkpoint_formats
    from modelexport.quantization.formats import names as number_formats

    known = {"quant": number_formats, "format": checkpoint_formats}
    kinds: dict[str, Any] = {"str": str, "int": int, "float": float}
    for spec in dataclasses.fields(settings):
        if spec.name in skip:
            continue
        flag = f"--{spec.name.replace('_', '-')}"
        kind = str(spec.type).split(" | ")[0]
        shown = f" (default: {spec.default})" if spec.default is not None and kind != "bool" else ""
        options: dict[str, Any] = {"dest": spec.name, "help": spec.metadata["help"] + shown}
        if kind == "bool":
            options["action"] = argparse.BooleanOptionalAction if spec.default else "store_true"
        else:
            options["type"] = kinds[kind]
            choices = known[spec.name]() if spec.name in known else spec.metadata["choices"]
            options["metavar"] = "|".join(choices) if choices else spec.metadata["metavar"]
        parser.add_argument(flag, **options)


def _export(arguments: list[str]) -> int:
    given = vars(export_parser().parse_strictly(arguments))
    path = given.pop("recipe", None)
    overrides = {**parse_assignments(given.pop("set", [])), **given}
    if path is not None:
        recipe = ExportRecipe.load(path, overrides)
    else:
        recipe = ExportRecipe.from_mapping(overrides, where="command line")
    return _exported(recipe)


def _convert(arguments: list[str]) -> int:
    given = vars(convert_parser().parse_strictly(arguments))
    return _exported(ExportRecipe.from_mapping({**given, "quant": "keep"}, where="command line"))


def _exported(recipe: ExportRecipe) -> int:
    from modelexport.exporter import export

    result = export(recipe)
    if external_rank() not in (None, 0):
        return 0
    if recipe.json:
        print(json.dumps(result.as_json(), indent=1))
    elif not recipe.quiet:
        from modelexport.summary import summary

        print(summary(result))
    return 0


def _reshard(arguments: list[str]) -> int:
    recipe = ReshardRecipe.from_mapping(vars(reshard_parser().parse_strictly(arguments)), where="command line")
    from modelexport.resharder import reshard

    result = reshard(recipe)
    if external_rank() not in (None, 0):
        return 0
    if recipe.json:
        print(json.dumps(result.as_json(), indent=1))
    elif not recipe.quiet:
        from modelexport.summary import reshard_summary

        print(reshard_summary(result))
    return 0


def _diff(arguments: list[str]) -> int:
    parser = _Parser(prog="modelexport diff", description="Do two checkpoints hold the same model?", allow_abbrev=False)
    for name in ("a", "b"):
        parser.add_argument(name, type=Path, metavar=name.upper(), help="a checkpoint: any format, any parallelism")
    parser.add_argument("--config", type=Path, metavar="PATH", help="the model's config.json, where one has none")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_strictly(arguments)
    from modelexport.inspection.diff import print_diff

    return print_diff(given.a, given.b, given.config, as_json=given.json)


def _eval(arguments: list[str]) -> int:
    parser = _Parser(
        prog="modelexport eval",
        description="Perplexity of a checkpoint on a text; beside its source, KL divergence and the loss's difference.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a checkpoint directory: any format; or: demo")
    parser.add_argument("--against", type=Path, metavar="SOURCE", help="the checkpoint it was made from, or: demo")
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help='UTF-8 text, or .jsonl with "text" or "input_ids" on each line (default: the package\'s held-out text)',
    )
    parser.add_argument("--windows", type=int, metavar="N", help="how many (default: 64; the demo model: all)")
    parser.add_argument("--window", type=int, default=256, metavar="N", help="tokens of each (default: 256)")
    parser.add_argument("--config", type=Path, metavar="PATH", help="the model's config.json, where CKPT lacks one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the arithmetic")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = vars(parser.parse_strictly(arguments))
    from modelexport.inspection.eval_command import print_evaluation

    return print_evaluation(given.pop("checkpoint"), as_json=given.pop("json"), **given)


def _subcommand(command: str, arguments: list[str]) -> int:
    if command in ("convert", "diff", "eval", "reshard"):
        return {"convert": _convert, "diff": _diff, "eval": _eval, "reshard": _reshard}[command](arguments)
    parser = _Parser(prog=f"modelexport {command}", allow_abbrev=False)
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a checkpoint directory: any format")
    parser.add_argument("--config", type=Path, metavar="PATH", help="the model's config.json, where CKPT lacks one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    if command == "verify":
        parser.add_argument(
            "--against", type=Path, metavar="SOURCE", help="the checkpoint it was made from: error per layer"
        )
        given = parser.parse_strictly(arguments)
        from modelexport.inspection.verify import print_verification

        return print_verification(given.checkpoint, given.against, given.config, as_json=given.json)
    given = parser.parse_strictly(arguments)
    from modelexport.inspection.inspect import print_inspection

    return print_inspection(given.checkpoint, given.config, as_json=given.json)
