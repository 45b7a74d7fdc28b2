"""A report's page as a browser takes it apart: elements, their texts, and which section they stand in."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br", "wbr"}


@dataclass
class Element:
    """One element: its tag, its attributes, the section that it is in, and all text within it."""

    tag: str
    attributes: dict[str, str]
    section: str
    text: str = ""


@dataclass
class Page(HTMLParser):
    """Parsed strictly: every element that is opened is closed, in order."""

    elements: list[Element] = field(default_factory=list)

    def __init__(self, content: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements = []
        self._open: list[Element] = []
        self.section = ""
        self.feed(content)
        self.close()
        assert not self._open, [element.tag for element in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {key: value or "" for key, value in attrs}
        assert len(attributes) == len(attrs), f"{tag} has an attribute twice: {attrs}"
        if tag == "section":
            self.section = attributes["id"]
        element = Element(tag, attributes, self.section)
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, {key: value or "" for key, value in attrs}, self.section))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}>"
        self._open.pop()
        if tag == "section":
            self.section = ""

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def all(self, tag: str, section: str | None = None, **attributes: str) -> list[Element]:
        """Elements of that tag, in a section, with these attributes (``class_``: among its classes)."""
        return [
            e
            for e in self.elements
            if e.tag == tag
            and (section is None or e.section == section)
            and all(
                value in e.attributes.get(key.rstrip("_"), "").split()
                if key == "class_"
                else e.attributes.get(key) == value
                for key, value in attributes.items()
            )
        ]

    @property
    def sections(self) -> list[str]:
        """Their ids, in order."""
        return [e.attributes["id"] for e in self.elements if e.tag == "section"]

    def text(self, section: str | None = None) -> str:
        """All text of a section, or of the body."""
        found = self.all("body") if section is None else self.all("section", id=section)
        assert len(found) == 1, section
        return found[0].text

    def rows(self, section: str) -> list[list[str]]:
        """The cells of every row of the tables of a section."""
        found: list[list[str]] = []
        for element in self.elements:
            if element.section == section and element.tag == "tr":
                found.append([])
            elif element.section == section and element.tag in ("td", "th"):
                found[-1].append(element.text)
        return found

    def check_self_contained(self) -> None:
        """Nothing is loaded, nothing runs, and no link leaves the page."""
        style = "".join(element.text for element in self.all("style"))
        assert len(style) > 1000
        assert not re.search(r"url\s*\(|@import|@font-face|expression\(", style, re.IGNORECASE)
        loading = {
            "script",
            "link",
            "img",
            "iframe",
            "object",
            "embed",
            "base",
            "form",
            "audio",
            "video",
            "image",
            "use",
        }
        assert not [e.tag for e in self.elements if e.tag in loading]
        for element in self.elements:
            for key, value in element.attributes.items():
                assert not key.startswith("on"), key
                assert key not in ("src", "srcset", "action", "xlink:href", "style", "background", "ping"), key
                assert key != "href" or (value.startswith("#") and value[1:] in self.sections), value
