"""Language models that are a part of others, and types by another name: as the language model alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from modelexport.errors import CheckpointError
from modelexport.exporting import export
from modelexport.inspection.verify import verify_checkpoint
from modelexport.models.architecture import family_of, language_config, read_dimensions, why_no_language_model
from modelexport.models.derived import derive
from modelexport.models.matching import match
from modelexport.models.opening import open_model
from modelexport.models.rules import expected_rules
from tests.helpers.models import copy_checkpoint, make_llama
from tests.helpers.tiny_models import tiny_checkpoint, tiny_config

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

TOWER = {
    "vision_model.encoder.layers.0.attn.qkv.weight": torch.randn(96, 64),
    "mlp1.1.weight": torch.randn(64, 64),
}


def wrapped(source: Path, target: Path, prefix: str = "language_model.", **config: Any) -> Path:
    """A model of an unheard-of type that has another one as a part, as InternVL's makers publish theirs."""
    part = json.loads((source / "config.json").read_text())

    def below(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**{f"{prefix}{name}": tensor for name, tensor in tensors.items()}, **TOWER}

    whole = copy_checkpoint(source, target, tensors=below)
    (whole / "config.json").write_text(json.dumps({"model_type": "sees_too", "llm_config": part, **config}))
    return whole


def exported(source: Path, target: Path, quant: str = "int4:32", **settings: Any) -> dict[str, Tensor]:
    export(model=str(source), quant=quant, out=str(target), evaluate=False, quiet=True, **settings)
    return load_file(target / "model.safetensors")


@pytest.mark.parametrize("tp", [1, 2])
def test_a_part_has_the_bytes_of_the_language_model_alone(tp: int, tmp_path: Path) -> None:
    source = make_llama(kv_heads=2)
    whole = wrapped(source, tmp_path / "source")
    alone, found = exported(source, tmp_path / "alone"), exported(whole, tmp_path / "out", tp=tp)
    assert set(found) == {*TOWER, *(f"language_model.{name}" for name in alone)}
    assert all(torch.equal(found[f"language_model.{name}"], tensor) for name, tensor in alone.items())
    assert all(torch.equal(found[name], tensor) for name, tensor in TOWER.items())
    assert verify_checkpoint(tmp_path / "out", whole).ok


def test_its_calibration_is_that_of_the_language_model(tmp_path: Path) -> None:
    source, text = make_llama(kv_heads=2), tmp_path / "ids.jsonl"
    text.write_text("".join(json.dumps({"input_ids": list(range(n, n + 24))}) + "\n" for n in (3, 50)))
    settings = {"algorithm": "gptq", "calib": str(text), "calib_samples": 2, "calib_length": 16}
    alone = exported(source, tmp_path / "alone", **settings)
    found = exported(wrapped(source, tmp_path / "source"), tmp_path / "out", **settings)
    assert all(torch.equal(found[f"language_model.{name}"], tensor) for name, tensor in alone.items())


def test_names_without_the_part_s_own_first_word_are_found(tmp_path: Path) -> None:
    """Gemma 3n's ``model.language_model.layers`` stands for ``model.layers``."""
    source = make_llama()
    infos = open_model(source).infos
    names = [f"model.language_model.{name.removeprefix('model.')}" for name in infos if name.startswith("model.")]
    config = {"model_type": "sees_too", "text_config": json.loads((source / "config.json").read_text())}
    family = family_of(config, [*names, "lm_head.weight"])
    assert family.layer_prefix == "model.language_model.layers.{i}"
    assert [module.path for module in family.after] == ["model.language_model.norm", "lm_head"]


def test_of_joined_models_the_one_that_reads_text_is_meant() -> None:
    """Qwen Omni's thinker, and not the talker beside it."""
    config = json.loads(tiny_config("qwen2_5_omni").to_json_string())
    text = config["thinker_config"]["text_config"]
    assert text["tie_word_embeddings"]
    names = [rule.name for rule in expected_rules({**text, "tie_word_embeddings": False}, "BF16")]
    joined = [f"{part}.{name}" for part in ("talker", "thinker") for name in names]
    family = family_of(config, joined)
    assert family.layer_prefix == "thinker.model.layers.{i}"
    assert "thinker.lm_head" in {module.path for module in family.after}
    tied = family_of(config, [name for name in joined if not name.endswith("lm_head.weight")])
    assert read_dimensions(config, tied).tied_embeddings
    assert not read_dimensions(config, family).tied_embeddings


def test_of_joined_models_one_that_transformers_cannot_build_does_not_matter() -> None:
    """Qwen3-Omni's talker, whose config.json lacks what its class asks for."""
    config = json.loads(tiny_config("qwen3_omni_moe").to_json_string())
    text = config["thinker_config"]["text_config"]
    names = [f"thinker.{rule.name}" for rule in expected_rules(text, "BF16")]
    with pytest.raises(CheckpointError, match="cannot build Qwen3OmniMoeForConditionalGeneration"):
        derive(config, names)
    family = family_of(config, [*names, "talker.model.codec_embedding.weight"])
    assert family.layer_prefix == "thinker.model.layers.{i}"


def test_two_language_models_are_refused(tmp_path: Path) -> None:
    whole = open_model(wrapped(make_llama(), tmp_path / "source"))
    twice = [*whole.infos, *(f"second.{name}" for name in whole.infos)]
    with pytest.raises(CheckpointError, match=r"below language_model\., second\.language_model\."):
        family_of(whole.config or {}, twice)


def test_the_part_s_quantization_is_the_model_s(tmp_path: Path) -> None:
    """Kimi K2.5 has it in text_config."""
    source = tmp_path / "quantised"
    export(model=str(make_llama(kv_heads=2)), quant="int8-wo", out=str(source), evaluate=False, quiet=True)
    whole = wrapped(source, tmp_path / "source")
    for quant in ("none", "int4:32"):
        found = exported(whole, tmp_path / quant, quant)
        alone = exported(source, tmp_path / f"alone-{quant}", quant)
        assert all(torch.equal(found[f"language_model.{name}"], tensor) for name, tensor in alone.items())
    config = json.loads((tmp_path / "int4:32" / "config.json").read_text())
    assert "quantization_config" in config
    assert "quantization_config" not in config["llm_config"]


def test_kimi_k2_is_deepseek_v3(tmp_path: Path) -> None:
    source = tiny_checkpoint("deepseek_v3")
    other = copy_checkpoint(source, tmp_path / "source", config={"model_type": "kimi_k2"})
    assert language_config({**json.loads((other / "config.json").read_text())})["model_type"] == "deepseek_v3"
    alone, found = exported(source, tmp_path / "alone"), exported(other, tmp_path / "out")
    assert set(alone) == set(found)
    assert all(torch.equal(found[name], tensor) for name, tensor in alone.items())


def test_a_tower_whose_files_are_missing_is_missed(tmp_path: Path) -> None:
    def without(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if "vision_tower" not in name}

    source = copy_checkpoint(tiny_checkpoint("gemma3"), tmp_path / "source", tensors=without)
    assert any("vision_tower" in text for text in match(open_model(source)).missing)


def test_a_tower_of_other_names_is_taken_over(tmp_path: Path) -> None:
    def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.replace("vision_tower", "eyes"): tensor for name, tensor in tensors.items()}

    source = copy_checkpoint(tiny_checkpoint("gemma3"), tmp_path / "source", tensors=renamed)
    matched = match(open_model(source))
    assert not matched.problems()
    assert any("eyes" in module.place.name for module in matched.modules)


def test_quantised_numbers_of_unknown_parts_are_not_taken_over(tmp_path: Path) -> None:
    def quantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**tensors, "eyes.proj.weight": torch.zeros(32, 32, dtype=torch.int8)}

    source = copy_checkpoint(wrapped(make_llama(), tmp_path / "whole"), tmp_path / "source", tensors=quantised)
    assert list(match(open_model(source)).unknown) == ["eyes.proj.weight"]


def test_a_type_that_transformers_computes_as_another_is_calibrated_as_that() -> None:
    config = {"model_type": "phi4mm", "vocab_size": 256}
    assert language_config(config)["model_type"] == "phi3"
    assert not why_no_language_model(config)


def test_a_part_by_itself_is_calibrated() -> None:
    """What GGUF has of a model that also sees."""
    for kind in ("qwen2_vl_text", "paddleocr_vl_text"):
        assert not why_no_language_model({"model_type": kind, "vocab_size": 256})
    assert why_no_language_model({"model_type": "siglip_text_model", "vocab_size": 256})


def test_a_type_that_transformers_computes_no_text_with_is_not_calibrated() -> None:
    said = why_no_language_model({"model_type": "clip_text_model_of_mine", "vocab_size": 256})
    assert said == "transformers has no causal language model of its model_type 'clip_text_model_of_mine'"
