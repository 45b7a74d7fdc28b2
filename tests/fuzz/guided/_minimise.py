"""The few inputs of a fuzzer's many that reach all the lines, the smallest first."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import modelexport
from tests.fuzz.guided import _corpus
from tests.fuzz.guided._execution import Fault, Place, Reader, execute

MOST = 4
"""Inputs of a reader in the corpus, beside those that are there."""
LARGEST = 700
"""Bytes of one that is added."""
_PACKAGE = os.path.dirname(modelexport.__file__) + os.sep


def keep(reader: Reader, work: Path) -> None:
    """Adds to a reader's corpus the inputs that reach lines which those in it do not."""
    place = Place(work / "places" / reader.name)
    kept = _corpus.load(reader.name)
    seen: set[tuple[str, int]] = set()
    for data in kept:
        execute(reader, data, place)
        seen |= _lines(reader, data, place)
    found = [path.read_bytes() for path in (work / "inputs" / reader.name).glob("*")]
    reached = [(data, _lines(reader, data, place)) for data in sorted(found, key=len) if len(data) <= LARGEST]
    for _ in range(MOST):
        data, lines = max(reached, key=lambda item: len(item[1] - seen), default=(b"", set()))
        if not lines - seen:
            break
        kept.append(data)
        seen |= lines
    _corpus.save(reader.name, kept)


def _lines(reader: Reader, data: bytes, place: Place) -> set[tuple[str, int]]:
    """The lines of the package that run while a reader reads; none of an input that is a fault."""
    lines: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        outcome = execute(reader, data, place)
    finally:
        sys.settrace(None)
    return set() if isinstance(outcome, Fault) else lines
