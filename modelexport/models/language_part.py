"""The language model alone, of a checkpoint whose model also sees or hears.

A view of the checkpoint, in the way of :mod:`modelexport.models.stacked`: its tensors by the names, and its config.json
as, a model of the language model's own type has them; the others are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from modelexport.checkpoints.safetensors.file import Checkpoint, TensorInfo, tensor_nbytes
from modelexport.errors import CheckpointError, PlanError
from modelexport.models.architecture import (
    Family,
    family_of,
    language_config,
    names_within,
    part_place,
    read_dimensions,
)
from modelexport.models.derived import is_known, is_text_part, skeleton_of
from modelexport.models.derived.cuts import ROLES
from modelexport.models.families.base import ExpertStack
from modelexport.models.stacked import JoinedStack

__all__ = ["language_part_alone", "part_as"]

WHY = "of what sees or hears beside the language model, which llama.cpp has in a file of its own"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_DEEPSTACK = "deepstack_visual_indexes"
"""The key of ``vision_config`` that lists the images' features that are added behind the first layers, one each."""
_DEEPSTACK_TARGETS = ("deepstack_layer_map", "spatial_target_layers")
"""Keys of Granite 4 Vision's: pairs of a layer of the vision tower and the one that its features are added before; and
the layers that the features of parts of an image are added before."""

_EXPERT = re.compile(r"(.+\.\d+)\.\w+\.experts\.(\d+)\.(\w+)\.(\w+)")
_STACK = re.compile(r"(.+\.\d+)\.(\w+\.experts)\.\w+")


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
    found = _in_own_form(found)
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


def _in_own_form(part: Checkpoint) -> Checkpoint:
    """The tensors of a language model by the names and in the form that it is saved with by itself, where the whole
    model is saved otherwise: MiniMax-M3's ``block_sparse_moe``, and an MLP's gate and up in two tensors.

    Raises:
        CheckpointError: tensors that are one there do not fit together.
    """
    config = part.config or {}
    kind = str(config.get("model_type"))
    if not is_known(kind) or not is_text_part(kind):
        return part
    own, within = (skeleton_of(config, part=True, in_whole=in_whole) for in_whole in (False, True))
    saved = {target: name for name, target in own.targets.items()}
    stacks = (match for name, shape in own.shapes.items() if len(shape) == 3 and (match := _STACK.fullmatch(name)))
    experts = {match[1]: match[2] for match in stacks}
    new: dict[str, str] = {}
    joined: dict[str, dict[str, TensorInfo]] = {}
    for name, info in part.infos.items():
        target, expert = within.targets.get(name), _EXPERT.fullmatch(name)
        if name in own.tensors:
            continue
        if expert is not None and expert[1] in experts and expert[3] in ROLES:
            stem = f"{expert[1]}.{experts[expert[1]]}.{expert[2]}"
            new[name] = f"{stem}.{ROLES[expert[3]]}_proj.{expert[4]}"
        elif target in saved and own.shapes[target] == info.shape:
            new[name] = saved[target]
        elif target in saved:
            joined.setdefault(saved[target], {})[ROLES.get(name.split(".")[-2], name)] = info
    taken = {info.name for parts in joined.values() for info in parts.values()}
    infos = {
        new.get(name, name): replace(info, name=new.get(name, name))
        for name, info in part.infos.items()
        if name not in taken
    }
    placements = {new.get(name, name): place for name, place in part.placements.items()}
    computed = {new.get(name, name): tensor for name, tensor in part.computed.items() if name not in taken}
    for name, parts in joined.items():
        stack = _gate_and_up(name, parts, part)
        infos[name], computed[name] = stack.weight, stack
    return replace(part, infos=infos, placements=placements, computed=computed)


def _gate_and_up(name: str, parts: Mapping[str, TensorInfo], checkpoint: Checkpoint) -> JoinedStack:
    """An MLP's gate and up, one behind the other, as one tensor."""
    found = [parts[each] for each in ("gate", "up") if each in parts]
    if len(found) != len(parts) or len(found) != 2 or found[0].shape != found[1].shape:
        listed = ", ".join(f"{each.name} {list(each.shape)}" for each in parts.values())
        raise CheckpointError(f"{checkpoint.directory}: {name} is a gate and an up of one shape, and there is {listed}")
    (height, *rest), dtype = found[0].shape, found[0].dtype
    if found[1].dtype != dtype:
        raise CheckpointError(f"{checkpoint.directory}: {found[0].name} is {dtype}, {found[1].name} {found[1].dtype}")
    shape = (2 * height, *rest)
    weight = TensorInfo(name, dtype, shape, checkpoint.directory, 0, tensor_nbytes(dtype, shape))
    own = tuple((each, checkpoint.computed.get(each.name)) for each in found)
    return JoinedStack(ExpertStack(linears=(), joined=1), weight, (own,))


def _part_of(name: str) -> str:
    """``vision_tower``, of ``model.vision_tower.encoder.layers.0.layer_norm1.weight``."""
    return next(part for part in name.split(".") if part not in ("model", "thinker"))
