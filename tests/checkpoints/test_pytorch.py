"""Models as they were published before safetensors: state dicts in ``pytorch_model.bin``, read without running them."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import modelexport
from modelexport.checkpoints.safetensors.file import Reader
from modelexport.errors import CheckpointError
from modelexport.models.opening import open_model
from tests.helpers.models import make_llama


class Strange:
    """An object that is no tensor."""


def pickled(model: Path, out: Path, parts: int = 1, tensors: Mapping[str, Tensor] | None = None) -> Path:
    """A checkpoint with its tensors in so many pickles, and an index where there are several."""
    out.mkdir()
    for path in model.iterdir():
        if path.suffix == ".json":
            (out / path.name).write_bytes(path.read_bytes())
    held = dict(load_file(model / "model.safetensors") if tensors is None else tensors)
    names, weight_map = sorted(held), {}
    for part in range(parts):
        file = "pytorch_model.bin" if parts == 1 else f"pytorch_model-{part + 1:05d}-of-{parts:05d}.bin"
        own = names[part::parts]
        torch.save(OrderedDict((name, held[name]) for name in own), out / file)
        weight_map |= dict.fromkeys(own, file)
    if parts > 1:
        (out / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return out


def read_all(directory: Path) -> dict[str, Tensor]:
    checkpoint = open_model(directory)
    with Reader(checkpoint) as reader:
        return {name: reader.read(info) for name, info in checkpoint.infos.items()}


@pytest.mark.parametrize("parts", [1, 2])
def test_exports_have_the_bytes_of_safetensors(tmp_path: Path, parts: int) -> None:
    model = make_llama()
    for name, source in (("old", pickled(model, tmp_path / "pickled", parts)), ("new", model)):
        modelexport.export(model=str(source), out=str(tmp_path / name), quant="int4", quiet=True, evaluate=False)
    old, new = tmp_path / "old", tmp_path / "new"
    assert (old / "model.safetensors").read_bytes() == (new / "model.safetensors").read_bytes()
    assert sorted(path.name for path in old.iterdir()) == sorted(path.name for path in new.iterdir())
    (note,) = json.loads((old / "modelexport.json").read_text())["notes"]
    assert note.endswith("parsed without running anything in them")


def test_tensors_that_are_views(tmp_path: Path) -> None:
    """Transposed, a part of a larger storage, one storage under two names, and a parameter."""
    whole = torch.arange(48.0).view(6, 8)
    tensors = {
        "transposed": whole.t(),
        "part": whole[2:4, 3:7],
        "again": whole,
        "parameter": torch.nn.Parameter(whole.bfloat16()),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
    }
    found = read_all(pickled(make_llama(), tmp_path / "views", tensors=tensors))
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_safetensors_win(tmp_path: Path) -> None:
    both = pickled(make_llama(), tmp_path / "both", tensors={"stale": torch.zeros(1)})
    (both / "model.safetensors").write_bytes((make_llama() / "model.safetensors").read_bytes())
    result = modelexport.export(model=str(both), quant="none", dry_run=True)
    assert open_model(both).format == "hf"
    modelexport.export(model=str(both), out=str(tmp_path / "out"), quant="none", quiet=True)
    record = json.loads((tmp_path / "out" / "modelexport.json").read_text())
    assert record["left_out"] == {"pytorch_model.bin": "weights in another format"}
    assert result.notes == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"x": Strange()}, "'x': holds Strange; only plain tensors"),
        ({"epoch": 3}, "'epoch': holds int; only plain tensors"),
        ({"state_dict": {"x": torch.zeros(1)}}, "'state_dict': holds dict; only plain tensors"),
        ([torch.zeros(1)], "holds list; a state dict is needed"),
        ({3: torch.zeros(1)}, "holds a int as a name"),
        ({"x": torch.zeros(1).expand(4)}, "'x' is expanded"),
        ({"x": torch.zeros(2, 2).to_sparse()}, "'x': holds _rebuild_sparse_tensor"),
    ],
)
def test_what_is_no_plain_tensor(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        open_model(tmp_path)


def test_files_that_are_damaged_or_not_there(tmp_path: Path) -> None:
    source = pickled(make_llama(), tmp_path / "model", 2)
    first, second = sorted(source.glob("*.bin"))
    content = second.read_bytes()
    second.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"00002-of-00002.bin: .*cut short: no zip directory"):
        open_model(source)
    torch.save({"x": torch.zeros(1)}, second, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"no zip archive, as torch.save writes since 1.6"):
        open_model(source)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002.bin: missing"):
        open_model(source)
    (source / "pytorch_model.bin.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002.bin is missing \(.* says there are 2\)"):
        open_model(source)
    assert first.exists()


def test_a_directory_with_an_adapter_alone(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="holds an adapter, and not the model"):
        open_model(tmp_path)


def test_damage_is_said_and_nothing_else_happens(tmp_path: Path) -> None:
    """Any byte of the archive's own, and any length."""
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(3, 4), "b": torch.ones(2, dtype=torch.bfloat16).t()}, path)
    content, random = path.read_bytes(), Random(0)
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(random.randint(1, 3)):
            damaged[random.randrange(len(damaged))] = random.randrange(256)
        path.write_bytes(damaged[: random.choice([len(damaged), random.randrange(len(damaged))])])
        with suppress(CheckpointError):
            assert all(value.numel() <= 64 for value in read_all(tmp_path).values())
