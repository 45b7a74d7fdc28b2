"""Quantised sources to other numbers in one pass: the bytes that decoding them into a checkpoint first would give."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import modelexport
from modelexport.checkpoints.safetensors.file import Reader
from modelexport.models.decoded import decoded
from modelexport.models.matching import match
from modelexport.models.opening import open_model
from tests.helpers.models import copy_checkpoint, make_llama
from tests.published._layouts import LAYOUTS
from tests.published._writing import write

SHAPE: dict[str, Any] = {"layers": 1, "hidden": 256, "intermediate": 384, "heads": 4, "kv_heads": 2, "head_dim": 64}
SOURCES = {
    "fp8-block": ("fp8-block", "fp8-block", None),
    "awq": ("int4", "awq", 32),
    "gptq": ("int4", "gptq", 32),
    "compressed-tensors": ("int4-asym", "hf", 32),
    "modelopt-nvfp4": ("nvfp4", "modelopt", None),
    "mxfp4": ("mxfp4", "hf", None),
    "fp8": ("fp8", "hf", None),
}
"""Name -> number format, checkpoint format, group size."""


def run(model: Path, out: Path, quant: str, **settings: Any) -> Path:
    samples = out.parent / "samples.jsonl"
    samples.write_text(
        "".join(json.dumps({"input_ids": [(7 * i + j) % 200 for j in range(40)]}) + "\n" for i in range(2))
    )
    given = {"calib": str(samples), "calib_samples": 2, "calib_length": 32, **settings}
    modelexport.export(model=str(model), out=str(out), quant=quant, quiet=True, evaluate=False, **given)
    return out


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root, made = tmp_path_factory.mktemp("sources"), {}

    def make(name: str) -> Path:
        if name not in made:
            quant, written, group = SOURCES[name]
            made[name] = run(make_llama(**SHAPE), root / name, quant, format=written, group_size=group)
        return made[name]

    return make


def weights_of(checkpoint: Path) -> bytes:
    return (checkpoint / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "name",
    [name if name in ("fp8-block", "gptq") else pytest.param(name, marks=pytest.mark.extended) for name in SOURCES],
)
def test_any_rectangle_of_a_decoded_weight(name: str, quantised: Callable[[str], Path], tmp_path: Path) -> None:
    """Also rectangles that no cut of the stored tensors allows; against the whole, which the export decodes."""
    source = decoded(open_model(quantised(name)))
    plain = load_file(run(quantised(name), tmp_path / "plain", "none") / "model.safetensors")
    assert match(source).problems() == []
    with Reader(source) as reader:
        for tensor, whole in plain.items():
            info = source.infos[tensor]
            assert torch.equal(reader.read(info), whole)
            if tensor in source.computed:
                assert torch.equal(reader.read(info, rows=(5, 131), cols=(33, 98)), whole[5:131, 33:98])
                out = torch.empty(7, whole.shape[1], dtype=whole.dtype)
                assert torch.equal(reader.read(info, rows=(1, 8), out=out), whole[1:8])


@pytest.mark.parametrize(
    "name",
    [name if name in ("fp8-block", "awq") else pytest.param(name, marks=pytest.mark.extended) for name in SOURCES],
)
def test_a_weight_decoded_a_few_rows_at_a_time(
    name: str, quantised: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = decoded(open_model(quantised(name)))
    with Reader(source) as reader:
        at_once = {tensor: reader.read(source.infos[tensor]) for tensor in source.computed}
        monkeypatch.setattr("modelexport.models.decoded._AT_ONCE", 1)  # as many rows as must be decoded together
        for tensor, whole in at_once.items():
            assert torch.equal(reader.read(source.infos[tensor], out=torch.empty_like(whole)), whole)


@pytest.mark.parametrize(
    ("tp", "quant", "settings"),
    [
        (2, "nvfp4-wo", {}),
        pytest.param(4, "nvfp4-wo", {}, marks=pytest.mark.extended),
        pytest.param(2, "int4", {"algorithm": "gptq"}, marks=pytest.mark.extended),
        pytest.param(4, "int4", {"algorithm": "gptq"}, marks=pytest.mark.extended),
    ],
)
def test_deepseek_v3_in_fp8_blocks_at_any_parallelism(
    tp: int, quant: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Latent attention, routed and shared experts, a draft layer: DeepSeek's own layout."""
    source = write(LAYOUTS["DeepSeek-V3"], tmp_path / "source")
    one, several = (run(source, tmp_path / f"tp{n}", quant, tp=n, **settings) for n in (1, tp))
    assert weights_of(several) == weights_of(one)


@pytest.mark.parametrize(
    ("name", "quant", "tp"),
    [
        ("fp8-block", "int4", 1),
        pytest.param("awq", "nvfp4", 3, marks=pytest.mark.extended),
        pytest.param("gptq", "fp8", 2, marks=pytest.mark.extended),
    ],
)
def test_one_pass_is_two(name: str, quant: str, tp: int, quantised: Callable[[str], Path], tmp_path: Path) -> None:
    once = run(quantised(name), tmp_path / "once", quant, tp=tp)
    plain = run(quantised(name), tmp_path / "plain", "none")
    assert weights_of(once) == weights_of(run(plain, tmp_path / "twice", quant))
    record = json.loads((once / "modelexport.json").read_text())
    (told,) = record["notes"]
    first = min(json.loads((quantised(name) / "modelexport.json").read_text())["sqnr_db"].values())
    assert told.startswith(f"7 linears are {SOURCES[name][0]} in the source (whose worst SQNR was {first:.2f} dB")
    checked = modelexport.verify(str(once), against=str(quantised(name)))
    assert checked.ok, checked.problems
    assert len(checked.modules) == 7


@pytest.mark.extended
def test_calibrated(quantised: Callable[[str], Path], tmp_path: Path) -> None:
    settings = {"algorithm": "awq+gptq", "group_size": 32}
    once = run(quantised("fp8-block"), tmp_path / "once", "int4", tp=2, **settings)
    plain = run(quantised("fp8-block"), tmp_path / "plain", "none")
    assert weights_of(once) == weights_of(run(plain, tmp_path / "twice", "int4", **settings))


@pytest.mark.extended
def test_fbgemm_fp8_is_read(quantised: Callable[[str], Path], tmp_path: Path) -> None:
    """Its tensors are those of fp8 in compressed-tensors, with scales in float32."""
    theirs = copy_checkpoint(quantised("fp8"), tmp_path / "theirs")
    (theirs / "modelexport.json").unlink()
    config = json.loads((theirs / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    (theirs / "config.json").write_text(json.dumps(config))
    found = run(theirs, tmp_path / "plain", "none")
    assert weights_of(found) == weights_of(run(quantised("fp8"), tmp_path / "same", "none"))


def test_a_linear_that_the_list_forgets_is_told_from_its_tensors(
    quantised: Callable[[str], Path], tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.up_proj"
    theirs = copy_checkpoint(quantised("fp8-block"), tmp_path / "theirs")
    (theirs / "modelexport.json").unlink()
    tensors = load_file(theirs / "model.safetensors")
    del tensors[f"{name}.weight_scale_inv"]
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.bfloat16)
    save_file(tensors, theirs / "model.safetensors")
    plain = load_file(run(theirs, tmp_path / "plain", "none") / "model.safetensors")
    assert torch.equal(plain[f"{name}.weight"], tensors[f"{name}.weight"])
    (problem,) = modelexport.verify(str(theirs)).problems
    assert problem.startswith(f"{name} is not quantised, but config.json makes it fp8 (")
