"""What the family recipes share: the YAML beside a script, the model's own numbers, and modelexport's command line.

``python recipes/NAME.py --model DIR --out DIR [FLAGS]`` exports with the settings of ``NAME.yaml``, then with what the
script chooses by the model's config.json, then with FLAGS, which are those of ``modelexport``; the later one wins.
The first rank of a launcher (torchrun, srun) speaks for all.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from modelexport import cli
from modelexport.checkpoints.source import resolve_source
from modelexport.distributed.environment import external_rank
from modelexport.errors import CheckpointError, ModelExportError, UsageError
from modelexport.models.opening import read_config
from modelexport.system.small_files import read_json

GROUPS = (128, 64, 32)
"""Group sizes of int4 and int8-wo, the cheapest first."""

Config = Mapping[str, Any]
"""The content of a config.json."""


class Choice(NamedTuple):
    """A setting that a script chooses by the model, and the reason, which is printed."""

    value: Any
    reason: str


Choose = Callable[[Config, int], Mapping[str, Choice]]
"""config.json and the engine's tensor-parallel size -> settings by their keys."""


def run(
    script: str,
    doc: str | None,
    *,
    model_types: Sequence[str] = (),
    choose: Choose | None = None,
    asks_serve_tp: bool = False,
) -> NoReturn:
    """Export as ``sys.argv`` says, and end the process with modelexport's exit status.

    Args:
        script: the calling file; its settings are in the YAML file beside it.
        doc: its docstring, which ``--help`` prints.
        model_types: values of config.json's ``model_type`` that it is for; by default those of the family of its name.
        choose: the settings that depend on the model.
        asks_serve_tp: whether they depend on the engine's tensor-parallel size, which ``--serve-tp`` says (default: 1).
    """
    path = Path(script)
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(f"{(doc or '').strip()}\n\n{path.with_suffix('.yaml')}:\n\n{path.with_suffix('.yaml').read_text()}")
        print("Every flag of modelexport is one here, too (see: modelexport --help).")
        sys.exit(0)
    try:
        serve_tp, flags = split_serve_tp(path, sys.argv[1:], wanted=asks_serve_tp)
        sys.argv[1:] = arguments(path, flags, model_types or types_of(path.stem), choose, serve_tp)
    except ModelExportError as error:
        if external_rank() in (None, 0):
            print(f"{path.name}: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    cli.run()


def arguments(
    script: Path, flags: list[str], model_types: Sequence[str], choose: Choose | None, serve_tp: int
) -> list[str]:
    """modelexport's arguments: the YAML, what is chosen by the model, then the flags of the user.

    Raises:
        UsageError: the model is of another type, or cannot be cut over ``serve_tp`` ranks.
        CheckpointError: there is no config.json.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--model", "--revision", "--config"):
        parser.add_argument(flag)
    parser.add_argument("--quiet", action="store_true")
    known, _ = parser.parse_known_args(flags)
    config = model_config(known.model, known.revision, known.config)
    check_type(script, config, model_types)
    chosen = {} if choose is None else choose(config, serve_tp)
    found = ["--recipe", str(script.with_suffix(".yaml"))]
    for key, (value, reason) in chosen.items():
        if not _gives(flags, key):
            found += ["--set", f"{key}={value}"]
            if not known.quiet and external_rank() in (None, 0):
                print(f"{script.name}: {key} {value}: {reason}", file=sys.stderr)
    return found + flags


def model_config(model: str | None, revision: str | None, config: str | None) -> dict[str, Any]:
    """config.json of a model as ``--model``, ``--revision`` and ``--config`` name it."""
    if config is not None:
        return read_config(config)
    directory = resolve_source(model, revision).directory
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} has no config.json; give the model's: --config DIR")
    return read_json(directory / "config.json")


def types_of(name: str) -> tuple[str, ...]:
    """Every ``model_type`` of the family of that name: its own, those that are alike, and its variants."""
    family = importlib.import_module(f"modelexport.models.families.{name}").FAMILY
    return (family.name, *family.aliases, *family.variants)


def check_type(script: Path, config: Config, model_types: Sequence[str]) -> None:
    """Refuse a model of another family, and name its recipe where there is one."""
    found = config.get("model_type")
    if found in model_types:
        return
    other = script.with_name(f"{found}.py")
    instead = (
        f"use {other}" if other.is_file() else f"to use its settings anyway: --recipe {script.with_suffix('.yaml')}"
    )
    raise UsageError(f"the model is of type {found!r}, and this recipe is for {', '.join(model_types)}: {instead}")


def group_size(config: Config, width: str, serve_tp: int) -> Choice:
    """The largest group size of which a rank's part of the rows of ``down_proj`` holds whole ones.

    An engine cuts them equally: ``width`` (a key of config.json) / ``serve_tp`` inputs a rank.

    Raises:
        UsageError: there is none.
    """
    inputs = config.get(width)
    if not isinstance(inputs, int) or isinstance(inputs, bool) or inputs < 1:
        raise CheckpointError(f"config.json: {width} is {inputs!r}; a positive whole number is needed")
    for size in GROUPS:
        if inputs % (size * serve_tp) == 0:
            return Choice(size, f"{width} {inputs} on {serve_tp} ranks is {inputs // serve_tp // size} groups a rank")
    largest = max(tp for tp in range(1, serve_tp + 1) if inputs % (GROUPS[-1] * tp) == 0 or tp == 1)
    raise UsageError(
        f"--serve-tp {serve_tp}: {width} {inputs} is not divisible into groups of {GROUPS[-1]} on {serve_tp} ranks; "
        f"--serve-tp {largest}, or a format without groups: --quant fp8"
    )


def split_serve_tp(script: Path, flags: Sequence[str], *, wanted: bool) -> tuple[int, list[str]]:
    """What ``--serve-tp`` says (1 where it is not given), and the other flags.

    Raises:
        UsageError: it is no size, or nothing of the recipe depends on it.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--serve-tp", nargs="?", default="1", const="(nothing)")
    known, others = parser.parse_known_args(flags)
    text = known.serve_tp
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--serve-tp {text}: the engine's tensor-parallel size is needed, e.g. --serve-tp 4")
    if len(others) != len(flags) and not wanted:
        raise UsageError(f"--serve-tp {text}: nothing of {script.name} depends on it: drop it")
    return int(text), others


def _gives(flags: Sequence[str], key: str) -> bool:
    """Whether the user sets that key."""
    flag = f"--{key.replace('_', '-')}"
    return any(word.split("=")[0] in (flag, f"--no-{flag[2:]}") for word in flags) or any(
        word.split("=")[0].replace("-", "_") == key for word in flags
    )
