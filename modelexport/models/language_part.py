"""The language model alone, of a checkpoint whose model also sees or hears.

A view of the checkpoint, in the way of :mod:`modelexport.models.stacked`: its tensors by the names, and its config.json
as, a model of the language model's own type has them; the others are left out.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from modelexport.checkpoints.safetensors.file import Checkpoint
from modelexport.errors import CheckpointError, PlanError
from modelexport.models.architecture import (
    Family,
    family_of,
    language_config,
    names_within,
    part_place,
    read_dimensions,
)

__all__ = ["language_part_alone", "part_as"]

WHY = "of what sees or hears beside the language model, which llama.cpp has in a file of its own"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_DEEPSTACK = "deepstack_visual_indexes"
"""The key of ``vision_config`` that lists the images' features that are added behind the first layers, one each."""
_DEEPSTACK_TARGETS = ("deepstack_layer_map", "spatial_target_layers")
"""Keys of Granite 4 Vision's: pairs of a layer of the vision tower and the one that its features are added before; and
the layers that the features of parts of an image are added before."""


def language_part_alone(checkpoint: Checkpoint) -> tuple[Checkpoint, list[str]]:
    """The language model of a checkpoint as a checkpoint of its own.

    Returns:
        The checkpoint, whose ``left_out`` names all other tensors, and warnings: none, or one for the user. A
        checkpoint of a language model is returned as it is.

    Raises:
        CheckpointError: the language model is not there, or is there twice; transformers does not accept config.json.
        PlanError: nothing is known of its type.
    """
    config = checkpoint.config
    if config is None or language_config(config).get("model_type") == config.get("model_type"):
        return checkpoint, []
    own = _config_of(config, checkpoint.infos)
    family = family_of(own)
    if family.architecture.isidentifier():  # and not one that transformers has as a part alone
        own["architectures"] = [family.architecture]
    new = _names(family, own, names_within(config, own, checkpoint.infos))
    infos = {new[name]: replace(info, name=new[name]) for name, info in checkpoint.infos.items() if name in new}
    others = dict.fromkeys((name for name in checkpoint.infos if name not in new), WHY)
    placements = {new.get(name, name): place for name, place in checkpoint.placements.items() if name not in others}
    computed = {new[name]: tensor for name, tensor in checkpoint.computed.items() if name in new}
    left_out = {**checkpoint.left_out, **others}
    found = replace(checkpoint, infos=infos, placements=placements, computed=computed, config=own, left_out=left_out)
    if not others:
        return found, []
    parts = ", ".join(dict.fromkeys(_part_of(name) for name in others))
    return found, [
        f"{len(others)} tensors beside the language model are not written ({parts}), the first {next(iter(others))}: "
        "llama.cpp has them in a file of their own, which its convert_hf_to_gguf.py --mmproj makes of "
        f"{checkpoint.directory}"
    ]


def part_as(checkpoint: Checkpoint, other: Checkpoint) -> Checkpoint:
    """The language model of a checkpoint where another checkpoint is one of its type, and else the checkpoint as it
    is; so, too, where nothing here knows the model."""
    if checkpoint.config is None or other.config is None:
        return checkpoint
    kind = other.config.get("model_type")
    if checkpoint.config.get("model_type") == kind:
        return checkpoint
    try:
        found, _ = language_part_alone(checkpoint)
    except (CheckpointError, PlanError):
        return checkpoint
    return found if (found.config or {}).get("model_type") == kind else checkpoint


def _config_of(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    own = json.loads(json.dumps(language_config(config, names), default=str))  # transformers' has numbers as keys
    own |= {key: config[key] for key in (*_TOKENS, "dtype", "torch_dtype") if config.get(key) is not None}
    seen = config.get("vision_config")
    listed = seen.get(_DEEPSTACK) if isinstance(seen, Mapping) else None
    if isinstance(listed, list):
        own["num_deepstack_layers"] = len(listed)
    mapped, sampled = (config.get(key) for key in _DEEPSTACK_TARGETS)
    if isinstance(mapped, list):
        layers = [each[1] for each in mapped if isinstance(each, (list, tuple)) and len(each) == 2]
        own["deepstack_target_layers"] = [*layers, *(sampled if isinstance(sampled, list) else ())]
    return own


def _names(family: Family, config: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """The language model's tensors -> their names in a model of its own."""
    prefix, inside = part_place(family, names)
    below = family.below(prefix, inside, read_dimensions(config, family), names)
    pairs = zip((*below.before, *below.after), (*family.before, *family.after), strict=True)
    modules = {there.path: here.path for there, here in pairs}
    layers, own_layers = (each.layer_prefix.partition("{i}")[0] for each in (below, family))
    found = {}
    for name in names:
        module, _, parameter = name.rpartition(".")
        if name.startswith(layers):
            found[name] = own_layers + name.removeprefix(layers)
        elif module in modules:
            found[name] = f"{modules[module]}.{parameter}"
    return found


def _part_of(name: str) -> str:
    """``vision_tower``, of ``model.vision_tower.encoder.layers.0.layer_norm1.weight``."""
    return next(part for part in name.split(".") if part not in ("model", "thinker"))
