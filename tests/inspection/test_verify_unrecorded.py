"""verify --against a source without modelexport.json: what was rounded to nearest is rounded again, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from modelexport.assets import demo_model_path
from modelexport.checkpoints.safetensors.file import open_checkpoint
from modelexport.cli import main
from modelexport.exporting import export
from modelexport.inspection.verify import audit, verify_checkpoint
from modelexport.inspection.verify.requantised import unlike
from tests.helpers.marks import few
from tests.helpers.models import copy_checkpoint, make_llama

pytestmark = pytest.mark.timeout(180)

Unrecorded = Callable[..., tuple[Path, Path]]
LINEAR = "layers.1.self_attn.k_proj"  # of those that engines fuse, and that share a scale


@pytest.fixture(scope="module")
def unrecorded(tmp_path_factory: pytest.TempPathFactory) -> Unrecorded:
    """(an export that has lost its record, its source), made once; do not write into it."""

    @cache
    def make(quant: str, checkpoint_format: str = "hf", algorithm: str = "rtn") -> tuple[Path, Path]:
        calibrated = quant == "fp8-static" or quant == "nvfp4"
        source = demo_model_path() if calibrated else make_llama(hidden=256, layers=2)
        out = tmp_path_factory.mktemp("unrecorded") / "out"
        few = {"calib_samples": 2, "calib_length": 32} if calibrated else {}
        settings = {"quant": quant, "format": checkpoint_format, "algorithm": algorithm, **few}
        export(model=str(source), out=str(out), evaluate=False, quiet=True, **settings)
        (out / "modelexport.json").unlink()
        return out, source

    return make


@pytest.mark.parametrize(
    ("quant", "checkpoint_format"),
    few(
        [
            *((quant, "hf") for quant in ("int8", "int4", "int4-asym", "fp8", "fp8-block", "nvfp4-wo", "mxfp4")),
            *(("fp8-static", "hf"), ("nvfp4", "modelopt"), ("int4-asym", "awq"), ("int4", "gptq")),
        ],
        ("fp8", "hf"),
        ("int4", "gptq"),
    ),
)
def test_the_lowest_bit_of_every_tensor_of_a_linear_counts(
    unrecorded: Unrecorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quant: str, checkpoint_format: str
) -> None:
    monkeypatch.setattr(audit, "CHUNK_BYTES", 1 << 14)  # several chunks of each
    good, source = unrecorded(quant, checkpoint_format)
    result = verify_checkpoint(good, source)
    assert result.problems == []
    assert result.requantised == len(result.modules) > 0
    statics = [line for line in result.unchecked if "input_scale" in line]
    assert result.unchecked == statics
    assert bool(statics) == (quant in ("fp8-static", "nvfp4"))
    bad = copy_checkpoint(good, tmp_path / "bad")
    for info in open_checkpoint(bad).infos.values():
        if LINEAR in info.name and not info.name.endswith("input_scale"):
            with open(info.path, "r+b") as file:
                for flips in (1, 0):  # flipped, looked at, and flipped back
                    file.seek(info.offset)
                    [byte] = file.read(1)
                    file.seek(info.offset)
                    file.write(bytes([byte ^ 1]))
                    file.flush()
                    found = verify_checkpoint(bad, source).problems
                    assert [LINEAR in line for line in found] == [True] * flips


@pytest.mark.parametrize(
    ("against", "said"),
    [
        (True, "not checked: the bytes of 14 linears in int4, which were not made by rounding the source to nearest"),
        (False, "not checked: the bytes of "),
    ],
)
def test_what_cannot_be_told_is_not_called_good(
    unrecorded: Unrecorded, capsys: pytest.CaptureFixture[str], against: bool, said: str
) -> None:
    searched, source = unrecorded("int4", "hf", "mse")
    assert main(["verify", str(searched), *(["--against", str(source)] if against else [])]) == 0
    printed = capsys.readouterr().out
    assert said in printed
    assert "not all checked" in printed
    assert "good" not in printed


@pytest.mark.parametrize("where", ["", "recipe"])
def test_a_key_that_no_export_writes_is_noticed(tmp_path: Path, where: str) -> None:
    export(model=str(make_llama()), out=str(tmp_path / "out"), quant="int8", evaluate=False, quiet=True)
    path = tmp_path / "out" / "modelexport.json"
    record = json.loads(path.read_text())
    (record[where] if where else record)["added"] = 1
    path.write_text(json.dumps(record))
    [problem] = verify_checkpoint(tmp_path / "out").problems
    assert f"has the key {where and 'recipe.'}added" in problem


def test_scales_of_one_group_in_any_layout() -> None:
    """GPTQ's are stored turned: of one group, their last dim has one element and any stride."""
    ours = {"weight_scale": torch.arange(8.0).view(8, 1)}
    assert not unlike(ours, {"weight_scale": torch.arange(8.0).view(1, 8).t()})
    assert unlike(ours, {"weight_scale": torch.zeros(1, 8).t()}) == {"weight_scale": 7}
