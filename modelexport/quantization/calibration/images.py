"""Rows of a calibration text that show images: messages whose content has parts of them, and the model's processor.

An image is a file on this machine, by its path (relative ones begin where the text is) or in base64 in a ``data:`` URL.
Nothing is fetched from a network.
"""

from __future__ import annotations

import base64
import binascii
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from modelexport.errors import CheckpointError, UsageError, error_text, quoted, shown
from modelexport.system.small_files import LARGEST_JSON, check_regular, has_file, open_regular

__all__ = [
    "PROCESSOR_FILES",
    "ImageRow",
    "check_processor",
    "image_files",
    "image_rows",
    "load_processor",
    "processed",
    "shows_images",
]

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_IMAGE = "image"
_KEYS = ("image", "path", "url", "image_url", "base64")
"""Keys of an image's part that say where it is, or hold it: as chat templates and as engines' servers have it."""
_MISSING = re.compile(r"requires the (\w+) library")
_LARGEST_FILE = 1 << 28
_MOST_PIXELS = 1 << 26


@dataclass(frozen=True)
class ImageRow:
    """A row that shows images.

    Attributes:
        where: file and line, for people.
        messages: of a chat; images' parts are ``{"type": "image"}``.
        images: a file, or the content of one, in the order of these parts.
    """

    where: str
    messages: list[dict[str, Any]]
    images: tuple[Path | bytes, ...]


def shows_images(row: Any) -> bool:
    """Returns whether a row of JSON lines has messages with an image."""
    messages = row.get("messages") if isinstance(row, dict) else None
    return isinstance(messages, list) and any(_is_image(part) for message in messages for part in _parts(message))


def image_rows(path: Path | None, flag: str = "--calib") -> Iterator[ImageRow]:
    """Yields the rows of a file that show images; none of another file than JSON lines.

    Raises:
        UsageError: a row is not as it should be, or an image is not on this machine.
    """
    if path is None or path.suffix != ".jsonl":
        return
    with open_regular(path, label=f"{flag} {path}", error=UsageError) as file:
        for number, line in enumerate(file, 1):
            if b'"messages"' not in line or _IMAGE.encode() not in line:
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue  # whoever reads the text says so
            if shows_images(row):
                yield _row(row["messages"], f"{flag} {path}, line {number}", path.parent)


def image_files(path: Path) -> list[Path]:
    """The files that are there of the images that a text shows. Errors as :func:`image_rows`."""
    named = (image for row in image_rows(path) for image in row.images if isinstance(image, Path))
    return [image for image in named if os.path.isfile(image)]  # False, too, of a name longer than any


def _row(messages: Sequence[Any], where: str, beside: Path) -> ImageRow:
    found: list[dict[str, Any]] = []
    images: list[Path | bytes] = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UsageError(f'{where}: a message is an object with a "role" and a "content"')
        content: list[dict[str, Any]] = []
        for part in _parts(message):
            if _is_image(part):
                images.append(_image(part, where, beside))
                content.append({"type": _IMAGE})
            elif isinstance(part.get("text"), str):
                content.append({"type": "text", "text": part["text"]})
            else:
                kind = shown(str(part.get("type")))
                raise UsageError(f"{where}: a part of the type {kind}, where text and images are known")
        found.append({"role": message["role"], "content": content})
    return ImageRow(where, found, tuple(images))


def _parts(message: Any) -> list[dict[str, Any]]:
    """The parts of a message's content; a string is one."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def _is_image(part: Mapping[str, Any]) -> bool:
    return _IMAGE in str(part.get("type"))  # "image", "image_url", "input_image"


def _image(part: Mapping[str, Any], where: str, beside: Path) -> Path | bytes:
    key = next((key for key in _KEYS if part.get(key)), None)
    value = part.get(key) if key is not None else None
    if isinstance(value, dict):
        value = value.get("url")
    if not isinstance(value, str):
        raise UsageError(f'{where}: an image has neither "image" nor "url": give the path of its file, or a data: URL')
    if key == "base64" or value.startswith("data:"):
        try:
            return base64.b64decode(value.partition(",")[2] if value.startswith("data:") else value, validate=True)
        except (binascii.Error, ValueError) as error:
            raise UsageError(f"{where}: an image is no base64: {error_text(error)}") from error
    scheme, separator, rest = value.partition("://")
    if separator and scheme != "file":
        raise UsageError(f"{where}: the image {shown(value)} is not on this machine: save it, and give its path")
    return beside / os.path.expanduser(unquote(rest) if separator else value)


def _opened(image: Path | bytes, where: str) -> Any:
    """The image in RGB."""
    from PIL import Image, UnidentifiedImageError

    label = f"{where}: the image {image if isinstance(image, Path) else 'in base64'}"
    if isinstance(image, Path):
        if not os.path.lexists(image):
            raise UsageError(f"{label}: no such file")
        check_regular(image, largest=_LARGEST_FILE, label=label, error=UsageError)
    try:
        with Image.open(image if isinstance(image, Path) else BytesIO(image)) as opened:
            width, height = opened.size
            if width * height > _MOST_PIXELS:
                raise UsageError(f"{label} has {width} x {height} pixels: {_MOST_PIXELS:,} are the most")
            return opened.convert("RGB")
    except UnidentifiedImageError as error:
        raise UsageError(f"{label} is in no format that is known") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UsageError(f"{label} cannot be read: {error_text(error)}") from error


def load_processor(directory: Path, label: str) -> Any:
    """A model's processor, as transformers loads it; no code of the model's is run.

    Args:
        label: of the text that it is needed for.

    Raises:
        UsageError: the model has none, or the package that reads images is missing.
        CheckpointError: it cannot be loaded.
    """
    check_processor(directory, label)
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except ImportError as error:
        missing = _MISSING.search(str(error))
        name = missing[1] if missing else error_text(error)
        raise UsageError(
            f"{label} shows images: the processor in {directory} needs a package that is missing, {name}: install it "
            f"(pip install {name.lower() if missing else 'NAME'}), or leave out the rows with images"
        ) from error
    except Exception as error:  # of any kind: what a damaged file leads to is not foreseen there
        what = f"{type(error).__name__}: {error_text(error)}"
        raise CheckpointError(f"{directory}: its processor cannot be loaded ({what})") from error
    if getattr(processor, "image_processor", None) is None:
        raise UsageError(f"{label} shows images, and the processor in {directory} reads none: leave out these rows")
    return processor


def check_processor(directory: Path, label: str) -> None:
    """Refuses a model without the files of a processor, before anything heavy is imported. Errors as above."""
    files = [name for name in PROCESSOR_FILES if has_file(directory, name)]
    if not files:
        raise UsageError(
            f"{label} shows images, and {directory} has neither {' nor '.join(PROCESSOR_FILES)}: copy the model's "
            "processor files there, or leave out the rows with images"
        )
    for name in files:
        check_regular(directory / name, largest=LARGEST_JSON)
    if importlib.util.find_spec("PIL") is None:
        raise UsageError(f"{label} shows images: the package that reads them is missing: pip install pillow")


def processed(processor: Any, row: ImageRow) -> dict[str, Any]:
    """Returns what the model's forward pass takes of a row: token ids, pixels, and what goes with them.

    The chat template decides where images stand; without one, they and the texts follow each other.

    Raises:
        UsageError: an image cannot be read, or the processor refuses the row.
    """
    images = [_opened(image, row.where) for image in row.images]
    try:
        if getattr(processor, "chat_template", None):
            text = processor.apply_chat_template(row.messages, tokenize=False)
        else:
            mark = str(getattr(processor, "image_token", ""))
            parts = [part for message in row.messages for part in message["content"]]
            text = "\n".join(mark if part["type"] == _IMAGE else part["text"] for part in parts)
        found = dict(processor(text=[text], images=images, return_tensors="pt"))
    except Exception as error:  # of any kind: templates and processors have their own
        what = f"{type(error).__name__}: {error_text(error)}"
        raise UsageError(f"{row.where}: the processor of the model refuses it ({quoted(what)})") from error
    return found
