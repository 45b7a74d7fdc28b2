"""A family made from what transformers knows of a model type: its modules, its names on disk, its tensor-parallel plan.

For every causal language model that has no file of its own here. The plan (``base_model_tp_plan``) says which linears
are cut along their output features and which along their inputs. What it leaves open is added: heads stay whole, key
and value heads are shared where there are more ranks than heads, parts of a linear that is fused on disk are cut one
by one, the vocabulary is cut for the embedding and the head. A type without a plan is exported all the same; only a
target of several tensor-parallel ranks then has its layers whole on each.

Only the linears of the language model's decoder layers are quantised. All else stays as it is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from modelexport.models.derived.modules import Derivation
from modelexport.models.derived.skeleton import JoinedModels, Skeleton, language_part, read_skeleton
from modelexport.models.derived.structure import KEY, StructuralDerivation, read_structure
from modelexport.models.families.base import Family
from modelexport.models.families.drafts import draft_counts

__all__ = [
    "KEY",
    "JoinedModels",
    "causal_types",
    "derive",
    "derive_by_structure",
    "is_known",
    "is_language_part",
    "is_text_part",
    "language_part",
    "model_types",
    "skeleton_of",
]

PLANNED = "tensor-parallel plan"
WHOLE = "no plan: replicated"
_TEXT_PART = "text_config"


def derive(config: Mapping[str, Any], names: Collection[str] = (), *, part: bool = False) -> Family:
    """The family of the one model that a config.json describes, its dimensions with it.

    Args:
        names: every tensor of the checkpoint: its modules are then called as they are there.
        part: whether it may be a language model that transformers has only as a part of others.

    Raises:
        CheckpointError: transformers does not accept config.json.
        PlanError: transformers has no causal language model of that type.
    """
    return _derived(json.dumps(config, sort_keys=True, default=str), frozenset(names), part)


def skeleton_of(config: Mapping[str, Any], *, part: bool = False, in_whole: bool = False) -> Skeleton:
    """transformers' model of a config.json without storage. Arguments and errors as :func:`derive`.

    Args:
        in_whole: as :func:`~modelexport.models.derived.skeleton.read_skeleton`.
    """
    return _skeleton(json.dumps(config, sort_keys=True, default=str), part, in_whole)


def derive_by_structure(config: Mapping[str, Any]) -> Family:
    """The family of the one model whose tensors a config.json describes, of a type that transformers does not know.

    Raises:
        CheckpointError: the description (:data:`~modelexport.models.derived.structure.KEY`) is none.
    """
    return _described(json.dumps(config, sort_keys=True, default=str))


@lru_cache(maxsize=8)
def _described(config: str) -> Family:
    content = json.loads(config)
    return _with_drafts(StructuralDerivation(read_structure(content)).family(), content)


@lru_cache(maxsize=8)
def _skeleton(config: str, part: bool, in_whole: bool = False) -> Skeleton:
    return read_skeleton(json.loads(config), part=part, in_whole=in_whole)


@lru_cache(maxsize=8)
def _derived(config: str, names: frozenset[str], part: bool) -> Family:
    skeleton, content = _skeleton(config, part).named_as(names), json.loads(config)
    head = skeleton.copies.get(f"{skeleton.head}.weight")
    if skeleton.tied and not skeleton.part_tied and content.get("tie_word_embeddings") is None and head in names:
        # The language model's own part says that its head is none: so engines read it, and there the head is.
        return derive({**content, "tie_word_embeddings": False}, names, part=part)
    return _with_drafts(Derivation(skeleton).family().as_in(names), content)


def _with_drafts(family: Family, content: Mapping[str, Any]) -> Family:
    """The same with the draft layers that config.json promises."""
    assert family.dimensions is not None
    drafts = max(draft_counts(content).values(), default=0)
    return replace(family, dimensions=replace(family.dimensions, prediction_layers=drafts))


def causal_types() -> list[str]:
    """Every causal model type of the installed transformers: names alone, which cost next to nothing."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def is_known(model_type: str) -> bool:
    """Returns whether transformers has any model of that type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def is_language_part(model_type: object) -> bool:
    """Returns whether transformers has a model of that type which turns tokens into hidden states."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    if model_type in MODEL_MAPPING_NAMES or not isinstance(model_type, str):
        return model_type in MODEL_MAPPING_NAMES
    from modelexport.quantization.calibration.model import causal_class, text_class

    return causal_class(model_type) is not None or text_class(model_type) is not None


def is_text_part(model_type: str) -> bool:
    """Returns whether transformers has models of that type as the ``text_config`` of others."""
    from transformers import CONFIG_MAPPING

    own = CONFIG_MAPPING[model_type]
    if getattr(own, "base_config_key", "") == _TEXT_PART:
        return True
    beside = vars(sys.modules[own.__module__]).values()  # configs that do not say so, as Qwen Omni's
    return any((getattr(each, "sub_configs", None) or {}).get(_TEXT_PART) is own for each in beside)


def model_types() -> dict[str, str]:
    """Every causal model type of the installed transformers -> how it is cut (:data:`PLANNED` or :data:`WHOLE`)."""
    from transformers import CONFIG_MAPPING

    found = {}
    for kind in causal_types():
        own = CONFIG_MAPPING[kind]
        parts = [own, *(getattr(own, "sub_configs", None) or {}).values()]
        found[kind] = PLANNED if any(getattr(part, "base_model_tp_plan", None) for part in parts) else WHOLE
    return found
