"""The family of a model: the one that a file of :mod:`modelexport.models.families` declares, or else a derived one."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

from modelexport import plugins
from modelexport.errors import CheckpointError, ModelExportError, PlanError, nearest, quoted, shown
from modelexport.models import families
from modelexport.models.aliases import parts
from modelexport.models.families._dimensions import read_dimensions
from modelexport.models.families.base import Dimensions, Family, Module, Scaling

__all__ = [
    "Dimensions",
    "Family",
    "Module",
    "Scaling",
    "declared_family",
    "family_of",
    "has_part",
    "known_model_types",
    "language_config",
    "part_of",
    "part_place",
    "read_dimensions",
    "ties_embeddings",
    "why_no_language_model",
]


BY_STRUCTURE = "modelexport --unknown-architecture structure exports it by its tensors' names and shapes"
"""What to type for a type that nothing here knows."""


@cache
def _families() -> dict[str, Family]:
    """``model_type`` -> family, for every file of the package, and every plugin, that declares a ``FAMILY``."""
    found: dict[str, Family] = {}
    for each in pkgutil.iter_modules(families.__path__):
        found |= _by_type(importlib.import_module(f"{families.__name__}.{each.name}"))
    for plugin in plugins.modules().values():
        for model_type, family in _by_type(plugin).items():
            plugins.register(found, model_type, family, kind="a family", module=plugin)
    return found


def _by_type(module: ModuleType) -> dict[str, Family]:
    family: Family | None = getattr(module, "FAMILY", None)
    if family is None:
        return {}
    return {model_type: family.of_type(model_type) for model_type in (family.name, *family.aliases, *family.variants)}


def known_model_types() -> list[str]:
    """Values of config.json's ``model_type`` that can be exported, sorted."""
    return sorted(_families())


def declared_family(model_type: object) -> Family | None:
    """The family of a file of this package that knows the type, if any."""
    return _families().get(model_type) if isinstance(model_type, str) else None


def family_of(config: Mapping[str, Any], names: Collection[str] = ()) -> Family:
    """The family of the model that ``config`` (a config.json's content) describes: declared, or else derived.

    Args:
        names: every tensor of the checkpoint, where one is at hand: makers' files and transformers' own may call the
            same modules by other names. None: as transformers saves them.

    Raises:
        CheckpointError: config.json has no ``model_type``, or transformers refuses it.
        PlanError: neither a family file nor transformers knows the type, and config.json does not describe its tensors
            (:mod:`modelexport.models.structure`); the message says which is near.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError("config.json has no model_type; is this a language model's checkpoint?")
    family = declared_family(model_type)
    if family is not None:
        return family.as_in(names)
    from modelexport.models import derived

    if config.get(derived.KEY) is not None:
        return derived.derive_by_structure(config)
    part = part_of(config)
    if derived.is_known(model_type):
        try:
            return derived.derive(config, names, part=derived.is_text_part(model_type))
        except derived.JoinedModels:
            inner = _inner_part(config, names)
            if inner is None:
                raise
            part, names = inner
        except CheckpointError as error:  # transformers cannot build the rest: it needs a package, or another version
            try:
                inner = _inner_part(config, names) if part is None else (part, names)
                if inner is not None:
                    return _family_of_part(*inner)
            except CheckpointError:
                raise error from None
            raise
    elif part is None:
        known = {*known_model_types(), *derived.causal_types()}
        raise PlanError(
            f"unknown architecture '{shown(model_type)}'{nearest(model_type, known, listing='modelexport models')}; "
            f"{BY_STRUCTURE}"
        )
    if not names:
        return family_of(part)
    note = (
        f"{shown(model_type)}: its language model is a {part['model_type']}; what is beside it is taken over as it is"
    )
    family = _family_of_part(part, names)
    return replace(family, notes=(*family.notes, note))


def _inner_part(config: Mapping[str, Any], names: Collection[str]) -> tuple[dict[str, Any], Collection[str]] | None:
    """The config of the language model that transformers finds in a model of several, and the tensors of the part of
    the model that has it; None where it finds none.

    Raises:
        CheckpointError: transformers does not accept config.json.
    """
    from modelexport.models import derived

    part = derived.language_part(config)
    if part is None:
        return None
    names = names_within(config, part, names)
    if any(name.endswith(_HEAD) for name in names):  # else tied by its own config, which does not count here
        part["tie_word_embeddings"] = False
    return part, names


def part_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config of the language model in one that has it as a part, if its type is known."""
    from modelexport.models.derived import causal_types

    kinds = (*known_model_types(), *causal_types())
    return next((part for part in parts(config) if part.get("model_type") in kinds), None)


def has_part(config: Mapping[str, Any]) -> bool:
    """Returns whether config.json is that of a model which has a language model as a part."""
    return bool(parts(config))


_HEAD = ".lm_head.weight"


def names_within(config: Mapping[str, Any], own: Mapping[str, Any], names: Collection[str]) -> Collection[str]:
    """The tensors of the part of a model that has the language model as a part in its turn: those below ``thinker.``
    where the ``text_config`` of ``thinker_config`` is meant; all of them where there is no such part.

    Args:
        config: of the whole model.
        own: of the language model.
        names: every tensor of the checkpoint.
    """
    for key, part in config.items():
        inner = part.get("text_config") if isinstance(part, Mapping) else None
        if isinstance(inner, Mapping) and inner.get("model_type") == own.get("model_type"):
            stem = f"{key.removesuffix('_config')}."
            return [name for name in names if name.startswith(stem)] or names
    return names


def _family_of_part(part: Mapping[str, Any], names: Collection[str]) -> Family:
    """The family of a language model by the names that it has as a part of a checkpoint's model, found by its
    embedding and its layers.

    Raises:
        CheckpointError: it is not there, or is there twice.
    """
    family = family_of(part)
    prefix, inside = part_place(family, names)
    family = family_of(part, {inside + name.removeprefix(prefix) for name in names if name.startswith(prefix)})
    return family.below(prefix, inside, read_dimensions(part, family), names)


def part_place(family: Family, names: Collection[str]) -> tuple[str, str]:
    """The place of a language model in a checkpoint of which it is a part.

    Args:
        family: its own.
        names: every tensor of the checkpoint.

    Returns:
        (what its tensors' names begin with there, what that stands in place of in its own names).

    Raises:
        CheckpointError: it is not there, or is there twice.
    """
    tokens = next(f"{module.path}.weight" for module in family.before if module.kind == "embedding")
    layers = family.layer_prefix.format(i=0)
    base = f"{tokens.partition('.')[0]}."
    places = []  # the name of the part, and what of its own names is not below it
    for inside in ("", base) if layers.startswith(base) else ("",):
        own = tokens.removeprefix(inside)
        found = {name.removesuffix(own) for name in names if name == own or name.endswith(f".{own}")}
        first = layers.removeprefix(inside)
        places += [(each, inside) for each in found if any(name.startswith(f"{each}{first}.") for name in names)]
        if places:
            break
    if len(places) != 1:
        several = f"several language models: below {', '.join(sorted(each for each, _ in places))}"
        raise CheckpointError(
            f"the checkpoint has {several if places else 'no language model'}, and config.json makes one of it, a "
            f"{family.name} ({tokens}, {layers})"
        )
    return places[0]


_CHOSEN = re.compile(r"experts?_per_tok|moe_top_?k|top_k_experts")


def experts_of_token(config: Mapping[str, Any]) -> int | None:
    """The experts of a layer that a token goes to, by a language model's config.json; None where it does not say."""
    chosen = [int(x) for key, x in config.items() if _CHOSEN.search(key) and isinstance(x, int) and x > 0]
    return max(chosen, default=None)


def language_config(config: Mapping[str, Any], names: Collection[str] = ()) -> dict[str, Any]:
    """The config of the language model that a config.json describes: of a model that also sees or hears, its part.

    Args:
        names: as for :func:`family_of`.

    Raises:
        CheckpointError: transformers does not accept config.json.
    """
    kind = config.get("model_type")
    family = declared_family(kind)
    from modelexport.models.derived import causal_types, is_known, language_part

    if family is not None:
        return dict(config) if is_known(str(kind)) else {**config, "model_type": family.computed_as or family.name}
    if kind in causal_types() and _counts_tokens(config):
        return dict(config)
    part = language_part(config) if is_known(str(kind)) else part_of(config)
    return dict(config) if part is None else {**part, "tie_word_embeddings": ties_embeddings(config, names)}


def why_no_language_model(config: Mapping[str, Any]) -> str:
    """The reason why a config.json holds no language model that transformers runs by itself; ``""`` where it may."""
    try:
        own = language_config(config)
    except ModelExportError as error:
        return str(error)
    if not _counts_tokens(own):
        return "config.json has no vocab_size that is a number of tokens"
    kind = own.get("model_type")
    from modelexport.models.derived import causal_types, is_known, is_language_part, is_text_part

    alone = kind == config.get("model_type")
    is_part = is_language_part(kind) and (not alone or is_text_part(str(kind)))
    if (declared_family(kind) is not None and is_known(str(kind))) or kind in causal_types() or is_part:
        return ""
    return f"transformers has no causal language model of its model_type {quoted(kind)}"


def _counts_tokens(config: Mapping[str, Any]) -> bool:
    size = config.get("vocab_size")
    return isinstance(size, int) and not isinstance(size, bool) and size >= 1


def ties_embeddings(config: Mapping[str, Any] | None, names: Collection[str] = ()) -> bool:
    """Returns whether the head is the embedding: as config.json says, or else as models of its type have it.

    Args:
        names: as for :func:`family_of`.
    """
    said = (config or {}).get("tie_word_embeddings")
    if said is not None or config is None:
        return bool(said)
    try:
        return read_dimensions(config, family_of(config, names)).tied_embeddings
    except ModelExportError:  # whoever needs the family says what is wrong with it
        return False
