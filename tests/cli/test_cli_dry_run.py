"""``--dry-run``: everything is said, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelexport.cli import main
from modelexport.quantization import formats
from modelexport.quantization.ggml_layouts import LAYOUTS
from tests.helpers.cli_running import fails, listing
from tests.helpers.models import make_llama

BLOCKS = {layout.number_format for layout in LAYOUTS.values()}  # held by GGUF files alone


@pytest.mark.parametrize("quant", [name for name in formats.names() if name not in BLOCKS])
def test_a_dry_run_writes_nothing_and_says_everything(
    quant: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    source = make_llama(kv_heads=2, vocab=101)
    calib = tmp_path_factory.mktemp("text") / "text.jsonl"  # for static scales: the model has no tokenizer
    calib.write_text('{"input_ids": [1, 2, 3]}\n')
    before = listing(source)
    line = ["--model", str(source), "--out", "ckpt", "--quant", quant, "--tp", "4", "--dry-run", "--calib", str(calib)]
    assert main(line) == 0
    text, err = capsys.readouterr()
    known = ("warning: vLLM", "warning: transformers", "warning: --calib-length")
    assert all(line.startswith(known) for line in err.splitlines())
    assert "dry run, nothing written: 4 ranks, buffers of at most" in text
    assert "self_attn.q_proj" in text
    assert "not quantised: lm_head" in text or quant == "none"
    assert "loads at tensor-parallel sizes: 1" in text
    assert main([*line, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["out"] is None
    assert (result["quant"], result["tp"], result["files"]) == (quant, 4, ["model.safetensors"])
    assert result["source_bytes"] == sum(p.stat().st_size for p in source.glob("*.safetensors")) - header_size(source)
    assert sum(row["nbytes"] for row in result["rows"]) == result["output_bytes"]
    assert main([*line, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []
    assert listing(source) == before


def header_size(directory: Path) -> int:
    with open(directory / "model.safetensors", "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_a_dry_run_needs_no_target_and_minds_no_existing_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ckpt").mkdir()
    assert main(["--dry-run"]) == 0
    assert main(["--dry-run", "--out", str(tmp_path / "ckpt")]) == 0
    assert list((tmp_path / "ckpt").iterdir()) == []
    assert "self_attn.q_proj" in capsys.readouterr().out


def test_a_dry_run_refuses_what_the_export_would(capsys: pytest.CaptureFixture[str]) -> None:
    source = make_llama(hidden=96, heads=3, kv_heads=3)
    text = fails(capsys, "--model", str(source), "--quant", "int4", "--dry-run", status=1)
    assert "96" in text
    assert "--group-size 32" in text
