"""The tokenizer of a checkpoint: in its directory, or made from what its weights' files say."""

from __future__ import annotations

from pathlib import Path

from modelexport.checkpoints.safetensors.file import Checkpoint
from modelexport.models.checkpoint_formats import recognised, source
from modelexport.quantization.calibration.text import TokenizerFiles, has_tokenizer

__all__ = ["may_be_restored", "tokenizer_of"]


def tokenizer_of(checkpoint: Checkpoint, directory: Path | None = None) -> Path | TokenizerFiles:
    """Returns where the tokenizer is: the directory, or files that the checkpoint's format makes where it has none.

    Args:
        directory: that should have it; None: the checkpoint's.

    Raises:
        CheckpointError: what the weights' file says of it is damaged.
    """
    directory = checkpoint.directory if directory is None else directory
    restore = getattr(source(checkpoint.format), "restored_files", None)
    if restore is None or has_tokenizer(directory):
        return directory
    files, missing = restore(checkpoint)
    return TokenizerFiles(directory, files, "; ".join(missing.values()))


def may_be_restored(directory: Path) -> bool:
    """Returns whether a directory's weights are of a format that has a tokenizer within."""
    return hasattr(recognised(directory), "restored_files")
