"""Quantised models in TensorRT-LLM's checkpoints: what its config.json says of them, and what it wants beside them.

Follows TensorRT-LLM's ``QuantConfig`` and ``preprocess_weights`` (``models/modeling_utils.py``), ``quantize_layers``
and ``smooth_quantize`` (``quantization/quantize.py``), and the parameters of ``quantization/layers.py`` and
``layers/moe.py``; names and shapes of a linear's own tensors are those of
:mod:`modelexport.quantization.methods.trtllm`.

- q, k and v have one number where they have a number (a scale of the whole weight, of the inputs); so have an expert's
  gate and up projections, and the inputs of all of a layer's experts.
- The engine wants arrays that say nothing of a model whose inputs are not smoothed: ``prequant_scaling_factor``
  ``[in]`` of W8A8_SQ_PER_CHANNEL in the model's dtype, ``smoother`` ``[1, in]`` and the norms' ``scale_to_int``
  ``[1]`` of W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN in float32: all of them 1.
- The scales of cached keys and values are ``attention.k_cache_scaling_factor`` and ``v_cache_scaling_factor`` ``[1]``,
  of which TensorRT-LLM (from 0.18) takes the larger; earlier versions want that one, ``kv_cache_scaling_factor``,
  which is read as both.
- ``exclude_modules`` are shell wildcards for the names of a rank's own modules, whose layers count from 0.
"""

from __future__ import annotations

import fnmatch
import math
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from modelexport.checkpoints import raw_io
from modelexport.checkpoints.engine_reading import Rules
from modelexport.checkpoints.safetensors.arrays import Array
from modelexport.checkpoints.safetensors.header import TensorInfo
from modelexport.checkpoints.safetensors.placement import itemsize
from modelexport.checkpoints.safetensors.reader import Checkpoint, Reader
from modelexport.checkpoints.safetensors.sharded import Constant, Found, Widened, raise_problems
from modelexport.errors import CheckpointError, PlanError, quoted, shown
from modelexport.sharding.boxes import whole
from modelexport.sharding.plan import Parallelism
from modelexport.sharding.rules import TensorRule
from modelexport.sharding.shard_plan import ShardPlan, build_shard_plan
from modelexport.system.dtypes import FLOATS
from modelexport.system.json_values import JsonValues
from modelexport.system.small_files import open_regular

METHOD = "trtllm"  # the quantisation method whose encoding this is
CACHE = {"k_scale": "k_cache_scaling_factor", "v_scale": "v_cache_scaling_factor"}
OLD_CACHE = "kv_cache_scaling_factor"
PARAMETERS = (
    "weight",
    "bias",
    "weights_scaling_factor",
    "weights_scaling_factor_2",
    "activation_scaling_factor",
    "per_channel_scale",
    *CACHE,
)
NUMBERS = ("weights_scaling_factor", "weights_scaling_factor_2", "activation_scaling_factor")
# quantize_layers takes these; the others replace whole attentions and MLPs, and know neither experts nor exceptions.
_BY_LINEAR = ("FP8", "W8A8_SQ_PER_CHANNEL", "W4A16_AWQ", "NVFP4")
_OF_EXPERTS = ("FP8", "W4A16_AWQ", "NVFP4")
_ALWAYS_EXCLUDED = ["lm_head", "transformer.vocab_embedding"]
_DEFAULT_EXCLUDED = ("*lm_head", "*router", "*vocab_embedding", "*position_embedding", "*shared_expert_gate")
_SMOOTHING = ("prequant_scaling_factor", "smoother")
_ONES = {"BF16": b"\x80\x3f", "F16": b"\x00\x3c", "F32": struct.pack("<f", 1.0)}

Names = Callable[[TensorRule], Collection[str]]
"""The names of the engine's modules that a tensor is a part of, as its rank counts layers."""


def entry(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The entry on quantisation of TensorRT-LLM's config.json; None where nothing is quantised.

    Raises:
        PlanError: it is quantised, and spelled in another way.
    """
    found = config.get("quantization_config")
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else None
    if method != METHOD:
        raise PlanError(
            f"--format trtllm: the model is quantised, in the spelling of quant_method '{shown(method)}'; modelexport "
            "convert CKPT --format trtllm writes the same numbers in TensorRT-LLM's, --format hf and dcp keep them"
        )
    return found


def check(rules: Iterable[TensorRule], config: Mapping[str, Any]) -> None:
    """Refuse quantised tensors that TensorRT-LLM has no place for.

    Raises:
        PlanError: there are any.
    """
    said = entry(config)
    algo = None if said is None else said.get("quant_algo")
    rules = list(rules)
    odd = [r for r in rules if r.parameter not in PARAMETERS or (algo is None and r.dtype not in (*FLOATS, "F64"))]
    if odd:
        raise PlanError(
            f"--format trtllm: {len(odd)} tensors are quantised in a way that config.json does not say, the first "
            f"{odd[0].name}, {odd[0].dtype}; --format hf and --format dcp keep what is there"
        )
    heads = [rule for rule in rules if rule.role in ("head", "embedding") and _is_quantised(rule)]
    if heads:
        raise PlanError(
            f"--format trtllm: {heads[0].module} is quantised, and is written as it is only, since its rows are filled "
            "up for the ranks; leave it out of --quant"
        )
    experts = [rule for rule in rules if rule.expert is not None and _is_quantised(rule)]
    if experts and algo not in _OF_EXPERTS:
        raise PlanError(
            f"--format trtllm: TensorRT-LLM's mixtures of experts know no {algo}, of which {experts[0].module} is; "
            "choose --quant fp8-static, nvfp4 or int4, or leave experts out"
        )


def _is_quantised(rule: TensorRule) -> bool:
    return rule.dtype not in FLOATS if rule.parameter == "weight" else rule.parameter not in ("bias", *CACHE)


def constants(arrays: Sequence[Array], config: Mapping[str, Any], dtype: str) -> list[Array]:
    """The arrays of ones that the engine wants beside those of the model.

    Args:
        dtype: the model's.
    """
    algo = (entry(config) or {}).get("quant_algo")
    found: list[Array] = []
    for array in arrays:
        module, _, parameter = array.name.rpartition(".")
        if parameter != "weight" or isinstance(array, Widened):
            continue
        if array.dtype == "I8" and algo == "W8A8_SQ_PER_CHANNEL":
            found.append(_ones(array.file, f"{module}.prequant_scaling_factor", dtype, (array.shape[-1],)))
        elif algo == "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN":
            if array.dtype == "I8" and module.endswith((".attention.dense", ".mlp.proj")):
                found.append(_ones(array.file, f"{module}.smoother", "F32", (1, array.shape[-1])))
            elif module.endswith((".input_layernorm", ".post_layernorm")):
                found.append(_ones(array.file, f"{module}.scale_to_int", "F32", (1,)))
    return found


def _ones(file: str, name: str, dtype: str, shape: tuple[int, ...]) -> Constant:
    what = "what inputs are smoothed by: 1, they are not"
    return Constant(file, name, dtype, shape, (), None, _ONES[dtype] * shape[-1], what)


def quantization(plan: ShardPlan, config: Mapping[str, Any], names: Names) -> dict[str, Any] | None:
    """The ``quantization`` of TensorRT-LLM's config.json; None where nothing is quantised.

    Raises:
        PlanError: a module is kept that TensorRT-LLM cannot leave out.
    """
    said = entry(config)
    if said is None:
        return None
    found = {key: value for key, value in said.items() if key not in ("quant_method", "ignore")}
    algo = said.get("quant_algo")
    if algo is None:
        return found
    weights = [r for r in plan.rules.values() if r.parameter == "weight" and r.layer is not None and len(r.shape) == 2]
    kept = [rule for rule in weights if not _is_quantised(rule) and rule.role != "router"]
    if kept and algo not in _BY_LINEAR:
        raise PlanError(
            f"--format trtllm: {kept[0].module} is not quantised, and TensorRT-LLM's {algo} leaves out no single "
            "module of a layer; quantise all of them, or choose --quant fp8-static, int8-static, int4 or nvfp4"
        )
    of_kept = {name: rule.module for rule in kept for name in names(rule)}
    of_others = {name: rule.module for rule in weights if _is_quantised(rule) for name in names(rule)}
    both = sorted(of_kept.keys() & of_others.keys())
    if both:
        raise PlanError(
            f"--format trtllm: {of_kept[both[0]]} is not quantised and {of_others[both[0]]} is, but both are {both[0]} "
            f"to TensorRT-LLM (with {plan.parallelism}): quantise both or neither"
        )
    routers = ["*.mlp.router"] if any(rule.role == "router" for rule in plan.rules.values()) else []
    return {**found, "exclude_modules": [*_ALWAYS_EXCLUDED, *routers, *dict.fromkeys(of_kept)]}


def quantization_config(
    engine: Mapping[str, Any],
    config: dict[str, Any],
    rules: Rules,
    parallelism: Parallelism,
    names: Callable[..., Names],
) -> dict[str, Any] | None:
    """``quantization_config`` for the model's config.json, from TensorRT-LLM's; None where nothing is quantised.

    Args:
        config: the model's config.json.
        names: from a plan, what its modules are called.

    Raises:
        CheckpointError: ``quantization`` is no object or has values of the wrong kind, or contradicts what the model's
            config.json says.
    """
    read = JsonValues(engine).object("quantization")
    said, own = read.content, JsonValues(config, "the model's config.json").object("quantization_config").content
    if own.get("quant_method") == METHOD:
        differs = [key for key in ("quant_algo", "kv_cache_quant_algo") if own.get(key) != said.get(key)]
        if differs:
            key = differs[0]
            theirs, ours = quoted(said.get(key)), quoted(own.get(key))
            raise CheckpointError(f"{key} is {theirs} in config.json, {ours} in the model's")
        return dict(own)
    if not said.get("quant_algo") and not said.get("kv_cache_quant_algo"):
        return None
    patterns = read.texts("exclude_modules")
    patterns = _DEFAULT_EXCLUDED if patterns is None else patterns
    plain = rules({key: value for key, value in config.items() if key != "quantization_config"}, "BF16")
    layers = 1 + max((rule.layer for rule in plain if rule.layer is not None), default=-1)
    called = names(build_shard_plan(plain, parallelism, layers=layers))
    ignore = ["lm_head"] if _excluded(patterns, ["lm_head"]) else []
    weights = (r for r in plain if r.parameter == "weight" and len(r.shape) == 2 and r.role != "embedding")
    ignore += [rule.module for rule in weights if _excluded(patterns, called(rule))]
    kept = {key: value for key, value in said.items() if key != "exclude_modules"}
    return {"quant_method": METHOD, **kept, "ignore": list(dict.fromkeys(ignore))}


def _excluded(patterns: Iterable[str], names: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in names)


def with_cache(rules: Rules) -> Rules:
    """The same rules, and those of the scales of cached keys and values where config.json says that there are any."""

    def found(config: dict[str, Any], dtypes: Any, **more: Any) -> list[TensorRule]:
        plain = rules(config, dtypes, **more)
        if not JsonValues(config).object("quantization_config").has("kv_cache_quant_algo"):
            return plain
        ordered: list[TensorRule] = []
        for number, rule in enumerate(plain):
            ordered.append(rule)
            if rule.layer is not None and (number + 1 == len(plain) or plain[number + 1].layer != rule.layer):
                ordered += _cache_rules(next(r for r in plain if r.layer == rule.layer and r.role in _ATTENTION))
        return ordered

    return found


_ATTENTION = ("attention.q", "attention.qkv")


def _cache_rules(attention: TensorRule) -> list[TensorRule]:
    module, path = attention.module.rpartition(".")[0], attention.path.rpartition(".")[0]
    return [
        TensorRule(
            name=f"{module}.{name}",
            dtype="F32",
            shape=(1,),
            module=module,
            path=path,
            parameter=name,
            role=f"attention.{name[0]}",
            layer=attention.layer,
        )
        for name in CACHE
    ]


def old_cache(found: Found) -> dict[str, Mapping[str, TensorInfo]]:
    """The same arrays, the one scale of keys and values that earlier versions want as both, where there is no other.

    Where there are all three, as modelopt writes them, the one is left out: it is the larger of the two.
    """
    changed: dict[str, Mapping[str, TensorInfo]] = {}
    for file, infos in found.items():
        own = dict(infos)
        for name, info in infos.items():
            prefix, _, parameter = name.rpartition(".")
            if parameter == OLD_CACHE:
                del own[name]
                for kind in CACHE.values():
                    own.setdefault(f"{prefix}.{kind}", info)
        changed[file] = own
    return changed


def check_smoothing(directory: Path, found: Found) -> None:
    """Refuse a checkpoint whose inputs are smoothed: no other format can say that.

    Raises:
        CheckpointError: one of the arrays that inputs are smoothed by holds anything but 1.
    """
    problems = []
    for infos in found.values():
        for name, info in infos.items():
            if name.endswith(_SMOOTHING) and info.dtype in _ONES:
                with open_regular(info.path) as stream:
                    stream.seek(info.offset)
                    content = stream.read(info.nbytes)
                one = _ONES[info.dtype]
                if content != one * (info.nbytes // len(one)):
                    problems.append(
                        f"{info.path.name}: {name} is not 1: its inputs are smoothed, which no other format can say; "
                        "give the checkpoint that this one was made from"
                    )
    raise_problems(directory, problems)


def check_numbers(groups: Iterable[tuple[str, Sequence[str]]], source: Checkpoint) -> None:
    """Refuse a source whose modules have different numbers where the engine has one.

    Args:
        groups: the engine's parameter, and the modules that share it.
        source: in whatever spelling: its numbers for the inputs or the weights are those whose names begin so.

    Raises:
        CheckpointError: some differ.
    """
    numbers: dict[str, list[TensorInfo]] = {}
    for info in source.infos.values():
        if math.prod(info.shape) == 1 and info.dtype in FLOATS:
            numbers.setdefault(info.name.rpartition(".")[0], []).append(info)
    differing = []
    with Reader(source) as reader:
        for parameter, modules in groups:
            kinds = ("activation", "input") if parameter.startswith("activation") else ("weight",)
            seen: dict[str, tuple[str, bytes]] = {}
            for info in (info for module in modules for info in numbers.get(module, ())):
                suffix = info.name.rpartition(".")[2]
                if suffix.startswith(kinds):
                    value = raw_io.empty(info.shape, itemsize(info))
                    reader.read_box(info, whole(info.shape), value)
                    first = seen.setdefault(suffix, (info.name, bytes(value.tobytes())))
                    if first[1] != bytes(value.tobytes()):
                        differing.append((first[0], info.name))
                        break
    if differing:
        one, other = differing[0]
        raise CheckpointError(
            f"{source.directory}: TensorRT-LLM has one number for modules that it joins, but {one} and {other} differ, "
            f"and so do those of {len(differing) - 1} other modules: write --format modelopt or hf, or quantise the "
            "unquantised model with --format trtllm"
        )
