"""The corpus: for each reader a file of JSON lines, an input a line: text as it is, or bytes in base64."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "corpus"


def load(name: str) -> list[bytes]:
    """The inputs of a reader; none where it has no file yet."""
    path = FOLDER / f"{name}.jsonl"
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    return [each.encode() if isinstance(each, str) else base64.b64decode(each[0]) for each in map(json.loads, lines)]


def save(name: str, inputs: Iterable[bytes]) -> None:
    """Makes these the inputs of a reader, each once."""
    FOLDER.mkdir(exist_ok=True)
    lines = [json.dumps(_written(each)) for each in dict.fromkeys(inputs)]
    (FOLDER / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="ascii")


def _written(data: bytes) -> str | list[str]:
    encoded = [base64.b64encode(data).decode("ascii")]
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return encoded
    return min(text, encoded, key=lambda each: len(json.dumps(each)))
