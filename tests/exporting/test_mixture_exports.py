"""Exports of llama.cpp's mixtures: blocks for the embedding and the head, too."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from modelexport.checkpoints.gguf.file import read_gguf, type_of
from modelexport.cli.summary import summary
from modelexport.errors import PlanError, UsageError
from modelexport.exporting import export
from modelexport.exporting.plan import build_plan
from modelexport.exporting.result import ExportResult
from modelexport.inspection.evaluate.models import load_dequantised, load_reference
from modelexport.inspection.verify import verify_checkpoint
from modelexport.models.opening import open_model
from modelexport.resharding import reshard
from modelexport.sharding.plan import Parallelism
from tests.helpers.models import make_llama

pytestmark = pytest.mark.timeout(120)


def run(out: Path, quant: str, *, model: Path | None = None, tp: int = 1, **settings: Any) -> ExportResult:
    source = model or make_llama(vocab=211)
    settings = {"format": "gguf", "evaluate": False, "quiet": True, **settings}
    return export(model=str(source), out=str(out), quant=quant, tp=tp, **settings)


def types(directory: Path) -> dict[str, str | None]:
    infos = read_gguf(directory / "model.gguf").infos
    return {name: type_of(info.dtype, info.shape) for name, info in infos.items() if len(info.shape) > 1}


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_and_the_embedding_are_blocks(tmp_path: Path, tied: bool) -> None:
    """The same on any number of ranks; a tied one is there once."""
    source = make_llama(vocab=211, tied=tied)
    run(tmp_path / "1", "q8_0", model=source)
    run(tmp_path / "3", "q8_0", model=source, tp=3)
    assert filecmp.cmp(tmp_path / "1" / "model.gguf", tmp_path / "3" / "model.gguf", shallow=False)
    found = types(tmp_path / "1")
    assert set(found.values()) == {"Q8_0"}
    assert ("output.weight" in found) is not tied
    assert read_gguf(tmp_path / "1" / "model.gguf").values["general.file_type"] == 7
    assert verify_checkpoint(tmp_path / "1", against=str(source)).ok
    recorded = json.loads((tmp_path / "1" / "modelexport.json").read_text())
    assert recorded["recipe"]["quant"] == "q8_0"
    assert recorded["sqnr_db"]["model.embed_tokens"] > 40


def test_such_a_file_is_a_source(tmp_path: Path) -> None:
    """Converted, resharded, decoded, and evaluated; one without a list of types in its config.json, too."""
    source = make_llama(vocab=211, tied=True)
    run(tmp_path / "a", "q8_0", model=source)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    (tmp_path / "a" / "modelexport.json").unlink()
    reshard(checkpoint=str(tmp_path / "a"), out=str(tmp_path / "again"), format="gguf", quiet=True)
    assert filecmp.cmp(tmp_path / "a" / "model.gguf", tmp_path / "again" / "model.gguf", shallow=False)
    run(tmp_path / "kept", "keep", model=tmp_path / "a")
    assert filecmp.cmp(tmp_path / "a" / "model.gguf", tmp_path / "kept" / "model.gguf", shallow=False)
    run(tmp_path / "plain", "none", model=tmp_path / "a", format="hf")
    decoded, plain = (
        dict(load(tmp_path / name).named_parameters())
        for load, name in ((load_dequantised, "a"), (load_reference, "plain"))
    )
    before = dict(load_reference(source).named_parameters())["model.embed_tokens.weight"]
    for name, value in plain.items():
        assert torch.equal(value, decoded[name].bfloat16().float()), name
    assert 0 < float((plain["model.embed_tokens.weight"] - before).detach().abs().max()) < 0.01


def test_patterns_come_before_a_mixture(tmp_path: Path) -> None:
    run(tmp_path / "out", "lm_head=none,*.mlp.*=int4:32,*=q8_0")
    found = types(tmp_path / "out")
    assert found["output.weight"] == "BF16"
    assert found["token_embd.weight"] == found["blk.0.attn_q.weight"] == "Q8_0"
    assert found["blk.1.ffn_down.weight"] == found["blk.1.ffn_up.weight"] == "Q4_0"


def test_a_pattern_of_a_tied_head_means_the_one_tensor(tmp_path: Path) -> None:
    result = run(tmp_path / "out", "lm_head=int8-wo:32,*=int4:32", model=make_llama(tied=True))
    assert types(tmp_path / "out")["token_embd.weight"] == "Q8_0"
    assert "no longer tied" not in summary(result)


def test_rows_of_no_whole_blocks_stay_and_it_is_said(tmp_path: Path) -> None:
    result = run(tmp_path / "out", "q8_0", model=make_llama(intermediate=176))
    assert types(tmp_path / "out")["blk.0.ffn_down.weight"] == "BF16"
    assert "176 input features are no multiple" in summary(result)
    assert verify_checkpoint(tmp_path / "out").ok


def test_experts_are_stacks_and_routers_stay(tmp_path: Path) -> None:
    result = run(tmp_path / "out", "mxfp4_moe", model=make_llama(model_type="mixtral"))
    found = types(tmp_path / "out")
    assert found["blk.1.ffn_down_exps.weight"] == "MXFP4"
    assert found["blk.1.attn_q.weight"] == found["token_embd.weight"] == "Q8_0"
    assert found["blk.1.ffn_gate_inp.weight"] == "F32"
    assert "router: it picks experts" in summary(result)
    assert read_gguf(tmp_path / "out" / "model.gguf").values["general.file_type"] == 38


def test_a_large_embedding_is_quantised_in_slabs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """To bound memory: of the same bytes."""
    run(tmp_path / "whole", "q8_0")
    monkeypatch.setattr("modelexport.exporting.plan.SLAB_BYTES", 10_000)
    result = run(tmp_path / "slabs", "q8_0")
    assert filecmp.cmp(tmp_path / "whole" / "model.gguf", tmp_path / "slabs" / "model.gguf", shallow=False)
    records = [json.loads((tmp_path / name / "modelexport.json").read_text()) for name in ("whole", "slabs")]
    assert records[0]["sqnr_db"] == records[1]["sqnr_db"]
    assert next(row.nbytes for row in result.rows if row.name == "lm_head") == 211 * 4 * 34


def test_a_format_without_blocks_has_no_mixtures(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--format hf holds none: add --format gguf"):
        run(tmp_path / "out", "q8_0", format="hf")
    run(tmp_path / "gguf", "q8_0", model=make_llama(tied=True))
    with pytest.raises(PlanError, match="serves as the head, too"):
        build_plan(open_model(tmp_path / "gguf"), None, Parallelism())
