"""The tokenizer of a checkpoint that is a GGUF file alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelexport.assets import demo_documents, demo_model_path
from modelexport.checkpoints.gguf.file import encode_header
from modelexport.checkpoints.gguf.tokenizer import read_tokenizer
from modelexport.checkpoints.safetensors.file import Checkpoint
from modelexport.checkpoints.source import directory_of, resolve_source
from modelexport.errors import CheckpointError, UsageError
from modelexport.exporting import export
from modelexport.inspection.diff import diff_checkpoints
from modelexport.models.tokenizers import may_be_restored, tokenizer_of
from modelexport.quantization.calibration.text import TokenDocuments, TokenizerFiles, load_tokenizer


def vocabulary_file(directory: Path, **changes: str) -> Checkpoint:
    """A GGUF file of the demo model's tokenizer, without tensors, as a checkpoint."""
    values = {"general.architecture": "llama", **read_tokenizer(demo_model_path(), {}, 2048).values, **changes}
    (directory / "model.gguf").write_bytes(encode_header(values, [])[0])
    return Checkpoint(directory, {}, {}, {}, format="gguf")


def test_a_gguf_file_alone_has_the_tokenizer_of_its_values(tmp_path: Path) -> None:
    place = tokenizer_of(vocabulary_file(tmp_path))
    assert isinstance(place, TokenizerFiles)
    assert may_be_restored(tmp_path)
    text = demo_documents("heldout")[0]
    assert load_tokenizer(place).encode(text) == load_tokenizer(demo_model_path()).encode(text)
    assert TokenDocuments(None, place, 2048).first(20) == TokenDocuments(None, demo_model_path(), 2048).first(20)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_files_beside_it_win(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((demo_model_path() / "tokenizer.json").read_bytes())
    assert tokenizer_of(vocabulary_file(tmp_path)) == tmp_path


def test_the_reason_why_there_is_none_is_told(tmp_path: Path) -> None:
    place = tokenizer_of(vocabulary_file(tmp_path, **{"tokenizer.ggml.pre": "of-nobody"}))
    with pytest.raises(UsageError, match=r"has no tokenizer .*not made: .*of-nobody.*needed to read the calibration"):
        TokenDocuments(None, place, 2048).check()


def test_the_file_names_its_directory(tmp_path: Path) -> None:
    vocabulary_file(tmp_path)
    source = resolve_source(str(tmp_path / "model.gguf"))
    assert (source.directory, source.label) == (tmp_path.resolve(), "model.gguf")
    assert directory_of(tmp_path) == tmp_path
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="safetensors lie beside it"):
        resolve_source(str(tmp_path / "model.gguf"))


@pytest.mark.extended
def test_a_gguf_file_alone_is_calibrated_as_its_model(tmp_path: Path) -> None:
    export(quant="none", format="gguf", out=str(tmp_path / "plain"), evaluate=False, quiet=True)
    alone = tmp_path / "alone" / "own.gguf"
    alone.parent.mkdir()
    (tmp_path / "plain" / "model.gguf").rename(alone)
    settings: dict[str, Any] = {"quant": "int4", "algorithm": "gptq", "evaluate": False, "quiet": True}
    settings |= {"calib_samples": 4, "calib_length": 64}
    export(model=str(alone), out=str(tmp_path / "of-file"), tp=2, **settings)
    export(out=str(tmp_path / "of-model"), **settings)
    assert diff_checkpoints(tmp_path / "of-file", tmp_path / "of-model").equal
