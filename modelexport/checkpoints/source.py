"""The source of a model: the embedded demo, a directory, or a repository of the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modelexport.errors import CheckpointError, UsageError, error_text

if TYPE_CHECKING:
    from modelexport.checkpoints.mirrors.fetching import Fetcher
    from modelexport.checkpoints.safetensors.reader import Checkpoint

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
NOT_NEEDED = [
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.h5",
    "*.msgpack",
    "*.gguf",
    "*.onnx",
    "*.pkl",
    "original/*",
]
PICKLED = ["pytorch_model*.bin", "pytorch_model.bin.index.json", "consolidated.*.pth", "qmodel.pt"]
"""The pickles that are read, where there is nothing else: without running anything in them."""


@dataclass(frozen=True)
class Source:
    """A model on this machine's disk; ``label`` names it in records: a hub id or a directory's name.

    Attributes:
        hub_id: where it came from the hub.
        checkpoint: its tensors, where these are in memory and only the small files in the directory.
        fetcher: what brings its weights to the directory while they are read, where they are not there yet.
    """

    directory: Path
    label: str
    is_demo: bool = False
    hub_id: str | None = None
    checkpoint: Checkpoint | None = None
    fetcher: Fetcher | None = None


def is_local(model: str | None) -> bool:
    """Returns whether ``model`` is on this machine's disk, and nothing has to be downloaded."""
    return model is None or Path(os.path.expanduser(model)).exists()


def directory_of(path: str | os.PathLike[str]) -> Path:
    """Returns the directory of a checkpoint that is named by its one file, a GGUF file; other paths as they are.

    Raises:
        CheckpointError: other weights lie beside the file, and would be read.
    """
    path = Path(path)
    if path.suffix != ".gguf" or not path.is_file():
        return path
    if any(name.endswith(".safetensors") for name in os.listdir(path.parent)):
        raise CheckpointError(f"{path}: safetensors lie beside it, and would be read: give it a directory of its own")
    return path.parent


def source_bytes(model: str | None) -> int | None:
    """Returns the size of the files of ``model``; None where it is not known before a download or a walk."""
    from modelexport.assets import demo_model_path

    directory = demo_model_path() if model is None else Path(os.path.expanduser(model))
    try:
        with os.scandir(directory) as entries:
            files = list(entries)
            return None if any(entry.is_dir() for entry in files) else sum(entry.stat().st_size for entry in files)
    except OSError:
        return None


def resolve_source(model: str | None, revision: str | None = None) -> Source:
    """Find ``model``: None is the demo model, then a directory, then a hub id (downloaded to the hub's cache).

    Raises:
        UsageError: neither a directory nor shaped like a hub id, or a revision of what has none.
        CheckpointError: the hub cannot be reached, or refuses the model.
    """
    if revision is not None and is_local(model):
        raise UsageError(f"--revision {revision} is for hub ids, and {model or 'the demo model'} is none: drop it")
    if model is None:
        from modelexport.assets import demo_model_path

        return Source(demo_model_path(), "modelexport demo model", is_demo=True)
    path = Path(os.path.expanduser(model))
    directory = directory_of(path)
    if directory.is_dir():
        return Source(directory.resolve(), path.resolve().name)
    if path.is_file():
        raise UsageError(f"--model {model} is a file; give the directory that holds it: --model {path.parent}")
    if not _HUB_ID.fullmatch(model):
        raise UsageError(f"--model {model}: no such directory (a hub id looks like ORGANISATION/NAME)")
    return Source(_download(model, revision), model, hub_id=model)


def is_hub_id(model: str) -> bool:
    """Returns whether a text has the form of a hub id, ``ORGANISATION/NAME``."""
    return bool(_HUB_ID.fullmatch(model))


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    with explained(model, revision):
        found = Path(snapshot_download(model, revision=revision, ignore_patterns=NOT_NEEDED))
        if not any(found.glob("*.safetensors")):  # published before there were any
            snapshot_download(model, revision=revision, allow_patterns=PICKLED)
        return found


@contextmanager
def hidden_bars() -> Iterator[None]:
    """Hides the progress bars of the hub's client."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def explained(model: str, revision: str | None) -> Iterator[None]:
    """Errors of the hub's client as one sentence: what is not done, why, and what to type."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    transport_error = HfHubHTTPError.__mro__[1]  # of the HTTP library that this version of the hub's client uses
    try:
        yield
    except HFValidationError as error:
        raise UsageError(f"--model {model}: no such directory, and no hub id either: {error_text(error)}") from error
    except (LocalEntryNotFoundError, ConnectionError) as error:  # the former may be an HfHubHTTPError too
        raise CheckpointError(_unreachable(model)) from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no answer"
        raise refused(model, revision, status) from error
    except transport_error as error:
        raise CheckpointError(_unreachable(model)) from error
    except OSError as error:
        raise CheckpointError(f"--model {model} could not be downloaded: {error.strerror or error}") from error


def refused(model: str, revision: str | None, status: int | str) -> CheckpointError:
    """The error for an HTTP status with which the hub does not give what it is asked for."""
    at = f" at revision '{revision}'" if revision is not None else ""
    if status == 429:
        return CheckpointError(
            f"the hub limits how much this address or token may ask for, and does not give '{model}' now (HTTP 429): "
            "wait a few minutes, or log in (hf auth login), and run the same command again"
        )
    return CheckpointError(
        f"the hub refused '{model}'{at} (HTTP {status}); check the name{' and the revision' if at else ''}, and "
        "for a gated model log in first: hf auth login"
    )


def _unreachable(model: str) -> str:
    return (
        f"--model {model} is no directory here, and the hub cannot be reached to download it (offline?). "
        "Download it where there is a network and give the directory: --model DIR"
    )
