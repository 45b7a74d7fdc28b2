"""The parsers of the command line, one for each command, with examples that are tested like code.

Nothing heavy is imported: an answer that needs no model needs no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from modelexport import __version__
from modelexport.errors import UsageError, nearest
from modelexport.settings import Settings, moved
from modelexport.system.terminal import show

__all__ = ["COMMANDS", "Command", "Parser", "export_parser", "parser_of"]

_EXAMPLES = """\
  modelexport --tp 4 --out ckpt/                             the embedded demo model, FP8
  modelexport --model DIR --quant int4 --tp 4 --out ckpt/    a checkpoint or a hub id; see: modelexport models
  modelexport --model DIR --quant int4 --algorithm gptq --calib text.jsonl --out ckpt/
                                                             calibrated, layer by layer
  modelexport --model DIR --quant '*.self_attn.*=fp8,*.mlp.*=int4:64' --out ckpt/
                                                             the first pattern that matches counts
  modelexport --recipe recipe.yaml --set quant=nvfp4 --out ckpt/
                                                             settings of a file; flags win
  modelexport --model DIR --quant int8 --dry-run             plan, sizes and memory; writes nothing
  modelexport --model DIR --out ckpt/ --push-to-hub me/model-fp8 --private
                                                             and uploads it, once it is complete
  torchrun --nnodes 2 --nproc-per-node 4 -m modelexport --tp 8 --workspace DIR --model DIR --out DIR
                                                             ranks on two machines, all DIRs seen by both
"""


class Parser(argparse.ArgumentParser):
    """argparse, with its errors as ours: one line that says what to type next.

    Attributes:
        moved: former flags -> those that took their place.
    """

    moved: Mapping[str, str] = {}

    def parse_strictly(self, arguments: Sequence[str]) -> argparse.Namespace:
        """As ``parse_args``, but an unknown flag is answered with the nearest one that there is."""
        given, unknown = self.parse_known_args(arguments)
        for word in unknown:
            flag = word.partition("=")[0]
            if flag in self.moved:
                self.error(f"{flag}: is {self.moved[flag]} now")
            if flag.startswith("--"):
                close = difflib.get_close_matches(flag, self._option_string_actions, n=1)
                self.error(f"unknown flag {flag}{f'; did you mean {close[0]}?' if close else ''}")
        if unknown:
            self.error(f"unexpected argument '{unknown[0]}'")
        return given

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """argparse's own check of choices, with the nearest one in its message."""
        if action.choices is not None and value not in action.choices:
            name = action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)
            self.error(f"{name} {value}: unknown{nearest(str(value), map(str, action.choices))}")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Prints the text of --help and --version on stdout."""
        show(message.rstrip("\n"))

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see: {self.prog} --help)")


def _parser(command: str, description: str, examples: str, *, only_given: bool = False) -> Parser:
    """``only_given``: what is not on the command line has no value, not even a default."""
    return Parser(
        prog=f"modelexport {command}".rstrip(),
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS if only_given else None,
        allow_abbrev=False,
    )


def export_parser() -> Parser:
    """The parser of the export command: one flag for every field of ExportRecipe, and --recipe, --set."""
    from modelexport.recipe import ExportRecipe

    others = "".join(f"  modelexport {name:<9} {command.summary}\n" for name, command in COMMANDS.items())
    parser = _parser(
        "",
        "Quantise a language model in tensor-parallel rank processes and write one checkpoint.",
        f"{_EXAMPLES}\nother commands, each with --help and --json:\n{others}\n"
        "With --json the result is JSON on stdout, an error a line of JSON on stderr.\n"
        "Exit status: 0 done; 1 failed, or nobody reads what is printed (| head); 2 usage; 130 interrupted (Ctrl-C).",
        only_given=True,
    )
    parser.add_argument("--version", action="version", version=f"modelexport {__version__}")
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="YAML file of settings; flags win over it")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="one setting, as in a recipe")
    _add_settings(parser, ExportRecipe)
    return parser


def _convert() -> Parser:
    """The flags of an export that keeps the source's numbers."""
    from modelexport.recipe import ExportRecipe, is_calibration

    parser = _parser(
        "convert",
        "Write a quantised checkpoint in another format, without rounding anything again.",
        "  modelexport convert ckpt/ --format awq --out DIR           compressed-tensors' int4 as AutoAWQ encodes it\n"
        "  modelexport convert ORG/MODEL-AWQ --format gptq --out DIR  from the hub\n"
        "  modelexport convert ckpt/ --format trtllm --target-tp 8 --out DIR\n",
        only_given=True,
    )
    parser.add_argument("model", metavar="CKPT", help="a quantised checkpoint: directory or hub id")
    decided = ("quant", "adapter", "group_size", "algorithm", "kv_cache", "evaluate")
    own = dataclasses.fields(ExportRecipe)
    about = [spec.name for spec in own if "algorithm" in spec.metadata or is_calibration(spec.name)]
    _add_settings(parser, ExportRecipe, skip=("model", *decided, *about))
    return parser


def _reshard() -> Parser:
    """One flag for every field of ReshardRecipe."""
    from modelexport.recipe import ReshardRecipe

    parser = _parser(
        "reshard",
        "Write a checkpoint for another parallelism or in another format; its values stay as they are.",
        "  modelexport reshard ckpt/ --tp 8 --pp 2 --out DIR          a set of files for each of 16 ranks\n"
        "  modelexport reshard step-1000/ --config DIR --out ckpt/    a training checkpoint (DCP, Megatron), whole\n"
        "  modelexport reshard ckpt/ --format dcp --tp 4 --dry-run    who would hold what; writes nothing\n",
        only_given=True,
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint directory: any format, any parallelism")
    _add_settings(parser, ReshardRecipe, skip=("checkpoint",))
    return parser


def _diff() -> Parser:
    parser = _parser(
        "diff",
        "Do two checkpoints hold the same model? Exit status 0: yes, 1: no.",
        "  modelexport diff ckpt/ sharded/                            any formats, any parallelism\n"
        "  modelexport diff a/ b/ --json\n",
    )
    for name in ("a", "b"):
        parser.add_argument(name, type=Path, metavar=name.upper(), help="a checkpoint: any format, any parallelism")
    _add_config(parser, "one has none")
    return _with_json(parser)


def _eval() -> Parser:
    parser = _parser(
        "eval",
        "Perplexity of a checkpoint on a text; beside its source, KL divergence and the loss's difference.",
        "  modelexport eval ckpt/ --against DIR                       on the package's held-out text\n"
        "  modelexport eval ckpt/ --against DIR --text text.jsonl --windows 32 --window 1024\n"
        "  modelexport eval ckpt/ --against DIR --save                and keeps the figures in the model card\n"
        "  modelexport eval ckpt/ --against DIR --tasks hellaswag,arc_easy\n"
        "                                                             of lm-eval: pip install 'modelexport[eval]'\n",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a checkpoint directory: any format; or: demo")
    parser.add_argument("--against", type=Path, metavar="SOURCE", help="the checkpoint it was made from, or: demo")
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help='UTF-8 text, taken as one document, or .jsonl with "text" or "input_ids", a document on each line '
        "(default: the documents of the package's held-out text). Each document begins with the tokenizer's "
        "beginning-of-text token, so that the same text in one piece gives another perplexity",
    )
    parser.add_argument("--windows", type=int, metavar="N", help="how many (default: 64; the demo model: all)")
    parser.add_argument(
        "--window",
        type=int,
        metavar="N",
        help="tokens of each (default: 256); the most of --tasks (default: the model's)",
    )
    parser.add_argument(
        "--tasks",
        type=lambda text: [name.strip() for name in text.split(",") if name.strip()],
        metavar="NAMES",
        help="no text, but these tasks of EleutherAI's lm-eval harness, with commas between them; those that have "
        "models write text are refused",
    )
    parser.add_argument("--tasks-path", type=Path, metavar="DIR", help="a directory with further tasks, as YAML files")
    parser.add_argument("--limit", type=float, metavar="N", help="of each task the first N documents; below 1 a part")
    parser.add_argument(
        "--num-fewshot", type=int, metavar="N", help="examples before each question (default: the task's)"
    )
    _add_config(parser, "CKPT lacks one")
    kinds = ("float32", "bfloat16")
    parser.add_argument("--dtype", choices=kinds, default=kinds[0], help="of the arithmetic (default: float32)")
    parser.add_argument(
        "--device",
        default="auto",
        metavar="NAME",
        help="what computes: auto (a GPU where torch sees one), cpu, cuda or cuda:N (default: auto)",
    )
    parser.add_argument("--save", action="store_true", help="keep the figures in CKPT's modelexport.json and README.md")
    return _with_json(parser)


def _inspect() -> Parser:
    parser = _parser(
        "inspect",
        "What a checkpoint holds: layers, dtypes, scales, bits per weight, valid tensor-parallel sizes.",
        "  modelexport inspect ckpt/\n  modelexport inspect step-1000/ --config DIR --json\n",
    )
    return _of_checkpoint(parser)


def _verify() -> Parser:
    parser = _parser(
        "verify",
        "Is a checkpoint whole, and what it says it is? Exit status 0: yes, 1: no.",
        "  modelexport verify ckpt/                                   hashes, structure, NaN and Inf\n"
        "  modelexport verify ckpt/ --against DIR                     and the error of every linear\n",
    )
    parser.add_argument("--against", type=Path, metavar="SOURCE", help="the checkpoint it was made from")
    parser.add_argument(
        "--adapter", action="append", metavar="DIR[=W]", help="an adapter that was merged into --against"
    )
    return _of_checkpoint(parser)


def _report() -> Parser:
    parser = _parser(
        "report",
        "One page of HTML that needs no network: sizes, errors of layers, scales, recipe, warnings.",
        "  modelexport report ckpt/ --html report.html\n  modelexport report ckpt/ --json\n",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="where the page goes (default: a summary as text)")
    parser.add_argument("--log", type=Path, metavar="FILE", help="the --log of the run that wrote it, drawn as well")
    return _of_checkpoint(parser)


def _push() -> Parser:
    parser = _parser(
        "push",
        "Upload a finished checkpoint to the Hugging Face hub, in one commit.",
        "  modelexport push ckpt/ me/model-fp8 --private\n",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a checkpoint directory")
    parser.add_argument("repository", metavar="ORG/NAME", help="of the hub; made where it is not there")
    parser.add_argument("--private", action="store_true", help="the repository is to be private")
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no last line")
    return _with_json(parser)


def _models() -> Parser:
    parser = _parser(
        "models",
        "Model types that can be exported, and how each is cut.",
        "  modelexport models\n"
        "  modelexport models qwen3_moe                               its modules: what is quantised, how it is cut\n"
        "  modelexport models --json\n",
    )
    parser.add_argument("name", nargs="?", metavar="TYPE", help="model_type of a config.json")
    return _with_json(parser)


def _formats() -> Parser:
    parser = _parser(
        "formats",
        "Number formats (--quant), checkpoint formats (--format), algorithms (--algorithm), and engines.",
        "  modelexport formats\n"
        "  modelexport formats int4                                   what holds it, what loads it\n"
        "  modelexport formats --json\n",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a number format, a checkpoint format or an algorithm")
    return _with_json(parser)


@dataclass(frozen=True)
class Command:
    """A command beside the export: what it does, in a line, and what makes its parser."""

    summary: str
    parser: Callable[[], Parser]


COMMANDS: dict[str, Command] = {
    "convert": Command("the same numbers in another encoding or format", _convert),
    "diff": Command("do two checkpoints hold the same model?", _diff),
    "eval": Command("perplexity, and KL divergence from the source, on a text", _eval),
    "formats": Command("number formats, checkpoint formats, algorithms, engines", _formats),
    "inspect": Command("layers, dtypes, bits per weight of any checkpoint", _inspect),
    "models": Command("model types that can be exported, and how each is cut", _models),
    "push": Command("upload a finished checkpoint to the Hugging Face hub", _push),
    "report": Command("one page of HTML: sizes, errors, scales, recipe", _report),
    "reshard": Command("the same tensors for another parallelism, any format", _reshard),
    "verify": Command("hashes, structure, error per layer", _verify),
}


def parser_of(command: str) -> Parser:
    """The parser of a command; of ``""`` that of the export.

    Raises:
        UsageError: there is no such command; the message has the nearest.
    """
    if not command:
        return export_parser()
    if command in COMMANDS:
        return COMMANDS[command].parser()
    if Path(command).is_dir():
        raise UsageError(
            f"'{command}' is a directory and no command: modelexport --model {command} --out DIR exports it, "
            f"modelexport inspect {command} says what it holds"
        )
    raise UsageError(f"unknown command '{command}'{nearest(command, COMMANDS)}")


def _of_checkpoint(parser: Parser) -> Parser:
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a checkpoint directory: any format")
    _add_config(parser, "CKPT lacks one")
    return _with_json(parser)


def _add_config(parser: Parser, where: str) -> None:
    parser.add_argument("--config", type=Path, metavar="PATH", help=f"the model's config.json, where {where}")


def _with_json(parser: Parser) -> Parser:
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_settings(parser: Parser, settings: type[Settings], skip: Sequence[str] = ()) -> None:
    from modelexport.models.checkpoint_formats import names as checkpoint_formats
    from modelexport.quantization import algorithms
    from modelexport.quantization.formats import names as number_formats

    known = {"quant": number_formats, "format": checkpoint_formats, "algorithm": algorithms.names}
    flags = {former: own for former, own in moved(settings).items() if own not in skip}
    for prefix in ("--", "--no-"):
        parser.moved = {**parser.moved, **{_flag(prefix, old): _flag(prefix, new) for old, new in flags.items()}}
    kinds: dict[str, Any] = {"str": str, "int": int, "float": float}
    for spec in dataclasses.fields(settings):
        if spec.name in skip:
            continue
        flag = _flag("--", spec.name)
        kind = str(spec.type).split(" | ")[0]
        several = spec.metadata.get("several")
        shown = f" (default: {spec.default})" if spec.default is not None and kind != "bool" and not several else ""
        options: dict[str, Any] = {"dest": spec.name, "help": spec.metadata["help"] + shown}
        if kind == "bool":
            options["action"] = argparse.BooleanOptionalAction if spec.default else "store_true"
        elif several:
            options |= {"action": "append", "metavar": spec.metadata["metavar"]}
        else:
            options["type"] = kinds[kind]
            choices = known[spec.name]() if spec.name in known else spec.metadata["choices"]
            options["metavar"] = "|".join(choices) if choices else spec.metadata["metavar"]
        parser.add_argument(flag, **options)


def _flag(prefix: str, name: str) -> str:
    return f"{prefix}{name.replace('_', '-')}"
