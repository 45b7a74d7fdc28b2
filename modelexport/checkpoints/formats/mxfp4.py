"""gpt-oss as it was published: experts of a layer in stacks of MXFP4 blocks, the rest in bfloat16.

https://huggingface.co/openai/gpt-oss-20b; the only quantised experts that vLLM's and transformers' classes of the type
read. ``mlp.experts.gate_up_proj_blocks`` is uint8 ``[experts, 2 * intermediate, hidden / 32, 16]`` with rows of gate
and up in turn, ``gate_up_proj_scales`` has the exponents of the blocks, ``gate_up_proj_bias`` the biases in the same
order; ``down_proj`` alike. Experts are written where they belong in the stacks as they are quantised, one by one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelexport.checkpoints.engine_reading import Rules
from modelexport.checkpoints.fused_arrays import check_type
from modelexport.checkpoints.safetensors.arrays import Array, Share
from modelexport.checkpoints.safetensors.layout import DEFAULT_MAX_SHARD_BYTES, Layout
from modelexport.checkpoints.safetensors.reader import INDEX_NAME, SINGLE_NAME, Checkpoint, open_checkpoint
from modelexport.checkpoints.safetensors.sharded import divide
from modelexport.checkpoints.safetensors.sharded import lay_out as lay_out_files
from modelexport.errors import PlanError
from modelexport.sharding.boxes import whole
from modelexport.sharding.rules import TensorRule
from modelexport.sharding.shard_plan import ShardPlan

NAME = "mxfp4"
DESCRIPTION = "gpt-oss as it was published: experts in stacks of MXFP4 blocks"
QUANT_METHOD = "mxfp4"
HUB_LIBRARY = "transformers"
HOLDS_UNQUANTISED = False
SIDE_FILES = ()
_TYPES = frozenset({"gpt_oss"})
_ENDINGS = {"blocks": "_blocks", "scales": "_scales", "bias": "_bias"}
_STACKS = {
    "expert.gate": ("gate_up_proj", 0, 2),
    "expert.up": ("gate_up_proj", 1, 2),
    "expert.down": ("down_proj", 0, 1),
}
"""Role of a linear -> the stack that it is in, which of the rows are its first, and how far the next ones are."""


def arrays(plan: ShardPlan, config: dict[str, Any]) -> list[Array]:
    """The arrays of the one file that :func:`lay_out` divides.

    Raises:
        PlanError: another type of model or several ranks; or other tensors than the experts' are quantised, or these
            are not.
    """
    check_type(config, NAME, _TYPES)
    if plan.parallelism.size > 1:
        raise PlanError(f"--format {NAME} is one set of files, which engines cut themselves: leave out --target-tp")
    stacks: dict[str, list[TensorRule]] = {}
    for rule in plan.rules.values():
        stacks.setdefault(_array_name(rule), []).append(rule)
    return [_array(name, rules) for name, rules in stacks.items()]


def _array_name(rule: TensorRule) -> str:
    """The array that a tensor is in: itself, but for an expert's.

    Raises:
        PlanError: it is quantised, and no expert's; or an expert's, and not quantised.
    """
    is_expert = rule.role in _STACKS and rule.expert is not None
    if is_expert != (rule.parameter in _ENDINGS and (is_expert or rule.parameter != "bias")):
        raise PlanError(
            f"--format {NAME}: {rule.name} is {'not ' if is_expert else ''}quantised, and of gpt-oss it is the experts "
            "that are: --quant '*experts*=mxfp4-wo,*=none'"
        )
    if not is_expert:
        return rule.name
    prefix = rule.module.partition(".experts.")[0]
    return f"{prefix}.experts.{_STACKS[rule.role][0]}{_ENDINGS[rule.parameter]}"


def _array(name: str, rules: list[TensorRule]) -> Array:
    first = rules[0]
    if first.expert is None:
        return Array("", name, first.dtype, first.shape, (Share(name, whole(first.shape), (0,) * len(first.shape)),))
    _, _, step = _STACKS[first.role]
    experts = len(rules) // step
    inner = (0,) * (len(first.shape) - 1)
    shares = tuple(
        Share(
            rule.name,
            whole(rule.shape),
            (rule.expert or 0, _STACKS[rule.role][1], *inner),
            (step, *(1 for _ in inner)),
        )
        for rule in rules
    )
    return Array("", name, first.dtype, (experts, step * first.shape[0], *first.shape[1:]), shares)


def lay_out(plan: ShardPlan, config: dict[str, Any], *, max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES) -> Layout:
    """Returns the layout: the files, and the place of every tensor in them.

    Raises:
        PlanError: as :func:`arrays`.
    """

    def name(_: str, part: int, parts: int) -> str:
        return SINGLE_NAME if parts == 1 else f"model-{part + 1:05d}-of-{parts:05d}.safetensors"

    return lay_out_files(divide(arrays(plan, config), max_bytes=max_shard_bytes, name=name), plan.rules.values())


def side_files(plan: ShardPlan, config: dict[str, Any], layout: Layout) -> Mapping[str, bytes]:
    """The index, where there are several files."""
    if len(layout.files) == 1:
        return {}
    infos = [info for file in layout.files for info in file.infos]
    index = {
        "metadata": {"total_size": sum(info.nbytes for info in infos)},
        "weight_map": {info.name: str(info.path) for info in infos},
    }
    return {INDEX_NAME: (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()}


def recognises(directory: Path) -> bool:
    """Returns False: it is opened as every checkpoint of Hugging Face's, whose quantisation config.json says."""
    return False


def open(directory: Path, config: dict[str, Any] | None, rules: Rules) -> Checkpoint:  # as in every format module
    """Open such a checkpoint: the stacks, as they are.

    Raises:
        CheckpointError: files are missing or damaged.
    """
    found = open_checkpoint(directory)
    return found if config is None else replace(found, config=config)
