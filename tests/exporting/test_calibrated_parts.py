"""Calibrated exports of language models that are a part of others: what text reaches is calibrated, under any name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from modelexport.cli.summary import summary
from modelexport.errors import ModelExportError
from modelexport.exporting import ExportResult, export
from tests.helpers.models import copy_checkpoint
from tests.helpers.tiny_models import tiny_checkpoint

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]  # transformers warns of many things

ON_IMAGES = ".layers.1."
"""Of the small Llama 3.2 Vision, the layer that attends to images."""


def exported(model: str, target: Path, **settings: Any) -> ExportResult:
    text = target.with_suffix(".jsonl")
    text.write_text("".join(json.dumps({"input_ids": list(range(n, n + 24))}) + "\n" for n in (3, 50)))
    calibration = {"calib": str(text), "calib_samples": 2, "calib_length": 16}
    model = model if Path(model).is_dir() else str(tiny_checkpoint(model))
    return export(model=model, out=str(target), evaluate=False, quiet=True, **calibration, **settings)


def test_layers_that_text_does_not_pass_through_are_rounded_to_nearest(tmp_path: Path) -> None:
    result = exported("mllama", tmp_path / "gptq", quant="int4:32", algorithm="gptq")
    exported("mllama", tmp_path / "rtn", quant="int4:32", algorithm="mse")
    gptq, rtn = (load_file(tmp_path / name / "model.safetensors") for name in ("gptq", "rtn"))

    def differing(found: dict[str, Tensor]) -> set[bool]:
        packed = [name for name in found if name.endswith("weight_packed")]
        return {ON_IMAGES in name for name in packed if not torch.equal(found[name], rtn[name])}

    assert differing(gptq) == {False}
    assert result.calibration is not None
    assert result.calibration["notes"]
    assert all(ON_IMAGES in name for name in result.calibration["notes"])
    assert "text does not pass through its layer" in summary(result)


@pytest.mark.parametrize("settings", [{"quant": "fp8-static"}, {"quant": "none", "kv_cache": "fp8"}])
def test_static_scales_of_such_layers_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelExportError, match=r"text does not pass through language_model\.model\.layers\.1 "):
        exported("mllama", tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_linears_beside_lora_branches_are_calibrated_as_without_them(tmp_path: Path) -> None:
    """Phi-4-multimodal's own files: of text no branch takes part."""
    source, linear = tiny_checkpoint("phi3"), re.compile(r"_proj(?=\.weight)")

    def branched(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {linear.sub("_proj.base_layer", name): tensor for name, tensor in tensors.items()}
        return {**found, "model.layers.0.mlp.down_proj.lora_A.vision.weight": torch.ones(4, 128)}

    beside = copy_checkpoint(source, tmp_path / "source", config={"model_type": "phi4mm"}, tensors=branched)
    for name, model in (("alone", source), ("beside", beside)):
        exported(str(model), tmp_path / name, quant="int4:32", algorithm="gptq")
    alone, found = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "beside"))
    assert all(torch.equal(found[re.sub(r"_proj(?=\.)", "_proj.base_layer", name)], x) for name, x in alone.items())


def test_autoquant_weighs_the_linears_of_a_part(tmp_path: Path) -> None:
    result = exported("gemma3", tmp_path / "out", algorithm="autoquant", group_size=32)
    assert {row.number_format for row in result.rows} - {"bf16"}


@pytest.mark.extended
def test_layers_without_a_cache_have_no_scales_of_one(tmp_path: Path) -> None:
    with pytest.raises(ModelExportError, match=r"has no attention whose keys and values are cached.*leave out --kv-c"):
        exported("qwen3_5_text", tmp_path / "out", quant="fp8-static", kv_cache="fp8")
