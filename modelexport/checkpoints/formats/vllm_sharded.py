"""vLLM's sharded state: each rank's parameters as the engine holds them, loaded with ``load_format="sharded_state"``.

Follows ``ShardedStateLoader`` of vLLM 0.32: files ``model-rank-{rank}-part-{part}.safetensors`` hold the parameters by
their names in the engine, config.json and tokenizer are those of a Hugging Face checkpoint. The engine

- joins q, k and v, and gate and up;
- stacks experts as w13 (gate, then up) and w2, in a module that 0.32 calls ``routed_experts`` (earlier versions have
  the two a level higher, which is read as well);
- fills the vocabulary up to a multiple of 64 before it cuts it;
- of parameters that share memory (tied embeddings) stores and wants the one whose name comes first, ``lm_head.weight``;
- wants the attention's scales, which are 1.

What it stores of a quantised model is what its kernels have made of the weights on one kind of device: such models are
refused. So are pipeline stages: versions before 0.32 store them over each other, and it deals layers out by a rule of
its own.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelexport.checkpoints.engine_reading import Rules, open_arrays
from modelexport.checkpoints.fused_arrays import Engine, Slot, check_plain, check_type, rank_arrays
from modelexport.checkpoints.safetensors.arrays import Array
from modelexport.checkpoints.safetensors.header import Header, TensorInfo, read_header
from modelexport.checkpoints.safetensors.layout import DEFAULT_MAX_SHARD_BYTES, Layout
from modelexport.checkpoints.safetensors.reader import Checkpoint
from modelexport.checkpoints.safetensors.sharded import Constant, divide, raise_problems
from modelexport.checkpoints.safetensors.sharded import lay_out as lay_out_files
from modelexport.errors import CheckpointError, PlanError
from modelexport.sharding.plan import Parallelism
from modelexport.sharding.shard_plan import ShardPlan
from modelexport.system.small_files import LARGEST_CONFIG, has_file, read_json

NAME = "vllm-sharded"
DESCRIPTION = 'vLLM\'s load_format="sharded_state"'
HUB_TAG = "vllm"
HOLDS_QUANTISED = False
SIDE_FILES = ()
VOCABULARY_UNIT = 64
_TYPES = frozenset({"llama", "mistral", "mixtral", "phi3", "qwen2"})
_FILE = re.compile(r"model-rank-(\d{1,6})-part-(\d{1,6})\.safetensors")
_LAYER = "model.layers.{layer}."
_SCALES = ("k", "v", "q", "prob")
_EXPERTS = _LAYER + "block_sparse_moe.experts.routed_experts."
_SLOTS = {
    "embedding": Slot("model.embed_tokens.{parameter}"),
    "attention.norm": Slot(_LAYER + "input_layernorm.{parameter}"),
    "attention.q": Slot(_LAYER + "self_attn.qkv_proj.{parameter}", 0),
    "attention.k": Slot(_LAYER + "self_attn.qkv_proj.{parameter}", 1),
    "attention.v": Slot(_LAYER + "self_attn.qkv_proj.{parameter}", 2),
    "attention.o": Slot(_LAYER + "self_attn.o_proj.{parameter}"),
    "mlp.norm": Slot(_LAYER + "post_attention_layernorm.{parameter}"),
    "mlp.gate": Slot(_LAYER + "mlp.gate_up_proj.{parameter}", 0),
    "mlp.up": Slot(_LAYER + "mlp.gate_up_proj.{parameter}", 1),
    "mlp.down": Slot(_LAYER + "mlp.down_proj.{parameter}"),
    "router": Slot(_LAYER + "block_sparse_moe.gate.{parameter}"),
    "expert.gate": Slot(_EXPERTS + "w13_{parameter}", 0),
    "expert.up": Slot(_EXPERTS + "w13_{parameter}", 1),
    "expert.down": Slot(_EXPERTS + "w2_{parameter}"),
    "final_norm": Slot("model.norm.{parameter}"),
    "head": Slot("lm_head.{parameter}"),
}
_ENGINE = Engine(slots=_SLOTS, padded_vocabulary=lambda size, tp: _padded(size), tied="head")


def _padded(vocabulary: int) -> int:
    return -(-vocabulary // VOCABULARY_UNIT) * VOCABULARY_UNIT


def arrays(plan: ShardPlan, config: dict[str, Any]) -> list[Array]:
    """The parameters of every rank; ``file`` is the rank's number, :func:`lay_out` names the files.

    Raises:
        PlanError: the format cannot hold the model, or not cut so; everything that stands in the way.
    """
    grid = plan.parallelism
    check_plain(
        plan.rules.values(),
        NAME,
        _SLOTS,
        "vLLM stores what its kernels have made of them, which depends on the device. Write --format hf and let vLLM "
        f"cut it: --tensor-parallel-size {grid.tp}",
    )
    check_type(config, NAME, _TYPES)
    problems = []
    if grid.pp > 1:
        problems.append(f"pp is {grid.pp}, and vLLM loads sharded state without pipeline stages; use --pp 1")
    if grid.ep not in (1, grid.tp):
        problems.append(
            f"ep is {grid.ep}: vLLM spreads experts over all tp ranks or none; use "
            f"{' or '.join(dict.fromkeys(('1', str(grid.tp))))}"
        )
    problems += [
        f"{rule.name}: its {rule.shape[0]} rows are filled up to {_padded(rule.shape[0])}, which {grid.tp} ranks "
        "cannot share equally"
        for rule in plan.rules.values()
        if rule.role in ("embedding", "head") and _padded(rule.shape[0]) % grid.tp
    ]
    if problems:
        raise PlanError(f"--format {NAME}: {'; '.join(problems)}")
    found = rank_arrays(plan, _ENGINE, lambda tp, stage: str(tp))
    scales = [
        f"{_LAYER.format(layer=layer)}self_attn.attn._{kind}_scale" for layer in range(plan.layers) for kind in _SCALES
    ]
    what = "a scale of vLLM's attention, 1 where nothing is quantised"
    one = struct.pack("<f", 1.0)
    return found + [Constant(str(tp), name, "F32", (), (), None, one, what) for tp in range(grid.tp) for name in scales]


def lay_out(plan: ShardPlan, config: dict[str, Any], *, max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES) -> Layout:
    """Returns the layout: the files, and the place of every tensor in them.

    Raises:
        PlanError: as :func:`arrays`.
    """

    def name(rank: str, part: int, parts: int) -> str:
        return f"model-rank-{rank}-part-{part}.safetensors"

    return lay_out_files(divide(arrays(plan, config), max_bytes=max_shard_bytes, name=name), plan.rules.values())


def side_files(plan: ShardPlan, config: dict[str, Any], layout: Layout) -> Mapping[str, bytes]:
    """None: config.json is the model's own."""
    return {}


def recognises(directory: Path) -> bool:
    """Returns whether a directory has files of that name: nothing else tells the format."""
    return any(_FILE.fullmatch(name) for name in os.listdir(directory))


def open(directory: Path, config: dict[str, Any] | None, rules: Rules) -> Checkpoint:  # as in every format module
    """Open what :func:`lay_out`, or vLLM's ``save_sharded_state`` on a GPU, wrote of an unquantised model.

    Args:
        config: config.json's content, where the directory's own is not to be taken.
        rules: as :func:`modelexport.models.rules.expected_rules`.

    Raises:
        CheckpointError: config.json is missing, files are missing or damaged, or they do not hold the model that
            config.json describes; everything that is wrong.
    """
    if config is None:
        if not has_file(directory, "config.json"):
            raise CheckpointError(
                f"{directory} has no config.json; give --config DIR, the directory or file of the model's config.json"
            )
        config = read_json(directory / "config.json", largest=LARGEST_CONFIG)
    headers, found = _read_files(directory)
    parallelism = Parallelism(len(found), 1, _expert_groups(found, config))
    _check_ranks(directory, found, config)
    return open_arrays(
        directory,
        config,
        rules,
        found,
        parallelism=parallelism,
        arrays=arrays,
        dtype_of=lambda rule, info: info.dtype,
        format_name=NAME,
        headers=headers,
    )


def _read_files(directory: Path) -> tuple[dict[Path, Header], dict[str, dict[str, TensorInfo]]]:
    """Every file's header, and each rank's arrays."""
    problems: list[str] = []
    headers: dict[Path, Header] = {}
    found: dict[str, dict[str, TensorInfo]] = {}
    parts: dict[str, set[int]] = {}
    for name in sorted(os.listdir(directory)):
        match = _FILE.fullmatch(name)
        if match is None:
            continue
        rank = str(int(match[1]))
        parts.setdefault(rank, set()).add(int(match[2]))
        arrays_there = found.setdefault(rank, {})
        try:
            headers[directory / name] = header = read_header(directory / name)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for array, info in header.infos.items():
            known = _current_name(array)
            if known in arrays_there:
                problems.append(f"{name}: {array} is also in {arrays_there[known].path.name}")
            arrays_there[known] = info
    ranks = max(map(int, found), default=-1) + 1
    lost = [f"model-rank-{rank}-part-0.safetensors" for rank in range(ranks) if 0 not in parts.get(str(rank), ())]
    for rank, numbers in parts.items():
        gaps = sorted(set(range(1, max(numbers))) - numbers)
        lost += [f"model-rank-{rank}-part-{part}.safetensors" for part in gaps]
    problems += [f"{name} is missing" for name in lost]
    raise_problems(directory, problems)
    return headers, found


def _current_name(array: str) -> str:
    """A parameter's name in vLLM 0.32, from that in it or in an earlier version."""
    for stack in ("w13_", "w2_"):
        array = array.replace(f".experts.{stack}", f".experts.routed_experts.{stack}")
    return array


def _expert_groups(found: Mapping[str, Mapping[str, TensorInfo]], config: Mapping[str, Any]) -> int:
    """The ep that the experts are stacked for: ranks with a part of the experts have whole ones."""
    experts = config.get("num_local_experts")
    for infos in found.values():
        for name, info in infos.items():
            if name.endswith("experts.routed_experts.w2_weight") and len(info.shape) == 3 and isinstance(experts, int):
                return len(found) if 0 < info.shape[0] < experts else 1
    return 1


def _check_ranks(directory: Path, found: Mapping[str, Mapping[str, TensorInfo]], config: Mapping[str, Any]) -> None:
    """That the last ranks' files were not copied along shows in the rows of the vocabulary."""
    vocabulary = config.get("vocab_size")
    if not isinstance(vocabulary, int):
        return
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        info = next((infos[name] for infos in found.values() if name in infos), None)
        if info is not None and info.shape and info.shape[0]:
            ranks, rest = divmod(_padded(vocabulary), info.shape[0])
            if not rest and ranks > len(found):
                raise CheckpointError(
                    f"{directory}: {name} has {info.shape[0]} of {_padded(vocabulary)} rows in each rank's files, so "
                    f"there are {ranks} ranks, but files of {len(found)}; those of the last {ranks - len(found)} are "
                    "missing"
                )
