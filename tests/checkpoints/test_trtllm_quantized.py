"""TensorRT-LLM's checkpoints of quantised models: arrays put together by numpy from the format's description."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from modelexport.checkpoints.formats import trtllm
from modelexport.errors import CheckpointError, ModelExportError, PlanError
from modelexport.exporting import export
from modelexport.models.opening import open_model
from modelexport.models.rules import expected_rules, tensor_rules
from modelexport.resharding import reshard
from tests.checkpoints._trtllm_arrays import ENTRIES, SHAPE, quantised, rank_arrays, raw
from tests.helpers.format_models import Model, assert_same, make_model, reopen, round_trip, write
from tests.helpers.marks import few
from tests.helpers.models import make_llama

CASES = [
    *((algo, {}, (4, 2, 1)) for algo in ENTRIES),
    *((algo, {}, (2, 1, 1)) for algo in ("FP8", "NVFP4", "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN")),
    ("W4A16_AWQ", {}, (1, 1, 1)),
    *((algo, {"model_type": "mixtral"}, (4, 2, 2)) for algo in ("FP8", "W4A16_AWQ", "NVFP4")),
    ("FP8", {"cache": True}, (2, 2, 1)),
]


@pytest.mark.parametrize(("algo", "shape", "grid"), CASES)
def test_files_are_what_numpy_makes_of_the_whole_tensors(
    tmp_path: Path, algo: str, shape: dict[str, Any], grid: tuple[int, int, int]
) -> None:
    tp, pp, ep = grid
    model = quantised(algo, **shape)
    found = round_trip(trtllm, tmp_path, model, tp, pp, ep)
    assert found.config == model.config
    assert [rule.name for rule in tensor_rules(found)] == [rule.name for rule in model.rules]
    for rank in range(tp * pp):
        got = load_file(tmp_path / f"rank{rank}.safetensors")
        want = rank_arrays(model, rank, tp, pp, ep)
        for name, value in want.items():
            own = raw(got.pop(name))
            assert own.shape == value.shape, name
            assert np.array_equal(own, value), name
        ones = {
            name: value
            for name, value in got.items()
            if name.endswith(("smoother", "to_int", "prequant_scaling_factor"))
        }
        assert all(bool((value == 1).all()) for value in ones.values())
        assert bool(ones) == algo.startswith("W8A8")
        left = {name.rpartition(".")[0].rpartition(".")[2] for name in got.keys() - ones.keys()}
        assert left <= {"input_layernorm", "post_layernorm", "vocab_embedding", "lm_head", "ln_f", "router"}


def test_what_the_engine_wants_besides(tmp_path: Path) -> None:
    """Smoothing by 1, of the shapes and dtypes of TensorRT-LLM's parameters."""
    model = quantised("W8A8_SQ_PER_CHANNEL")
    write(trtllm, tmp_path / "static", model, model.plan(2))
    arrays = load_file(tmp_path / "static" / "rank1.safetensors")
    found = {n: tuple(t.shape) for n, t in arrays.items() if n.startswith("transformer.layers.3") and "prequant" in n}
    assert found == {
        "transformer.layers.3.attention.qkv.prequant_scaling_factor": (256,),
        "transformer.layers.3.attention.dense.prequant_scaling_factor": (128,),
        "transformer.layers.3.mlp.fc.prequant_scaling_factor": (256,),
        "transformer.layers.3.mlp.gate.prequant_scaling_factor": (256,),
        "transformer.layers.3.mlp.proj.prequant_scaling_factor": (256,),
    }
    assert arrays["transformer.layers.3.mlp.fc.prequant_scaling_factor"].dtype == torch.bfloat16
    model = quantised("W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN")
    write(trtllm, tmp_path / "token", model, model.plan(2))
    arrays = load_file(tmp_path / "token" / "rank0.safetensors")
    own = {
        n.removeprefix("transformer.layers.0."): t for n, t in arrays.items() if n.startswith("transformer.layers.0.")
    }
    smoothing = {n: (t.dtype, tuple(t.shape)) for n, t in own.items() if n.endswith(("smoother", "scale_to_int"))}
    assert smoothing == {
        "attention.dense.smoother": (torch.float32, (1, 128)),
        "mlp.proj.smoother": (torch.float32, (1, 256)),
        "input_layernorm.scale_to_int": (torch.float32, (1,)),
        "post_layernorm.scale_to_int": (torch.float32, (1,)),
    }


def config_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


def test_config_json_says_how_and_what_is_kept(tmp_path: Path) -> None:
    kept = tuple(f"model.layers.{i}.self_attn.o_proj" for i in (0, 2))
    model = quantised("W4A16_AWQ", keep=kept, cache=True)
    round_trip(trtllm, tmp_path / "a", model, 2, 2)
    assert config_of(tmp_path / "a")["quantization"] == {
        "quant_algo": "W4A16_AWQ",
        "kv_cache_quant_algo": "FP8",
        "group_size": 64,
        "has_zero_point": False,
        "pre_quant_scale": False,
        "exclude_modules": ["lm_head", "transformer.vocab_embedding", "transformer.layers.0.attention.dense"],
    }
    other = quantised("W4A16_AWQ", keep=kept[1:])
    trtllm.lay_out(other.plan(2), other.config)
    with pytest.raises(
        PlanError, match=r"layers.2.self_attn.o_proj is not quantised and .*layers.3.self_attn.o_proj is"
    ):
        trtllm.lay_out(other.plan(1, 4), other.config)


def test_the_models_config_is_derived_where_it_is_not_there(tmp_path: Path) -> None:
    """As of modelopt's checkpoints: what is kept is read from exclude_modules, by the engine's names."""
    kept = tuple(f"model.layers.{i}.mlp.{name}_proj" for i in (0, 2) for name in ("gate", "down"))
    model = quantised("FP8", keep=kept, cache=True)
    write(trtllm, tmp_path, model, model.plan(2, 2))
    (tmp_path / "hf_config.json").unlink()
    found = reopen(trtllm, tmp_path)
    assert_same(found, model)
    assert (found.config or {})["quantization_config"]["ignore"] == ["lm_head", *kept]
    config = config_of(tmp_path)
    patterns = ["lm_head", "transformer.layers.0.mlp.[fp]*"]
    config["quantization"]["exclude_modules"] = patterns
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_same(reopen(trtllm, tmp_path), model)
    experts = quantised("FP8", model_type="mixtral", layers=2)
    write(trtllm, tmp_path / "experts", experts, experts.plan(2))
    (tmp_path / "experts" / "hf_config.json").unlink()
    config = config_of(tmp_path / "experts")
    del config["quantization"]["exclude_modules"]  # TensorRT-LLM's own habit
    (tmp_path / "experts" / "config.json").write_text(json.dumps(config))
    assert_same(reopen(trtllm, tmp_path / "experts"), experts)


def changed(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    for path in sorted(directory.glob("rank*.safetensors")):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)


def test_the_one_cache_scale_of_earlier_versions_is_read_as_both(tmp_path: Path) -> None:
    model = quantised("FP8", cache=True, layers=2)
    write(trtllm, tmp_path, model, model.plan(2))

    def all_three(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(2):
            name = f"transformer.layers.{layer}.attention."
            both = [tensors[f"{name}{kind}_cache_scaling_factor"] for kind in "kv"]
            tensors[f"{name}kv_cache_scaling_factor"] = torch.maximum(*both)

    def one(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if name.endswith((".k_cache_scaling_factor", ".v_cache_scaling_factor")):
                del tensors[name]

    changed(tmp_path, all_three)  # as modelopt writes them
    assert_same(reopen(trtllm, tmp_path), model)
    changed(tmp_path, one)
    for layer in range(2):
        names = [f"model.layers.{layer}.self_attn.{kind}_scale" for kind in "kv"]
        largest = torch.maximum(*(model.values[name] for name in names))
        model.values.update(dict.fromkeys(names, largest))
    assert_same(reopen(trtllm, tmp_path), model)


def test_bytes_of_fp8_may_be_called_int8(tmp_path: Path) -> None:
    model = quantised("FP8", layers=2)
    write(trtllm, tmp_path, model, model.plan(2))

    def as_int8(tensors: dict[str, torch.Tensor]) -> None:
        for name, value in tensors.items():
            if value.dtype == torch.float8_e4m3fn:
                tensors[name] = value.view(torch.int8)

    changed(tmp_path, as_int8)
    found = reopen(trtllm, tmp_path)
    assert found.infos["model.layers.0.mlp.up_proj.weight"].dtype == "I8"
    assert len(tensor_rules(found)) == len(model.rules)


def test_smoothed_inputs_are_refused(tmp_path: Path) -> None:
    model = quantised("W8A8_SQ_PER_CHANNEL", layers=2)
    write(trtllm, tmp_path, model, model.plan(2))

    def smooth(tensors: dict[str, torch.Tensor]) -> None:
        tensors["transformer.layers.1.mlp.fc.prequant_scaling_factor"][7] = 0.5

    changed(tmp_path, smooth)
    with pytest.raises(CheckpointError, match=r"rank0.*layers.1.mlp.fc.prequant_scaling_factor is not 1: .*smoothed"):
        reopen(trtllm, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_algo": "NVFP4"}, "quant_algo is 'NVFP4' in config.json, 'FP8' in the model's"),
        ({"quant_algo": None}, "quant_algo is None in config.json, 'FP8' in the model's"),
    ],
)
def test_contradictions_are_said(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    model = quantised("FP8", layers=2)
    write(trtllm, tmp_path, model, model.plan(2))
    config = config_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization": {**config["quantization"], **change}}))
    with pytest.raises(CheckpointError, match=message):
        reopen(trtllm, tmp_path)


def test_what_the_format_cannot_hold() -> None:
    other = make_model("int8")
    with pytest.raises(PlanError, match=r"spelling of quant_method 'compressed-tensors'; modelexport convert CKPT"):
        trtllm.arrays(other.plan(2), other.config)
    with pytest.raises(PlanError, match=r"28 tensors are quantised in a way .*q_proj.weight, I8; --format hf"):
        trtllm.arrays(other.plan(2), {**other.config, "quantization_config": None})
    mixtral = quantised("W8A8_SQ_PER_CHANNEL", model_type="mixtral")
    with pytest.raises(PlanError, match=r"mixtures of experts know no W8A8_SQ_PER_CHANNEL, of which .*experts.0.w1 is"):
        trtllm.arrays(mixtral.plan(2), mixtral.config)
    kept = quantised("FP8_PER_CHANNEL_PER_TOKEN", keep=("model.layers.1.mlp.down_proj",))
    with pytest.raises(PlanError, match=r"layers.1.mlp.down_proj is not quantised, .*leaves out no single module"):
        trtllm.lay_out(kept.plan(2), kept.config)
    model = quantised("FP8")
    model.config["quantization_config"]["ignore"] = []
    rules = expected_rules(model.config, "BF16")
    with pytest.raises(PlanError, match=r"lm_head is quantised, and is written as it is only"):
        trtllm.arrays(Model(model.config, rules, {}).plan(2), model.config)
    apart = quantised("FP8", keep=("model.layers.0.self_attn.k_proj",))
    with pytest.raises(PlanError, match=r"the engine joins .*layers.0.self_attn.q_proj.weight, F8_E4M3, and .*BF16"):
        trtllm.lay_out(apart.plan(2), apart.config)


EXPORTS = [("fp8", "llama"), ("nvfp4", "mixtral"), ("int4", "phi3")]


@pytest.mark.parametrize(("quant", "model_type"), few(EXPORTS, EXPORTS[0]))
def test_exported_resharded_and_converted_back(tmp_path: Path, quant: str, model_type: str) -> None:
    """tp 2, pp 2 -> tp 4 -> hf -> tp 2, pp 2: the same files; and through compressed-tensors' spelling."""
    source = make_llama(model_type=model_type, **SHAPE)
    samples = tmp_path / "samples.jsonl"
    samples.write_text("".join(json.dumps({"input_ids": list(range(i, i + 40))}) + "\n" for i in range(6)))
    settings: dict[str, Any] = {"quiet": True, "evaluate": False}
    cut: dict[str, Any] = {"format": "trtllm", "target_tp": 2, "target_pp": 2}
    calib = {
        "calib": str(samples),
        "calib_samples": 4,
        "calib_length": 32,
        "group_size": 64 if quant == "int4" else None,
    }
    export(model=str(source), quant=quant, out=str(tmp_path / "a"), **cut, **calib, **settings)
    steps = [("a", "b", {"tp": 4, "format": "trtllm"}), ("b", "c", {"format": "hf"})]
    steps.append(("c", "d", {"tp": 2, "pp": 2, "format": "trtllm"}))
    for old, new, grid in steps:
        reshard(checkpoint=str(tmp_path / old), out=str(tmp_path / new), quiet=True, **grid)
    same_files(tmp_path / "a", tmp_path / "d")
    export(model=str(tmp_path / "b"), quant="keep", out=str(tmp_path / "e"), format="hf", **settings)
    assert config_of(tmp_path / "e")["quantization_config"]["quant_method"] == "compressed-tensors"
    export(model=str(tmp_path / "e"), quant="keep", out=str(tmp_path / "f"), **cut, **settings)
    same_files(tmp_path / "a", tmp_path / "f")


def same_files(left: Path, right: Path) -> None:
    names = sorted(path.name for path in left.glob("rank*.safetensors"))
    assert len(names) == 4
    for name in names:
        assert (left / name).read_bytes() == (right / name).read_bytes(), name
    assert config_of(left) == config_of(right)


def test_numbers_of_experts_are_checked_together(tmp_path: Path) -> None:
    """The weights' ones of an expert's gate and up, the inputs' ones of all experts; in any spelling."""
    model = quantised("NVFP4", layers=1, model_type="mixtral")
    write(trtllm, tmp_path / "a", model, model.plan(2))
    export(model=str(tmp_path / "a"), quant="keep", format="hf", out=str(tmp_path / "b"), quiet=True, evaluate=False)
    path = tmp_path / "b" / "model.safetensors"
    tensors = load_file(path)
    trtllm.check_source(model.rules, open_model(tmp_path / "b"))
    experts = "model.layers.0.block_sparse_moe.experts."
    for name, other in (
        ("1.w3.weight_global_scale", "1.w1.weight_g"),
        ("2.w2.input_global_scale", "0.w2.input_global"),
    ):
        save_file({**tensors, experts + name: tensors[experts + name] * 2}, path, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=rf"{other}.* and .*{name} differ|{name} and .*{other}.* differ"):
            trtllm.check_source(model.rules, open_model(tmp_path / "b"))


def test_numbers_that_differ_where_the_engine_has_one_are_refused(tmp_path: Path) -> None:
    model = quantised("FP8", layers=2)
    write(trtllm, tmp_path / "a", model, model.plan(2))
    reshard(checkpoint=str(tmp_path / "a"), out=str(tmp_path / "b"), format="hf", quiet=True)
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weights_scaling_factor"] *= 2
    save_file(tensors, tmp_path / "b" / "model.safetensors", metadata={"format": "pt"})
    rules = tensor_rules(open_model(tmp_path / "b"))
    with pytest.raises(
        CheckpointError, match=r"q_proj.weights_scaling_factor and .*1.self_attn.k_proj.w.* 0 other mod"
    ):
        trtllm.check_source(rules, open_model(tmp_path / "b"))
    trtllm.check_source(rules, open_model(tmp_path / "a"))
    with pytest.raises(ModelExportError, match=r"weights_scaling_factor"):
        reshard(checkpoint=str(tmp_path / "b"), out=str(tmp_path / "c"), format="trtllm", tp=2, quiet=True)
    assert not (tmp_path / "c").exists()
