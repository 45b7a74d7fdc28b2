"""Look into pickles without running anything: what a stranger's file says becomes inert data.

A pickle is a program for a stack machine whose instructions can call any function. Here its instructions only build
plain values: a function or class becomes a :class:`Name`, calling it becomes a :class:`Call` that notes what would have
been called with what. Nothing is imported, looked up or executed. Instructions are those that protocols 2 to 5 use, in
the encoding that :mod:`pickletools` documents; every other one is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from reprlib import Repr
from typing import Any

from modelexport.errors import CheckpointError

MAX_PICKLE_BYTES = 1 << 30
"""A pickle larger than this is refused; six million chunks of a distributed checkpoint take less."""
_MAX_STACK = 1 << 20
_TOO_MANY = f"more than {_MAX_STACK:,} values are waiting; no checkpoint needs that"
_MAX_INT_BYTES = 255
_PLAIN_KEYS = (str, int, float, bytes, type(None))


@dataclass(frozen=True, repr=False)
class Name:
    """A class or function that a pickle names. Never looked up."""

    module: str
    name: str

    def __repr__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, repr=False, slots=True)
class Call:
    """An object that a pickle would make.

    Attributes:
        function: what would be called, mostly a :class:`Name`.
        args: the arguments.
        new: whether ``function`` is a class whose ``__new__`` would be called.
        state: what ``__setstate__`` would be given, or None.
        items: pairs that would be set on it as on a dict.
        elements: what would be appended to it as to a list, or added as to a set.
    """

    function: Any
    args: tuple[Any, ...] = ()
    new: bool = False
    state: Any = None
    items: list[tuple[Any, Any]] | tuple[()] = ()
    elements: list[Any] | tuple[()] = ()

    @property
    def name(self) -> str:
        """The function's or class's own name, without its module; ``""`` where it is no plain name."""
        return self.function.name if isinstance(self.function, Name) else ""

    def __repr__(self) -> str:
        return f"<{self.function if isinstance(self.function, Name) else 'object'}(...)>"


@dataclass(frozen=True, eq=False)
class Persistent:
    """An object that the pickle's owner keeps elsewhere, by the id that the pickle gives it."""

    id: Any


_SHORT = Repr()
_SHORT.maxlevel = 2


def shown(value: Any) -> str:
    """A few words for a value from a pickle, however large, deep or circular it is."""
    return _SHORT.repr(value)


def read_pickle(data: bytes, *, what: str) -> Any:
    """The value that a pickle describes.

    Args:
        data: one pickle; what follows its end is an error.
        what: names it in errors.

    Returns:
        None, bool, int, float, str, bytes, tuple, list, dict, set, :class:`Name`, :class:`Call` and
        :class:`Persistent`, nested; shared and even circular where the pickle is.

    Raises:
        CheckpointError: it is damaged, too large, or uses instructions that such files do not need.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{what}: {len(data):,} bytes; at most {MAX_PICKLE_BYTES:,} are read")
    machine = _Machine(data)
    try:
        return machine.run()
    except CheckpointError as error:
        raise CheckpointError(f"{what}: byte {machine.at:,} of its pickle: {error}") from None
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error) as error:
        why = "it ends too early" if machine.at > len(data) else "it contradicts itself"
        raise CheckpointError(f"{what}: damaged pickle: {why} at byte {machine.at:,} of {len(data):,}") from error


class _Machine:
    """The stack machine. Each method is one instruction; ``at`` is the byte after what has been read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, instructions = self.data, _INSTRUCTIONS
        while True:
            opcode = data[self.at]
            self.at += 1
            if opcode == 0x2E:  # STOP
                break
            instruction = instructions.get(opcode)
            if instruction is None:
                raise CheckpointError(f"instruction {opcode:#04x} has no place in a checkpoint")
            instruction(self)
            if len(self.stack) > _MAX_STACK:
                raise CheckpointError(_TOO_MANY)
        if self.at != len(data) or self.marks or len(self.stack) != 1:
            raise ValueError
        return self.stack.pop()

    def take(self, count: int) -> bytes:
        start = self.at
        self.at += count
        piece = self.data[start : self.at]
        if len(piece) != count:
            raise ValueError
        return piece

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        text = self.data[self.at : end].decode("utf-8")
        self.at = end + 1
        return text

    def since_mark(self) -> list[Any]:
        values, self.stack = self.stack, self.marks.pop()
        return values

    def mark(self) -> None:
        if len(self.marks) > _MAX_STACK:
            raise CheckpointError(_TOO_MANY)
        self.marks.append(self.stack)
        self.stack = []

    def integer(self, size: int) -> None:
        count = self.number(size)
        if count > _MAX_INT_BYTES:
            raise CheckpointError(f"a whole number of {count:,} bytes")
        self.stack.append(int.from_bytes(self.take(count), "little", signed=True))

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Call):
            target.elements = _grown(target.elements, values)
        else:
            _only(target, list).extend(values)

    def add(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Call):
            target.elements = _grown(target.elements, values)
        else:
            _only(target, set).update(_key(value) for value in values)

    def set_items(self, values: list[Any]) -> None:
        if len(values) % 2:
            raise ValueError
        pairs = [(_key(key), value) for key, value in zip(values[::2], values[1::2], strict=True)]
        target = self.stack[-1]
        if isinstance(target, Call):
            target.items = _grown(target.items, pairs)
        else:
            _only(target, dict).update(pairs)

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(Name(_only(module, str), _only(name, str)))

    def call(self, *, new: bool) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        self.stack.append(Call(function, _only(args, tuple), new))

    def call_with_keywords(self) -> None:
        keywords, args, cls = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.stack.append(Call(cls, (*_only(args, tuple), _only(keywords, dict)), True))

    def build(self) -> None:
        state = self.stack.pop()
        _only(self.stack[-1], Call).state = state


def _grown(held: list[Any] | tuple[()], values: list[Any]) -> list[Any]:
    """``held`` with more in it; most objects never get a list of their own."""
    if isinstance(held, tuple):
        return values
    held.extend(values)
    return held


def _only(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value


def _key(value: Any) -> Any:
    """A dict's key or set's element: of few kinds, so that hashing it takes neither code nor a deep stack."""
    if type(value) is str or type(value) is Call:
        return value
    parts = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(part, (*_PLAIN_KEYS, Name, Call, Persistent)) for part in parts):
        raise TypeError
    return value


def _gather(make: Callable[[list[Any]], Any]) -> Callable[[_Machine], None]:
    def instruction(m: _Machine) -> None:
        values = m.since_mark()  # brings the stack below the mark back, so before m.stack is looked at
        m.stack.append(make(values))

    return instruction


def _push(make: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(make(m))


def _remember(index: Callable[[_Machine], int]) -> Callable[[_Machine], None]:
    return lambda m: m.memo.__setitem__(index(m), m.stack[-1])


def _drop_to_mark(m: _Machine) -> None:
    m.since_mark()


_INSTRUCTIONS: dict[int, Callable[[_Machine], Any]] = {
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME: a hint for buffering
    ord("("): _Machine.mark,
    ord("0"): lambda m: m.stack.pop(),
    ord("1"): _drop_to_mark,
    ord("2"): _push(lambda m: m.stack[-1]),
    ord("N"): _push(lambda m: None),
    0x88: _push(lambda m: True),
    0x89: _push(lambda m: False),
    ord("J"): _push(lambda m: struct.unpack("<i", m.take(4))[0]),
    ord("K"): _push(lambda m: m.number(1)),
    ord("M"): _push(lambda m: m.number(2)),
    0x8A: lambda m: m.integer(1),
    0x8B: lambda m: m.integer(4),
    ord("G"): _push(lambda m: struct.unpack(">d", m.take(8))[0]),
    ord("X"): _push(lambda m: m.take(m.number(4)).decode("utf-8", "surrogatepass")),
    0x8C: _push(lambda m: m.take(m.number(1)).decode("utf-8", "surrogatepass")),
    0x8D: _push(lambda m: m.take(m.number(8)).decode("utf-8", "surrogatepass")),
    ord("U"): _push(lambda m: m.take(m.number(1))),
    ord("T"): _push(lambda m: m.take(m.number(4))),
    ord("B"): _push(lambda m: m.take(m.number(4))),
    ord("C"): _push(lambda m: m.take(m.number(1))),
    0x8E: _push(lambda m: m.take(m.number(8))),
    0x96: _push(lambda m: m.take(m.number(8))),
    ord(")"): _push(lambda m: ()),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("t"): _gather(tuple),
    ord("]"): _push(lambda m: []),
    ord("l"): _gather(list),
    ord("a"): lambda m: m.append([m.stack.pop()]),
    ord("e"): lambda m: m.append(m.since_mark()),
    ord("}"): _push(lambda m: {}),
    ord("s"): lambda m: m.set_items([m.stack.pop(), m.stack.pop()][::-1]),
    ord("u"): lambda m: m.set_items(m.since_mark()),
    0x8F: _push(lambda m: set()),
    0x90: lambda m: m.add(m.since_mark()),
    0x91: _gather(lambda values: {_key(value) for value in values}),
    ord("c"): _push(lambda m: Name(m.line(), m.line())),
    0x93: _Machine.stack_global,
    ord("R"): lambda m: m.call(new=False),
    0x81: lambda m: m.call(new=True),
    0x92: _Machine.call_with_keywords,
    ord("b"): _Machine.build,
    ord("Q"): lambda m: m.stack.append(Persistent(m.stack.pop())),
    ord("h"): _push(lambda m: m.memo[m.number(1)]),
    ord("j"): _push(lambda m: m.memo[m.number(4)]),
    ord("q"): _remember(lambda m: m.number(1)),
    ord("r"): _remember(lambda m: m.number(4)),
    0x94: _remember(lambda m: len(m.memo)),
}
