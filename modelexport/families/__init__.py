"""Model families, one declarative file each, registered by being there."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

from modelexport.errors import CheckpointError, PlanError, nearest
from modelexport.families.base import Dimensions, Family, Module, Scaling, read_dimensions

__all__ = ["Dimensions", "Family", "Module", "Scaling", "family_of", "known_model_types", "read_dimensions"]


@cache
def _families() -> dict[str, Family]:
    """``model_type`` -> family, for every file of this package that declares a ``FAMILY``."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(__path__):
        family = getattr(importlib.import_module(f"{__name__}.{module.name}"), "FAMILY", None)
        if family is not None:
            for model_type in (family.name, *family.aliases, *family.variants):
                found[model_type] = family.of_type(model_type)
    return found


def known_model_types() -> list[str]:
    """Values of config.json's ``model_type`` that can be exported, sorted."""
    return sorted(_families())


def family_of(config: dict[str, Any]) -> Family:
    """The family of the model that ``config`` (a config.json's content) describes.

    Raises:
        CheckpointError: config.json has no ``model_type``.
        PlanError: no family file knows the type; the message lists those that are known.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError("config.json has no model_type; is this a language model's checkpoint?")
    family = _families().get(model_type)
    if family is None:
        raise PlanError(f"unknown architecture '{model_type}'{nearest(model_type, known_model_types())}")
    return family
