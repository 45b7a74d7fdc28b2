"""Reading what an engine's own files hold: the model's tensors are worked out from its config.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelexport.checkpoints.safetensors.arrays import Array
from modelexport.checkpoints.safetensors.header import Header, TensorInfo
from modelexport.checkpoints.safetensors.reader import Checkpoint
from modelexport.checkpoints.safetensors.sharded import Found, bind, stored_parts
from modelexport.errors import CheckpointError, PlanError
from modelexport.sharding.plan import Parallelism
from modelexport.sharding.rules import TensorRule
from modelexport.sharding.shard_plan import ShardPlan, build_shard_plan

Rules = Callable[..., list[TensorRule]]


def open_arrays(
    directory: Path,
    config: dict[str, Any],
    rules: Rules,
    found: Found,
    *,
    parallelism: Parallelism,
    arrays: Callable[[ShardPlan, dict[str, Any]], list[Array]],
    dtype_of: Callable[[TensorRule, TensorInfo], str],
    format_name: str,
    headers: Mapping[Path, Header],
) -> Checkpoint:
    """Bind the arrays that a model of this config.json has at this parallelism to those that are there.

    Args:
        config: the model's own config.json, of Hugging Face's keys.
        rules: config.json's content, dtypes -> the model's tensors, as :func:`modelexport.models.rules.expected_rules`.
        found: what is there.
        parallelism: that the files are cut for.
        arrays: the format's.
        dtype_of: a tensor's dtype, from its rule and an array that holds a part of it.

    Raises:
        CheckpointError: config.json does not suit the files; arrays are missing, unknown, or of another dtype or
            shape.
    """
    # Before any loop over a number that a stranger wrote: each layer has arrays, each expert a row of a stack.
    there = sum(len(infos) for infos in found.values())
    rows = max((info.shape[0] for infos in found.values() for info in infos.values() if info.shape), default=0)
    limits = (("num_hidden_layers", there, "arrays"), ("num_local_experts", rows * parallelism.tp, "rows in any array"))
    for key, most, what in limits:
        number = config.get(key)
        if isinstance(number, int) and number > most:
            raise CheckpointError(f"{directory}: config.json says {key} {number}, but there are only {most} {what}")
    try:
        everything = _arrays(rules(config, "BF16", has=lambda name: True), parallelism, arrays, config)
        parts = stored_parts(everything, found)
        usual = _usual(parts.values())
        model = [
            replace(rule, dtype=dtype_of(rule, parts[rule.name])) if rule.name in parts else rule
            for rule in rules(config, usual, has=parts.__contains__)
        ]
        wanted = _arrays(model, parallelism, arrays, config)
    except PlanError as error:
        raise CheckpointError(
            f"{directory}: its files are for {parallelism}, but by its config.json {error}"
        ) from error
    return bind(directory, wanted, found, model, config=config, format_name=format_name, headers=headers)


def _arrays(
    rules: Sequence[TensorRule],
    parallelism: Parallelism,
    arrays: Callable[[ShardPlan, dict[str, Any]], list[Array]],
    config: dict[str, Any],
) -> list[Array]:
    layers = 1 + max((rule.layer for rule in rules if rule.layer is not None), default=-1)
    return arrays(build_shard_plan(rules, parallelism, layers=layers), config)


def _usual(infos: Iterable[TensorInfo]) -> str:
    """The dtype that most arrays have, for those that are missing: the error is then about what is wrong."""
    counts = Counter(info.dtype for info in infos)
    return counts.most_common(1)[0][0] if counts else "BF16"
