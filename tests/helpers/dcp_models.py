"""Tiny models for the tests of distributed checkpoints: values by name, written by us and read back by us."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp

from modelexport.checkpoints.safetensors.file import Checkpoint, Reader, Writer, dtype_name
from modelexport.models.rules import expected_rules
from modelexport.sharding.plan import Parallelism
from modelexport.sharding.rules import TensorRule
from modelexport.sharding.shard_plan import ShardPlan, build_shard_plan
from tests.helpers.models import LlamaShape, config_json, tensor_shapes
from tests.helpers.shard_plans import layers_of

Values = dict[str, torch.Tensor]
ALONE = {"no_dist": True} if "no_dist" in inspect.signature(torch_dcp.save).parameters else {}
"""What tells torch's DCP that there is one process; older ones see that by themselves."""


def values_of(shape: LlamaShape, dtype: torch.dtype = torch.bfloat16) -> Values:
    """Random tensors of a model, in its order."""
    generator = torch.Generator().manual_seed(shape.seed)
    return {name: torch.randn(size, generator=generator).to(dtype) for name, size in tensor_shapes(shape).items()}


def rules_of(shape: LlamaShape, values: Values) -> list[TensorRule]:
    """Its rules, with the dtypes of the values."""
    return expected_rules(config_json(shape), lambda name: dtype_name(values[name].dtype), has=values.__contains__)


def plan_of(rules: list[TensorRule], **parallelism: int) -> ShardPlan:
    return build_shard_plan(rules, Parallelism(**parallelism), layers=layers_of(rules))


def write(module: ModuleType, directory: Path, plan: ShardPlan, config: dict[str, Any], values: Values) -> None:
    """A checkpoint of the format, every tensor written in two pieces where it has rows."""
    directory.mkdir(parents=True, exist_ok=True)
    layout = module.lay_out(plan, config, max_shard_bytes=1 << 30)
    layout.create(directory)
    with Writer(layout, directory) as writer:
        for name, value in values.items():
            if value.dim() and len(value) > 1:
                cut = len(value) // 3 or 1
                rest = (0,) * (value.dim() - 1)
                writer.write(name, value[:cut])
                writer.write(name, value[cut:], offset=(cut, *rest))
            else:
                writer.write(name, value)
    for name, content in module.side_files(plan, config, layout).items():
        (directory / name).write_bytes(content)


def read_all(checkpoint: Checkpoint) -> Values:
    with Reader(checkpoint) as reader:
        return {name: reader.read(info) for name, info in checkpoint.infos.items()}


def assert_same(found: Values, values: Values) -> None:
    """The same names, dtypes, shapes and bits."""
    assert set(found) == set(values)
    for name, value in values.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (found[name], value))
        assert torch.equal(a, b), name
