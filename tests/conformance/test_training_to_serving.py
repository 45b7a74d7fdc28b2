"""From a sharded training checkpoint that torch itself wrote to one that engines load: the same bytes as ever."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from modelexport.distributed.launch import MultiprocessConfig, launch_subprocesses
from modelexport.errors import CheckpointError
from modelexport.exporting import export
from modelexport.inspection.diff import diff_checkpoints
from tests.conformance._training_rank import save_as_training_would
from tests.exporting.test_export import digests
from tests.helpers.marks import few
from tests.helpers.models import make_llama


@pytest.fixture(scope="module")
def source() -> Path:
    return make_llama(kv_heads=2, vocab=1003, hidden=256, layers=3)


@pytest.fixture(scope="module")
def trained(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as four ranks of torch save it."""
    directory = tmp_path_factory.mktemp("training") / "step-1000"
    config = MultiprocessConfig(world_size=4, model_parallelism=4, backend="gloo", timeout=120.0)
    launch_subprocesses(save_as_training_would, config, None, 0, str(source), str(directory))
    return directory


@pytest.mark.timeout(120)
@pytest.mark.parametrize("quant", few(["none", "int4", "fp8"], "int4"))
def test_an_export_of_it_is_the_export_of_the_model(source: Path, trained: Path, quant: str, tmp_path: Path) -> None:
    settings = {"quant": quant, "evaluate": False, "quiet": True}
    export(model=str(source), out=str(tmp_path / "a"), **settings)
    export(model=str(trained), config=str(source), out=str(tmp_path / "b"), tp=2, **settings)
    expected, found = digests(tmp_path / "a"), digests(tmp_path / "b")
    for name in ("model.safetensors", "config.json"):
        assert found[name] == expected[name]
    assert diff_checkpoints(tmp_path / "a", tmp_path / "b").equal


@pytest.mark.timeout(120)
def test_it_is_compared_with_the_model_and_says_what_it_leaves_out(source: Path, trained: Path, tmp_path: Path) -> None:
    assert diff_checkpoints(source, trained, config=source).equal
    with pytest.raises(CheckpointError, match=r"step-1000 .*config\.json; give --config DIR"):
        export(model=str(trained), out=str(tmp_path / "out"), quiet=True)
    result = export(model=str(trained), config=str(source), out=str(tmp_path / "out"), evaluate=False, quiet=True)
    assert any("step" in name for name in result.left_out), "the step counter is no part of the model"


@pytest.mark.timeout(120)
def test_transformers_loads_what_came_of_it(source: Path, trained: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    export(model=str(trained), config=str(source), quant="none", out=str(tmp_path / "out"), quiet=True)
    tokens = torch.arange(24).view(2, 12)
    logits = []
    for directory in (source, tmp_path / "out"):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        with torch.no_grad():
            logits.append(model(tokens).logits)
    assert torch.equal(*logits)
