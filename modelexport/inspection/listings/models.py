"""``modelexport models``: which model types can be exported, and of one of them what is quantised and how it is cut."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from modelexport.errors import PlanError, UsageError, error_text, nearest, shown
from modelexport.models.architecture import BY_STRUCTURE, family_of, known_model_types
from modelexport.models.families.base import Family
from modelexport.system.tables import text_table
from modelexport.system.terminal import show

__all__ = ["ModelType", "describe", "model_types", "print_models"]

DECLARED = "declared"
_WIDTH = 110
_KEPT = {
    "norm": "a norm",
    "vector": "a vector",
    "embedding": "an embedding: looked up in the model's dtype",
    "head": "the head",
    "router": "a router: it decides between experts on small differences",
    "other": "no linear",
}


@dataclass(frozen=True)
class ModelType:
    """A ``model_type`` of config.json.

    Attributes:
        family: whose file declares it; None where it is derived from transformers.
        how: ``"declared"``, or what it is derived from.
    """

    model_type: str
    family: str | None
    how: str


def model_types() -> list[ModelType]:
    """Every type: the declared ones, then what the installed transformers knows beside them."""
    from modelexport.models.derived import model_types as derivable

    declared = {name: family_of({"model_type": name}).name for name in known_model_types()}
    found = [ModelType(name, family, DECLARED) for name, family in declared.items()]
    return found + [ModelType(name, None, how) for name, how in derivable().items() if name not in declared]


def describe(name: str) -> dict[str, Any]:
    """One model type: its modules, which of them ``--quant`` is for, and how each is cut.

    Raises:
        UsageError: neither we nor transformers know it; the message has the nearest.
        PlanError: transformers has it, but not as a causal language model.
    """
    declared = name in known_model_types()
    config: dict[str, Any] = {"model_type": name} if declared else _default_config(name)
    family = family_of(config)
    return {
        "model_type": name,
        "how": DECLARED if declared else "derived from transformers, for the default config",
        "family": family.name if declared else None,
        "architecture": family.architecture,
        "aliases": [alias for alias in family.aliases if alias != name],
        "notes": list(family.notes),
        "modules": list(_modules(family)),
    }


def print_models(name: str | None, *, as_json: bool) -> int:
    """Print all types, or one; returns the exit status, 0."""
    if name is not None:
        found = describe(name)
        show(json.dumps(found, indent=1) if as_json else "\n".join(_described(found)))
        return 0
    types = model_types()
    if as_json:
        show(json.dumps({"models": [asdict(each) for each in types]}, indent=1))
    else:
        show("\n".join(_listed(types)))
    return 0


def _default_config(name: str) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        known = {*known_model_types(), *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
        raise UsageError(
            f"unknown model type '{shown(name)}'{nearest(name, known, listing='modelexport models')}; {BY_STRUCTURE}"
        )
    try:
        config: dict[str, Any] = CONFIG_MAPPING[name]().to_dict()
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"model type '{name}' has no default config in transformers ({error_text(error)}): "
            "modelexport --model DIR --dry-run plans a model of it"
        ) from error
    return config


def _modules(family: Family) -> Iterator[dict[str, Any]]:
    for where, modules in (("before", family.before), ("layer", family.layer), ("after", family.after)):
        for module in modules:
            quantised = module.kind == "linear" and not module.why
            yield {
                "path": module.general_path,
                "where": where,
                "role": module.role,
                "kind": module.kind,
                "quantised": quantised,
                "why_not": None if quantised else module.why or _KEPT.get(module.kind, ""),
                "partition": module.partition,
                "along": [axis for _, axis in module.axes],
            }


def _described(found: dict[str, Any]) -> Iterator[str]:
    also = f", also {', '.join(found['aliases'])}" if found["aliases"] else ""
    yield f"{found['model_type']} ({found['architecture']}{also}): {found['how']}"
    yield from found["notes"]
    yield ""
    rows = [
        (
            ("" if module["where"] == "layer" else f"({module['where']} the layers) ") + module["path"],
            "as --quant says" if module["quantised"] else "no",
            _cut(module),
            "" if module["quantised"] else module["why_not"],
        )
        for module in found["modules"]
    ]
    yield from text_table(("module", "quantised", "cut across tensor-parallel ranks", "why not"), rows)


def _cut(module: dict[str, Any]) -> str:
    ways = {"column": "output features", "row": "input features"}
    if module["partition"] not in ways:
        return "whole on each"
    along = f" ({', '.join(module['along'])})" if module["along"] else ""
    return ways[module["partition"]] + along


def _listed(types: list[ModelType]) -> Iterator[str]:
    families: dict[str, list[str]] = {}
    for each in types:
        if each.family is not None:
            families.setdefault(each.family, [])
            if each.model_type != each.family:
                families[each.family].append(each.model_type)
    count = sum(each.family is not None for each in types)
    yield f"declared, {count} types (a file each; look-alikes in brackets):"
    yield from _wrapped([f"{name} ({', '.join(others)})" if others else name for name, others in families.items()])
    for how in dict.fromkeys(each.how for each in types if each.family is None):
        names = [each.model_type for each in types if each.family is None and each.how == how]
        yield ""
        yield f"derived from the installed transformers, {how}, {len(names)} types:"
        yield from _wrapped(names)
    yield ""
    yield f"{len(types)} in all; modelexport models TYPE says what of one is quantised, and how it is cut"


def _wrapped(names: list[str]) -> Iterator[str]:
    yield from textwrap.wrap(
        ", ".join(names), _WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
