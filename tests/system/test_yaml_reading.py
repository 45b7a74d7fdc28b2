"""YAML from a stranger: plain values, or an error of one kind, in time."""

from __future__ import annotations

import time

import pytest

from modelexport.system.yaml_reading import read_yaml


def test_plain_values() -> None:
    assert read_yaml("a: [1, 'x']\nb: {c: null}") == {"a": [1, "x"], "b": {"c": None}}


@pytest.mark.parametrize(
    "text",
    [
        "a: b: c",
        "a: 2024-13-45",
        "a: !!int ''",
        "a: !!int x",
        "a: !!timestamp x",
        "a: !!bool x",
        "a: !!python/object/apply:os.getcwd []",
        "{? [a] : b}",
        "a: " + "1" * 5000,
        "a: *nothing",
        b"\xff",
        "- " * 5000,
        "[" * 200_000,
        "{a: " * 50_000,
    ],
    ids=lambda text: repr(text[:30]),
)
def test_what_is_no_yaml(text: str | bytes) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
        read_yaml(text)
    assert time.monotonic() - began < 2.0
