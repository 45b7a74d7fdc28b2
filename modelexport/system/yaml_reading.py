"""Untrusted YAML: plain values, or an error of one kind."""

from __future__ import annotations

import re
from typing import Any

from modelexport.errors import error_text

_DEEPEST = 100


def read_yaml(text: str | bytes) -> Any:
    """The value that a YAML document describes.

    Raises:
        ValueError: it is none, or is nested too deeply; its text is one line.
    """
    import yaml

    _check_depth(text if isinstance(text, str) else text.decode("utf-8", errors="replace"))
    try:
        return yaml.safe_load(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    # Beside its own errors the parser raises what a wrong date, number or truth value leads to.
    except (yaml.YAMLError, ValueError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(error_text(error)) from error


def _check_depth(text: str) -> None:
    """Refuses brackets within brackets: the parser's time grows with the square of their depth."""
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth = depth + 1 if bracket in "[{" else max(0, depth - 1)
        if depth > _DEEPEST:
            raise ValueError(f"more than {_DEEPEST} brackets are open at once")
