"""The hf checkpoint format: what is said in config.json, and which files come along."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from modelexport.checkpoints.formats.hf import config_bytes, copy_side_files
from modelexport.errors import CheckpointError


def fill(directory: Path, *names: str) -> Path:
    """Files with their own names as content."""
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return directory


def copied(directory: Path) -> dict[str, str]:
    """Content of every file below ``directory`` by name."""
    return {str(p.relative_to(directory)): p.read_text() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "target"
    path.mkdir()
    return path


# --------------------------------------------------------------- config.json


def test_config_without_quantisation_keeps_its_bytes() -> None:
    content = '{"model_type":"llama",\r\n  "name": "\u00e9"}'.encode()  # another writer's habits
    assert config_bytes(content, None) == content


def test_config_gains_quantisation_and_keeps_the_rest() -> None:
    keys = {"model_type": "llama", "rope_parameters": {"rope_theta": 1e4}, "name": "\u00e9", "pad_token_id": None}
    written = json.loads(config_bytes(json.dumps(keys).encode(), {"quant_method": "x"}))
    assert written == {**keys, "quantization_config": {"quant_method": "x"}}
    assert list(written)[:4] == list(keys), "in the source's order"


# ---------------------------------------------------------------- side files


def test_everything_but_weights_comes_along(tmp_path: Path, target: Path) -> None:
    kept = ["tokenizer.json", "generation_config.json", "LICENSE", "chat_template.jinja", "figures/a.png", "a/b/c"]
    rewritten = ["config.json", "modelexport.json"]
    weights = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index, unused = "model.safetensors.index.json", "consolidated.safetensors"
    others = ["pytorch_model.bin", "original/consolidated.00.pth", "model.gguf", "onnx/model.onnx"]
    source = fill(tmp_path / "source", *kept, *rewritten, *weights, index, unused, *others)
    side = copy_side_files(source, target, {source / name for name in weights})
    assert copied(target) == {name: name for name in kept}
    assert side.copied == sorted(kept)
    left_out = dict.fromkeys(others, "weights in another format")
    assert side.left_out == {**left_out, unused: "weights that the checkpoint does not use"}


def test_links_to_files_are_followed_as_a_hub_cache_has_them(tmp_path: Path, target: Path) -> None:
    fill(tmp_path / "blobs", "0123abcd")
    source = fill(tmp_path / "snapshots" / "main", "LICENSE")
    (source / "tokenizer.json").symlink_to("../../blobs/0123abcd")
    assert copy_side_files(source, target).copied == ["LICENSE", "tokenizer.json"]
    assert copied(target)["tokenizer.json"] == "0123abcd"
    assert not (target / "tokenizer.json").is_symlink()


def test_a_link_to_a_directory_is_left_out_and_said(tmp_path: Path, target: Path) -> None:
    source = fill(tmp_path / "source", "LICENSE")
    (source / "loop").symlink_to(source, target_is_directory=True)
    side = copy_side_files(source, target)
    assert side.copied == ["LICENSE"]
    assert side.left_out == {"loop": "a link to a directory"}


def test_a_target_inside_the_source_does_not_copy_itself(tmp_path: Path) -> None:
    source = fill(tmp_path / "source", "LICENSE", "config.json")
    fill(source, "older/modelexport.json", "older/config.json", "older/tokenizer.json")  # an earlier export
    fill(source, ".git/HEAD", ".cache/huggingface/x", ".gitattributes", "__pycache__/a.pyc", ".out.modelexport/lock")
    staging = source / ".out.modelexport" / "ckpt"
    staging.mkdir()
    side = copy_side_files(source, staging)
    assert copied(staging) == {"LICENSE": "LICENSE"}
    assert side.left_out == {"older": "a checkpoint of its own"}


def test_a_dangling_link_is_an_error_that_names_it(tmp_path: Path, target: Path) -> None:
    source = fill(tmp_path / "source", "LICENSE")
    (source / "tokenizer.json").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read: No such file"):
        copy_side_files(source, target)


def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path: Path, target: Path) -> None:
    source = fill(tmp_path / "source", "LICENSE")
    os.mkfifo(source / "pipe")
    with pytest.raises(CheckpointError, match=r"pipe: is a named pipe; a regular file is needed"):
        copy_side_files(source, target)


def test_an_unreadable_directory_is_an_error(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = fill(tmp_path / "source", "LICENSE", "closed/a")
    scandir = os.scandir

    def refuse(path: str) -> object:  # root, who often runs tests, may read everything
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(CheckpointError, match="closed cannot be read: Permission denied"):
        copy_side_files(source, target)
