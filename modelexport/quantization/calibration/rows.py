"""Rows of a calibration text, as data sets have them: a text, a chat, or token ids."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelexport.errors import UsageError, shown

__all__ = ["COLUMNS", "Chat", "Row", "read_row"]

_CHATS = ("messages", "conversations", "conversation")
_PAIRS = (("prompt", "completion"), ("instruction", "output"))
COLUMNS = frozenset({*_CHATS, "text", "input_ids", "tools", "input", *(name for pair in _PAIRS for name in pair)})
"""The keys of a row that are read."""
_KNOWN = (
    '"text" (a string) nor "messages" or "conversations" (a chat) nor "input_ids" (a list of integers) nor "prompt" '
    'with "completion" nor "instruction" with "output"'
)
_MOST_KEYS = 12
_ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
    "system": "system",
}
"""Who a message of ShareGPT's form is from -> the role that chat templates know."""


@dataclass(frozen=True)
class Chat:
    """The messages of a chat, as chat templates take them.

    Attributes:
        messages: with ``role``, ``content`` (a string or None) and whatever else the row has; no other key is None.
        tools: JSON schemas of what the assistant may call; None where the row has none.
        plain: the chat as a text, for a tokenizer without a template; None where it takes one.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    plain: str | None = None


Row = str | Chat | list[int]


def read_row(value: Any, where: str) -> Row:
    """Returns the text, the chat or the token ids of a row.

    Args:
        value: as JSON has it.
        where: file and line, for people.

    Raises:
        UsageError: it has none of these, or one that is not as it should be.
    """
    row = value if isinstance(value, dict) else {}
    if isinstance(row.get("text"), str):
        return _characters(row["text"], where)
    for key in _CHATS:
        if isinstance(row.get(key), list):
            return Chat(_messages(row[key], where), _tools(row, where))
    ids = row.get("input_ids")
    if isinstance(ids, list) and all(type(token) is int for token in ids):
        return ids
    for first, second in _PAIRS:
        if first in row and second in row:
            return _pair(row, first, second, where)
    raise UsageError(f"{where} has neither {_KNOWN}; {_found(value)}")


def _found(value: Any) -> str:
    if not isinstance(value, dict):
        return f"it is no object, but of the type {type(value).__name__}"
    kinds = [f'"{shown(str(key))}" ({type(item).__name__})' for key, item in value.items()]
    more = f" and {len(kinds) - _MOST_KEYS} more" if len(kinds) > _MOST_KEYS else ""
    return f"it has {', '.join(kinds[:_MOST_KEYS])}{more}" if kinds else "it has no key"


def _characters(text: str, where: str) -> str:
    if re.search("[\ud800-\udfff]", text):  # as JSON may have it
        raise UsageError(f"{where}: its text has half a surrogate pair, which stands for no character")
    return text


def _pair(row: Mapping[str, Any], first: str, second: str, where: str) -> Row:
    """A prompt and its completion: texts that follow each other, or two parts of a chat; or an instruction, perhaps
    with an input, and its output: the two turns of a chat."""
    asked, given = row[first], row[second]
    if isinstance(asked, list) and isinstance(given, list):
        return Chat(_messages([*asked, *given], where), _tools(row, where))
    if not isinstance(asked, str) or not isinstance(given, str):
        raise UsageError(f'{where}: "{first}" and "{second}" are to be two strings, or two lists of messages')
    if first == "prompt":
        return _characters(asked + given, where)
    more = row.get("input")
    parts = [_characters(text, where) for text in (asked, more if isinstance(more, str) else "", given)]
    question = "\n\n".join(filter(None, parts[:2]))
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": parts[2]}]
    return Chat(turns, plain="\n\n".join(filter(None, parts)))


def _messages(items: Sequence[Any], where: str) -> list[dict[str, Any]]:
    return [_message(item, where) for item in items]


def _message(item: Any, where: str) -> dict[str, Any]:
    """A message with a role and a content, of which parts are joined: templates for text take a string."""
    if not isinstance(item, dict) or not isinstance(item.get("role", item.get("from")), str):
        raise UsageError(f'{where}: a message is an object with a "role" and a "content", or with "from" and "value"')
    # A column of a data set has every key in every row, and templates ask whether a message has one.
    message = {key: value for key, value in item.items() if value is not None or key == "content"}
    if "role" not in message:
        speaker = message.pop("from")
        if speaker not in _ROLES:
            raise UsageError(f"{where}: a message is from {shown(speaker)}, where {', '.join(_ROLES)} are known")
        message = {"role": _ROLES[speaker], "content": message.pop("value", None), **message}
    if isinstance(message.get("content"), list):
        message["content"] = "".join(_part(part, where) for part in message["content"])
    if isinstance(message.get("content"), str):
        _characters(message["content"], where)
    return message


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = shown(str(part.get("type"))) if isinstance(part, dict) else type(part).__name__
    raise UsageError(f"{where}: a message has a part of the type {kind}, where text is known")


def _tools(row: Mapping[str, Any], where: str) -> list[Any] | None:
    """The tools that the assistant may call; a column of a data set has them as JSON."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise UsageError(f'{where}: its "tools" are not JSON: {error}') from error
    if tools and not isinstance(tools, list):
        raise UsageError(f'{where}: its "tools" are of the type {type(tools).__name__}; a list of schemas is needed')
    return tools or None
