"""modelopt and vLLM read what we write in modelopt's and DeepSeek's spellings, and we what modelopt itself exports.

Both pin a torch of their own, so each lives in another environment, named by MODELEXPORT_MODELOPT_PYTHON and
MODELEXPORT_VLLM_PYTHON (interpreters).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelexport.checkpoints.safetensors.file import open_checkpoint
from modelexport.errors import CheckpointError
from modelexport.exporting import export
from modelexport.quantization import formats
from modelexport.quantization.formats.base import NumberFormat
from modelexport.quantization.methods import fp8, modelopt, read_quantization_config
from modelexport.quantization.methods.base import ModelQuantization, WeightSlice
from tests.helpers.models import copy_checkpoint, make_llama

MODELOPT = os.environ.get("MODELEXPORT_MODELOPT_PYTHON")
VLLM = os.environ.get("MODELEXPORT_VLLM_PYTHON")
MODULES = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj", "model.layers.1.mlp.gate", "lm_head")
KEPT = MODULES[2:]
FORMATS = {
    "fp8": ("fp8", None),
    "fp8-static": ("fp8-static", None),
    "fp8-block": ("fp8-block", None),
    "int8-static": ("int8-static", None),
    "int8-wo": ("int8-wo", -1),
    "int4": ("int4", 128),
    "int4-32": ("int4", 32),
    "nvfp4": ("nvfp4", None),
    "nvfp4-wo": ("nvfp4-wo", None),
    "mxfp8": ("mxfp8", None),
    "mxfp4": ("mxfp4", None),
}
IN_VLLM = ("fp8", "fp8-static", "fp8-block", "nvfp4", "nvfp4-wo", "mxfp8")
SHAPE = (256, 384)


def number_format(case: str) -> NumberFormat:
    name, group_size = FORMATS[case]
    return formats.get(name, group_size=group_size, scale_dtype=torch.float32)


def announced(*cases: str, kv_cache: str | None = None) -> ModelQuantization:
    """The first two modules quantised, by the cases in turn, the others kept."""
    return ModelQuantization(
        {m: number_format(cases[n % len(cases)]) for n, m in enumerate(MODULES[:2])}, KEPT, kv_cache, "1"
    )


def quantised(case: str) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """Native tensors of a weight with zeros, outliers and tiny rows, its dequantised values, and modelopt's tensors."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(SHAPE, generator=generator)
    weight[3] = 0
    weight[5, :128] = 0
    weight[8] *= 1e-4
    weight[9, 17] = 30.0
    chosen = number_format(case)
    inputs = 5.75 if chosen.has_static_inputs else None
    native = chosen.quantise(weight.to(torch.bfloat16), inputs=inputs)
    return native, chosen.dequantise(native), modelopt.encode(chosen, native, WeightSlice.whole(SHAPE))


def run(interpreter: str | None, script: str, *arguments: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "PYTHON"))}
    done = subprocess.run(
        [str(interpreter), "-W", "ignore", str(Path(__file__).with_name(script)), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**environment, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with our tensors and modelopt's answers and exports, see modelopt_oracle.py."""
    if MODELOPT is None:
        pytest.skip("MODELEXPORT_MODELOPT_PYTHON names no interpreter with nvidia-modelopt")
    root = tmp_path_factory.mktemp("modelopt")
    copy_checkpoint(make_llama(hidden=256, intermediate=384), root / "source")
    tensors: dict[str, Tensor] = {}
    said: dict[str, Any] = {}
    for case in FORMATS:
        _, value, encoded = quantised(case)
        tensors |= {f"{case}/{suffix}": tensor.contiguous() for suffix, tensor in encoded.items()}
        if FORMATS[case][0] == "int4":
            tensors[f"{case}/value"] = value
        announcement = modelopt.quantization_files(announced(case))
        side = json.loads(announcement.files["hf_quant_config.json"])
        said[case] = {"quant_algo": announcement.config["quant_algo"], "side": side}
    for mixed in (("int4", "fp8-static"), ("nvfp4", "mxfp8"), ("int8-static", "nvfp4-wo"), ("int8-wo", "fp8")):
        files = modelopt.quantization_files(announced(*mixed)).files
        said["+".join(mixed)] = {"side": json.loads(files["hf_quant_config.json"])}
    save_file(tensors, root / "ours.safetensors")
    (root / "ours.json").write_text(json.dumps(said))
    assert "MODELOPT DONE" in run(MODELOPT, "modelopt_oracle.py", root)
    return root


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_modelopt_dequantises_what_we_write(exchanged: Path) -> None:
    """To the bit; NVFP4's values, divided here and multiplied there, within 2^-22 of each other."""
    theirs = load_file(exchanged / "theirs.safetensors")
    for case in FORMATS:
        _, value, encoded = quantised(case)
        if FORMATS[case][0] == "int4":
            assert torch.equal(theirs[f"{case}/weight"], encoded["weight"])
        elif case.startswith("nvfp4"):
            got = theirs[f"{case}/value"]
            apart = (got - value).abs() / value.abs().clamp(min=2.0**-126)
            print(f"{case}: {int((got != value).sum())} of {got.numel()} values differ, by {apart.max():.3g} at most")
            assert apart.max() <= 2.0**-22
            assert torch.equal(got == 0, value == 0)
        else:
            assert torch.equal(theirs[f"{case}/value"], value), case


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_modelopt_says_the_same_in_config_json(exchanged: Path) -> None:
    """Its own conversion of our side file is our entry of config.json, but for the group size that we add."""
    theirs = json.loads((exchanged / "theirs.json").read_text())
    for case, config in theirs.items():
        ours = modelopt.quantization_files(announced(*case.split("+"))).config
        assert {key: value for key, value in ours.items() if key != "group_size"} == config, case


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("FP8_DEFAULT_CFG", "fp8-static"),
        ("FP8_PER_CHANNEL_PER_TOKEN_CFG", "fp8"),
        ("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "fp8-block"),
        ("INT8_DEFAULT_CFG", "int8-static"),
        ("INT8_SMOOTHQUANT_CFG", "int8-static"),
        ("INT8_WEIGHT_ONLY_CFG", "int8-wo"),
        ("INT4_AWQ_CFG", "int4"),
        ("NVFP4_DEFAULT_CFG", "nvfp4"),
        ("W4A16_NVFP4_CFG", "nvfp4-wo"),
        ("MXFP8_DEFAULT_CFG", "mxfp8"),
        ("MXFP4_DEFAULT_CFG", "mxfp4"),
        ("W4A8_AWQ_BETA_CFG", None),
        ("W4A8_NVFP4_FP8_CFG", None),
        ("W4A8_MXFP4_FP8_CFG", None),
    ],
)
def test_we_read_what_modelopt_exports(exchanged: Path, name: str, found: str | None) -> None:
    """Every tensor is as promised; dequantised they are modelopt's own values, and near the source's."""
    directory = exchanged / "exported" / name
    config = read_quantization_config(json.loads((directory / "config.json").read_text()))
    side = modelopt.read(json.loads((directory / "hf_quant_config.json").read_text()))
    assert config is not None
    assert config.schemes == side.schemes
    stored, theirs = load_file(directory / "model.safetensors"), load_file(f"{directory}.safetensors")
    source = load_file(exchanged / "source" / "model.safetensors")
    infos, multiplied = open_checkpoint(directory).infos, 0
    modules = sorted({key.rpartition(".")[0] for key in stored if key.endswith(".weight")})
    for module in modules:
        weight = source[f"{module}.weight"].float()
        scheme = config.scheme_of(module) if weight.dim() == 2 else None
        tensors = {key.rpartition(".")[2]: t for key, t in stored.items() if key.rpartition(".")[0] == module}
        if scheme is None:
            assert list(tensors) == ["weight"]
            assert tensors["weight"].dtype == torch.bfloat16
            continue
        shape = (weight.shape[0], weight.shape[1])
        promises, extra = modelopt.tensor_specs(scheme, shape), modelopt.extras(scheme, shape)
        assert set(promises) <= set(tensors) <= {*promises, *extra}
        for suffix in tensors:
            info, promise = infos[f"{module}.{suffix}"], promises.get(suffix) or extra[suffix]
            assert info.dtype in promise.dtypes
            assert info.shape in promise.shapes
        if found is None:
            with pytest.raises(CheckpointError, match="no number format of ours"):
                formats.of_scheme(scheme)
            continue
        chosen = formats.of_scheme(scheme)
        assert chosen.name == found
        multiplier = modelopt.weight_multiplier(tensors)
        bare = {suffix: tensor for suffix, tensor in tensors.items() if suffix != "pre_quant_scale"}
        native = modelopt.decode(chosen, bare, WeightSlice.whole(shape))
        again = modelopt.encode(chosen, native, WeightSlice.whole(shape))
        assert all(torch.equal(again[s].float(), bare[s].float()) for s in promises), module
        value = chosen.dequantise(native)
        if module in theirs:
            bound = 2.0**-22 if found.startswith("nvfp4") else 0.0
            assert ((value - theirs[module]).abs() <= bound * value.abs()).all(), module
        if multiplier is not None:
            multiplied += 1
            value = value * multiplier.float()
        if name != "INT4_AWQ_CFG" or multiplier is not None:  # elsewhere the factor went into the norm
            error = (value - weight).norm() / weight.norm()
            assert error < 0.15, f"{module}: {error}"
    assert len(modules) > 8
    assert (multiplied > 0) == (name in ("INT4_AWQ_CFG", "INT8_SMOOTHQUANT_CFG"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("cache", "config"), [("fp8", "FP8_KV_CFG"), ("nvfp4", "NVFP4_KV_CFG")])
def test_the_scales_of_a_kv_cache_are_those_that_modelopt_exports(
    cache: str, config: str, exchanged: Path, tmp_path: Path
) -> None:
    ids = tmp_path / "ids.jsonl"
    ids.write_text(json.dumps({"input_ids": list(range(64))}) + "\n")
    calibration: dict[str, Any] = {"calib": str(ids), "calib_samples": 1, "calib_length": 64, "calib_range": "max"}
    settings: dict[str, Any] = {"quant": "fp8-static", "format": "modelopt", "kv_cache": cache, **calibration}
    export(model=str(exchanged / "source"), out=str(tmp_path / "out"), evaluate=False, quiet=True, **settings)
    ours, theirs = ((tmp_path / "out"), (exchanged / "cached" / config))
    scales = [
        {name: x for name, x in load_file(each / "model.safetensors").items() if name.endswith(("k_scale", "v_scale"))}
        for each in (ours, theirs)
    ]
    assert scales[0].keys() == scales[1].keys()
    for name, scale in scales[0].items():
        assert (scale.shape, scale.dtype) == (scales[1][name].shape, scales[1][name].dtype)
        assert float(scale) == pytest.approx(float(scales[1][name]), rel=1e-4), name
    said = [json.loads((each / "config.json").read_text())["quantization_config"] for each in (ours, theirs)]
    side = [json.loads((each / "hf_quant_config.json").read_text())["quantization"] for each in (ours, theirs)]
    assert said[0]["kv_cache_scheme"] == said[1]["kv_cache_scheme"]
    assert side[0]["kv_cache_quant_algo"] == side[1]["kv_cache_quant_algo"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(VLLM is None, reason="MODELEXPORT_VLLM_PYTHON names no interpreter with vLLM")
def test_vllm_makes_the_parameters_that_we_write(tmp_path: Path) -> None:
    """By its own parsing of config.json: method, names, dtypes and shapes of each linear, kept modules, KV cache."""
    cases: dict[str, Any] = {}
    promises = {}
    for case in IN_VLLM:
        announcement = modelopt.quantization_files(announced(case, kv_cache="fp8"))
        cases[f"modelopt {case}"] = {"config": announcement.config}
        side = json.loads(announcement.files["hf_quant_config.json"])
        cases[f"side file {case}"] = {"config": {**side, "quant_method": "modelopt"}}
    for mixed in (("nvfp4", "fp8-static"), ("mxfp8", "nvfp4-wo"), ("fp8", "fp8-block"), ("fp8-block", "nvfp4")):
        cases[f"modelopt {' '.join(mixed)}"] = {
            "config": modelopt.quantization_files(announced(*mixed, kv_cache="fp8")).config
        }
    for case in ("fp8-block", "fp8-static"):
        cases[f"fp8 {case}"] = {"config": fp8.quantization_files(announced(case)).config}
    for name, case in cases.items():
        method = fp8 if name.startswith("fp8") else modelopt
        scheme = method.read(case["config"]).scheme_of(MODULES[0])
        assert scheme is not None
        promises[name] = method.tensor_specs(scheme, SHAPE)
        case |= {"shape": list(SHAPE), "modules": list(MODULES)}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    output = run(VLLM, "vllm_configs.py", tmp_path / "cases.json")
    answers = json.loads(next(line for line in output.splitlines() if line.startswith("VLLM "))[5:])
    dtypes = {"torch.float8_e4m3fn": "F8_E4M3", "torch.uint8": "U8", "torch.float32": "F32"}
    for name, answer in answers.items():
        made = {suffix: (dtypes[dtype], tuple(shape)) for suffix, (dtype, shape) in answer["tensors"].items()}
        assert set(made) == set(promises[name]), name
        for suffix, (dtype, shape) in made.items():
            assert dtype in promises[name][suffix].dtypes, (name, suffix)
            assert shape in promises[name][suffix].shapes, (name, suffix)  # of a fused linear's one number: (1,)
        assert answer["kept"] == list(KEPT), name
        assert answer["kv_cache"] == (None if name.startswith("fp8") else "FP8"), name
    methods = {name: answer["method"] for name, answer in answers.items()}
    assert methods["modelopt nvfp4"] == "modelopt_fp4"
    assert methods["side file mxfp8"] == "modelopt_mxfp8"
    assert methods["modelopt fp8 fp8-block"] == "modelopt_mixed"
    assert {methods[f"modelopt {case}"] for case in ("fp8", "fp8-static", "fp8-block")} == {"modelopt"}
    assert methods["fp8 fp8-block"] == "fp8"
