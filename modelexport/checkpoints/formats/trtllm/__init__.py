"""TensorRT-LLM's checkpoint: config.json and ``rank{n}.safetensors``, n = tensor-parallel rank + stage * tp.

Follows TensorRT-LLM's own conversion of Llama, Qwen2, Mixtral and Phi-3 (``models/*/convert.py``, ``mapping.py``,
``layers/moe.py``), what ``trtllm-build --checkpoint_dir`` reads:

- q, k and v are joined on each rank; with fewer key/value heads than ranks, neighbours hold the same one;
- ``mlp.fc`` is the gate (what the activation is applied to) and ``mlp.gate`` the up projection; where both are one
  array (experts, Phi-3) the up projection comes first;
- a layer's experts are stacked ``[experts, out, in]``; the tensor-parallel ranks split into ep groups, the group
  running fastest; the router is float32 and whole;
- each stage counts its layers from 0; the first stages have one more where they differ;
- the head's rows, and with several ranks the embedding's, are filled up with zeros to a multiple of tp;
- tied embeddings are stored as both.

Of quantised models see :mod:`modelexport.checkpoints.formats.trtllm.quantized`.

Beside config.json, ours is ``hf_config.json``: the model's config.json in Hugging Face's keys, of which TensorRT-LLM's
lacks some (the tokens that end a text). Where it is missing, the reader derives what it needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from modelexport.checkpoints.engine_reading import Rules, open_arrays
from modelexport.checkpoints.formats.trtllm import quantized
from modelexport.checkpoints.formats.trtllm.config import engine_config, model_config, read_mapping
from modelexport.checkpoints.fused_arrays import Engine, Slot, check_roles, rank_arrays
from modelexport.checkpoints.safetensors.arrays import Array
from modelexport.checkpoints.safetensors.header import Header, TensorInfo, read_header
from modelexport.checkpoints.safetensors.layout import DEFAULT_MAX_SHARD_BYTES, Layout
from modelexport.checkpoints.safetensors.reader import Checkpoint
from modelexport.checkpoints.safetensors.sharded import lay_out as lay_out_files
from modelexport.checkpoints.safetensors.sharded import only_widened, raise_problems
from modelexport.errors import CheckpointError, PlanError
from modelexport.sharding.plan import Parallelism
from modelexport.sharding.rules import TensorRule
from modelexport.sharding.shard_plan import ShardPlan
from modelexport.system.small_files import LARGEST_CONFIG, has_file, read_json

NAME = "trtllm"
DESCRIPTION = "TensorRT-LLM's config.json and rankN.safetensors"
HUB_TAG = "tensorrt-llm"
SIDE_FILES = ("config.json", "hf_config.json")
MODEL_CONFIG = "hf_config.json"
_LAYER = "transformer.layers.{layer}."
_SLOTS = {
    "embedding": Slot("transformer.vocab_embedding.{parameter}"),
    "attention.norm": Slot(_LAYER + "input_layernorm.{parameter}"),
    "attention.q": Slot(_LAYER + "attention.qkv.{parameter}", 0),
    "attention.k": Slot(_LAYER + "attention.qkv.{parameter}", 1),
    "attention.v": Slot(_LAYER + "attention.qkv.{parameter}", 2),
    "attention.qkv": Slot(_LAYER + "attention.qkv.{parameter}"),  # what q, k and v have one of
    "attention.o": Slot(_LAYER + "attention.dense.{parameter}"),
    "mlp.norm": Slot(_LAYER + "post_layernorm.{parameter}"),
    "mlp.gate": Slot(_LAYER + "mlp.fc.{parameter}"),
    "mlp.up": Slot(_LAYER + "mlp.gate.{parameter}"),
    "mlp.down": Slot(_LAYER + "mlp.proj.{parameter}"),
    "router": Slot(_LAYER + "mlp.router.{parameter}"),
    "expert.up": Slot(_LAYER + "mlp.fc.{parameter}", 0),
    "expert.gate": Slot(_LAYER + "mlp.fc.{parameter}", 1),
    "expert.down": Slot(_LAYER + "mlp.proj.{parameter}"),
    "final_norm": Slot("transformer.ln_f.{parameter}"),
    "head": Slot("lm_head.{parameter}"),
}
_ENGINE = Engine(
    slots=_SLOTS,
    padded_vocabulary=lambda size, tp: -(-size // tp) * tp,
    local_layers=True,
    float32=frozenset({"router"}),
    parameters={ours: f"{_LAYER}attention.{theirs}" for ours, theirs in quantized.CACHE.items()},
    one_of_experts=frozenset({"activation_scaling_factor"}),
)
# Phi-3's MLP is one of gate and up on disk, and one in the engine.
_JOINED_MLP = {
    "mlp.up": Slot(_LAYER + "mlp.fc.{parameter}", 0),
    "mlp.gate": Slot(_LAYER + "mlp.fc.{parameter}", 1),
    "mlp.gate_up": Slot(_LAYER + "mlp.fc.{parameter}"),
}


def arrays(plan: ShardPlan, config: dict[str, Any], *, whole_embedding: bool = False) -> list[Array]:
    """The parameters of every rank.

    Args:
        whole_embedding: whether every rank holds the whole embedding, as TensorRT-LLM converts by default.

    Raises:
        PlanError: the format cannot hold the model, or not cut so; everything that stands in the way.
    """
    grid = plan.parallelism
    engine = replace(_engine(plan), whole_embedding=whole_embedding)
    check_roles(plan.rules.values(), NAME, engine.slots)
    quantized.check(plan.rules.values(), config)
    if grid.tp % grid.ep:
        raise PlanError(
            f"--format {NAME}: ep {grid.ep} does not divide tp {grid.tp}: TensorRT-LLM splits the tensor-parallel "
            "ranks into groups for the experts"
        )
    found = rank_arrays(plan, engine, lambda tp, stage: f"rank{tp + stage * grid.tp}.safetensors")
    dtype = next((rule.dtype for rule in plan.rules.values() if rule.role == "embedding"), "BF16")
    return found + quantized.constants(found, config, dtype)


def _engine(plan: ShardPlan) -> Engine:
    joined = any(rule.role == "mlp.gate_up" for rule in plan.rules.values())
    return replace(_ENGINE, slots=_SLOTS | _JOINED_MLP) if joined else _ENGINE


def _names(plan: ShardPlan) -> quantized.Names:
    """TensorRT-LLM's names of the modules of a plan: those of a mixture of experts are one."""
    engine = _engine(plan)

    def names(rule: TensorRule) -> set[str]:
        layer = rule.layer or 0
        if rule.layer is not None:
            layer -= plan.layers_of(plan.stage_of(layer)).start
        roles = {part.role for part in rule.parts} or {rule.role}
        slots = (engine.slots[role].array.format(layer=layer, parameter="") for role in roles if role in engine.slots)
        found = {slot.rstrip(".") for slot in slots}
        return found if rule.expert is None else {name.rpartition(".")[0] for name in found}

    return names


def lay_out(plan: ShardPlan, config: dict[str, Any], *, max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES) -> Layout:
    """Returns the layout: one file for each rank, however large.

    Raises:
        PlanError: as :func:`arrays`; or TensorRT-LLM's config.json has no place for what the model's says.
    """
    found = arrays(plan, config)
    _engine_config(plan, config)
    return lay_out_files(found, plan.rules.values())


def check_source(rules: Iterable[TensorRule], source: Checkpoint) -> None:
    """Refuse a source whose numbers differ where TensorRT-LLM has one: those of q, k and v, and of a layer's experts.

    Reads them. What is written would be the last of them, which reading back would find.

    Args:
        rules: of the tensors to be written.
        source: in whatever spelling.

    Raises:
        CheckpointError: some differ; says how many groups of them, and names the first two with their values.
    """
    groups: dict[tuple[str, int | None], dict[str, None]] = {}
    for rule in rules:
        if rule.dim is None and rule.parameter in quantized.NUMBERS and rule.role in _SLOTS:
            array = _SLOTS[rule.role].array.format(layer=rule.layer, parameter=rule.parameter)
            expert = None if rule.parameter in _ENGINE.one_of_experts else rule.expert
            groups.setdefault((array, expert), {})[rule.module] = None
    modules = [(array.rpartition(".")[2], tuple(group)) for (array, _), group in groups.items()]
    quantized.check_numbers(modules, source)


def side_files(plan: ShardPlan, config: dict[str, Any], layout: Layout) -> Mapping[str, bytes]:
    """config.json in TensorRT-LLM's keys, and the model's own as ``hf_config.json``."""
    return {"config.json": _json(_engine_config(plan, config)), MODEL_CONFIG: _json(config)}


def _engine_config(plan: ShardPlan, config: dict[str, Any]) -> dict[str, Any]:
    return engine_config(plan, config, quantized.quantization(plan, config, _names(plan)))


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def recognises(directory: Path) -> bool:
    """Returns whether a directory's config.json is TensorRT-LLM's."""
    try:
        config = read_json(directory / "config.json", largest=LARGEST_CONFIG)
    except CheckpointError:
        return False
    return isinstance(config.get("architecture"), str) and isinstance(config.get("mapping"), dict)


def open(directory: Path, config: dict[str, Any] | None, rules: Rules) -> Checkpoint:  # as in every format module
    """Open what :func:`lay_out`, TensorRT-LLM's own conversion of an unquantised model, or modelopt's export wrote.

    Args:
        config: the model's config.json in Hugging Face's keys, where what lies in the directory is not to be taken.
        rules: as :func:`modelexport.models.rules.expected_rules`.

    Raises:
        CheckpointError: a rank's file is missing or damaged, the model is quantised in a way that is not read, the
            model's config.json cannot be derived, or the files do not hold the model that it describes; everything
            that is wrong.
    """
    engine = read_json(directory / "config.json", largest=LARGEST_CONFIG)
    parallelism = read_mapping(directory, engine)
    if config is None:
        has_own = has_file(directory, MODEL_CONFIG)
        config = (
            read_json(directory / MODEL_CONFIG, largest=LARGEST_CONFIG) if has_own else model_config(directory, engine)
        )
    _check_configs(directory, engine, config)
    config = _with_quantization(directory, engine, config, rules, parallelism)
    headers: dict[Path, Header] = {}
    found: dict[str, Mapping[str, TensorInfo]] = {}
    problems = []
    for rank in range(parallelism.tp * parallelism.pp):
        path = directory / f"rank{rank}.safetensors"
        try:
            headers[path] = read_header(path)
            found[path.name] = headers[path].infos
        except CheckpointError as error:
            problems.append(str(error) if path.exists() else f"{path.name} is missing")
            if len(problems) > 100:  # a number that a stranger wrote
                break
    raise_problems(directory, problems)
    quantized.check_smoothing(directory, found)
    return open_arrays(
        directory,
        config,
        quantized.with_cache(rules),
        quantized.old_cache(found),
        parallelism=parallelism,
        arrays=partial(arrays, whole_embedding=not engine.get("use_parallel_embedding", False)),
        dtype_of=_dtype,
        format_name=NAME,
        headers=headers,
    )


def _with_quantization(
    directory: Path, engine: Mapping[str, Any], config: dict[str, Any], rules: Rules, parallelism: Parallelism
) -> dict[str, Any]:
    """The model's config.json with what TensorRT-LLM's says of quantisation."""
    try:
        said = quantized.quantization_config(engine, config, rules, parallelism, _names)
    except (CheckpointError, PlanError) as error:
        raise CheckpointError(f"{directory}: {error}") from error
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    return plain if said is None else {**plain, "quantization_config": said}


def _check_configs(directory: Path, engine: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """A config.json of another model would make errors about every array."""
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
    problems = [
        f"{key} is {engine[key]} in config.json, {config[key]} in the model's"
        for key in keys
        if key in engine and key in config and engine[key] != config[key]
    ]
    raise_problems(directory, problems)


def _dtype(rule: TensorRule, info: TensorInfo) -> str:
    """A router's dtype is bfloat16, if that is all that its float32 numbers hold. Routers are small: they are read."""
    if rule.role in _ENGINE.float32 and info.dtype == "F32" and only_widened(info):
        return "BF16"
    return info.dtype
