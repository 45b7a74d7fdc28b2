"""recipes/convert.py and recipes/training_to_serving.py, end to end."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch

from modelexport.assets import demo_model_path
from modelexport.errors import CheckpointError
from modelexport.exporting import export
from modelexport.inspection.evaluate.models import PlainTensors
from modelexport.inspection.inspect import inspect_checkpoint
from modelexport.models.opening import open_model
from modelexport.resharding import reshard
from tests.helpers.models import copy_checkpoint
from tests.recipes._running import RECIPES, run_apart, run_here

pytestmark = pytest.mark.timeout(240)
QUIET = {"quiet": True, "evaluate": False}


def exported(directory: Path, **settings: object) -> Path:
    """The demo model, quantised."""
    export(out=str(directory), **QUIET, **settings)
    return directory


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("awq") / "ckpt", quant="int4", format="awq")


# --------------------------------------------------------------- convert


def same_numbers(a: Path, b: Path) -> None:
    with PlainTensors(open_model(a)) as first, PlainTensors(open_model(b)) as second:
        name = "model.layers.1.mlp.down_proj.weight"
        assert torch.equal(first.read(name), second.read(name))


def test_awq_to_gptq(awq: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gptq"
    assert run_here("convert.py", str(awq), "--format", "gptq", "--out", str(out)) == 0
    assert "decoded and compared: 38 tensors are equal" in capfd.readouterr().out
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "gptq"
    same_numbers(awq, out)


def test_modelopt_to_what_transformers_reads(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = exported(tmp_path / "modelopt", quant="nvfp4-wo", format="modelopt")
    out = tmp_path / "out"
    assert run_here("convert.py", str(source), "--engine", "transformers", "--out", str(out), "--tp", "2") == 0
    said = capfd.readouterr()
    assert "transformers: --format hf" in said.err
    assert "tensors are equal" in said.out
    found = inspect_checkpoint(out)
    assert found.quantization is not None
    assert found.quantization["quant_method"] == "compressed-tensors"
    same_numbers(source, out)


def test_an_engine_gets_the_first_format_that_it_is_not_known_to_refuse(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers makes no room for packed zero points of compressed-tensors, and reads AWQ's."""
    source = exported(tmp_path / "asym", quant="int4-asym", group_size=64)
    assert run_here("convert.py", str(source), "--engine", "transformers", "--out", str(tmp_path / "out")) == 0
    said = capfd.readouterr().err
    assert "not hf: transformers 5.23" in said
    assert "not fp8-block: " in said
    assert "transformers: --format awq" in said


def test_what_no_format_of_an_engine_holds(awq: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run_here("convert.py", str(awq), "--engine", "llama.cpp", "--out", str(out)) == 1
    assert "no format that llama.cpp reads can hold" in capfd.readouterr().err
    assert run_here("convert.py", str(awq), "--out", str(out)) == 2
    assert "one of the arguments --engine --format is required" in capfd.readouterr().err
    assert not out.exists()


def test_a_value_that_differs_is_found(awq: Path, tmp_path: Path) -> None:
    """The comparison itself can fail: one norm of a copy is another."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][0] += 1

    spoilt = copy_checkpoint(awq, tmp_path / "spoilt", tensors=spoil)
    compare = runpy.run_path(str(RECIPES / "convert.py"))["compare"]
    assert compare(awq, awq) == 38
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is not the same in"):
        compare(awq, spoilt)


# --------------------------------------------------------------- from training to serving


@pytest.mark.parametrize("form", ["dcp", "megatron"])
def test_a_sharded_training_checkpoint(form: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What FSDP and Megatron-core leave: no tokenizer, and (here) no config.json."""
    trained, out = tmp_path / "step-10", tmp_path / "out"
    reshard(checkpoint=str(demo_model_path()), out=str(trained), format=form, tp=2, quiet=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md"):
        (trained / name).unlink(missing_ok=True)
    arguments = ["--model", str(trained), "--config", str(demo_model_path()), "--out", str(out)]
    assert run_here("training_to_serving.py", *arguments, "--serve-tp", "4", "--tp", "2") == 0
    said = capfd.readouterr()
    assert "good: " in said.out
    assert {"tokenizer.json", "config.json", "modelexport.json"} <= {path.name for path in out.iterdir()}
    assert (
        exported(tmp_path / "plain", quant="fp8").joinpath("model.safetensors").read_bytes()
        == (out / "model.safetensors").read_bytes()
    ), "the same numbers as from the model in one piece"
    assert not any(path.is_symlink() for path in out.iterdir())
    assert sorted(path.name for path in trained.iterdir() if path.suffix == ".json") == (
        ["metadata.json"] if form == "megatron" else []
    ), "the training checkpoint is left as it was"


def test_requests_that_cannot_be(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trained, out = tmp_path / "step-10", str(tmp_path / "out")
    reshard(checkpoint=str(demo_model_path()), out=str(trained), format="dcp", quiet=True)
    config = ["--config", str(demo_model_path())]
    cases = [
        (["--model", str(trained), *config, "--serve-tp", "3"], 2, "can load this at tensor-parallel sizes 1, 2, 4, 8"),
        (["--model", str(trained)], 2, "--model and --config belong together"),
        (["--model", str(trained), *config, "--set", "quant=int9"], 2, "int9"),
        (["--model", str(tmp_path / "no"), *config], 2, "no is no directory"),
    ]
    for arguments, status, message in cases:
        assert run_here("training_to_serving.py", *arguments, "--out", out) == status
        assert message in capfd.readouterr().err
        assert not Path(out).exists()


@pytest.mark.slow
def test_a_real_training_run(tmp_path: Path) -> None:
    """Two FSDP ranks under torchrun train the demo model; what they saved is served."""
    out = tmp_path / "out"
    done = run_apart("python", "recipes/training_to_serving.py", "--out", str(out), "--serve-tp", "2", timeout=200)
    assert done.returncode == 0, done.stderr
    assert "trained the demo model on 2 ranks" in done.stdout
    assert "optimizer.* (optimizer state" in done.stdout
    assert "good: " in done.stdout
    plain = exported(tmp_path / "plain", quant="fp8")
    assert (plain / "model.safetensors").read_bytes() != (out / "model.safetensors").read_bytes(), "it has learnt"
