"""vLLM itself loads our sharded state, and computes with it what it computes with the Hugging Face checkpoint.

On a CPU its own ``save_sharded_state`` is no reference: there the engine lets go of a linear's weight once its kernel
has packed it. Loading comes before that.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from modelexport.checkpoints.formats import vllm_sharded
from modelexport.checkpoints.safetensors.file import Reader, Writer, open_checkpoint
from modelexport.models.rules import tensor_rules
from modelexport.sharding.plan import Parallelism
from modelexport.sharding.shard_plan import build_shard_plan
from tests.helpers.models import make_llama
from tests.helpers.shard_plans import layers_of

VLLM = os.environ.get("MODELEXPORT_VLLM_PYTHON")
MODELS: dict[str, dict[str, Any]] = {
    "biased": {"hidden": 256, "vocab": 1003, "attention_bias": True, "mlp_bias": True},
    "tied": {"hidden": 256, "vocab": 1003, "tied": True},
    "phi3": {"hidden": 256, "vocab": 1003, "model_type": "phi3"},
    "mixtral": {"vocab": 1003, "intermediate": 256, "model_type": "mixtral"},
}


def shard(source: Path, target: Path, tp: int) -> None:
    checkpoint = open_checkpoint(source)
    rules = tensor_rules(checkpoint)
    plan = build_shard_plan(rules, Parallelism(tp), layers=layers_of(rules))
    layout = vllm_sharded.lay_out(plan, checkpoint.config or {})
    target.mkdir()
    layout.create(target)
    with Reader(checkpoint) as reader, Writer(layout, target) as writer:
        for rule in rules:
            writer.write(rule.name, reader.read(checkpoint.infos[rule.name]))
    shutil.copyfile(source / "config.json", target / "config.json")


def log_probabilities(checkpoint: Path, tp: int, load_format: str, tokens: list[int]) -> torch.Tensor:
    script = Path(__file__).with_name("vllm_logprobs.py")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "PYTHON"))}
    environment["MODELEXPORT_VLLM_LOAD_FORMAT"] = load_format
    done = subprocess.run(
        [str(VLLM), str(script), str(checkpoint), str(tp), *map(str, tokens)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOGPROBS ")]
    assert lines, done.stdout[-2000:] + done.stderr[-2000:]
    return torch.tensor(json.loads(lines[0].removeprefix("LOGPROBS ")))


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.skipif(VLLM is None, reason="MODELEXPORT_VLLM_PYTHON names no interpreter with vLLM")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", MODELS)
def test_vllm_loads_it_and_computes_the_same(tmp_path: Path, model: str) -> None:
    source = make_llama(**MODELS[model])
    tokens = torch.randint(0, 1003, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = log_probabilities(source, 1, "auto", tokens)
    for tp in (1, 2):
        shard(source, tmp_path / str(tp), tp)
        got = log_probabilities(tmp_path / str(tp), tp, "sharded_state", tokens)
        difference = (got - expected).abs()
        print(f"{model} tp {tp}: log-probabilities differ by {difference.mean():.5f}, {difference.max():.5f} at most")
        if tp == 1:
            assert torch.equal(got, expected)
        assert difference.max() <= 0.06  # sums of two ranks, in bfloat16
