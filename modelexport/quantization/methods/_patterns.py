"""Patterns of module names as strangers write them: read without trust, and matched in bounded time.

Python's own matcher tries one way after another, and a pattern of twenty characters can have more ways than there is
time. So the ways are counted first. Where they may be many, a name is matched by sets of places instead: all those that
each part of the pattern can have reached, which are never more than the name has characters.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from modelexport.errors import CheckpointError, shown

_NEW = sys.version_info >= (3, 11)
_parser: Any = importlib.import_module("re._parser" if _NEW else "sre_parse")
_compiler: Any = importlib.import_module("re._compiler" if _NEW else "sre_compile")

MOST_BITS = 22.0  # of the number of ways: some hundredths of a second for each name
_LENGTH = 64  # of a name, usually
_LONGEST = 1024  # what is longer is the name of no module
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT")
_LOOKS = ("ASSERT", "ASSERT_NOT")
_SINGLE = ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT")  # at most one character

Places = frozenset[int]


class Pattern:
    """A regular expression that begins where a name begins, as ``re.match`` has it.

    Raises:
        CheckpointError: it is none; or it may take for ever, and has references, conditions, flags of a part or atomic
            groups, which sets of places do not know.
    """

    def __init__(self, text: str, where: str) -> None:
        try:
            self._tree = _parser.parse(text)
            self._compiled: re.Pattern[str] = _compiler.compile(self._tree)
            self._bits = _bits(self._tree, _LENGTH)
            self._stepwise = _is_stepwise(self._tree)
        except (re.error, OverflowError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise CheckpointError(f"{where}: '{shown(text)}' is no regular expression: {why}") from error
        self._single: dict[int, re.Pattern[str]] = {}
        if self._bits > MOST_BITS and not self._stepwise:
            raise CheckpointError(
                f"{where}: '{shown(text)}' repeats what repeats, and could take for ever to match: "
                "write it with fewer '*' and '+'"
            )

    def matches(self, name: str) -> bool:
        """Returns whether the pattern matches at the beginning of a name."""
        if len(name) > _LONGEST:
            return False
        bits = self._bits if len(name) <= _LENGTH else _bits(self._tree, len(name))
        if bits > MOST_BITS and self._stepwise:
            return bool(self._after(self._tree, name, frozenset({0})))
        return self._compiled.match(name) is not None

    def _after(self, tree: Any, name: str, places: Places) -> Places:
        """The places where a sequence may end that begins at one of the given places."""
        for item in tree:
            kind, value = str(item[0]), item[1]
            if kind in _REPEATS:
                places = self._after_repeats(value, name, places)
            elif kind == "BRANCH":
                places = frozenset().union(*(self._after(branch, name, places) for branch in value[1]))
            elif kind == "SUBPATTERN":
                places = self._after(value[3], name, places)
            elif kind in _LOOKS:
                wanted = kind == "ASSERT"
                places = frozenset(p for p in places if bool(self._after(value[1], name, frozenset({p}))) is wanted)
            else:
                one = self._single.get(id(item))
                if one is None:
                    alone = _parser.SubPattern(self._tree.state, [item])
                    one = self._single[id(item)] = _compiler.compile(alone, self._compiled.flags)
                places = frozenset(found.end() for p in places if (found := one.match(name, p)) is not None)
            if not places:
                break
        return places

    def _after_repeats(self, value: tuple[Any, Any, Any], name: str, places: Places) -> Places:
        least, most, inner = int(value[0]), int(value[1]), value[2]
        for _ in range(min(least, len(name) + 1)):  # once more than there are characters is as good as ever so often
            places = self._after(inner, name, places)
        found, fresh = places, places
        for _ in range(most - least):
            fresh = self._after(inner, name, fresh) - found
            if not fresh:
                break
            found |= fresh
        return found


@lru_cache(maxsize=4096)
def compiled(text: str, where: str) -> Pattern:
    """The pattern of that text, read once; ``where`` it stands, for errors.

    Raises:
        CheckpointError: see :class:`Pattern`.
    """
    return Pattern(text, where)


def matcher(pattern: str, matching: str, where: str) -> Callable[[str], bool] | None:
    """Returns the predicate of an entry in a list of modules, beside the name that it is; None: there is none.

    Args:
        matching: as :class:`~modelexport.quantization.methods.base.QuantizationConfig` has it.
    """
    where = f"config.json: quantization_config: {where}"
    if pattern.startswith("re:"):
        return compiled(pattern[3:], where).matches
    if matching == "part":
        return lambda module: pattern in module
    if matching == "wildcard" and ("*" in pattern or "?" in pattern):
        return compiled(rf"{from_wildcard(pattern)}\Z", where).matches
    return None


def from_wildcard(text: str) -> str:
    """A shell wildcard, of ``*`` and ``?``, as a regular expression without an end."""
    return "".join({"*": ".*", "?": "."}.get(piece[:1], re.escape(piece)) for piece in re.split(r"(\*+|\?)", text))


def _bits(tree: Iterable[Any], length: int) -> float:
    """log2 of the number of ways, at most, in which a sequence is tried at a place of a name of that length."""
    bits = aside = 0.0
    for op, value in tree:
        kind = str(op)
        if kind in _REPEATS:
            least, most = int(value[0]), min(int(value[1]), length)
            each = _bits(value[2], length)
            bits += math.log2(max(1, most - least + 1)) + (each * most if each > 0 else 0)
        elif kind == "BRANCH":
            bits += math.log2(sum(2 ** min(64.0, _bits(branch, length)) for branch in value[1]))
        elif kind == "SUBPATTERN":
            bits += _bits(value[3], length)
        elif kind in _LOOKS:  # once, if there is one way to it
            looked = _bits(value[1], length)
            aside, bits = (max(aside, looked), bits) if bits == 0 else (aside, bits + looked)
        elif kind not in _SINGLE:
            bits += math.log2(length)
    return max(bits, aside)


def _is_stepwise(tree: Iterable[Any]) -> bool:
    """Returns whether what can come after a place depends on nothing but the place."""
    for op, value in tree:
        kind = str(op)
        inner: Iterable[Any] | None = None
        if kind in _REPEATS:
            inner = (value[2],)
        elif kind == "BRANCH":
            inner = value[1]
        elif kind == "SUBPATTERN" and not value[1] and not value[2]:
            inner = (value[3],)
        elif kind in _LOOKS and value[0] > 0:
            inner = (value[1],)
        elif kind in _SINGLE:
            inner = ()
        if inner is None or not all(map(_is_stepwise, inner)):
            return False
    return True
