"""Shard plans of derived families against transformers' own tensor parallelism: what each of its ranks holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modelexport.models.derived.skeleton import read_skeleton
from modelexport.sharding.plan import Parallelism
from tests.conformance.test_transformers_tp import part, plan_of, run_transformers
from tests.helpers.tiny_models import tiny_checkpoint

FEW = ["cohere", "ernie4_5", "glm4_moe", "granitemoe"]
MORE = ["apertus", "arcee", "dots1", "exaone4", "olmoe", "nemotron", "phi", "mellum"]

pytestmark = [pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    "types",
    [pytest.param(FEW, id="few", marks=pytest.mark.extended), pytest.param(MORE, id="more", marks=pytest.mark.slow)],
)
def test_each_rank_holds_what_transformers_gives_it(tmp_path: Path, types: list[str]) -> None:
    models = {name: tiny_checkpoint(name) for name in types}
    run_transformers(tmp_path, 2, models)
    for name, directory in models.items():
        skeleton = read_skeleton(json.loads((directory / "config.json").read_text()))
        whole = load_file(directory / "model.safetensors")
        plan = plan_of(directory, Parallelism(tp=2))
        cut = 0
        for rank in range(2):
            held = load_file(tmp_path / f"{name}-rank{rank}.safetensors")
            stacks: dict[str, dict[int, list[torch.Tensor]]] = {}
            for own, tensor in part(plan, whole, rank).items():
                target = skeleton.targets[own]
                if target not in held:
                    assert not target.endswith("proj.weight"), target  # a buffer
                elif skeleton.shapes[target] == tuple(whole[own].shape):
                    assert torch.equal(held[target], tensor.float()), f"{name} {own} on rank {rank}"
                    cut += tensor.shape != whole[own].shape
                else:
                    expert = plan.rules[own].expert
                    assert expert is not None, own
                    stacks.setdefault(target, {}).setdefault(expert, []).append(tensor.float())
            for target, experts in stacks.items():
                rows = [torch.cat(sorted_by_name) for _, sorted_by_name in sorted(experts.items())]
                assert torch.equal(held[target], torch.stack(rows)), f"{name} {target} on rank {rank}"
                cut += 1
        assert cut > 8, f"{name}: transformers cut next to nothing"
