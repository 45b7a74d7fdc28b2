"""Adapters are merged as PEFT merges them: ``--adapter`` beside ``merge_and_unload``, in float32."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modelexport.exporting import export
from tests.helpers.models import make_llama

PYTHON = os.environ.get("MODELEXPORT_PEFT_PYTHON")
SCRIPT = Path(__file__).with_name("peft_oracle.py")
CASES = dict.fromkeys(("lora", "rslora", "dora", "saved", "patterns", "embedding", "bias"), 1) | {"several": 2}
WEIGHTS = ("=0.7", "=-0.3")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(PYTHON is None, reason="MODELEXPORT_PEFT_PYTHON names no interpreter with PEFT"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model in float32, and the directory in which PEFT's adapters and merged weights lie."""
    out = tmp_path_factory.mktemp("peft")
    model = make_llama(dtype="float32", attention_bias=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [str(PYTHON), str(SCRIPT), str(model), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == list(CASES)
    return model, out


@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_of_its_merge(made: tuple[Path, Path], case: str, tmp_path: Path) -> None:
    """To a rounding of float32 for each of the rank's products: theirs is a matrix product, ours a sum in order."""
    model, oracle = made
    adapters = [str(oracle / case / f"adapter{number}") for number in range(CASES[case])]
    if len(adapters) > 1:
        adapters = [f"{path}{weight}" for path, weight in zip(adapters, WEIGHTS, strict=True)]
    export(model=str(model), quant="none", adapter=adapters, out=str(tmp_path / "out"), quiet=True, evaluate=False)
    found, wanted = load_file(tmp_path / "out" / "model.safetensors"), load_file(oracle / f"{case}.safetensors")
    base = load_file(model / "model.safetensors")
    assert found.keys() == wanted.keys()
    changed = [name for name in found if name not in base or not torch.equal(found[name], base[name])]
    assert changed, "nothing was merged"
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=2e-6, atol=2e-7)
