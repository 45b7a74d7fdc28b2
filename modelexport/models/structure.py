"""Checkpoints of types that nothing here knows, described by the names and shapes of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from modelexport.checkpoints.safetensors.file import Checkpoint
from modelexport.errors import ModelExportError, PlanError, quoted
from modelexport.models.architecture import declared_family, part_of
from modelexport.models.derived import KEY, is_known
from modelexport.models.derived.structure import described
from modelexport.models.matching import KV_SCALES
from modelexport.models.modules import Architecture, read_modules
from modelexport.quantization.methods import read_quantization_config

__all__ = ["by_structure", "check_whole", "described_as", "is_structural"]


def by_structure(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint with the description of its tensors in its config.json, where nothing knows its type.

    Raises:
        CheckpointError: its quantization config is damaged.
        PlanError: the shape of a quantised weight cannot be told, or no tensor's name has a layer's number.
    """
    config = checkpoint.config
    if config is None or not isinstance(config.get("model_type"), str) or _is_understood(config):
        return checkpoint
    if config.get(KEY) is not None:
        return checkpoint
    try:
        description = described(_plain_shapes(checkpoint), config)
    except PlanError as error:
        raise PlanError(f"{checkpoint.directory}: --unknown-architecture structure: {error}") from error
    return replace(checkpoint, config={**config, KEY: description})


def described_as(checkpoint: Checkpoint, other: Checkpoint) -> Checkpoint:
    """The same with a description of its tensors, where another checkpoint of the same unknown type has one."""
    config = checkpoint.config or {}
    if not is_structural(other.config) or config.get("model_type") != (other.config or {}).get("model_type"):
        return checkpoint
    with suppress(ModelExportError):  # whoever needs the family says what is wrong with it
        return by_structure(checkpoint)
    return checkpoint


def _plain_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """The shapes of a checkpoint's tensors, of quantised linears those of the weights that they stand for.

    Raises:
        PlanError: a quantised weight's shape cannot be told, or config.json does not say how it is quantised.
    """
    quantization = read_quantization_config(checkpoint.config)
    shapes: dict[str, tuple[int, ...]] = {}
    for module in read_modules(checkpoint, Architecture(), quantization):
        kept, stored = dict(module.tensors), module.stored
        if stored.quantised:
            if quantization is None or stored.shape is None or len(stored.shape) != 2:
                why = "config.json has no quantization_config" if quantization is None else "its shape cannot be told"
                raise PlanError(
                    f"{module.name} is quantised ({stored.number_format}), and {why}: give the unquantised checkpoint "
                    "that it was made from"
                )
            shapes[f"{module.name}.weight"] = stored.shape
            kept = {suffix: info for suffix, info in kept.items() if suffix == "bias"}
        elif quantization is not None:
            kept = {suffix: info for suffix, info in kept.items() if suffix not in KV_SCALES}
        shapes |= {info.name: info.shape for info in kept.values()}
    return shapes


def is_structural(config: Mapping[str, Any] | None) -> bool:
    """Returns whether a config.json's model is known by the description of its tensors alone."""
    return config is not None and config.get(KEY) is not None and not _is_understood(config)


def check_whole(config: Mapping[str, Any] | None, ranks: Mapping[str, int]) -> None:
    """Refuse to cut a model of which names and shapes alone are known.

    Args:
        ranks: flag (``"target-tp"``) -> what it says.

    Raises:
        PlanError: one says more than 1.
    """
    several = {flag: count for flag, count in ranks.items() if count > 1}
    if several and config is not None and is_structural(config):
        asked = " ".join(f"--{flag} {count}" for flag, count in several.items())
        instead = " ".join(f"--{flag} 1" for flag in several)
        raise PlanError(
            f"{asked}: transformers does not know model_type {quoted(config.get('model_type'))}, and names and shapes "
            f"do not say how tensors are cut: 1 rank has them whole: {instead}"
        )


def _is_understood(config: Mapping[str, Any]) -> bool:
    kind = config.get("model_type")
    return declared_family(kind) is not None or is_known(str(kind)) or part_of(config) is not None
