"""YAML from a stranger: plain values, or an error of one kind."""

from __future__ import annotations

from typing import Any

from modelexport.errors import error_text


def read_yaml(text: str | bytes) -> Any:
    """The value that a YAML document describes.

    Raises:
        ValueError: it is none, or is nested too deeply; its text is one line.
    """
    import yaml

    try:
        return yaml.safe_load(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    # Beside its own errors the parser raises what a wrong date, number or truth value leads to.
    except (yaml.YAMLError, ValueError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(error_text(error)) from error
