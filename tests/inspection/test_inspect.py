"""inspect: formats told from names and shapes, for checkpoints of every maker; damage said in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig as TheirConfig
from compressed_tensors.quantization import apply_quantization_config, preset_name_to_scheme
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from modelexport.checkpoints.safetensors.file import TensorInfo
from modelexport.cli import main
from modelexport.errors import CheckpointError
from modelexport.exporting import export
from modelexport.inspection.inspect import inspect_checkpoint
from modelexport.models.modules import layer_path, recognise
from modelexport.quantization.methods import read_quantization_config, tensor_specs
from tests.helpers.models import copy_checkpoint, make_llama

pytestmark = pytest.mark.timeout(120)

PRESETS = {  # llm-compressor's name -> ours, and the elements that no cut may separate
    "W8A8": ("int8", (1, 1)),
    "W4A16": ("int4", (1, 128)),
    "W4A16_ASYM": ("int4-asym", (1, 128)),
    "W8A16": ("int8-wo", (1, 128)),
    "FP8": ("fp8-static", (1, 1)),
    "FP8_DYNAMIC": ("fp8", (1, 1)),
    "FP8_BLOCK": ("fp8-block", (128, 128)),
    "NVFP4A16": ("nvfp4-wo", (1, 16)),
    "NVFP4": ("nvfp4", (1, 16)),
    "MXFP4A16": ("mxfp4-wo", (1, 32)),
    "MXFP8": ("mxfp8", (1, 32)),
}


def infos(**tensors: tuple[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    """Tensors of one module: name within it -> dtype and shape."""
    return {s.replace("__", "."): TensorInfo(f"m.{s}", d, shape, Path("f"), 0, 0) for s, (d, shape) in tensors.items()}


def compressed(preset: str) -> tuple[dict[str, torch.Tensor], dict]:
    """What compressed-tensors itself makes of a linear of 256 x 512, and the config it writes."""
    model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(512, 256, bias=False, dtype=torch.bfloat16)})
    config = TheirConfig(config_groups={"group_0": preset_name_to_scheme(preset, ["Linear"])}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for name, parameter in model.named_parameters():
        if "scale" in name:
            parameter.data.fill_(1)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    return model.state_dict(), json.loads(compressor.quantization_config.model_dump_json())


@pytest.mark.parametrize("preset", PRESETS)
def test_what_compressed_tensors_writes_is_promised_and_recognised(preset: str, tmp_path: Path) -> None:
    tensors, theirs = compressed(preset)
    save_file(tensors, tmp_path / "model.safetensors")
    theirs |= {"quantization_status": "compressed", "ignore": ["lm_head"]}  # it lists what the model has
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unknown", "quantization_config": theirs}))
    found = inspect_checkpoint(tmp_path)
    assert found.warnings == []
    assert [(row.name, row.number_format, row.shapes) for row in found.rows] == [
        ("up_proj", PRESETS[preset][0], [[256, 512]])
    ]
    assert found.parameters == 256 * 512
    assert found.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    quantization = read_quantization_config({"quantization_config": theirs})
    assert quantization is not None
    scheme = quantization.scheme_of("up_proj")
    assert scheme is not None
    assert {f"up_proj.{suffix}" for suffix in tensor_specs(scheme, (256, 512))} == set(tensors)
    stored = recognise({n.split(".")[1]: i for n, i in _infos_of(tensors).items()}, scheme, "compressed-tensors")
    assert stored.unit == PRESETS[preset][1]


def _infos_of(tensors: dict[str, torch.Tensor]) -> dict[str, TensorInfo]:
    from modelexport.checkpoints.safetensors.file import dtype_name

    return {n: TensorInfo(n, dtype_name(t.dtype), tuple(t.shape), Path("f"), 0, t.nbytes) for n, t in tensors.items()}


@pytest.mark.parametrize(
    ("tensors", "method", "number_format", "shape"),
    [
        (infos(weight=("F16", (6, 8))), "", "fp16", (6, 8)),
        (infos(weight=("F32", (6,))), "", "fp32", (6,)),
        # AutoAWQ packs eight output columns of [in, out] in a word, GPTQ eight input rows
        (
            infos(qweight=("I32", (64, 4)), qzeros=("I32", (2, 4)), scales=("F16", (2, 32))),
            "awq",
            "int4-awq",
            (32, 64),
        ),
        (
            infos(qweight=("I32", (8, 32)), qzeros=("I32", (2, 4)), scales=("F16", (2, 32)), g_idx=("I32", (64,))),
            "gptq",
            "int4-gptq",
            (32, 64),
        ),
        # DeepSeek
        (infos(weight=("F8_E4M3", (256, 384)), weight_scale_inv=("F32", (2, 3))), "fp8", "fp8-block", (256, 384)),
        # modelopt
        (
            infos(weight=("U8", (6, 32)), weight_scale=("F8_E4M3", (6, 4)), weight_scale_2=("F32", ())),
            "modelopt",
            "nvfp4",
            (6, 64),
        ),
        (infos(weight=("U8", (6, 256)), weight_scale=("F32", (12, 2))), "modelopt", "int4", (12, 256)),
        (infos(weight=("F8_E4M3", (6, 32)), weight_scale=("U8", (6, 1))), "modelopt", "mxfp8", (6, 32)),
        # gpt-oss' experts
        (infos(blocks=("U8", (3, 10, 2, 16)), scales=("U8", (3, 10, 2))), "mxfp4", "mxfp4", (3, 10, 64)),
        # bitsandbytes
        (infos(**{"weight": ("U8", (128, 1)), "weight.absmax": ("F32", (4,))}), "bitsandbytes", "nf4", (256,)),
        # hqq, without the settings of config.json
        (infos(W_q=("U8", (2, 64)), scale=("F16", (4, 1)), zero=("F16", (4, 1))), "hqq", "hqq", (256,)),
        (infos(k_scale=("F32", (1,))), "", "-", None),
    ],
)
def test_formats_of_other_makers(
    tensors: dict[str, TensorInfo], method: str, number_format: str, shape: tuple[int, ...] | None
) -> None:
    stored = recognise(tensors, None, method)
    assert (stored.number_format, stored.shape) == (number_format, shape)


def test_names_are_split_at_the_layer() -> None:
    assert layer_path("model.layers.3.mlp.experts.7.up_proj") == ("model.layers", 3, "mlp.experts.*.up_proj")
    assert layer_path("model.embed_tokens") == ("", None, "model.embed_tokens")
    assert layer_path("visual.blocks.0") == ("visual.blocks", 0, "")


@given(st.lists(st.sampled_from(["model", "layers", "0", "12", "mlp", "up_proj"]), min_size=1, max_size=8))
def test_splitting_loses_only_numbers(parts: list[str]) -> None:
    stack, index, path = layer_path(".".join(parts))
    joined = ".".join(part for part in (stack, "" if index is None else "*", path) if part)
    assert joined == ".".join("*" if part.isdecimal() else part for part in parts)


@pytest.mark.parametrize("quant", ["none", "int8", "fp8", "int4"])
def test_our_own_export(tmp_path: Path, quant: str) -> None:
    model = make_llama(hidden=256, layers=2, attention_bias=True)
    result = export(model=str(model), out=str(tmp_path / "ckpt"), quant=quant, evaluate=False, quiet=True)
    found = inspect_checkpoint(tmp_path / "ckpt")
    assert found.warnings == []
    assert found.layers == 2
    assert found.nbytes == result.output_bytes
    assert found.tensor_parallel_sizes == result.tensor_parallel_sizes
    assert [(r.name, r.count, r.nbytes) for r in found.rows] == [(r.name, r.count, r.nbytes) for r in result.rows]
    formats = {row.name: row.number_format for row in found.rows}
    assert formats["mlp.down_proj"] == ("bf16" if quant == "none" else quant)
    assert formats["lm_head"] == "bf16"
    assert found.parameters == inspect_checkpoint(model).parameters
    assert found.record is not None
    assert found.record["recipe"]["quant"] == quant
    if quant == "none":
        assert found.quantization is None
        assert found.ratio == pytest.approx(1.0)
    else:
        assert found.quantization is not None
        assert found.quantization["ignore"] == ["lm_head"]
        assert found.record["worst_sqnr"]["db"] == min(row.sqnr_db for row in result.rows if row.sqnr_db)
        assert found.kept == ["lm_head"]
        assert len(found.quantised) == 14


def test_warnings_about_what_engines_do_not_notice(tmp_path: Path) -> None:
    export(model=str(make_llama()), out=str(tmp_path / "good"), quant="int8", evaluate=False, quiet=True)
    config = json.loads((tmp_path / "good" / "config.json").read_text())["quantization_config"]
    spoilt = {**config, "ignore": [], "quantization_status": None}

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight_scale"]
        tensors["model.layers.0.mlp.up_proj.input_scale"] = torch.ones(1)

    copy_checkpoint(tmp_path / "good", tmp_path / "bad", tensors=change, config={"quantization_config": spoilt})
    warnings = "\n".join(inspect_checkpoint(tmp_path / "bad").warnings)
    for expected in (
        "quantization_status is missing",
        "lm_head is not in quantization_config.ignore",
        "model.layers.1.mlp.up_proj.weight_scale is missing",
        "model.layers.0.mlp.up_proj.input_scale (F32 [1]) is not expected",
    ):
        assert expected in warnings


def test_index_that_counts_wrong_is_a_warning(tmp_path: Path) -> None:
    model = copy_checkpoint(make_llama(max_shard_size="100KB"), tmp_path / "model")
    assert len(inspect_checkpoint(model).files) > 1
    index = model / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["metadata"]["total_size"] += 1
    index.write_text(json.dumps(content))
    assert any("total_size" in text for text in inspect_checkpoint(model).warnings)


def test_index_that_counts_no_bytes_is_a_warning(tmp_path: Path) -> None:
    model = copy_checkpoint(make_llama(max_shard_size="100KB"), tmp_path / "model")
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "metadata": {"total_size": "AAA"}}))
    assert any("total_size is 'AAA'" in text for text in inspect_checkpoint(model).warnings)


def test_weights_in_a_column_of_bytes(tmp_path: Path) -> None:
    """bitsandbytes stores a weight of any shape as one column of bytes."""

    def flat(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            elements = tensors[name].numel()
            tensors[name] = torch.zeros(elements // 2, 1, dtype=torch.uint8)
            tensors[f"{name}.absmax"] = torch.zeros(elements // 64)
            tensors[f"{name}.quant_map"] = torch.zeros(16)
            tensors[f"{name}.quant_state.bitsandbytes__nf4"] = torch.zeros(8, dtype=torch.uint8)

    said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    model = copy_checkpoint(make_llama(), tmp_path / "nf4", tensors=flat, config={"quantization_config": said})
    found = inspect_checkpoint(model)
    assert {row.number_format for row in found.rows if row.name.endswith("_proj")} == {"nf4"}
    assert [row.shapes for row in found.rows if row.name.endswith("q_proj")] == [[[128, 128]]]
    assert found.tensor_parallel_sizes is None
    assert "is stored flat" in found.tensor_parallel_note
    assert found.warnings == []


def test_unknown_architecture_without_config(tmp_path: Path) -> None:
    save_file({"encoder.0.dense.weight": torch.zeros(4, 8), "scalar": torch.zeros(())}, tmp_path / "x.safetensors")
    found = inspect_checkpoint(tmp_path)
    assert found.layers == 1
    assert found.tensor_parallel_sizes is None
    assert "config.json" in found.tensor_parallel_note
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lama"}))
    assert "did you mean 'llama'" in inspect_checkpoint(tmp_path).tensor_parallel_note


def test_unknown_architecture_may_have_tensors_of_its_own_but_no_stray_scales(tmp_path: Path) -> None:
    gate = "model.layers.0.mlp.gate"
    tensors = {f"{gate}.weight": torch.zeros(4, 8), f"{gate}.e_score_correction_bias": torch.zeros(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert inspect_checkpoint(tmp_path).warnings == []
    save_file({**tensors, f"{gate}.weight_scale": torch.ones(4, 1)}, tmp_path / "model.safetensors")
    assert [text.split(" ")[0] for text in inspect_checkpoint(tmp_path).warnings] == [f"{gate}.weight_scale"]


@pytest.mark.parametrize("as_json", [False, True])
def test_command_line_prints_text_and_json(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_llama()
    assert main(["inspect", str(model), *(["--json"] if as_json else [])]) == 0
    out = capsys.readouterr().out
    if as_json:
        assert json.loads(out) == inspect_checkpoint(model).as_json()
    else:
        assert "self_attn.q_proj" in out
        assert "tensor-parallel sizes: 1, 2" in out


def test_damage_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = copy_checkpoint(make_llama(), tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for path, expected in [
        (tmp_path / "missing", "does not exist"),
        (tmp_path, "holds no safetensors file"),
        (damaged, "truncated"),
    ]:
        assert main(["inspect", str(path)]) == 1
        error = capsys.readouterr().err
        assert expected in error
        assert "Traceback" not in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ([], None),
        ("fp8", "must be an object"),
        ({"config_groups": {"g": {"weights": {}, "targets": "Linear"}}}, "must be a list of names"),
        ({"quant_method": "compressed-tensors", "ignore": ["re:("]}, "no regular expression"),
        ({"config_groups": {"g": 3}}, "config_groups.g must be an object"),
    ],
)
def test_config_of_the_wrong_kind(quantization: object, expected: str | None) -> None:
    config = {"quantization_config": quantization}
    if expected is None:
        assert read_quantization_config(config) is None
        return
    with pytest.raises(CheckpointError, match=expected):
        read_quantization_config(config)


def test_record_that_is_damaged_is_a_warning(tmp_path: Path) -> None:
    model = copy_checkpoint(make_llama(), tmp_path / "model")
    (model / "modelexport.json").write_text('{"recipe": 3}')
    found = inspect_checkpoint(model)
    assert found.record is None
    assert any("has no 'recipe'" in text for text in found.warnings)


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from modelexport.cli import main; "
        f"assert main(['inspect', {str(make_llama())!r}]) == 0; "
        "heavy = {'torch', 'numba', 'transformers', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("architectures", [7, "LlamaForCausalLM", {"a": 1}, 1.5])
def test_architectures_that_are_no_list(architectures: object, tmp_path: Path) -> None:
    copy = copy_checkpoint(make_llama(), tmp_path / "copy", config={"architectures": architectures})
    assert inspect_checkpoint(copy).architectures == []
