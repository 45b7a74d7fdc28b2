"""Every command: its help and the examples in it, JSON for results and errors, and the nearest name for a wrong one."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from modelexport import cli
from modelexport.cli import COMMANDS, main, parser_of
from modelexport.errors import HubError, ModelExportError, PlanError, RankFailedError, UsageError
from modelexport.exporting import prepare
from modelexport.inspection.listings.formats import known
from modelexport.models.checkpoint_formats import names as checkpoint_formats
from modelexport.quantization import algorithms, formats
from modelexport.recipe import ExportRecipe
from modelexport.settings import parse_assignments
from tests.helpers.models import make_llama

HEADERS = {"", *COMMANDS}


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 2) -> str:
    """What is on stderr; nothing is on stdout."""
    assert main(list(arguments)) == status
    out, err = capsys.readouterr()
    assert out == ""
    return err


def answered(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """The JSON on stdout; nothing is on stderr."""
    assert main([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


# ------------------------------------------------------------------------- help


def examples(command: str) -> list[list[str]]:
    """Words of each example in a command's help, without the comment beside it."""
    epilog = parser_of(command).epilog or ""
    before = epilog.partition("other commands")[0]
    lines = [line.strip() for line in before.splitlines()]
    commands = [re.split(r"\s{2,}", line)[0] for line in lines if line.startswith(("modelexport ", "torchrun "))]
    return [shlex.split(line) for line in commands]


@pytest.mark.parametrize("command", sorted(HEADERS))
def test_examples_are_what_the_parser_takes(command: str) -> None:
    found = examples(command)
    assert found
    for words in found:
        arguments = words[words.index("modelexport") + 1 :]
        assert (arguments[0] if command else arguments[0][:2]) == (command or "--")
        given = vars(parser_of(command).parse_strictly(arguments[1:] if command else arguments))
        assert given
        if not command:  # and the settings are free of contradictions
            given.pop("recipe", None)
            ExportRecipe.from_mapping({**parse_assignments(given.pop("set", [])), **given})


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_is_handled_explained_and_takes_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.util.find_spec(f"modelexport.cli.{command}") is not None
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: modelexport {command} ")
    assert "examples:" in text
    assert "--json" in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_the_main_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert re.search(rf"modelexport {name} +{re.escape(command.summary)}\n", text)


# --------------------------------------------------------------- errors as JSON


@pytest.mark.parametrize(
    ("arguments", "status", "kind", "words"),
    [
        (["--quantt", "int4"], 2, "UsageError", "did you mean --quant?"),
        (["--quant", "int5", "--dry-run"], 2, "UsageError", "int4"),
        (["inspekt"], 2, "UsageError", "did you mean 'inspect'?"),
        (["inspect", "nowhere"], 1, "CheckpointError", "nowhere"),
        (["verify", "nowhere"], 2, "UsageError", "nowhere"),
        (["diff", "a", "b"], 1, "CheckpointError", "a"),
        (["eval", "nowhere"], 2, "UsageError", "nowhere"),
        (["report", "nowhere"], 1, "CheckpointError", "nowhere"),
        (["reshard", "nowhere", "--out", "x"], 1, "CheckpointError", "nowhere"),
        (["convert", "nowhere", "--out", "x"], 2, "UsageError", "nowhere"),
        (["push", "nowhere", "me/x"], 2, "UsageError", "nowhere"),
        (["models", "lama"], 2, "UsageError", "did you mean 'llama'"),
        (["formats", "nt4"], 2, "UsageError", "did you mean 'int4'?"),
    ],
)
def test_an_error_is_one_line_or_one_object(
    arguments: list[str],
    status: int,
    kind: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    text = said(capsys, *arguments, status=status)
    assert text.startswith("modelexport: ")
    assert text.count("\n") == 1
    assert words in text
    machine = said(capsys, *arguments, "--json", status=status)
    assert machine.count("\n") == 1
    error = {"kind": kind, "message": text.removeprefix("modelexport: ").rstrip("\n"), "exit_status": status}
    assert json.loads(machine) == {"error": error}


def test_a_rank_s_failure_and_an_interrupt_are_objects_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(arguments: list[str]) -> int:
        raise raised

    monkeypatch.setattr(cli, "_run", run)
    raised: BaseException = RankFailedError(3, "reading x", "boom", "its\ntraceback")
    found = json.loads(said(capsys, "--json", status=1))["error"]
    assert (found["kind"], found["exit_status"]) == ("RankFailedError", 1)
    assert found["message"] == "rank 3 failed while reading x: boom\nits\ntraceback"
    raised = KeyboardInterrupt()
    assert json.loads(said(capsys, "--json", status=130))["error"]["kind"] == "Interrupted"


def test_a_failed_push_prints_the_summary_of_what_stands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from modelexport import exporting as exporter
    from tests.cli.test_summary import RESULT

    def export(recipe: ExportRecipe) -> None:
        error = HubError("ckpt is complete, but was not pushed")
        error.result = RESULT
        raise error

    monkeypatch.setattr(exporter, "export", export)
    assert main(["--out", "ckpt", "--push-to-hub", "me/x"]) == 1
    out, err = capsys.readouterr()
    assert re.fullmatch(r"wrote ckpt in \d+\.\d s", out.splitlines()[-1]), "the seconds of this process"
    assert err == "modelexport: ckpt is complete, but was not pushed\n"
    pushed = dataclasses.replace(RESULT, pushed="https://hub.example/me/x")
    monkeypatch.setattr(exporter, "export", lambda recipe: pushed)
    assert main(["--out", "ckpt", "--push-to-hub", "me/x"]) == 0
    assert capsys.readouterr().out.endswith("\npushed to https://hub.example/me/x\n")


# ---------------------------------------------------------------- wrong names


def test_a_directory_is_no_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpt").mkdir()
    text = said(capsys, "ckpt", "--out", "x")
    assert "modelexport --model ckpt --out DIR exports it, modelexport inspect ckpt says what it holds" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["eval", "demo", "--dtype", "float"],
            "--dtype float: unknown; did you mean 'float32'? known: bfloat16, float32",
        ),
        (["--algorithm", "gptqq", "--dry-run"], "--algorithm gptqq: unknown; did you mean 'gptq'?"),
        (["--algorithm", "rotation+gtpq", "--dry-run"], "--algorithm gtpq: unknown; did you mean 'gptq'?"),
        (["--kv-cache", "fp9", "--dry-run"], "--kv-cache fp9: unknown; did you mean 'fp8'?"),
        (["--calib-range", "maxx", "--dry-run"], "--calib-range maxx: unknown; did you mean 'max'?"),
        (["reshard", "x", "--exchange", "p3p"], "--exchange p3p: unknown; did you mean 'p2p'?"),
        (["reshard", "x", "--fromat", "dcp"], "unknown flag --fromat; did you mean --format?"),
        (["push", "x", "me/x", "--privat"], "unknown flag --privat; did you mean --private?"),
        (["models", "--jsn"], "unknown flag --jsn; did you mean --json?"),
    ],
)
def test_the_nearest_name_is_said(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in said(capsys, *arguments)


@pytest.mark.parametrize(
    ("pattern", "close"),
    [
        ("*.mpl.*", "*.mlp.*"),
        ("*.self_atn.o_prj", "*.self_attn.o_proj"),
        ("mlp", "*mlp*"),
        ("o_proj", "*o_proj"),
        ("model.layers.0.mlp", "model.layers.0.mlp*"),
    ],
)
def test_the_nearest_pattern_is_said(pattern: str, close: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--quant", f"{pattern}=fp8", "--dry-run", status=1)
    assert f"did you mean '{close}'?" in text
    assert main(["--quant", f"{close}=fp8", "--dry-run", "--quiet"]) == 0


@pytest.mark.parametrize("pattern", ["*xyzzy*", "re:.*mpl.*", "*[", "..", "*.9.*"])
def test_a_pattern_with_nothing_near(pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "mind the * at both ends" in said(capsys, "--quant", f"{pattern}=fp8", "--dry-run", status=1)


# ---------------------------------------------------------------- what there is


def test_formats_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(capsys, "formats")
    assert [each["name"] for each in found["number_formats"]] == formats.names()
    assert [each["name"] for each in found["checkpoint_formats"]] == checkpoint_formats()
    assert [each["name"] for each in found["algorithms"]] == list(algorithms.names())
    assert main(["formats"]) == 0
    text = capsys.readouterr().out
    for name in (*formats.names(), *checkpoint_formats(), *algorithms.names()):
        assert re.search(rf"^  {re.escape(name)} ", text, re.MULTILINE), name
    for name, algorithm in algorithms.registered().items():
        assert algorithm.description in text, name


@pytest.mark.timeout(200)
def test_what_a_format_is_said_to_hold_is_what_an_export_takes(tmp_path: Path) -> None:
    """Every number format in every checkpoint format, planned."""
    source = str(make_llama(hidden=256, intermediate=512, kv_heads=4, vocab=256))
    calib = tmp_path / "ids.jsonl"
    calib.write_text('{"input_ids": [1]}\n')
    held = {each["name"]: set(each["number_formats"]) for each in known()["checkpoint_formats"]}
    assert held.pop("mxfp4") == {"mxfp4-wo"}, "experts alone, of gpt-oss alone"
    for name in held:
        for quant in formats.names():
            sizes = formats.get(quant).group_sizes or (None,)
            asked = f"*_proj={quant}"  # alone most of llama.cpp's types are mixtures
            taken = any(planned(model=source, quant=asked, group_size=n, format=name, calib=str(calib)) for n in sizes)
            assert (quant in held[name]) == taken, (quant, name)


def planned(**settings: Any) -> bool:
    try:
        prepare(ExportRecipe(dry_run=True, quiet=True, **settings))
    except PlanError:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("int4", {"number_format"}, "held by --format awq, dcp, gguf, gptq, hf, modelopt, trtllm"),
        (
            "gguf",
            {"checkpoint_format"},
            "llama.cpp (llama-cpp-python 0.3.36): none, int8-wo:32, int4:32, mxfp4-wo, nvfp4-wo, q4-0",
        ),
        (
            "gptq",
            {"checkpoint_format", "algorithm"},
            "--gptq-damping 0.0, --gptq-block-size 128, --gptq-asymmetry 0.0, --no-gptq-act-order",
        ),
        ("w4a8", {"number_format"}, "its kernel for int4 with fp8 runs on Hopper GPUs alone"),
    ],
)
def test_one_format(name: str, keys: set[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(capsys, "formats", name)
    assert set(found) - {"name", "loaded", "refused"} == keys
    assert main(["formats", name]) == 0
    assert words in capsys.readouterr().out


@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore")  # of configs that transformers imports
def test_models_lists_declared_and_derived_types(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from modelexport.models.architecture import known_model_types

    found = {each["model_type"]: each for each in answered(capsys, "models")["models"]}
    assert {name for name, each in found.items() if each["how"] == "declared"} == set(known_model_types())
    assert set(found) == {*known_model_types(), *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    assert found["mistral"]["family"] == "llama"
    assert found["bloom"]["family"] is None
    assert main(["models"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(name in text for name in found)
    assert f"{len(found)} in all" in text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "how", "quantised", "kept"),
    [
        ("qwen3_moe", "declared", "mlp.experts.*.down_proj", "mlp.gate"),
        ("mistral", "declared", "self_attn.q_proj", "lm_head"),
        ("bloom", "derived from transformers, for the default config", "mlp.dense_h_to_4h", "lm_head"),
    ],
)
def test_one_model_type(name: str, how: str, quantised: str, kept: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(capsys, "models", name)
    assert (found["model_type"], found["how"]) == (name, how)
    modules = {module["path"].removeprefix("transformer."): module for module in found["modules"]}
    assert modules[quantised]["quantised"]
    assert not modules[kept]["quantised"]
    assert modules[kept]["why_not"]
    assert main(["models", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith(f"{quantised} ")]
    assert "as --quant says" in line


def test_report_is_called_with_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from modelexport.cli import report

    calls: list[Any] = []

    def print_report(
        checkpoint: Path, html: Path | None, config: Path | None, log: Path | None, *, as_json: bool
    ) -> int:
        calls.append((checkpoint, html, config, log, as_json))
        return 0

    monkeypatch.setattr(report, "print_report", print_report)
    assert main(["report", "ckpt"]) == 0
    assert main(["report", "ckpt", "--html", "x.html", "--config", "c.json", "--log", "l.jsonl", "--json"]) == 0
    given = (Path("ckpt"), Path("x.html"), Path("c.json"), Path("l.jsonl"), True)
    assert calls == [(Path("ckpt"), None, None, None, False), given]


def test_every_kind_of_error_has_an_exit_status() -> None:
    kinds = [ModelExportError, *ModelExportError.__subclasses__()]
    assert HubError in kinds
    assert {kind.exit_status for kind in kinds if kind is not UsageError} == {1}
    assert UsageError.exit_status == 2
