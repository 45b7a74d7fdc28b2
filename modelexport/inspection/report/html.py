"""HTML from trees of elements: whatever is not an element already is text, and text is escaped.

Names, notes and settings in a checkpoint are a stranger's. They are shown as text of bounded length, without the
characters that a browser does not show or that turn the direction of what follows.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import TypeAlias

__all__ = ["Child", "Markup", "breakable", "clean", "element", "join"]

LONGEST = 300
"""Characters of one text; names of modules are shorter."""
_VOID = frozenset({"meta", "br", "wbr", "rect", "line", "circle", "path"})
# Control characters, halves of surrogate pairs, and marks that reorder the text around them.
_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """Text that is HTML already: what :func:`element` returns, or a constant of ours."""

    __slots__ = ()


Child: TypeAlias = "str | int | Iterable[Child] | None"


def clean(text: object) -> str:
    """As much of a stranger's text as a reader needs, unescaped: no character in it that is not shown."""
    value = str(text)
    if len(value) > LONGEST:
        value = f"{value[:LONGEST]}..."
    return _UNSHOWN.sub("\ufffd", value)


def element(name: str, /, *children: Child, **attributes: str | float | None) -> Markup:
    """An element of HTML or SVG.

    Args:
        children: elements, texts (escaped), None (nothing), or iterables of these.
        attributes: None leaves one out; ``class_`` is ``class``, and other underscores are hyphens.
    """
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is not None:
            shown = f"{value:g}" if isinstance(value, float) else clean(value)
            parts.append(f' {key.rstrip("_").replace("_", "-")}="{html.escape(shown)}"')
    if name in _VOID and not children:
        parts.append("/>" if name in ("rect", "line", "circle", "path") else ">")
        return Markup("".join(parts))
    return Markup("".join((*parts, ">", join(children), f"</{name}>")))


def breakable(text: str) -> list[Child]:
    """A module's name, which may be broken after its dots."""
    parts = clean(text).split(".")
    return [[f"{part}.", element("wbr")] for part in parts[:-1]] + [parts[-1]]


def join(children: Child) -> Markup:
    """The HTML of children one after the other."""
    if children is None:
        return Markup("")
    if isinstance(children, Markup):
        return children
    if isinstance(children, (str, int)):
        return Markup(html.escape(clean(children)))
    return Markup("".join(join(child) for child in children))
