"""``modelexport eval``: which text, how much of it, and what is printed."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from modelexport.assets import demo_documents, demo_model_path
from modelexport.cli import main
from modelexport.errors import CheckpointError, PlanError, UsageError
from modelexport.inspection.evaluate import compare_checkpoints
from modelexport.inspection.evaluate import text as eval_command
from modelexport.inspection.evaluate.text import evaluate_on_text
from tests.helpers.models import copy_checkpoint, make_llama
from tests.inspection._quantised import save_quantised

pytestmark = pytest.mark.timeout(120)

SHAPE = {"hidden": 128, "layers": 2, "vocab": 211}


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_quantised(demo_model_path(), tmp_path_factory.mktemp("eval") / "int4", "int4")


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    """101 tokens on two lines, and a line without any."""
    path = tmp_path / "ids.jsonl"
    lines = [json.dumps({"input_ids": [(7 * n + k) % 211 for n in range(50 + k)]}) for k in (0, 1)]
    path.write_text("\n\n".join(lines) + "\n")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["eval", *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    assert captured.err == "", "no bar where nobody watches"
    return captured.out


def test_what_is_printed(int4: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, int4, "--against", "demo", "--windows", 4, "--window", 64).splitlines()
    assert lines[0] == (
        "the held-out text of the package (48 documents, each begun anew): 4 of 789 windows of 64 tokens, float32"
    )
    assert lines[1].split() == ["perplexity", "loss,", "nats", "a", "token"]
    assert lines[2].startswith("demo ")
    assert lines[3].startswith(f"{int4} ")
    source, ours = (float(line.split()[1]) for line in lines[2:4])
    assert 5 < source < ours < 100
    assert lines[4].startswith("loss +")
    assert "mean KL 0." in lines[4]
    assert re.fullmatch(
        r"same top token \d\d\.\d\d % \+- \d\.\d\d; mean KL of the worst 1 % of tokens 0\.\d{4}", lines[5]
    )
    assert re.fullmatch(
        r"KL percentiles: 50 % 0\.\d{4}, 95 % 0\.\d{4}, 99 % 0\.\d{4}, 99\.9 % 0\.\d{4}; maximum 0\.\d{4}", lines[6]
    )
    assert lines[7].endswith("tokens/s")
    assert len(lines) == 8


def test_json(int4: Path, ids: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = json.loads(run(capsys, int4, "--text", ids, "--window", 100, "--json", "--dtype", "bfloat16"))
    assert (one["windows"], one["window"], one["windows_in_text"], one["all_of_text"]) == (1, 100, 1, True)
    assert one["comparison"] is None
    assert one["against"] is None
    assert one["dtype"] == "bfloat16"
    assert one["text"] == f"--text {ids}"
    assert one["model"]["standard_error"] is None, "of one window; NaN is no JSON"
    assert one["model"]["perplexity"] == pytest.approx(math.exp(one["model"]["loss"]))
    two = json.loads(run(capsys, int4, "--against", demo_model_path(), "--text", ids, "--window", 50, "--json"))
    assert (two["windows"], two["model"]["tokens"]) == (2, 100)
    assert two["comparison"]["model"]["loss"] == two["model"]["loss"]
    found = two["comparison"]
    assert 0 < found["mean_kl"] < found["worst_kl"] <= found["max_kl"]
    assert list(found["kl_percentiles"].values()) == sorted(found["kl_percentiles"].values())
    assert 0 < found["same_top"] <= 1
    assert two["model"]["standard_error"] > 0


def test_texts_are_tokenised_by_the_sources_tokenizer(int4: Path, tmp_path: Path) -> None:
    plain = tmp_path / "a.txt"
    plain.write_text("The hacker wrote a program that prints itself. " * 12)
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps({"text": plain.read_text()}))
    by_source = evaluate_on_text(int4, demo_model_path(), plain, window=32)
    assert by_source.windows == by_source.windows_in_text > 3
    assert by_source.comparison is not None
    alone = evaluate_on_text(demo_model_path(), None, lines, window=32)  # by its own
    assert alone.model == by_source.comparison.reference
    assert "all " in next(iter(alone.lines()))


def test_how_many_windows(ids: Path, monkeypatch: pytest.MonkeyPatch, int4: Path, tmp_path: Path) -> None:
    """All of the package's text for the demo model and what was made of it, else 64; of a file, its first ones."""
    seen = []

    def compare(reference: Any, checkpoint: Any, windows: Any, **_: Any) -> Any:
        seen.append((windows.inputs.shape[0], windows.in_text))
        return compare_checkpoints(reference, checkpoint, type(windows)(windows.inputs[:1], windows.targets[:1], 1))

    monkeypatch.setattr("modelexport.inspection.evaluate.compare_checkpoints", compare)
    evaluate_on_text(int4, demo_model_path())
    assert seen.pop() == (197, 197)
    other = tmp_path / "other"
    shutil.copytree(demo_model_path(), other)
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    evaluate_on_text(other, other, window=128)
    assert seen.pop() == (64, 394)
    text = tmp_path / "long.txt"
    text.write_text("\n".join(demo_documents("heldout")), encoding="utf-8")
    result = evaluate_on_text(other, other, text, window=32)
    assert seen.pop() == (64, 1024)
    assert not result.all_of_text
    evaluate_on_text(int4, demo_model_path(), ids, window=2)
    assert seen.pop() == (50, 50)


@pytest.mark.parametrize(
    ("kind", "bits", "words"),
    [
        ("float", 8, "keys and values rounded to FP8, as engines keep them"),
        ("int", 8, "keys and values rounded to int8, as engines keep them"),
        ("int", 4, "the KV cache was not rounded"),
    ],
)
def test_what_became_of_a_cache_that_engines_round(
    kind: str, bits: int, words: str, ids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantised = save_quantised(make_llama(**SHAPE), tmp_path / "kv", "int8")
    path = quantised / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": bits, "type": kind, "strategy": "tensor"}
    path.write_text(json.dumps(config))
    assert words in run(capsys, quantised, "--text", ids, "--window", 50)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"has no tokenizer, which is needed to read the held-out text.*--text FILE\.jsonl"),
        ({"text": "IDS", "window": 101}, r"has 101 tokens; a window of 101 .* 102: .*--text.*--window"),
        ({"text": "IDS", "windows": 0}, "--windows 0: at least 1"),
        ({"text": "IDS", "window": -1}, "--window -1: at least 1"),
        ({"text": "nothing.txt"}, r"--text nothing\.txt: no such file"),
        ({"checkpoint": "nowhere"}, "nowhere: no such directory"),
    ],
)
def test_requests_that_cannot_be_met(options: dict[str, Any], message: str, ids: Path) -> None:
    given = {"checkpoint": make_llama(**SHAPE), **options}
    if given.get("text") == "IDS":
        given["text"] = ids
    with pytest.raises(UsageError, match=message):
        evaluate_on_text(**given)


def test_checkpoints_that_are_no_models(ids: Path, tmp_path: Path) -> None:
    source = make_llama(**SHAPE)
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(source / "model.safetensors", bare)
    with pytest.raises(CheckpointError, match=r"bare has no config\.json.*--config PATH"):
        evaluate_on_text(bare, text=ids)
    found = evaluate_on_text(bare, text=ids, window=50, config=source)
    assert found.model == evaluate_on_text(source, text=ids, window=50).model
    endless = copy_checkpoint(source, tmp_path / "endless", config={"vocab_size": None})
    with pytest.raises(PlanError, match="no vocab_size"):
        evaluate_on_text(endless, text=ids)
    config = {"model_type": "t5"}
    with pytest.raises(PlanError, match=r"no causal language model of its model_type 't5'.*modelexport verify"):
        evaluate_on_text(copy_checkpoint(source, tmp_path / "encoder", config=config), text=ids)
    with pytest.raises(UsageError, match="token 210 is not in the model's vocabulary of 100"):
        evaluate_on_text(copy_checkpoint(source, tmp_path / "small", config={"vocab_size": 100}), text=ids_of(tmp_path))
    with pytest.raises(CheckpointError, match=r"vocabulary of 211, .* one of 2,048"):
        evaluate_on_text(source, demo_model_path(), ids, window=50)


def ids_of(directory: Path) -> Path:
    path = directory / "high.jsonl"
    path.write_text(json.dumps({"input_ids": [210] * 300}))
    return path


def test_the_word_demo_is_a_directory_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert eval_command.opened_model("demo", None).directory == demo_model_path()
    shutil.copytree(make_llama(**SHAPE), tmp_path / "demo")
    assert eval_command.opened_model("demo", None).directory == Path("demo")


def test_a_text_in_one_piece_is_one_document(tmp_path: Path) -> None:
    """The package's own text, too, whose documents each begin anew otherwise: perplexities that are not the same."""
    text = tmp_path / "heldout.txt"
    text.write_text("\n".join(demo_documents("heldout")), encoding="utf-8")
    one = evaluate_on_text("demo", text=text, windows=2, window=32)
    many = evaluate_on_text("demo", windows=2, window=32)
    assert (one.documents, many.documents) == (1, 48)
    assert next(one.lines()).startswith(f"--text {text} (1 document): 2 of the first 32 windows of 32 tokens")
    assert many.all_of_text


def test_what_is_no_text_is_told_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    for path, what in (
        (tmp_path / "empty.txt", "is empty"),
        (tmp_path, "is a directory"),
        ("/dev/null", "is a character device"),
    ):
        with pytest.raises(UsageError, match=f"--text {path}: {what}"):
            evaluate_on_text("demo", text=path)
