"""Draft layers are taken out of a checkpoint and of its config.json, and everything that is written says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from modelexport.cli.summary import summary
from modelexport.errors import CheckpointError
from modelexport.exporting import export
from modelexport.models.families.drafts import draft_counts, without_counts
from tests.helpers.tiny_models import tiny_checkpoint

NESTED = {"num_nextn_predict_layers": 0, "text_config": {"mtp_num_hidden_layers": 2, "hidden_size": 8}, "x": [1]}


def test_counts_are_found_where_the_language_model_is_described() -> None:
    assert draft_counts(NESTED) == {"text_config.mtp_num_hidden_layers": 2}
    assert without_counts(NESTED) == {**NESTED, "text_config": {"mtp_num_hidden_layers": 0, "hidden_size": 8}}


@pytest.mark.parametrize("value", [-1, True, "1", 1.0, []])
def test_a_count_that_is_no_whole_number_is_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"num_mtp_modules is .*; a whole number, 0 or more, is needed"):
        draft_counts({"num_mtp_modules": value})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model_type", "name"),
    [("glm4_moe", "model.layers.2.eh_proj.weight"), ("qwen3_next", "mtp.layers.0.mlp.gate.weight")],
    ids=["numbered on", "below mtp"],
)
def test_they_are_left_out_and_no_longer_promised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model_type: str, name: str
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    plain = tiny_checkpoint(model_type)
    tensors = load_file(plain / "model.safetensors")
    drafts = next(value for key, value in tensors.items() if key.endswith("o_proj.weight"))
    save_file({**tensors, name: drafts.clone()}, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(config))
    result = export(model=str(source), quant="int8", out=str(out), evaluate=False)
    said = "config.json's num_nextn_predict_layers becomes 0, not 1"
    assert said in capsys.readouterr().err
    assert name in result.left_out
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0
    record = json.loads((out / "modelexport.json").read_text())
    assert name in record["left_out"]
    assert any(said in warning for warning in record["warnings"])
    for told in (summary(result), (out / "README.md").read_text()):
        assert name in told
        assert "of a draft layer" in told
