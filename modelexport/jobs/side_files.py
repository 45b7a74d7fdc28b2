"""Files beside the weights that exports and reshardings alike make, and the digests of what they are made from."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from modelexport.checkpoints.formats.hf import CARD, SOURCE_CARD, config_bytes
from modelexport.checkpoints.mirrors.mirror import stamped
from modelexport.checkpoints.safetensors.file import Checkpoint
from modelexport.errors import CheckpointError
from modelexport.inspection.card import model_card
from modelexport.inspection.record.reading import read_record
from modelexport.models.opening import config_path
from modelexport.system.small_files import LARGEST_CONFIG, has_file, is_failing, read_small


def cards(source: Path) -> tuple[frozenset[str], dict[str, str]]:
    """Decides on a source's README.md where a card of ours takes its place.

    Returns:
        Files that stay behind, and those that come along under another name: a card that was made of the source's
        record is made anew, any other one is kept beside ours.

    Raises:
        CheckpointError: the disk fails.
    """
    try:
        record = read_record(source)
        own = record is not None and read_small(source / CARD) == model_card(record.content).encode()
    except CheckpointError as error:  # damaged, or gone: nobody can tell, so it is kept
        if is_failing(error):
            raise
        own = False
    return (frozenset({CARD}), {}) if own else (frozenset(), {CARD: SOURCE_CARD})


def source_config(
    checkpoint: Checkpoint, given: str | None, quantization: dict[str, Any] | None, *, replaced: bool = False
) -> bytes:
    """The target's config.json: the bytes that the model came with wherever there are such.

    Args:
        quantization: its new ``quantization_config``; None: there is none.
        replaced: whether what the model came with says of quantisation no longer holds.
    """
    content = None
    if given is not None:
        content = read_small(config_path(given), largest=LARGEST_CONFIG)
        if json.loads(content) != checkpoint.config:  # changed since, as where a head was untied
            content = (json.dumps(checkpoint.config, indent=2) + "\n").encode()
    elif checkpoint.config is not None:
        if has_file(checkpoint.directory, "config.json"):
            content = read_small(checkpoint.directory / "config.json", largest=LARGEST_CONFIG)
            if json.loads(content) != checkpoint.config:  # a format with a config.json of its own kind
                content = None
        if content is None:
            content = (json.dumps(checkpoint.config, indent=2) + "\n").encode()
    assert content is not None
    return config_bytes(content, quantization, replace=replaced)


def inputs_of(checkpoint: Checkpoint, config: str | None, texts: Iterable[Path] = ()) -> list[Path]:
    """The files that a target is made from: weights, config.json, and the texts that a model is calibrated on."""
    own = checkpoint.directory / "config.json" if config is None else config_path(config)
    return stamped((*checkpoint.files, own, *texts))


def files_digest(config: dict[str, Any] | None, files: Iterable[Path]) -> str:
    """A digest of a config and of the names, sizes and times of files: equal as long as nobody touched them."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in stamped(files):
        stat = os.stat(path)
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def target_of(tp: int, pp: int, ep: int) -> dict[str, int]:
    """The settings of a recipe that say for which parallelism it is written; none for a whole checkpoint."""
    return {f"target_{axis}": size for axis, size in (("tp", tp), ("pp", pp), ("ep", ep)) if size != 1}
