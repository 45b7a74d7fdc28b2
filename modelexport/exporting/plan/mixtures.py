"""The number formats that the mixtures of ``--quant`` give the modules of a model, by their tensors in a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from modelexport.checkpoints.safetensors.file import Checkpoint, torch_dtype
from modelexport.models.architecture import ties_embeddings
from modelexport.models.matching import ModelDescription
from modelexport.models.rules import tensor_rules
from modelexport.quantization.assignment import Assignment
from modelexport.quantization.methods.gguf import SCALES
from modelexport.quantization.mixtures import MixtureModel, MixtureTensor, number_format_of, resolve
from modelexport.sharding.plan import Parallelism
from modelexport.sharding.rules import TensorRule
from modelexport.sharding.shard_plan import build_shard_plan

if TYPE_CHECKING:
    from modelexport.recipe import ExportRecipe


def with_mixtures(recipe: ExportRecipe, checkpoint: Checkpoint, assignment: Assignment) -> Assignment:
    """The assignment with the number format of every module that its mixtures mean.

    Args:
        checkpoint: the model as it is written but for its rounding: unquantised, and with linears of each expert.

    Raises:
        CheckpointError: config.json is missing or contradicts the tensors.
        PlanError: llama.cpp cannot hold the model.
    """
    config = checkpoint.config or {}
    rules = tensor_rules(checkpoint)
    layers = 1 + max((rule.layer for rule in rules if rule.layer is not None), default=-1)
    plan = build_shard_plan(rules, Parallelism(), layers=layers)
    modules = {place.name: place.module for place in ModelDescription.of(checkpoint).places()}
    from modelexport.checkpoints.formats import gguf

    may_be = {
        name for name, module in modules.items() if module.kind in ("linear", "head", "embedding") and not module.why
    }
    tensors = [
        MixtureTensor(name, tuple(rule.module for rule in held), _shape(held[0].shape), _block(held[0], layers))
        for name, held in gguf.matrices(plan, config).items()
        if may_be.issuperset(rule.module for rule in held)
    ]
    tied = ties_embeddings(config, checkpoint.infos)
    model = _model(gguf.header_values(plan, config), tied=tied, importance=recipe.rounding.needs_samples)
    make = cache(partial(number_format_of, observer=recipe.observer, scale_dtype=torch_dtype(SCALES)))
    return assignment.resolved(lambda mixture: resolve(mixture, tensors, model, make))


def _block(rule: TensorRule, layers: int) -> int | None:
    """The block that a tensor is in; draft layers stand behind the others, as llama.cpp counts them."""
    return rule.layer if rule.draft is None else layers + rule.draft


def _shape(shape: Sequence[int]) -> tuple[int, int]:
    return (shape[0], shape[1])


def _model(values: dict[str, Any], *, tied: bool, importance: bool) -> MixtureModel:
    """The facts as the file's own values have them: llama.cpp decides by these."""
    kind = str(values["general.architecture"])

    def number(key: str, default: int) -> int:
        found = values.get(f"{kind}.{key}", default)
        return int(found) if isinstance(found, int) else int(found[0])  # one for each layer

    heads = number("attention.head_count", 0)
    return MixtureModel(
        architecture=kind,
        layers=number("block_count", 0),
        heads=heads,
        kv_heads=number("attention.head_count_kv", heads),
        experts=number("expert_count", 0),
        tied=tied,
        importance=importance,
    )
