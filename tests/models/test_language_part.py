"""The language model of a checkpoint whose model also sees or hears, as a checkpoint of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modelexport.checkpoints.safetensors.file import Checkpoint, Reader
from modelexport.models.language_part import language_part_alone, part_as
from modelexport.models.opening import open_model
from modelexport.models.rules import expected_rules
from modelexport.models.stacked import experts_apart
from modelexport.quantization.calibration.model import build
from tests.helpers.gguf_models import gguf_tiny_config, gguf_tiny_model
from tests.helpers.models import make_llama
from tests.helpers.tiny_models import tiny_checkpoint


def test_it_is_a_model_of_its_own_type() -> None:
    whole = open_model(tiny_checkpoint("gemma3"))
    found, (warning,) = language_part_alone(whole)
    assert found.config is not None
    assert found.config["model_type"] == "gemma3_text"
    assert {rule.name for rule in expected_rules(found.config, "BF16")} == found.infos.keys()
    assert len(found.infos) + len(found.left_out) == len(whole.infos)
    assert all(name.startswith(("vision_tower.", "multi_modal_projector.")) for name in found.left_out)
    assert (
        f"{len(found.left_out)} tensors beside the language model are not written (multi_modal_projector, " in warning
    )
    with Reader(whole) as theirs, Reader(found) as ours:
        name = "model.layers.1.mlp.up_proj.weight"
        assert torch.equal(ours.read(found.infos[name]), theirs.read(whole.infos[f"language_model.{name}"]))


def test_a_language_model_is_left_as_it_is() -> None:
    found = open_model(make_llama())
    assert language_part_alone(found) == (found, [])


def test_it_is_compared_with_its_own_type_alone() -> None:
    whole = open_model(tiny_checkpoint("gemma3"))
    part, _ = language_part_alone(whole)
    assert part_as(whole, part).infos == part.infos
    assert part_as(whole, replace(part, config={"model_type": "llama"})) is whole


@pytest.mark.parametrize("tied", [True, False])
def test_a_part_s_head_is_its_embedding_where_its_config_says_so(tied: bool) -> None:
    config = {**gguf_tiny_config("qwen2_vl_text"), "tie_word_embeddings": tied}
    names = {rule.name for rule in expected_rules(config, "BF16")}
    assert ("lm_head.weight" in names) != tied


def loaded(part: Checkpoint) -> Any:
    """The model that calibration runs, with a checkpoint's weights."""
    model: Any = build(part.config or {}, {})
    with Reader(part) as reader:
        tensors = {name: reader.read(info) for name, info in part.infos.items()}
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    assert not [name for name, each in model.named_parameters() if each.is_meta]
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind",
    ["granite4_vision", *(pytest.param(kind, marks=pytest.mark.extended) for kind in ("paddleocr_vl", "muse_glimmer"))],
)
def test_a_part_without_a_causal_model_computes_what_the_whole_does(tmp_path: Path, kind: str) -> None:
    whole = gguf_tiny_model(kind)
    whole.save_pretrained(tmp_path)
    part, _ = language_part_alone(open_model(tmp_path))
    tokens = torch.arange(3, 27)[None]
    with torch.inference_mode():
        expected, found = (model(input_ids=tokens).logits for model in (whole, loaded(part)))
    assert expected.std() > 0.01
    torch.testing.assert_close(found, expected)


def test_the_layers_that_an_image_is_added_before_are_told(tmp_path: Path) -> None:
    gguf_tiny_model("granite4_vision").save_pretrained(tmp_path)
    part, _ = language_part_alone(open_model(tmp_path))
    assert (part.config or {})["deepstack_target_layers"] == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["minimax_m3_vl", "step3p7"])
def test_a_part_has_the_names_and_forms_of_a_model_of_its_own(tmp_path: Path, kind: str) -> None:
    """Both are published with other modules in their layers than their language models are saved with; the gates and
    ups of Step's experts are a stack each."""
    gguf_tiny_model(kind).save_pretrained(tmp_path)
    part, _ = language_part_alone(experts_apart(open_model(tmp_path)))
    assert {rule.name: rule.shape for rule in expected_rules(part.config or {}, "F32", apart=True)} == {
        name: info.shape for name, info in part.infos.items()
    }


@pytest.mark.filterwarnings("ignore")
def test_tensors_of_a_part_are_those_of_the_whole_by_other_names(tmp_path: Path) -> None:
    gguf_tiny_model("minimax_m3_vl").save_pretrained(tmp_path)
    whole = experts_apart(open_model(tmp_path))
    part, _ = language_part_alone(whole)
    theirs = {
        "mlp.gate.weight": "block_sparse_moe.gate.weight",
        "mlp.experts.1.up_proj.weight": "block_sparse_moe.experts.1.w3.weight",
        "self_attn.indexer.k_proj.weight": "self_attn.index_k_proj.weight",
    }
    there = {name.rpartition("model.layers.")[2]: info for name, info in whole.infos.items() if "model.layers." in name}
    with Reader(whole) as reader, Reader(part) as own:
        for name, their in theirs.items():
            assert torch.equal(own.read(part.infos[f"model.layers.1.{name}"]), reader.read(there[f"1.{their}"]))
        gate, up = (reader.read(there[f"0.mlp.{each}_proj.weight"]) for each in ("gate", "up"))
        fused = own.read(part.infos["model.layers.0.mlp.gate_up_proj.weight"], rows=(200, 300), cols=(3, 70))
        assert torch.equal(fused, torch.cat([gate, up])[200:300, 3:70])
