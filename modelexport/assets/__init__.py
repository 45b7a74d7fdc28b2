"""The embedded demo model: a small trained Llama, so that perplexity before and after means something.

``recipes/train_demo.py`` makes it again; ``demo_model/README.md`` says what it is. Nothing heavy is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from modelexport.errors import CheckpointError

__all__ = ["demo_documents", "demo_model_path", "demo_text"]

_DIRECTORY = Path(__file__).parent / "demo_model"
_TEXTS = Path(__file__).parent / "demo_text"  # not in the checkpoint, or every export of it would carry them

Split = Literal["calibration", "heldout"]


def demo_model_path() -> Path:
    """Directory of the demo checkpoint: safetensors, config and tokenizer.

    Raises:
        CheckpointError: the package was installed without its data files.
    """
    if not (_DIRECTORY / "model.safetensors").is_file():
        raise CheckpointError(
            f"the embedded demo model is missing: no file {_DIRECTORY / 'model.safetensors'}; "
            "install modelexport again from a complete copy, or give a model with --model DIR"
        )
    return _DIRECTORY


def demo_text(split: Split) -> str:
    """The demo model's text, UTF-8 documents parted by a blank line.

    ``"calibration"`` is 300 kB of what it was trained on, ``"heldout"`` half of the documents kept from it.
    """
    if split not in ("calibration", "heldout"):
        raise ValueError(f"split is 'calibration' or 'heldout', not {split!r}")
    return (_TEXTS / f"{split}.txt").read_text(encoding="utf-8")


def demo_documents(split: Split) -> list[str]:
    """:func:`demo_text` cut into its documents; in training an end-of-text token stood before each."""
    return demo_text(split).split("\n\n")
