"""diff: equal and different checkpoints, and what it says of the difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelexport.cli import main
from modelexport.errors import CheckpointError
from modelexport.inspection.diff import CHUNK_BYTES, diff_checkpoints
from modelexport.resharding import reshard
from tests.helpers.models import copy_checkpoint, make_llama

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def model() -> Path:
    return make_llama()


def test_a_copy_is_equal(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = copy_checkpoint(model, tmp_path / "b")
    assert main(["diff", str(model), str(copy)]) == 0
    tensors = len(load_file(model / "model.safetensors"))
    assert capsys.readouterr().out.startswith(f"equal: {tensors} tensors, ")


def test_the_first_differing_tensor_and_element(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(tensors: dict) -> None:
        tensors[DOWN][5, 7] = 3.0
        tensors[DOWN][100, 2] += 1.0
        tensors["model.norm.weight"][3] = float("nan")

    copy = copy_checkpoint(model, tmp_path / "b", tensors=change)
    before = load_file(model / "model.safetensors")[DOWN]
    result = diff_checkpoints(model, copy)
    [down, norm] = sorted(result.differences, key=lambda found: "norm" in found.tensor)
    assert (down.tensor, down.what, down.elements, down.first) == (DOWN, "values", 2, (5, 7))
    assert down.values == (float(before[5, 7]), 3.0)
    assert down.largest == pytest.approx(max(abs(3.0 - float(before[5, 7])), 1.0), rel=0.02)
    assert norm.largest is None
    assert norm.first == (3,)
    assert main(["diff", str(model), str(copy)]) == 1
    printed = capsys.readouterr().out
    assert f"{DOWN}: 2 of {before.numel():,} elements differ, first [5, 7]: " in printed
    assert main(["diff", str(model), str(copy), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["equal"] is False


def test_chunks_do_not_shift_the_first_element(tmp_path: Path) -> None:
    rows = 3 * CHUNK_BYTES // (256 * 2)
    sides = []
    for name in "ab":
        value = torch.zeros(rows, 256, dtype=torch.bfloat16)
        if name == "b":
            value[rows - 5, 200] = -0.0  # equal as a number, and not the same bits
            value[rows - 3, 1] = 2.0
        (tmp_path / name).mkdir()
        save_file({"w": value}, tmp_path / name / "model.safetensors")
        sides.append(tmp_path / name)
    [found] = diff_checkpoints(*sides, threads=1).differences
    assert (found.first, found.elements, found.largest) == ((rows - 5, 200), 2, 2.0)


def test_dtypes_shapes_and_names(tmp_path: Path) -> None:
    tensors = {
        "same": torch.ones(3),
        "wider": torch.tensor([1.0, 0.5]).half(),
        "rounded": torch.tensor([1.0, 0.1]).half(),
        "longer": torch.ones(2),
        "mine": torch.ones(1),
        "scalar": torch.tensor(7),
        "bytes": torch.tensor([1, 2, 3], dtype=torch.uint8).view(torch.float8_e4m3fn),
    }
    others = {
        **{name: tensors[name] for name in ("same", "scalar", "bytes")},
        "wider": tensors["wider"].float(),
        "rounded": torch.tensor([1.0, 0.1]),
        "longer": torch.ones(3),
        "yours": torch.ones(1),
    }
    for name, side in (("a", tensors), ("b", others)):
        (tmp_path / name).mkdir()
        save_file(side, tmp_path / name / "model.safetensors")
    found = {d.tensor: d for d in diff_checkpoints(tmp_path / "a", tmp_path / "b").differences}
    assert {name: d.what for name, d in found.items()} == {
        "wider": "dtype",
        "rounded": "dtype",
        "longer": "shape",
        "mine": "only in A",
        "yours": "only in B",
    }
    assert "the same values" in found["wider"].text
    assert "F16" in found["wider"].text
    assert "F32" in found["wider"].text
    assert found["rounded"].first == (1,)
    assert "[2]" in found["longer"].text
    assert "[3]" in found["longer"].text


def test_replicas_that_disagree(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "tp2"
    reshard(checkpoint=str(model), out=str(out), tp=2, quiet=True)
    assert diff_checkpoints(model, out).equal
    last = sorted(out.glob("*.safetensors"))[-1]
    header = int.from_bytes(last.read_bytes()[:8], "little")
    entry = json.loads(last.read_bytes()[8 : 8 + header])["model.norm.weight"]["data_offsets"]
    with last.open("r+b") as stream:
        stream.seek(8 + header + entry[0])
        stream.write(b"\x11\x22")
    [found] = diff_checkpoints(model, out).differences
    assert (found.tensor, found.what) == ("model.norm.weight", "replicas")
    assert last.name in found.text


def test_what_cannot_be_opened(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        diff_checkpoints(model, tmp_path / "none")
    (tmp_path / "bare").mkdir()
    with pytest.raises(CheckpointError, match=r"--config .*does not exist; give the model's config\.json"):
        diff_checkpoints(model, tmp_path / "bare", tmp_path / "none.json")


def test_inspect_and_verify_take_the_config_too(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "dcp"
    reshard(checkpoint=str(model), out=str(out), tp=2, format="dcp", quiet=True)
    (out / "config.json").unlink()
    for command in (["inspect", str(out)], ["verify", str(out)]):
        assert main(command) == 1
        said = capsys.readouterr()
        assert "give --config DIR" in said.out + said.err
        assert main([*command, "--config", str(model)]) == 0
        assert "211, 128" in capsys.readouterr().out or command[0] == "verify"
