"""The ``hf`` checkpoint format: safetensors files with a compressed-tensors ``quantization_config``.

Read by vLLM, SGLang and transformers. What engines insist on: ``quantization_status`` is ``"compressed"``
(transformers loads random weights without it), every unquantised linear is in ``ignore``, and no tensor is
there that the config does not announce. See https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from modelexport.errors import CheckpointError
from modelexport.system.small_files import check_regular

RECORD = "modelexport.json"
CARD = "README.md"
"""The model card: what the Hub shows, and takes a model's licence and base model from."""
SOURCE_CARD = "README.source.md"
"""What the source's own card is called beside ours."""
_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".gguf",
    ".onnx",
    ".pkl",
    ".npz",
    ".distcp",
)
_REWRITTEN = {"config.json", RECORD}
_NOT_A_MODELS = {"__pycache__", ".gitattributes"}


@dataclass
class SideFiles:
    """Files that came along unchanged, and those that did not -> why. Names relative to the checkpoint."""

    copied: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def config_bytes(content: bytes, quantization: dict[str, Any] | None, *, replace: bool = True) -> bytes:
    """A config.json: the given bytes as they are, or their content with another ``quantization_config``.

    Args:
        quantization: None: there is none.
        replace: whether what ``content`` says of quantisation is dropped; it is, where ``quantization`` is given.
    """
    config = json.loads(content)
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]  # Kimi K2.5: in text_config
    keys = ("quantization_config", "compression_config")
    stale = [(part, key) for part in parts for key in keys if part.get(key) is not None]
    if quantization is None and not (replace and stale):
        return content
    for part, key in stale:
        del part[key]
    if quantization is not None:
        config["quantization_config"] = quantization
    return (json.dumps(config, indent=2) + "\n").encode()


def copy_side_files(
    source: Path,
    target: Path,
    weights: Collection[Path] = (),
    not_the_models: Collection[str] = (),
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> SideFiles:
    """Copy everything of the checkpoint that is neither weights nor rewritten: tokenizer, templates, licence.

    Links to files are followed (a hub cache is made of them). Hidden directories stay behind, the staging directory
    of a target inside ``source`` among them.

    Args:
        weights: the files that the checkpoint's tensors were read from; other safetensors files are noted.
        not_the_models: names of files that belong to the source's format alone.
        renamed: name -> what it is called in the target; a file that has this name already stays behind.

    Raises:
        CheckpointError: a file or a directory cannot be read.
    """
    side = SideFiles()
    taken = {new: old for old, new in renamed.items() if (source / old).is_file()}
    for path in sorted(_files_below(source, side)):
        name = path.relative_to(source)
        if path.name in _NOT_A_MODELS or str(name) in _REWRITTEN or str(name) in not_the_models:
            continue
        if path in weights or path.name.endswith(".index.json"):
            continue
        if str(name) in taken:
            side.left_out[str(name)] = f"another file has its name here: the source's {taken[str(name)]}"
            continue
        name = Path(renamed.get(str(name), name))
        if path.suffix in _WEIGHTS:
            other = (
                "weights that the checkpoint does not use"
                if path.suffix == ".safetensors"
                else "weights in another format"
            )
            side.left_out[str(name)] = other
            continue
        destination = target / name
        destination.parent.mkdir(parents=True, exist_ok=True)
        check_regular(path)
        try:
            shutil.copyfile(path, destination)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be copied: {error.strerror or error}") from error
        side.copied.append(str(name))
    return side


def _files_below(source: Path, side: SideFiles) -> Iterator[Path]:
    """Every file of a checkpoint; what is not entered is noted in ``side``."""

    def refuse(error: OSError) -> NoReturn:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror or error}") from error

    for directory, below, files in os.walk(source, onerror=refuse):
        entered = []
        for path in (Path(directory, name) for name in below):
            if path.is_symlink():
                side.left_out[str(path.relative_to(source))] = "a link to a directory"
            elif (path / RECORD).exists():
                side.left_out[str(path.relative_to(source))] = "a checkpoint of its own"
            elif not path.name.startswith(".") and path.name not in _NOT_A_MODELS:
                entered.append(path.name)
        below[:] = entered
        yield from (Path(directory, name) for name in files)
