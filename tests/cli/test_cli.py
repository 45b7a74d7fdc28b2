"""The command line: what it takes, what it refuses and with which words and exit status."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from modelexport import __version__, cli
from modelexport.cli import export_parser, main
from modelexport.errors import CheckpointError, ModelExportError, PlanError, RankFailedError, UsageError
from modelexport.quantization import formats
from modelexport.recipe import ExportRecipe
from tests.helpers.cli_running import fails, listing, shell
from tests.helpers.models import copy_checkpoint, make_llama

FIELDS = {field.name: field for field in dataclasses.fields(ExportRecipe)}


@dataclasses.dataclass
class Result:
    """Stands for ExportResult where the export itself is not run."""

    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {"stands": "for a result"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ExportRecipe]:
    """The recipes that the command line hands to export(), which is not run."""
    from modelexport import exporting as exporter

    recipes: list[ExportRecipe] = []

    def export(recipe: ExportRecipe) -> Result:
        recipes.append(recipe)
        return Result()

    monkeypatch.setattr(exporter, "export", export)
    return recipes


def recipe_of(asked: list[ExportRecipe], *arguments: str) -> ExportRecipe:
    asked.clear()
    assert main([*arguments, "--quiet"]) == 0
    [recipe] = asked
    return dataclasses.replace(recipe, quiet=False)


# ------------------------------------------------------------ one name for each


def test_help_lists_every_field_and_every_choice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for field in FIELDS.values():
        assert f"--{field.name.replace('_', '-')}" in text
        assert " ".join(field.metadata["help"].split()) in " ".join(text.split()), field.name
    assert "|".join(formats.names()) in text
    assert "shm|nfs|direct" in text
    assert "(default: 1)" in text, "of --tp: a default that equals True is shown all the same"
    for command in cli.COMMANDS:
        assert f"modelexport {command} " in text


def test_help_imports_neither_methods_nor_sockets() -> None:
    """It is to answer at once: names are read from sources, and what only work needs is imported by the work."""
    code = "import sys\nfrom modelexport.cli import main\ntry: main(['--help'])\nexcept SystemExit: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    imported = set(done.stdout.splitlines()[-1].split())
    assert "modelexport.recipe" in imported
    assert not imported & {"hashlib", "socket", "modelexport.quantization.methods", "modelexport.distributed.config"}


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"modelexport {__version__}\n"


def flag_for(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else [f"--no-{name.replace('_', '-')}"]
    if isinstance(value, tuple):
        return [word for each in value for word in (flag, each)]
    return [flag, str(value)]


# Every field with a value that is not its default; with one algorithm that rounds they are free of contradictions.
OTHER: dict[str, Any] = {
    "model": "org/name",
    "revision": "main",
    "download": True,
    "adapter": ("tuned", "other=0.5"),
    "out": "ckpt",
    "quant": "int4",
    "group_size": 64,
    "algorithm": "rotation+autoquant+smoothquant+awq",
    "smoothquant_alpha": 0.75,
    "awq_grid": 10,
    "gptq_damping": 0.05,
    "gptq_asymmetry": 0.5,
    "autoround_steps": 100,
    "autoround_batch_size": 4,
    "autoround_rate": 0.01,
    "gptq_block_size": 64,
    "gptq_act_order": False,
    "autoquant_bits": 4.5,
    "autoquant_candidates": "int4,int8",
    "calib_range": "mse",
    "calib_experts": "all",
    "calib_memory": 1000,
    "kv_cache": "fp8",
    "draft": "drop",
    "unknown_architecture": "structure",
    "calib": ("text.jsonl", "hf:more:train=0.5"),
    "calib_samples": 8,
    "calib_length": 32,
    "calib_seed": 3,
    "config": "config.json",
    "format": "trtllm",
    "target_tp": 4,
    "target_pp": 2,
    "target_ep": 2,
    "device": "cuda:1",
    "device_memory": 1000,
    "tp": 3,
    "gather": "nfs",
    "workspace": "/shared",
    "max_shard_bytes": 1000,
    "overwrite": True,
    "push_to_hub": "me/model",
    "private": True,
    "evaluate": False,
    "timeout": 2.5,
    "log": "run.jsonl",
    "dry_run": True,
    "quiet": True,
    "json": True,
}


def test_every_field_is_a_flag_a_key_and_a_setting(asked: list[ExportRecipe], tmp_path: Path) -> None:
    assert set(OTHER) == set(FIELDS)
    for name, value in OTHER.items():
        if name in ("gather", "private") or "algorithm" in FIELDS[name].metadata:
            continue  # of use with another one alone, see below
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({name: value}))
        ways = [flag_for(name, value), ["--recipe", str(path)], ["--set", f"{name}={json.dumps(value)}"]]
        asked.clear()
        for way in ways:
            assert main([*way, *([] if name == "quiet" else ["--quiet"])]) == 0
        expected = ExportRecipe(**{"quiet": True, name: value})
        assert asked == [expected] * 3, name


@pytest.mark.parametrize(("rounding", "other"), [("gptq", "autoround"), ("autoround", "gptq")])
def test_all_fields_together(asked: list[ExportRecipe], tmp_path: Path, rounding: str, other: str) -> None:
    fields = {name: value for name, value in OTHER.items() if not name.startswith(f"{other}_")}
    fields["algorithm"] = f"{OTHER['algorithm']}+{rounding}"
    flags = [word for name, value in fields.items() for word in flag_for(name, value)]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(fields))
    for way in (flags, ["--recipe", str(path)], ["--recipe", str(path), *flags]):
        assert main(way) == 0
    assert asked == [ExportRecipe(**fields)] * 3


@pytest.mark.parametrize("value", [[["*.mlp.*", "int4:64"], ["*", "fp8"]], [{"*.mlp.*": "int4:64"}, {"*": "fp8"}]])
def test_patterns_are_a_list_in_a_recipe_and_text_on_the_command_line(
    asked: list[ExportRecipe], tmp_path: Path, value: object
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"quant": value}))
    text = "*.mlp.*=int4:64,*=fp8"
    assert recipe_of(asked, "--recipe", str(path)).quant == recipe_of(asked, "--quant", text).quant == text
    assert recipe_of(asked, "--set", f"quant={json.dumps(value)}").quant == text


def test_convert_is_an_export_that_keeps_the_numbers(asked: list[ExportRecipe]) -> None:
    recipe = recipe_of(asked, "convert", "ckpt", "--format", "awq", "--out", "there", "--tp", "2")
    assert (recipe.model, recipe.quant, recipe.format, recipe.out, recipe.tp) == ("ckpt", "keep", "awq", "there", 2)


def test_flags_win_over_set_and_set_over_the_recipe(asked: list[ExportRecipe], tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("quant: int4\ngroup-size: 32\ntp: 2\nevaluate: false\n")
    recipe = recipe_of(asked, "--recipe", str(path))
    assert (recipe.quant, recipe.group_size, recipe.tp, recipe.evaluate) == ("int4", 32, 2, False)
    recipe = recipe_of(
        asked, "--tp", "8", "--set", "tp=4", "--set", "group-size=64", "--recipe", str(path), "--evaluate"
    )
    assert (recipe.quant, recipe.group_size, recipe.tp, recipe.evaluate) == ("int4", 64, 8, True)
    recipe = recipe_of(asked, "--set", "group-size=64", "--set", "group_size=128", "--recipe", str(path))
    assert recipe.group_size == 128, "the later of two"


@given(st.lists(st.tuples(st.sampled_from(["recipe", "set", "flag"]), st.integers(1, 64)), max_size=4))
def test_precedence_does_not_depend_on_the_order_of_words(words: list[tuple[str, int]]) -> None:
    arguments = {"recipe": [], "set": ["--set"], "flag": ["--tp"]}
    line = [
        w
        for kind, tp in words
        if kind != "recipe"
        for w in [*arguments[kind], f"tp={tp}" if kind == "set" else str(tp)]
    ]
    given_ = vars(export_parser().parse_strictly(line))
    last = dict(words)
    assert given_.get("tp") == last.get("flag")
    assert given_.get("set", []) == [f"tp={tp}" for kind, tp in words if kind == "set"]


def test_nothing_given_is_the_default_recipe(asked: list[ExportRecipe]) -> None:
    assert recipe_of(asked) == ExportRecipe()


def test_equals_signs(asked: list[ExportRecipe]) -> None:
    assert recipe_of(asked, "--out=a=b", "--tp=2") == ExportRecipe(out="a=b", tp=2)


# ----------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--quantt", "int4"], "unknown flag --quantt; did you mean --quant? (see: modelexport --help)"),
        (["--group_size", "64"], "unknown flag --group_size; did you mean --group-size?"),
        (["--grop-size=64"], "unknown flag --grop-size; did you mean --group-size?"),
        (["--no-evaluat"], "did you mean --no-evaluate?"),
        (["--xyzzy"], "unknown flag --xyzzy (see: modelexport --help)"),
        (["--quan", "int4"], "unknown flag --quan; did you mean --quant?"),  # no abbreviations
        (["--tp"], "argument --tp: expected one argument"),
        (["--tp", "four"], "argument --tp: invalid int value: 'four'"),
        (["--tp", "0"], "--tp 0: at least 1 rank is needed"),
        (["--timeout", "soon"], "argument --timeout: invalid float value: 'soon'"),
        (["--tp", "2", "ckpt"], "unexpected argument 'ckpt'"),
        (["-q"], "unexpected argument '-q'"),
        (["--quant", "int44", "--dry-run"], "'int44'"),
        (
            ["--format", "mega-tron", "--dry-run"],
            "--format mega-tron: unknown; did you mean 'megatron'? known: awq, dcp, ",
        ),
        (["--quant", "fp8", "--group-size", "64", "--dry-run"], "fp8 has no groups"),
        (["--quant", "int4", "--group-size", "50", "--dry-run"], "32, 64, 128"),
        (["--gather", "smh"], "--gather smh: unknown; did you mean 'shm'?"),
        (["--gather", "nfs"], "add --workspace DIR"),
        (["--set", "quantt=int4"], "command line: unknown key 'quantt'; did you mean 'quant' or"),
        (["--set", "tp"], "--set tp: expected KEY=VALUE"),
        (["--set", "tp=many"], "command line: tp must be int, found 'many'"),
        (["--recipe", "missing.yaml"], "recipe missing.yaml: cannot be read"),
        ([], "no target given: add --out DIR"),
        (["--model", "/nonexistent", "--out", "x"], "--model /nonexistent: no such directory"),
        (
            ["inspekt", "ckpt"],
            "unknown command 'inspekt'; did you mean 'inspect'? known: convert, diff, eval, formats, inspect, models, ",
        ),
        (["ckpt"], "unknown command 'ckpt'; known: convert, diff, eval, formats, inspect, models, push, report, "),
        (["inspect"], "the following arguments are required: CKPT (see: modelexport inspect --help)"),
        (["verify", "ckpt", "--agianst", "x"], "unknown flag --agianst; did you mean --against?"),
        (["inspect", "ckpt", "--against", "x"], "unknown flag --against"),
        (["inspect", "a", "b"], "unexpected argument 'b'"),
    ],
)
def test_usage_errors(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in fails(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_format_names_the_nearest_and_where_all_are(capsys: pytest.CaptureFixture[str]) -> None:
    text = fails(capsys, "--quant", "int5", "--dry-run")
    assert "int4" in text
    assert "modelexport formats" in text


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (UsageError("u"), 2, "modelexport: u\n"),
        (CheckpointError("c"), 1, "modelexport: c\n"),
        (PlanError("p"), 1, "modelexport: p\n"),
        (
            RankFailedError(3, "quantising x", "boom", "the rank's\ntraceback"),
            1,
            "rank 3 failed while quantising x: boom",
        ),
        (
            RankFailedError(3, "reading x", "NaN", "traceback", user_error=True),
            1,
            "rank 3 failed while reading x: NaN\n",
        ),
    ],
)
def test_exit_status_of_errors(
    error: ModelExportError,
    status: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    assert main([]) == status
    err = capsys.readouterr().err
    assert words in err
    assert ("the rank's\ntraceback" in err) == (isinstance(error, RankFailedError) and not error.user_error)


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_run", fail)
    with pytest.raises(ZeroDivisionError):
        main([])


def test_an_interrupt_says_how_to_go_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupt)
    assert fails(capsys, status=130) == "modelexport: interrupted; the same command resumes\n"


@pytest.mark.parametrize("out", ["model", "model/", "elsewhere/../model", ".", "link"])
def test_the_source_is_never_the_target(
    out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copy_checkpoint(make_llama(), tmp_path / "model")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("model")
    before = listing(tmp_path)
    text = fails(capsys, "--model", "model", "--out", out, "--overwrite")
    assert f"--out {out} would replace the source" in text
    assert listing(tmp_path) == before


# ------------------------------------------------------------------ as a process


def test_exit_statuses_of_the_process(tmp_path: Path) -> None:
    done = shell("--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: modelexport ")
    usage = shell("--quantt", "int4", cwd=tmp_path)
    assert (usage.returncode, usage.stdout) == (2, "")
    assert usage.stderr.count("\n") == 1
    (tmp_path / "empty").mkdir()
    failed = shell("--model", "empty", "--out", "ckpt", cwd=tmp_path)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "holds no safetensors file" in failed.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_a_reader_that_leaves_early_is_no_traceback() -> None:
    """``modelexport --dry-run | head -0``: the pipe is closed before anything is printed."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "modelexport", "--dry-run"]
    try:
        result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(write)
    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.parametrize(
    ("rank", "phase", "spoken"),
    [(0, "", True), (0, "reading the source", False), (2, "reading the source", False)],
)
def test_where_the_first_rank_is_gone_without_a_word_the_others_speak(
    monkeypatch: pytest.MonkeyPatch, rank: int, phase: str, spoken: bool
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert cli._is_ours_to_say(RankFailedError(rank, phase, "its process ended")) == spoken
