"""Draft layers in GGUF files: blocks behind those of the decoder layers, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelexport.checkpoints.formats import gguf
from modelexport.checkpoints.gguf.file import read_gguf, read_values
from modelexport.checkpoints.safetensors.file import Reader
from modelexport.errors import PlanError
from modelexport.models.checkpoint_formats import why_no_drafts
from modelexport.models.opening import open_model
from modelexport.models.rules import tensor_rules
from modelexport.models.stacked import experts_apart
from tests.helpers.drafts import draft_checkpoint
from tests.helpers.format_models import Model, assert_same, reopen, write
from tests.helpers.models import copy_checkpoint

KINDS = ("deepseek_v3", "glm4_moe", "qwen3_next")
PARTS = {"eh_proj", "enorm", "hnorm", "shared_head_norm"}
OWN = {"embed_tokens", "shared_head_head"}

Tensors = dict[str, Any]


def model_of(directory: Path) -> Model:
    """The model with its draft layer, every expert's linears by themselves."""
    checkpoint = experts_apart(open_model(directory))
    assert checkpoint.config is not None
    with Reader(checkpoint) as reader:
        values = {name: reader.read(info) for name, info in checkpoint.infos.items()}
    return Model(checkpoint.config, tensor_rules(checkpoint), values)


def changed(tmp_path: Path, kind: str, change: Callable[[Tensors], Tensors]) -> Model:
    return model_of(copy_checkpoint(draft_checkpoint(kind), tmp_path / "source", tensors=change))


def without(ending: str) -> Callable[[Tensors], Tensors]:
    return lambda found: {name: value for name, value in found.items() if not name.endswith(ending)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_layer_is_a_block_behind_the_others_and_comes_back(tmp_path: Path, kind: str) -> None:
    model = model_of(draft_checkpoint(kind))
    write(gguf, tmp_path, model, model.plan())
    found = read_gguf(tmp_path / "model.gguf")
    name, layers = found.values["general.architecture"], model.config["num_hidden_layers"]
    counts = (f"{name}.block_count", f"{name}.nextn_predict_layers")
    assert [found.values[key] for key in counts] == [layers + 1, 1]
    blocks: dict[int, set[str]] = {}
    for array in found.infos:
        if array.startswith("blk."):
            blocks.setdefault(int(array.split(".")[1]), set()).add(array.split(".", 2)[2])
    drafts = {array.split(".")[1] for array in blocks[layers] if array.startswith("nextn.")}
    assert drafts == (PARTS if kind == "qwen3_next" else PARTS | OWN)
    assert {array for array in blocks[layers] if not array.startswith("nextn.")} == blocks[layers - 1]
    assert_same(reopen(gguf, tmp_path), model)
    (tmp_path / "config.json").unlink()
    assert_same(reopen(gguf, tmp_path), model)


def test_lists_of_values_have_one_for_the_draft_layer(tmp_path: Path) -> None:
    model = model_of(draft_checkpoint("qwen3_next"))
    write(gguf, tmp_path, model, model.plan())
    key = "qwen3next.attention.recurrent_layers"
    assert list(read_values(tmp_path / "model.gguf", {key})[key]) == [True, False, False]


def test_a_draft_layer_without_what_joins_its_inputs_is_refused(tmp_path: Path) -> None:
    model = changed(tmp_path, "glm4_moe", without(".hnorm.weight"))
    with pytest.raises(PlanError, match=r"draft layer 0 \(model.layers.2.*nextn.hnorm.weight: --draft drop exports"):
        gguf.arrays(model.plan(), model.config)


def test_a_draft_layer_unlike_every_decoder_layer_is_refused(tmp_path: Path) -> None:
    bias = "model.layers.2.self_attn.q_proj.bias"

    def more(found: Tensors) -> Tensors:
        return found | {bias: found["model.layers.2.self_attn.q_proj.weight"][:, 0].clone()}

    model = changed(tmp_path, "glm4_moe", more)
    with pytest.raises(PlanError, match=r"draft layer 0 .* has other tensors than every decoder layer: --draft drop"):
        gguf.arrays(model.plan(), model.config)


def test_models_whose_draft_layers_llama_cpp_has_no_use_for() -> None:
    assert why_no_drafts("gguf", {"model_type": "glm4_moe"}) == ""
    assert why_no_drafts("gguf", {"model_type": "exaone_moe"}) == (
        "draft layers of a 'exaone_moe' are not written to a GGUF file"
    )
    assert why_no_drafts("gguf", {"model_type": "glm5_next_text"}) == (
        "draft layers of a 'glm5_next_text' are not written to a GGUF file: "
        "llama.cpp loads them, and has no graph that runs them"
    )
