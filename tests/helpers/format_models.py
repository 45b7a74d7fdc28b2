"""Models of random numbers, written in a sharded format and read back: what the tests of those formats share."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from modelexport.checkpoints.safetensors.file import Checkpoint, Layout, Reader, Writer, torch_dtype
from modelexport.models.rules import expected_rules, tensor_rules
from modelexport.sharding.plan import Parallelism
from modelexport.sharding.rules import TensorRule
from modelexport.sharding.shard_plan import ShardPlan, build_shard_plan
from tests.helpers.models import headers_only, quantised_headers
from tests.helpers.shard_plans import layers_of


@dataclass(frozen=True)
class Model:
    """A tiny model: its config.json, and numbers for each of its tensors."""

    config: dict[str, Any]
    rules: list[TensorRule]
    values: dict[str, torch.Tensor]

    def plan(self, tp: int = 1, pp: int = 1, ep: int = 1) -> ShardPlan:
        return build_shard_plan(self.rules, Parallelism(tp, pp, ep), layers=layers_of(self.rules))


def make_model(scheme: str | None = None, **shape: Any) -> Model:
    """A model of that :class:`LlamaShape`, quantised where ``scheme`` names how; no two near elements are alike."""
    checkpoint = headers_only(**shape) if scheme is None else quantised_headers(scheme, **shape)
    rules = tensor_rules(checkpoint)
    generator = torch.Generator().manual_seed(len(rules))
    values = {}
    for rule in rules:
        dtype = torch_dtype(rule.dtype)
        count = math.prod(rule.shape)
        if dtype in (torch.bfloat16, torch.float16, torch.float32):
            values[rule.name] = torch.randn(count, generator=generator).to(dtype).view(rule.shape)
        else:
            noise = torch.randint(1, 120, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
            values[rule.name] = noise.view(dtype).view(rule.shape)
    assert checkpoint.config is not None
    return Model(checkpoint.config, rules, values)


def write(module: ModuleType, directory: Path, model: Model, plan: ShardPlan, **options: int) -> Layout:
    """Write a model in a format; also its config.json, where the format has none of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    layout = module.lay_out(plan, model.config, **options)
    layout.create(directory)
    (directory / "config.json").write_text(json.dumps(model.config))
    for name, content in module.side_files(plan, model.config, layout).items():
        (directory / name).write_bytes(content)
    with Writer(layout, directory) as writer:
        for name, value in model.values.items():
            writer.write(name, value)
    return layout


def reopen(module: ModuleType, directory: Path, config: dict[str, Any] | None = None) -> Checkpoint:
    assert module.recognises(directory)
    found: Checkpoint = module.open(directory, config, expected_rules)
    return found


def assert_same(checkpoint: Checkpoint, model: Model) -> None:
    """Every tensor is there, under its own name, with its own bytes; and nothing else."""
    assert sorted(checkpoint.infos) == sorted(model.values)
    with Reader(checkpoint) as reader:
        for name, value in model.values.items():
            info = checkpoint.infos[name]
            got = reader.read(info)
            assert got.dtype == value.dtype, name
            assert got.shape == value.shape, name
            assert torch.equal(_bits(got), _bits(value)), name


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def round_trip(module: ModuleType, directory: Path, model: Model, tp: int = 1, pp: int = 1, ep: int = 1) -> Checkpoint:
    """Write, read back and compare; every file is one that the safetensors library takes."""
    from safetensors import safe_open

    write(module, directory, model, model.plan(tp, pp, ep))
    found = reopen(module, directory)
    assert_same(found, model)
    assert found.format == module.NAME
    for path in found.files:
        with safe_open(path, framework="pt") as file:
            assert set(file.keys()) == set(found.headers[path].infos)
    return found
