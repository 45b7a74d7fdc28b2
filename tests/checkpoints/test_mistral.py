"""Mistral's own layout: consolidated.safetensors and params.json, read as the Hugging Face model that it stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import modelexport
from modelexport.checkpoints.safetensors.file import Reader
from modelexport.errors import CheckpointError
from modelexport.models.opening import open_model
from tests.helpers.models import make_llama

SHAPE: dict[str, Any] = {"model_type": "mistral", "hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 96}
OWN = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "block_sparse_moe": "feed_forward",
}


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows in the order of Mistral's code: that of halves undone, by the inverse of what transformers' script does."""
    rows, cols = weight.shape
    return weight.view(heads, 2, rows // heads // 2, cols).transpose(1, 2).reshape(rows, cols).contiguous()


def native(model: Path) -> dict[str, Tensor]:
    """The tensors of a Hugging Face checkpoint as Mistral's code has them."""
    config, found = json.loads((model / "config.json").read_text()), {}
    for name, value in load_file(model / "model.safetensors").items():
        if name.endswith("q_proj.weight"):
            value = interleaved(value, config["num_attention_heads"])
        if name.endswith("k_proj.weight"):
            value = interleaved(value, config["num_key_value_heads"])
        for theirs, own in OWN.items():
            name = name.replace(theirs, own)
        found[name] = value
    return found


def params_of(model: Path) -> dict[str, Any]:
    config = json.loads((model / "config.json").read_text())
    return {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "head_dim": config["hidden_size"] // config["num_attention_heads"],
        "hidden_dim": config["intermediate_size"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "max_position_embeddings": 128,
    }


def save_native(model: Path, out: Path, **params: Any) -> Path:
    out.mkdir()
    save_file(native(model), out / "consolidated.safetensors")
    (out / "params.json").write_text(json.dumps({**params_of(model), **params}))
    (out / "tekken.json").write_text("{}")
    return out


def read_all(directory: Path, config: Path | None = None) -> dict[str, Tensor]:
    checkpoint = open_model(directory, config)
    with Reader(checkpoint) as reader:
        return {name: reader.read(info) for name, info in checkpoint.infos.items()}


def same(found: dict[str, Tensor], model: Path) -> bool:
    wanted = load_file(model / "model.safetensors")
    return found.keys() == wanted.keys() and all(torch.equal(found[name], value) for name, value in wanted.items())


def test_exports_have_the_bytes_of_hugging_faces_files(tmp_path: Path) -> None:
    model = make_llama(**SHAPE)
    for name, source, tp in (("own", save_native(model, tmp_path / "source"), 2), ("theirs", model, 1)):
        out = tmp_path / name
        modelexport.export(model=str(source), out=str(out), quant="fp8", tp=tp, quiet=True, evaluate=False)
    own, theirs = tmp_path / "own", tmp_path / "theirs"
    assert (own / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    assert (own / "tekken.json").exists()
    assert not (own / "params.json").exists()
    (note,) = json.loads((own / "modelexport.json").read_text())["notes"]
    assert note.startswith("the weights are read from Mistral's own layout (consolidated.safetensors), and config.json")


def test_transformers_reads_the_config_that_is_made(tmp_path: Path) -> None:
    from transformers import AutoConfig

    model = make_llama(**SHAPE)
    modelexport.export(
        model=str(save_native(model, tmp_path / "source")), out=str(tmp_path / "out"), quant="none", quiet=True
    )
    ours, theirs = (AutoConfig.from_pretrained(path).to_dict() for path in (tmp_path / "out", model))
    keys = (
        "hidden_size",
        "num_hidden_layers",
        "num_key_value_heads",
        "intermediate_size",
        "rms_norm_eps",
        "vocab_size",
    )
    assert {key: ours[key] for key in keys} == {key: theirs[key] for key in keys}
    assert ours["model_type"] == "mistral"
    assert ours["rope_parameters"]["rope_theta"] == 1000000.0


def test_experts(tmp_path: Path) -> None:
    model = make_llama(**{**SHAPE, "model_type": "mixtral"})
    source = save_native(model, tmp_path / "source", moe={"num_experts": 4, "num_experts_per_tok": 2})
    assert same(read_all(source), model)
    assert (open_model(source).config or {})["num_local_experts"] == 4


def test_parts_with_an_index(tmp_path: Path) -> None:
    model = make_llama(**SHAPE)
    source = save_native(model, tmp_path / "source")
    tensors = native(model)
    names = sorted(tensors)
    files = {name: f"consolidated-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, source / file)
    (source / "consolidated.safetensors").unlink()
    (source / "consolidated.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert same(read_all(source), model)


def test_a_pickle_of_the_first_llamas_kind(tmp_path: Path) -> None:
    """consolidated.00.pth, with the config.json of a Llama."""
    model = make_llama(hidden=64, intermediate=96)
    source = tmp_path / "source"
    source.mkdir()
    torch.save({**native(model), "rope.freqs": torch.zeros(8)}, source / "consolidated.00.pth")
    (source / "params.json").write_text(json.dumps({"dim": 64, "multiple_of": 32, "n_heads": 4, "n_layers": 2}))
    assert same(read_all(source, model), model)
    with pytest.raises(
        CheckpointError, match=r"what 'multiple_of' would be in config.json is not known .* --config DIR"
    ):
        open_model(source)
    (source / "consolidated.01.pth").write_bytes(b"")
    with pytest.raises(CheckpointError, match="parts for 2 tensor-parallel ranks"):
        open_model(source, model)


@pytest.mark.parametrize("indexed", [True, False])
def test_hugging_faces_files_win(tmp_path: Path, indexed: bool) -> None:
    """As Mistral publishes both; whether an index names the parts or not."""
    model = make_llama(**SHAPE)
    source = save_native(model, tmp_path / "source")
    (source / "config.json").write_bytes((model / "config.json").read_bytes())
    file = "model-00001-of-00001.safetensors"
    (source / file).write_bytes((model / "model.safetensors").read_bytes())
    if indexed:
        weight_map = dict.fromkeys(load_file(source / file), file)
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert open_model(source).format == "hf"
    assert same(read_all(source), model)
    modelexport.export(model=str(source), out=str(tmp_path / "out"), quant="none", quiet=True)
    left_out = json.loads((tmp_path / "out" / "modelexport.json").read_text())["left_out"]
    assert left_out == {"consolidated.safetensors": "weights that the checkpoint does not use"}


def test_of_two_kinds_of_pickles_hugging_faces_are_read(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    torch.save({"x": torch.zeros(1)}, tmp_path / "consolidated.00.pth")
    torch.save({"y": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert list(open_model(tmp_path).infos) == ["y"]


def test_safetensors_of_its_own_are_read_before_pickles(tmp_path: Path) -> None:
    source = save_native(make_llama(**SHAPE), tmp_path / "source")
    torch.save({"y": torch.zeros(1)}, source / "pytorch_model.bin")
    assert same(read_all(source), make_llama(**SHAPE))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, "what 'quantization' would be in config.json is not known"),
        ({"moe": {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1}}, "'moe.num_shared_experts'"),
        ({"sliding_window": [None, 4096]}, "'sliding_window' of several values"),
        ({"dim": None}, "dim is missing"),
        ({"vocab_size": 100}, r"tok_embeddings.weight is \[211, 64\], the model's .* is \[100, 64\]"),
        ({"n_layers": 3}, r"layers.2.self_attn.q_proj.weight is missing: layers.2.attention.wq.weight or"),
        ({"n_layers": 10**9}, "1000000000 layers; at most .* are believed"),
    ],
)
def test_what_params_json_says_wrong(tmp_path: Path, params: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_model(save_native(make_llama(**SHAPE), tmp_path / "source", **params))


def test_tensors_of_no_module_are_refused_by_name(tmp_path: Path) -> None:
    source = save_native(make_llama(**SHAPE), tmp_path / "source")
    save_file({**native(make_llama(**SHAPE)), "vision.x": torch.zeros(1)}, source / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match=r"1 tensor\(s\) are not part of a llama model of 2 layers: vision.x"):
        modelexport.export(model=str(source), quant="none", dry_run=True)
