"""Values of a stranger's JSON: of the kind that is needed, or an error that names the key."""

from __future__ import annotations

from typing import Any

import pytest

from modelexport.errors import CheckpointError
from modelexport.system.json_values import JsonValues

CONTENT: dict[str, Any] = {
    "whole": 7,
    "number": 0.5,
    "text": "a",
    "null": None,
    "object": {"inner": True},
    "list": [1, 2.5],
    "texts": ["a", "b"],
    "nan": float("nan"),
    "huge": 10**400,
    "negative": -1,
}
VALUES = JsonValues(CONTENT)


def test_values_of_their_kind() -> None:
    assert (VALUES.whole("whole"), VALUES.whole("null", 3), VALUES.whole("none", 0, least=0)) == (7, 3, 0)
    assert (VALUES.number("whole"), VALUES.number("number"), VALUES.number("null", 2.0)) == (7.0, 0.5, 2.0)
    assert (VALUES.text("text"), VALUES.text("null", "b")) == ("a", "b")
    assert (VALUES.numbers("list"), VALUES.texts("texts"), VALUES.texts("null")) == ((1.0, 2.5), ("a", "b"), None)
    assert (VALUES.object("object").content, VALUES.object("null").content) == ({"inner": True}, {})
    assert [key for key in ("whole", "null", "none") if VALUES.has(key)] == ["whole"]


@pytest.mark.parametrize(
    ("kind", "key", "words"),
    [
        ("whole", "text", "text is 'a'; a positive whole number is needed"),
        ("whole", "null", "null is missing"),
        ("whole", "object", "object is {'inner': True}"),
        ("whole", "negative", "negative is -1"),
        ("whole", "huge", "at most 9,007,199,254,740,992 are believed"),
        ("number", "nan", "nan is nan; a positive number is needed"),
        ("number", "huge", "huge is a number of very many digits"),
        ("number", "texts", "texts is ['a', 'b']"),
        ("numbers", "texts", "a list of numbers is needed"),
        ("numbers", "whole", "a list of numbers is needed"),
        ("texts", "list", "list is [1, 2.5]; a list of texts is needed"),
        ("texts", "text", "a list of texts is needed"),
        ("text", "whole", "whole is 7; a text is needed"),
        ("object", "list", "an object is needed"),
    ],
)
def test_values_of_another_kind(kind: str, key: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=r"^config\.json: ") as caught:
        getattr(VALUES, kind)(key)
    assert words in str(caught.value)


def test_where_a_value_stands_is_told() -> None:
    with pytest.raises(CheckpointError, match=r"^config\.json: object: inner is True; a text is needed$"):
        VALUES.object("object").text("inner")
