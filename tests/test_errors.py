"""What any message may look like, whatever it quotes."""

from __future__ import annotations

import pytest

from modelexport.errors import (
    CheckpointError,
    RankFailedError,
    UsageError,
    error_text,
    listed,
    nearest,
    quoted,
    shown,
)

ESCAPE = "\x1b]0;owned\x07\x00\r\x9b31m\u202e"
"""A terminal's title, NUL, a return, a colour, and text that runs backwards."""


@pytest.mark.parametrize(
    "text",
    [
        str(UsageError(f"tensor {ESCAPE}")),
        str(RankFailedError(1, f"reading {ESCAPE}", ESCAPE)),
        str(RankFailedError(1, "reading", "a defect", f"Traceback:\n  of {ESCAPE}")),
        shown(ESCAPE),
        quoted(ESCAPE),
        error_text(ValueError(ESCAPE)),
        listed([ESCAPE]),
    ],
)
def test_no_control_character_is_left(text: str) -> None:
    assert all(line.isprintable() for line in text.split("\n"))


def test_a_message_is_one_line_but_for_a_list() -> None:
    """What a library says over several lines does not break ours."""
    assert str(CheckpointError("a: refused:\nby yaml\n\n\tat line 2\n")) == "a: refused: by yaml at line 2"
    text = str(CheckpointError("a:" + listed(["b\nc", *(f"problem {i}" for i in range(8))])))
    assert text.split("\n") == [
        "a:",
        "  b\\nc",
        *(f"  problem {i}" for i in range(5)),
        "  ... and 3 more",
    ]


def test_a_long_message_keeps_its_beginning_and_its_end() -> None:
    text = str(UsageError(f"--quant {'x' * 100_000}: give a shorter one"))
    assert len(text) < 1600
    assert text.startswith("--quant xxx")
    assert text.endswith("xxx: give a shorter one")
    assert "(98,5" in text, "how much is left out"


def test_a_value_is_cut_at_200_characters() -> None:
    assert shown("x" * 200) == "x" * 200
    assert shown("x" * 201) == "x" * 200 + "..."
    assert shown("\x00" * 100_000) == "\\x00" * 50 + "..."
    assert len(error_text(ValueError("two\nlines " * 1000))) == 203


def test_a_defect_keeps_its_traceback_whole() -> None:
    trace = "Traceback (most recent call last):\n" + "  File x, line 1\n" * 1000
    assert str(RankFailedError(2, "", "KeyError: 3", trace)) == f"rank 2 failed: KeyError: 3\n{trace.rstrip()}"


def test_few_names_are_told_and_of_many_the_nearest_three() -> None:
    assert nearest("inspekt", ["diff", "inspect"]) == "; did you mean 'inspect'? known: diff, inspect"
    many = [f"model{i}" for i in range(200)]
    hint = nearest("model12", many, listing="modelexport models")
    assert hint == "; did you mean 'model12', 'model192' or 'model182'? modelexport models lists all 200"
    assert nearest("zzz", many) == "; 200 are known"
