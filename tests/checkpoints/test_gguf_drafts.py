"""Draft layers in GGUF files: blocks behind those of the decoder layers, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modelexport.checkpoints.formats import gguf
from modelexport.checkpoints.gguf.file import read_gguf, read_values
from modelexport.checkpoints.safetensors.file import Reader
from modelexport.errors import PlanError
from modelexport.exporting import export
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


@pytest.fixture
def mimo(tmp_path: Path) -> Model:
    """MiMo-V2-Flash with two draft layers, whose attention is as of layers with a sliding window."""

    def twice(found: Tensors) -> Tensors:
        first = "model.mtp.layers.0."
        own = {name.removeprefix(first): value for name, value in found.items() if name.startswith(first)}
        return found | {f"model.mtp.layers.1.{name}": -value for name, value in own.items()}

    return changed(tmp_path, "mimo_v2_flash", twice)


def written(tmp_path: Path, model: Model) -> Path:
    out = tmp_path / "out"
    out.mkdir()
    write(gguf, out, model, model.plan())
    return out


def test_queries_keys_and_values_of_mimo_s_draft_layers_are_one_array(tmp_path: Path, mimo: Model) -> None:
    out = written(tmp_path, mimo)
    found = read_gguf(out / "model.gguf")
    shapes = {name: info.shape for name, info in found.infos.items() if name.startswith("blk.4.")}
    assert shapes == {
        **{f"blk.4.{name}.weight": (128,) for name in ("attn_norm", "ffn_norm", "layer_output_norm")},
        **{f"blk.4.nextn.{name}.weight": (128,) for name in ("enorm", "hnorm")},
        "blk.4.nextn.eh_proj.weight": (128, 256),
        "blk.4.attn_qkv.weight": (128 + 128 + 128, 128),
        "blk.4.attn_output.weight": (128, 128),
        "blk.4.attn_sinks.weight": (4,),
        "blk.4.ffn_gate.weight": (256, 128),
        "blk.4.ffn_up.weight": (256, 128),
        "blk.4.ffn_down.weight": (128, 256),
    }
    assert "blk.1.attn_q.weight" in found.infos
    info = found.infos["blk.4.attn_qkv.weight"]
    wanted = b"".join(
        mimo.values[f"model.mtp.layers.1.self_attn.{which}_proj.weight"].view(torch.uint8).numpy().tobytes()
        for which in "qkv"
    )
    assert info.path.read_bytes()[info.offset :][: info.nbytes] == wanted


def test_mimo_s_draft_layers_come_back(tmp_path: Path, mimo: Model) -> None:
    out = written(tmp_path, mimo)
    assert_same(reopen(gguf, out), mimo)
    (out / "config.json").unlink()
    assert_same(reopen(gguf, out), mimo)


def test_mimo_s_draft_layers_are_read_where_their_arrays_stand_apart(
    tmp_path: Path, mimo: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llama.cpp's conversion writes them if it is not told otherwise."""
    with monkeypatch.context() as patched:
        patched.setattr(gguf._Target, "joined", lambda *_: None)
        out = written(tmp_path, mimo)
    assert "blk.4.attn_q.weight" in read_gguf(out / "model.gguf").infos
    assert_same(reopen(gguf, out), mimo)


def test_values_of_mimo_s_blocks_count_draft_layers_as_with_a_sliding_window(mimo: Model) -> None:
    values = gguf.header_values(mimo.plan(), mimo.config)
    assert values["mimo2.block_count"] == 5
    assert values["mimo2.nextn_predict_layers"] == 2
    assert values["mimo2.attention.head_count_kv"] == (2, 4, 2, 4, 4)
    assert values["mimo2.attention.sliding_window_pattern"] == (False, True, False, True, True)


def test_queries_and_keys_that_become_one_array_have_one_number_format(mimo: Model) -> None:
    name = "model.mtp.layers.0.self_attn.k_proj.weight"
    rules = [replace(rule, dtype="F16") if rule.name == name else rule for rule in mimo.rules]
    model = replace(mimo, rules=rules)
    with pytest.raises(PlanError, match=r"blk.3.attn_k.weight F16, .* become one array, blk.3.attn_qkv.weight, and"):
        gguf.arrays(model.plan(), model.config)


def test_a_draft_layer_without_what_joins_its_inputs_is_refused(tmp_path: Path) -> None:
    model = changed(tmp_path, "glm4_moe", without(".hnorm.weight"))
    with pytest.raises(PlanError, match=r"draft layer 0 \(model.layers.2.*nextn.hnorm.weight: --draft drop exports"):
        gguf.arrays(model.plan(), model.config)


def test_a_draft_layer_is_kept_beside_decoder_layers_with_scales(tmp_path: Path) -> None:
    source, out = draft_checkpoint("glm4_moe"), tmp_path / "out"
    export(model=str(source), out=str(out), format="gguf", quant="*.o_proj=nvfp4-wo", quiet=True, evaluate=False)
    names = {name for name in read_gguf(out / "model.gguf").infos if name.endswith(".scale")}
    assert names == {"blk.0.attn_output.scale", "blk.1.attn_output.scale"}
    assert any(name.startswith("model.layers.2.") for name in open_model(out).infos)


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
