"""The model card: in every export, made of the record alone, true, and whatever strangers wrote in it stays text."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from modelexport.assets import demo_model_path
from modelexport.checkpoints.card_metadata import read_card_metadata
from modelexport.checkpoints.formats.hf import CARD, SOURCE_CARD
from modelexport.cli import main
from modelexport.exporting import export
from modelexport.inspection.card import model_card
from modelexport.inspection.record.reading import ExportRecord
from modelexport.inspection.record.rows import rows_of, stored_of
from modelexport.models.checkpoint_formats import names as checkpoint_formats
from modelexport.models.loading import LOADINGS
from modelexport.recipe import ExportRecipe
from modelexport.resharding import reshard
from tests.helpers.marks import extended
from tests.helpers.models import copy_checkpoint, make_llama

QUIET: dict[str, Any] = {"quiet": True, "evaluate": False}
FEW: dict[str, Any] = {"calib_samples": 2, "calib_length": 32, **QUIET}


def digests(directory: Path) -> dict[str, str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def record_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "modelexport.json").read_text())
    return found


def card_of(directory: Path) -> str:
    return (directory / CARD).read_text(encoding="utf-8")


def front_of(card: str) -> dict[str, Any]:
    _, front, _ = card.split("---\n", 2)
    found: dict[str, Any] = yaml.safe_load(front)
    return found


def recipe_in(card: str) -> dict[str, Any]:
    (block,) = re.findall(r"```yaml\n(.*?)```", card, re.DOTALL)
    found: dict[str, Any] = yaml.safe_load(block)
    return found


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in FP8."""
    out = tmp_path_factory.mktemp("card") / "demo"
    export(out=str(out), quant="fp8", **QUIET)
    return out


# ------------------------------------------------------------------ every export


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "settings", [{"tp": 3, "gather": "direct"}, extended({"tp": 2}), extended({"tp": 4, "gather": "shm"})]
)
def test_the_same_card_for_every_parallelism(demo: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    export(out=str(tmp_path / "elsewhere"), quant="fp8", **settings, **QUIET)
    assert digests(tmp_path / "elsewhere") == digests(demo)
    assert CARD in digests(demo)


def test_it_is_made_of_the_record_and_says_no_path(demo: Path) -> None:
    card = card_of(demo)
    assert card == model_card(record_of(demo))
    assert str(demo.parent) not in card
    assert str(demo_model_path().parent) not in card
    assert CARD not in record_of(demo)["file_sha256"], "people edit cards"
    assert card.isascii()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("form", [name for name in checkpoint_formats() if name != "mxfp4"])  # of gpt-oss alone
def test_every_checkpoint_format_has_one(tmp_path: Path, form: str) -> None:
    quant = {"gguf": "int4:32", "fp8-block": "fp8-block", "awq": "int4", "gptq": "int4", "modelopt": "nvfp4-wo"}
    names = {"quant": quant.get(form, "none" if form in ("dcp", "megatron", "vllm-sharded") else "fp8")}
    export(out=str(tmp_path / "out"), format=form, **names, **QUIET)
    card = card_of(tmp_path / "out")
    front = front_of(card)
    assert front["pipeline_tag"] == "text-generation"
    assert "modelexport" in front["tags"]
    assert recipe_in(card)["format"] == form
    commands = [row.command for row in LOADINGS if row.format == form and not row.sharded]
    shown = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert all(block in [command.replace("{tp}", "1") for command in commands] for block in shown)
    assert bool(shown) == (form != "trtllm")
    if form == "trtllm":
        assert "TensorRT-LLM itself was not run" in card


def test_what_is_no_weight_is_not_counted_as_one(tmp_path: Path) -> None:
    export(out=str(tmp_path / "ckpt"), quant="none", kv_cache="fp8", calib_samples=1, **QUIET)
    card = card_of(tmp_path / "ckpt")
    assert "| `self_attn (KV cache scales)` | 4 | `f32` | - | 32 B | - |" in card
    assert "3,672,320 weights" in card
    assert "each linear's error" not in card and "\n\n\n" not in card  # noqa: PT018


def test_figures_are_the_record_s(demo: Path) -> None:
    record, card = record_of(demo), card_of(demo)
    worst = min(record["sqnr_db"], key=record["sqnr_db"].get)
    assert f"SQNR of the worst {record['sqnr_db'][worst]:.2f} dB (`{worst}`)" in card
    rows = {row.name: row for row in rows_of(ExportRecord.of(record))}
    stored = sum(path.stat().st_size for path in demo.glob("*.safetensors"))
    header = 8 + int.from_bytes((demo / "model.safetensors").read_bytes()[:8], "little")
    assert sum(row.nbytes for row in rows.values()) == stored - header
    assert sum(row.weights for row in rows.values()) == 3_672_320
    assert "3,672,320 weights in 4.22 MB, of 7.34 MB before (1.74 times smaller): 9.19 bits a weight." in card
    assert "| `self_attn.q_proj` | 4 | `fp8` | 8.06 | 528 kB |" in card
    assert "Not quantised: `model.embed_tokens` (embedding" in card


# -------------------------------------------------------------- making it again


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "settings",
    [
        extended({"quant": "*.mlp.*=int4:64,*=fp8"}),
        {"quant": "int4", "group_size": 32, "algorithm": "awq+gptq", "gptq_damping": 0.02, "format": "awq"},
        {"quant": "none", "target_tp": 2, "max_shard_bytes": 1_000_000},
        extended({"quant": "int8-static", "calib_range": "max", "calib_seed": 3, "kv_cache": "fp8"}),
        extended({"quant": "int8", "algorithm": "rotation", "calib_seed": 5}),
    ],
)
def test_its_recipe_makes_the_same_bytes(tmp_path: Path, settings: dict[str, Any]) -> None:
    few = {} if settings["quant"] in ("none",) else FEW
    export(out=str(tmp_path / "a"), **{**QUIET, **few, **settings})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe_in(card_of(tmp_path / "a"))))
    again = ExportRecipe.load(tmp_path / "recipe.yaml", {"out": str(tmp_path / "b"), **QUIET})
    export(again)
    assert digests(tmp_path / "b") == digests(tmp_path / "a")


@pytest.mark.timeout(120)
def test_what_autoquant_chose_stands_in_its_place(tmp_path: Path) -> None:
    export(out=str(tmp_path / "a"), algorithm="autoquant", autoquant_bits=6, autoquant_candidates="int4,fp8", **FEW)
    card = card_of(tmp_path / "a")
    assert "chosen by autoquant, within 6.0 bits a weight among `int4,fp8`" in card
    recipe = recipe_in(card)
    assert recipe["algorithm"] == "rtn"
    export(ExportRecipe(out=str(tmp_path / "b"), **recipe, **QUIET))
    assert record_of(tmp_path / "b")["sha256"] == record_of(tmp_path / "a")["sha256"]


# ----------------------------------------------------------- what loads it


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")  # transformers' and compressed-tensors' own
def test_the_command_for_transformers_runs(demo: Path) -> None:
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", card_of(demo), re.DOTALL) if "transformers" in b)
    names: dict[str, Any] = {}
    exec(block.replace("CKPT", str(demo)), names)
    assert names["model"].config.quantization_config is not None


@pytest.mark.timeout(120)
def test_what_engines_refuse_is_said_and_no_command_given(tmp_path: Path) -> None:
    source = str(make_llama(model_type="mixtral", kv_heads=2, vocab=211, hidden=256))
    export(model=source, out=str(tmp_path / "out"), quant="int8", **QUIET)
    card = card_of(tmp_path / "out")
    assert "transformers 5.23 (compressed-tensors 0.20) and int8 as hf" in card
    assert "Known not to work" in card
    assert "AutoModelForCausalLM" not in card
    assert "With `mixtral` models it was not run." in card, "vLLM was run with Llama alone"
    assert record_of(tmp_path / "out")["warnings"], "they are in the record too"


def test_what_was_not_run_is_named_by_nobody(tmp_path: Path) -> None:
    export(out=str(tmp_path / "out"), quant="int4:64", format="gptq", **QUIET)
    card = card_of(tmp_path / "out")
    assert "No engine has been run on such a checkpoint" in card
    assert "```python" not in card


# -------------------------------------------------- the source's card, licences


FRONT = "---\nlicense: apache-2.0\nlanguage: [en, de]\nbase_model: org/parent\ntags: [x]\n---\n# Theirs\n"


def with_card(directory: Path, text: str) -> str:
    copy_checkpoint(make_llama(kv_heads=2, hidden=128), directory)
    (directory / CARD).write_text(text, encoding="utf-8")
    return str(directory)


def test_the_source_s_card_comes_along_under_another_name(tmp_path: Path) -> None:
    source = with_card(tmp_path / "source", FRONT)
    export(model=source, out=str(tmp_path / "out"), quant="int8", **QUIET)
    assert (tmp_path / "out" / SOURCE_CARD).read_text() == FRONT
    card = card_of(tmp_path / "out")
    front = front_of(card)
    assert (front["license"], front["language"]) == ("apache-2.0", ["en", "de"])
    assert "base_model" not in front, "the source's parent is not what this was made of, and the source has no hub id"
    assert front["tags"] == ["compressed-tensors", "int8", "modelexport"]
    assert "Licence, as the source's card has it: `apache-2.0`." in card
    assert SOURCE_CARD in record_of(tmp_path / "out")["file_sha256"]


def test_a_hub_id_is_the_base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = with_card(tmp_path / "snapshot", FRONT)
    monkeypatch.setattr("modelexport.checkpoints.source._download", lambda model, revision: Path(source))
    export(model="org/name", download=True, revision="v1", out=str(tmp_path / "out"), quant="int8", **QUIET)
    card = card_of(tmp_path / "out")
    front = front_of(card)
    assert (front["base_model"], front["base_model_relation"]) == ("org/name", "quantized")
    assert recipe_in(card) == {
        "model": "org/name",
        "revision": "v1",
        "quant": "int8",
        "algorithm": "rtn",
        "format": "hf",
    }
    assert "--model SOURCE" not in card
    export(model="org/name", download=True, out=str(tmp_path / "plain"), quant="none", **QUIET)
    assert "base_model_relation" not in front_of(card_of(tmp_path / "plain"))
    # Resharded, it is still made of that model, under that licence.
    reshard(checkpoint=str(tmp_path / "out"), out=str(tmp_path / "two"), tp=2, quiet=True)
    assert front_of(card_of(tmp_path / "two"))["base_model"] == "org/name"
    assert front_of(card_of(tmp_path / "two"))["license"] == "apache-2.0"


def test_convert_writes_its_own_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = with_card(tmp_path / "snapshot", FRONT)
    monkeypatch.setattr("modelexport.checkpoints.source._download", lambda model, revision: Path(source))
    export(model="org/name", download=True, out=str(tmp_path / "ct"), quant="int4", **QUIET)
    assert main(["convert", str(tmp_path / "ct"), "--format", "gptq", "--out", str(tmp_path / "gptq"), "--quiet"]) == 0
    card = card_of(tmp_path / "gptq")
    front = front_of(card)
    assert (front["base_model"], front["license"]) == ("org/name", "apache-2.0")
    assert "gptq" in front["tags"]
    assert "modelexport convert SOURCE --format gptq --out CKPT" in card
    assert "its numbers as they were" in card
    assert (tmp_path / "gptq" / SOURCE_CARD).read_text() == FRONT, "the model's own, handed on"
    assert stored_of(ExportRecord.of(record_of(tmp_path / "gptq"))).format == "gptq"


def test_a_card_that_somebody_edited_is_kept(demo: Path, tmp_path: Path) -> None:
    shutil.copytree(demo, tmp_path / "ct")
    (tmp_path / "ct" / CARD).write_text(card_of(demo) + "\nMy own words.\n")
    assert main(["verify", str(tmp_path / "ct")]) == 0
    reshard(checkpoint=str(tmp_path / "ct"), out=str(tmp_path / "out"), tp=2, quiet=True)
    assert "My own words." in (tmp_path / "out" / SOURCE_CARD).read_text()
    assert "My own words." not in card_of(tmp_path / "out")


def test_resharding_writes_the_card_of_what_is_there_then(demo: Path, tmp_path: Path) -> None:
    reshard(checkpoint=str(demo), out=str(tmp_path / "dcp"), format="dcp", tp=2, quiet=True)
    card = card_of(tmp_path / "dcp")
    assert "vLLM" not in card
    assert recipe_in(card)["target_tp"] == 2
    assert main(["verify", str(tmp_path / "dcp")]) == 0
    reshard(checkpoint=str(tmp_path / "dcp"), out=str(tmp_path / "back"), quiet=True)
    assert digests(tmp_path / "back") == digests(demo)


def test_resharding_what_we_did_not_export_keeps_its_card(tmp_path: Path) -> None:
    source = with_card(tmp_path / "source", FRONT)
    reshard(checkpoint=source, out=str(tmp_path / "out"), tp=2, quiet=True)
    assert card_of(tmp_path / "out") == FRONT
    assert not (tmp_path / "out" / SOURCE_CARD).exists()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ("# no front matter\nlicense: mit\n", {}),
        ("---\nlicense: mit\n", {}),
        ("---\nlicense: [unclosed\n---\n", {}),
        ("---\ndate: 2024-99-99\nlicense: mit\n---\n", {}),
        ("---\n" + "[" * 5000 + "\n---\n", {}),
        ("---\n- a list\n---\n", {}),
        ("---\nlicense: 3\nlanguage: {a: b}\nbase_model: [1, 'no id', org/x]\n---\n", {"base_model": ["org/x"]}),
        ("---\nlicense: 'mit\n  x'\n---\n", {}),
        ("---\nlicense: other\nlicense_name: llama3.1\nlicense_link: https://x.y/z\n---\n", None),
        ("---\nlicense_link: javascript:alert(1)\u00e9\n---\n", {}),
        ("\ufeff---\r\nlicense: mit\r\n---\r\n", {"license": "mit"}),
        (
            "---\nlicense: mit\nbase_model_relation: quantized\n---\n",
            {"license": "mit", "base_model_relation": "quantized"},
        ),
        ("---\nlicense: mit\nbase_model_relation: merge\n---\n", {"license": "mit"}),
    ],
)
def test_strangers_front_matter_is_data(tmp_path: Path, text: str, found: dict[str, Any] | None) -> None:
    (tmp_path / CARD).write_text(text, encoding="utf-8")
    if found is None:
        found = {"license": "other", "license_name": "llama3.1", "license_link": "https://x.y/z"}
    assert read_card_metadata(tmp_path) == found


def test_front_matter_that_is_code_is_not_run(tmp_path: Path) -> None:
    (tmp_path / CARD).write_text("---\nlicense: !!python/object/apply:os.getcwd []\n---\n")
    assert read_card_metadata(tmp_path) == {}
    assert read_card_metadata(tmp_path / "nowhere") == {}


# ------------------------------------------------------------------- strangers


HOSTILE = "x`|<script>alert(1)</script>[a](http://evil.example)\n# head\n---\n![i](x) **b** www.evil.example \u202e"


def test_hostile_names_stay_text(demo: Path) -> None:
    record = record_of(demo)
    record["source"] = HOSTILE
    record["model"]["model_type"] = HOSTILE
    record["model"] |= {"license": HOSTILE, "base_model": HOSTILE, "language": [HOSTILE]}
    record["unquantised"] = {HOSTILE: HOSTILE}
    record["calibration"] = {"text": HOSTILE, "samples": 2, "length": 1, "unseen_experts": []}
    record["recipe"]["format"] = HOSTILE
    record["layers"][1]["modules"][HOSTILE] = record["layers"][1]["modules"].pop("self_attn.q_proj")
    card = model_card(record)
    assert front_of(card) == {"pipeline_tag": "text-generation", "tags": ["fp8", "modelexport"]}
    body = card.split("---\n", 2)[2]
    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "CODE", re.sub(r"```.*?```", "BLOCK", body, flags=re.DOTALL))
    assert "<script>" not in outside
    assert not re.search(r"(?<!\\)\[a\]|(?<!\\)!\[|https?://|(?<!\\)\*\*b", outside)
    assert not re.search(r"www\.evil", outside)
    headings = [line for line in body.splitlines() if line.startswith("#")]
    assert [line.split()[1] for line in headings[1:]] == ["What", "How", "Quality", "Loading", "Checking"]
    assert "\u202e" not in body
    assert {line.count(" | ") for line in body.splitlines() if line.startswith("| ")} == {5}


# ------------------------------------------------------------------- evaluation


@pytest.mark.timeout(200)
def test_figures_of_an_evaluation_are_kept(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ckpt"
    shutil.copytree(demo, out)
    assert "were not measured" in card_of(out)
    line = ["eval", str(out), "--against", "demo", "--windows", "2", "--window", "32", "--save", "--json"]
    assert main(line) == 0
    found = json.loads(capsys.readouterr().out)
    kept = record_of(out)["evaluation"]
    assert kept["comparison"]["mean_kl"] == pytest.approx(found["comparison"]["mean_kl"], rel=1e-8)
    assert (kept["text"], kept["windows"], kept["window"]) == ("modelexport's held-out text", 2, 32)
    assert str(tmp_path) not in json.dumps(kept)
    card = card_of(out)
    c = found["comparison"]
    assert f"perplexity {c['reference']['perplexity']:.2f} before, {c['model']['perplexity']:.2f} after" in card
    assert f"mean KL divergence {c['mean_kl']:.4f} +- {c['kl_standard_error']:.4f} nats a token" in card
    same = f"is the source's after {100 * c['same_top']:.2f} % of the tokens; in the 1 % where it is largest"
    assert f"{same}, KL divergence is {c['worst_kl']:.4f} nats on average" in card
    assert "were not measured" not in card
    assert main(["verify", str(out)]) == 0
    capsys.readouterr()
    # Without a source there is a perplexity alone; a card that was edited is left alone.
    (out / CARD).write_text("mine\n")
    assert main(["eval", str(out), "--windows", "2", "--window", "32", "--save"]) == 0
    assert card_of(out) == "mine\n"
    assert "comparison" not in record_of(out)["evaluation"]
    assert f"perplexity {record_of(out)['evaluation']['model']['perplexity']:.2f}." in model_card(record_of(out))


@pytest.mark.timeout(200)
def test_the_demo_model_s_figures_are_on_its_card(tmp_path: Path) -> None:
    result = export(out=str(tmp_path / "out"), quiet=True)
    assert result.evaluation is not None
    comparison = result.evaluation.comparison
    assert f"{comparison.model.perplexity:.2f} after" in card_of(tmp_path / "out")
    assert card_of(tmp_path / "out") == model_card(record_of(tmp_path / "out"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")) == []


def test_save_refuses_what_has_no_record_before_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(make_llama()), "--save"]) == 2
    assert "has no modelexport.json, which figures are kept in: leave out --save" in capsys.readouterr().err
