"""torch's own reader of sharded safetensors files loads what we write, and ours loads what torch writes."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch

from modelexport.checkpoints.formats import hf_sharded
from modelexport.checkpoints.safetensors.file import Reader
from tests.helpers.dcp_models import ALONE
from tests.helpers.format_models import Model, assert_same, make_model, write

pytest.importorskip("torch.distributed.checkpoint.hf_storage")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def load_with_torch(directory: Path, model: Model) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    found = {name: torch.zeros_like(value) for name, value in model.values.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(directory)), **ALONE)
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("scheme", [None, "int4", "int8", "fp8-static"])
def test_torch_loads_whole_tensors(tmp_path: Path, scheme: str | None) -> None:
    """fp8 too, where the reader takes dtypes from the safetensors library and not from its own ``DTYPE_MAP``."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    if scheme == "fp8-static" and "_getdtype" not in inspect.getsource(HuggingFaceStorageReader.read_metadata):
        pytest.skip("this torch's reader takes dtypes that it does not know, fp8 among them, for float32")
    model = make_model(scheme, hidden=256, heads=4, kv_heads=2, intermediate=512, layers=3)
    write(hf_sharded, tmp_path, model, model.plan(2, 2), max_shard_bytes=400_000)
    found = load_with_torch(tmp_path, model)
    for name, value in model.values.items():
        assert torch.equal(found[name].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)), name


@pytest.mark.timeout(120)
def test_torch_loads_fused_and_shared_parts(tmp_path: Path) -> None:
    model = make_model(model_type="phi3", heads=8, kv_heads=2, tied=True)
    write(hf_sharded, tmp_path, model, model.plan(4, 2))
    found = load_with_torch(tmp_path, model)
    assert all(torch.equal(found[name], value) for name, value in model.values.items())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("scheme", [None, "fp8-static"])
def test_torch_consolidates_them(tmp_path: Path, scheme: str | None) -> None:
    """Not integers: torch 2.13 asks for their size as for that of floating-point numbers, and fails."""
    from safetensors.torch import load_file

    module = pytest.importorskip("torch.distributed.checkpoint._consolidate_hf_safetensors")
    model = make_model(scheme, hidden=256, heads=4, kv_heads=2, intermediate=512, layers=3)
    write(hf_sharded, tmp_path / "shards", model, model.plan(2, 3))
    (tmp_path / "whole").mkdir()
    module.consolidate_safetensors_files(
        input_dir=str(tmp_path / "shards"),
        output_dir=str(tmp_path / "whole"),
        fqn_to_index_mapping=dict.fromkeys(model.values, 1),
    )
    (path,) = (tmp_path / "whole").glob("*.safetensors")
    found = load_file(path)
    assert sorted(found) == sorted(model.values)
    for name, value in model.values.items():
        assert torch.equal(found[name].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)), name


@pytest.mark.timeout(120)
def test_we_read_what_torch_writes(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    model = make_model()
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save(dict(model.values), storage_writer=writer, **ALONE)
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    assert hf_sharded.recognises(tmp_path)
    found = hf_sharded.open(tmp_path, None)
    assert_same(found, model)
    with Reader(found) as reader:
        rows = reader.read(found.infos["model.norm.weight"], rows=(3, 9))
        assert torch.equal(rows, model.values["model.norm.weight"][3:9])
