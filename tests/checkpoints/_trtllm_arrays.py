"""Quantised models of random bytes, and a rank's arrays of them put together by numpy from the format's description."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from modelexport.checkpoints.formats.trtllm.quantized import with_cache
from modelexport.checkpoints.safetensors.file import torch_dtype
from modelexport.models.rules import expected_rules
from tests.helpers.format_models import Model
from tests.helpers.models import headers_only

Matrix = npt.NDArray[Any]
ENTRIES: dict[str, dict[str, Any]] = {
    "FP8": {},
    "FP8_PER_CHANNEL_PER_TOKEN": {},
    "W8A8_SQ_PER_CHANNEL": {},
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": {},
    "W4A16_AWQ": {"group_size": 64, "has_zero_point": False, "pre_quant_scale": False},
    "NVFP4": {"group_size": 16},
}
SHAPE = {"hidden": 256, "intermediate": 512, "heads": 8, "kv_heads": 2, "layers": 4}
NAMES = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}


def quantised(algo: str, *, cache: bool = False, keep: tuple[str, ...] = (), **shape: Any) -> Model:
    """A model of random bytes; what the engine joins has one number where it has numbers."""
    config = dict(headers_only(**{**SHAPE, **shape}).config or {})
    routers = [f"model.layers.{i}.block_sparse_moe.gate" for i in range(config["num_hidden_layers"])]
    config["quantization_config"] = {
        "quant_method": "trtllm",
        "quant_algo": algo,
        "kv_cache_quant_algo": "FP8" if cache else None,
        **ENTRIES[algo],
        "ignore": ["lm_head", *keep, *(routers if config["model_type"] == "mixtral" else [])],
    }
    rules = with_cache(expected_rules)(config, "BF16")
    generator = torch.Generator().manual_seed(len(rules))
    values: dict[str, torch.Tensor] = {}
    for rule in rules:
        dtype, count = torch_dtype(rule.dtype), math.prod(rule.shape)
        if count == 1:
            group = f"{rule.layer} {rule.role.split('.')[0]} {rule.role[-1] in 'onw'} {rule.parameter}"
            if rule.expert is not None and rule.parameter.startswith("weights"):
                group += str(rule.expert)
            number = (sum(map(ord, group)) % 1009 + 1) / 1024 if rule.parameter not in ("k_scale", "v_scale") else None
            made = torch.rand(1, generator=generator) if number is None else torch.tensor([number])
            values[rule.name] = made.reshape(rule.shape)
        elif dtype in (torch.bfloat16, torch.float32):
            values[rule.name] = torch.rand(count, generator=generator).to(dtype).view(rule.shape)
        else:
            noise = torch.randint(1, 120, (count,), generator=generator, dtype=torch.uint8)
            values[rule.name] = noise.view(dtype).view(rule.shape)
    return Model(config, rules, values)


def raw(tensor: torch.Tensor) -> Matrix:
    """The same numbers as integers, which numpy has for every dtype."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
    return tensor.reshape(-1).view(words).numpy().reshape(tuple(tensor.shape))


def along(name: str, value: Matrix, column: bool) -> int | None:
    """By which dim a linear's array goes with the output features, or else with the inputs."""
    if value.size == 1:
        return None
    if name == "per_channel_scale" or (name == "weights_scaling_factor" and value.ndim == 1):
        return value.ndim - 1 if column else None
    return 0 if column else 1


def piece(name: str, value: Matrix, column: bool, tp: int, at: int, heads: int = 0) -> Matrix:
    """A rank's part of a linear's array; heads are repeated where there are fewer of them than ranks."""
    axis = along(name, value, column)
    if axis is None:
        return value
    if heads and heads < tp:
        blocks = np.split(value, heads, axis=axis)
        return blocks[at * heads // tp]
    return np.split(value, tp, axis=axis)[at]


def joined(name: str, pieces: list[Matrix]) -> Matrix:
    axis = along(name, pieces[0], True)
    if axis is None:
        assert all(np.array_equal(each, pieces[0]) for each in pieces)
        return pieces[0]
    return np.concatenate(pieces, axis=axis)


def of_module(model: Model, module: str) -> dict[str, Matrix]:
    """A module's arrays by suffix."""
    start = f"{module}."
    return {
        n.removeprefix(start): raw(v)
        for n, v in model.values.items()
        if n.startswith(start) and "." not in n[len(start) :]
    }


def rank_arrays(model: Model, rank: int, tp: int, pp: int, ep: int = 1) -> dict[str, Matrix]:
    """The linears of a rank's file."""
    at, stage = rank % tp, rank // tp
    config, found = model.config, {}
    counts = {
        "q": config["num_attention_heads"],
        "k": config["num_key_value_heads"],
        "v": config["num_key_value_heads"],
    }
    for local, layer in enumerate(np.array_split(np.arange(config["num_hidden_layers"]), pp)[stage].tolist()):
        ours, theirs = f"model.layers.{layer}", f"transformer.layers.{local}"
        qkv = {n: of_module(model, f"{ours}.{NAMES[n]}") for n in "qkv"}
        for suffix in qkv["q"]:
            parts = [piece(suffix, qkv[n][suffix], True, tp, at, counts[n]) for n in "qkv"]
            found[f"{theirs}.attention.qkv.{suffix}"] = joined(suffix, parts)
        rest = [("attention.dense", f"{ours}.{NAMES['o']}", False)]
        if config["model_type"] == "mixtral":
            found.update(experts(model, layer, theirs, (at, tp, ep)))
        else:
            for own, name, column in (
                ("fc", "gate_proj", True),
                ("gate", "up_proj", True),
                ("proj", "down_proj", False),
            ):
                rest.append((f"mlp.{own}", f"{ours}.mlp.{name}", column))
        for own, module, column in rest:
            for suffix, value in of_module(model, module).items():
                found[f"{theirs}.{own}.{suffix}"] = piece(suffix, value, column, tp, at)
        for kind in "kv":
            scale = model.values.get(f"{ours}.self_attn.{kind}_scale")
            if scale is not None:
                found[f"{theirs}.attention.{kind}_cache_scaling_factor"] = raw(scale)
    return found


def experts(model: Model, layer: int, theirs: str, rank: tuple[int, int, int]) -> dict[str, Matrix]:
    """Up and gate below each other, one expert behind the other; the scale of the inputs is that of all of them."""
    at, tp, ep = rank
    count = model.config["num_local_experts"]
    mine = range(at % ep * count // ep, (at % ep + 1) * count // ep)
    found: dict[str, Matrix] = {}
    for own, parts, column in (("fc", ("w3", "w1"), True), ("proj", ("w2",), False)):
        stacks: dict[str, list[Matrix]] = {}
        for expert in mine:
            tensors = [of_module(model, f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{w}") for w in parts]
            for suffix in tensors[0]:
                cut = [piece(suffix, each[suffix], column, tp // ep, at // ep) for each in tensors]
                stacks.setdefault(suffix, []).append(joined(suffix, cut) if column else cut[0])
        for suffix, stack in stacks.items():
            whole = stack[0].reshape(1) if suffix == "activation_scaling_factor" else np.stack(stack)
            found[f"{theirs}.mlp.{own}.{suffix}"] = whole
    return found
