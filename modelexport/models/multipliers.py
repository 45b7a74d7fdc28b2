"""Numbers of config.json that a model multiplies by as it computes, moved into its weights, for engines without them.

Falcon-H1 (Falcon LLM team, 2025; the multipliers are maximal update parametrisation's) scales the inputs and outputs of
its projections. Here each weight is multiplied as it is read, in float32, and rounded once to its dtype, as merging an
adapter rounds; config.json then says 1 everywhere, and the model computes the same but for that rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from modelexport.checkpoints.safetensors.file import Checkpoint, Reader, TensorInfo, torch_dtype
from modelexport.checkpoints.safetensors.reader import ComputedTensor
from modelexport.errors import PlanError
from modelexport.models.matching import ModelDescription
from modelexport.models.ties import untie
from modelexport.sharding.plan import Range
from modelexport.system.json_values import JsonValues

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MultipliedTensor", "multiplied"]

RowFactors = tuple[tuple[int, float], ...]
"""(rows, their factor) of the ranges of a weight's rows, from the first on; 0 rows: all that are left."""

_ONES = (
    *("attention_in_multiplier", "attention_out_multiplier", "key_multiplier"),
    *("ssm_in_multiplier", "ssm_out_multiplier", "embedding_multiplier", "lm_head_multiplier"),
)
_LISTS = {"mlp_multipliers": 2, "ssm_multipliers": 5}


@dataclass(frozen=True)
class MultipliedTensor:
    """A weight of a checkpoint times the factors of its rows.

    Attributes:
        info: the weight.
        base: it without them, where that is computed, too.
        factors: of its rows.
    """

    info: TensorInfo
    base: ComputedTensor | None
    factors: RowFactors

    @property
    def sources(self) -> Collection[TensorInfo]:
        """The tensors that it is computed from."""
        return (self.info,) if self.base is None else self.base.sources

    def read(self, reader: Reader, rows: Range, cols: Range, out: Tensor | None = None) -> Tensor:
        """Rows and columns of it, multiplied in float32 and rounded to its dtype.

        Raises:
            CheckpointError: a file cannot be read.
        """
        import torch

        if self.base is None:
            found = reader.read_stored(self.info, rows=rows, cols=cols if len(self.info.shape) > 1 else None)
        else:
            found = self.base.read(reader, rows, cols)
        out = torch.empty(found.shape, dtype=torch_dtype(self.info.dtype)) if out is None else out
        start = 0
        for count, factor in self.factors:
            stop = start + count if count else self.info.shape[0]
            own = slice(max(start, rows[0]) - rows[0], max(0, min(stop, rows[1]) - rows[0]))
            out[own] = found[own].float() * factor
            start = stop
        return out


def multiplied(checkpoint: Checkpoint) -> Checkpoint:
    """The model with its multipliers in its weights; a model without any is returned as it is.

    Raises:
        CheckpointError: a multiplier is no number.
        PlanError: a linear that would be multiplied has a bias, whose part the multiplier is of, too.
    """
    config = checkpoint.config or {}
    factors_of = _FACTORS.get(str(config.get("model_type")))
    if factors_of is None:
        return checkpoint
    factors = factors_of(JsonValues(config))
    moved = {path: own for path, own in factors.items() if any(factor != 1 for _, factor in own)}
    if not moved:
        return checkpoint
    checkpoint = untie(checkpoint) if moved.keys() & {"embedding", "head"} else checkpoint
    computed = dict(checkpoint.computed)
    biased = []
    for place in ModelDescription.of(checkpoint).places():
        own = moved.get(place.module.role if place.module.role in ("embedding", "head") else place.module.path)
        info = checkpoint.infos.get(place.tensor("weight"))
        if own is None or info is None:
            continue
        if place.tensor("bias") in checkpoint.infos:
            biased.append(place.name)
        computed[info.name] = MultipliedTensor(info, computed.get(info.name), own)
    if biased:
        raise PlanError(f"{checkpoint.directory}: {biased[0]} has a bias: its multipliers cannot be moved into weights")
    told = f"the multipliers of config.json are in the weights ({', '.join(moved)}), which config.json says"
    content = {**(checkpoint.config or {}), **_without(config)}
    return replace(checkpoint, config=content, computed=computed, notes=(*checkpoint.notes, told))


def _without(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict.fromkeys(_ONES, 1.0), **{key: [1.0] * count for key, count in _LISTS.items()}}


def _falcon_h1(config: JsonValues) -> dict[str, RowFactors]:
    """The factors of Falcon-H1's weights, by the module's path within a layer or its role outside of them."""
    lists = {key: config.numbers(key) if config.has(key) else (1.0,) * count for key, count in _LISTS.items()}
    for key, count in _LISTS.items():
        if len(lists[key]) != count:
            raise PlanError(f"{config.where}: {key} has {len(lists[key])} numbers; {count} are needed")
    number = {key: config.number(key, 1.0) for key in _ONES}
    into, gate, down = number["attention_in_multiplier"], *lists["mlp_multipliers"]
    found: dict[str, RowFactors] = {
        "embedding": ((0, number["embedding_multiplier"]),),
        "head": ((0, number["lm_head_multiplier"]),),
        "self_attn.q_proj": ((0, into),),
        "self_attn.k_proj": ((0, into * number["key_multiplier"]),),
        "self_attn.v_proj": ((0, into),),
        "self_attn.o_proj": ((0, number["attention_out_multiplier"]),),
        "feed_forward.gate_proj": ((0, gate),),
        "feed_forward.down_proj": ((0, down),),
        "mamba.out_proj": ((0, number["ssm_out_multiplier"]),),
    }
    inner = (
        config.whole("mamba_d_ssm")
        if config.has("mamba_d_ssm")
        else config.whole("mamba_expand") * config.whole("hidden_size")
    )
    groups = config.whole("mamba_n_groups") * config.whole("mamba_d_state")
    sizes = (inner, inner, groups, groups, 0)
    parts = zip(sizes, lists["ssm_multipliers"], strict=True)
    found["mamba.in_proj"] = tuple((rows, own * number["ssm_in_multiplier"]) for rows, own in parts)
    return found


_FACTORS: Mapping[str, Callable[[JsonValues], dict[str, RowFactors]]] = {"falcon_h1": _falcon_h1}
"""Model type -> what its weights are multiplied by."""
