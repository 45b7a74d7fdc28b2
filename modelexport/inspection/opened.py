"""A checkpoint opened for inspection: its headers and its config.json, read once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from modelexport.checkpoints.safetensors.file import Checkpoint
from modelexport.models.modules import Architecture, StoredModule, read_architecture, read_modules
from modelexport.models.opening import open_model
from modelexport.quantization.methods import QuantizationConfig, read_quantization_config

__all__ = ["OpenedCheckpoint", "open_contents"]


@dataclass(frozen=True)
class OpenedCheckpoint:
    """The content of a checkpoint's headers and of its config.json.

    Attributes:
        directory: as it was given.
    """

    directory: str
    checkpoint: Checkpoint
    architecture: Architecture
    quantization: QuantizationConfig | None
    modules: list[StoredModule]


def open_contents(directory: Path | str, config: Path | str | None = None) -> OpenedCheckpoint:
    """Opens a checkpoint of any format; no tensor is read and torch is not imported.

    Args:
        config: the model's config.json, where the checkpoint has none of its own.

    Raises:
        CheckpointError: no checkpoint there, a damaged header or index, or a config.json that is no JSON.
    """
    checkpoint = open_model(directory, config)
    architecture = read_architecture(checkpoint.config, checkpoint.infos)
    quantization = read_quantization_config(checkpoint.config)
    modules = read_modules(checkpoint, architecture, quantization)
    return OpenedCheckpoint(str(directory), checkpoint, architecture, quantization, modules)
