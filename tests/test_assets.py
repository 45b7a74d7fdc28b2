"""The embedded demo model is whole, and its texts are what its README says."""

from __future__ import annotations

import json
import struct
import subprocess
import sys

import pytest

from modelexport import assets
from modelexport.errors import CheckpointError


def test_demo_checkpoint_is_complete() -> None:
    directory = assets.demo_model_path()
    names = {path.name for path in directory.iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    }
    blob = (directory / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + length])
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    assert max(entry["data_offsets"][1] for entry in tensors.values()) == len(blob) - 8 - length
    assert {entry["dtype"] for entry in tensors.values()} == {"BF16"}
    assert tensors["model.embed_tokens.weight"]["shape"] == [2048, 256]
    assert sum(name.endswith("_proj.weight") for name in tensors) == 4 * 7


def test_texts_are_documents_and_disjoint() -> None:
    heldout, calibration = assets.demo_documents("heldout"), assets.demo_documents("calibration")
    assert (len(heldout), len(calibration)) == (48, 102)
    assert heldout[0].startswith("Genesis 8\nGod remembered Noah")
    assert not set(heldout) & set(calibration)
    assert "\n\n".join(heldout) == assets.demo_text("heldout")
    assert len(assets.demo_text("calibration").encode()) > 300_000


def test_unknown_split() -> None:
    with pytest.raises(ValueError, match="not 'train'"):
        assets.demo_text("train")  # type: ignore[arg-type]


def test_missing_model_is_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(assets, "_DIRECTORY", tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*--model DIR"):
        assets.demo_model_path()


def test_import_is_light() -> None:
    code = "import sys, modelexport.assets; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"
