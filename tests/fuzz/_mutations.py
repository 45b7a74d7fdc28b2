"""Damage done to a file on purpose: at the level of bytes, and at the level of what the file's format says.

Every function takes a file's content and a random generator, and returns other content; the same seed gives the same.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import random
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import yaml

from modelexport.checkpoints.torch_archive.pickle_reading import Call, Name, read_pickle
from modelexport.checkpoints.torch_archive.pickle_writing import write_pickle
from modelexport.errors import CheckpointError
from tests.fuzz._words import KEYS, WORDS

Mutation = Callable[[bytes, random.Random], bytes]


class Raw(str):
    """JSON text that is written as it stands."""


class Pairs(list[tuple[str, Any]]):
    """A JSON object as its keys and values, in which a key may stand twice."""


def _nested(depth: int) -> Raw:
    return Raw("[" * depth + "]" * depth)


HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 1 << 20, 1 << 31, 1 << 63, 1 << 64, 10**30, -(10**30)),
    *(0.5, -1.5, 1e-320, 1e308, Raw("1e999"), Raw("NaN"), Raw("-Infinity"), Raw("1" + "0" * 5000)),
    *("", " ", "0", "AAA", "\0", "\x1b[31m\x07", "a\nb\r\nc", "\ud800", "\u202eabc", "x" * 3000, "-1", "\u0663"),
    *("../../outside", "/", ".", "re:(", "re:(a+)+$", "a{99999999}", "%s{0}", "{}"),
    *([], {}, [None], [[]], [0], ["x", 1], {"": None}, {"a": {"b": [1]}}, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
    *(_nested(50), _nested(990), _nested(100_000)),
)
_INTEGERS = (0, 1, 2, 3, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "U8", "I8", "BOOL", "F8_E4M3", "F8_E8M0", "F4", "X9", "f32")


# ------------------------------------------------------------------ bytes


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Flip, overwrite, cut, repeat or add some bytes, mostly near the beginning or the end."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at, kind = _place(data, rng), rng.randrange(8)
        span = rng.choice((1, 1, 2, 4, 8, 32, 200))
        if kind == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at : at + span] = rng.randbytes(span)
        elif kind == 2:
            del data[rng.choice((at, len(data) - span, 0)) :]
        elif kind == 3:
            data += rng.choice((b"\0" * span, rng.randbytes(span), b"{}", bytes(data[:span])))
        elif kind == 4:
            data[at:at] = data[at : at + span] * rng.choice((1, 2, 50))
        elif kind == 5:
            del data[at : at + span]
        elif kind == 6:
            width, layout = rng.choice(((8, "<Q"), (4, "<I"), (8, ">Q"), (2, "<H")))
            data[at : at + width] = struct.pack(layout, rng.choice(_INTEGERS) % (1 << 8 * width))
        else:
            data[at : at + 1] = rng.choice((b"\0", b"\n", b"\r", b"\x1b", b"\xff", b"\xed\xa0\x80", b'"', b"\\", b"["))
    return bytes(data)


def _place(data: bytearray, rng: random.Random) -> int:
    """Where formats say something of themselves: the beginning, the end, and around a zip's own marks."""
    size = len(data)
    if not size:
        return 0
    where = rng.randrange(4)
    if where == 0:
        return min(size - 1, rng.randrange(64))
    if where == 1:
        return max(0, size - 1 - rng.randrange(256))
    if where == 2 and data[:2] == b"PK":
        found = data.find(b"PK", rng.randrange(size))
        return min(size - 1, max(found, 0) + rng.randrange(48))
    return rng.randrange(size if where == 3 else min(size, 4096))


# ------------------------------------------------------------------ JSON


def mutate_json(content: bytes, rng: random.Random) -> bytes:
    """Change values, keys and their order in a JSON document."""
    return encode(mutate_value(json.loads(content, object_pairs_hook=Pairs), rng)).encode("utf-8", "surrogatepass")


def mutate_value(document: Any, rng: random.Random) -> Any:
    """A few changes of a value as JSON has it (objects as :class:`Pairs`)."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        document = _mutated(document, rng)
    return document


def _mutated(document: Any, rng: random.Random) -> Any:
    holders = [holder for holder in _holders(document) if holder]
    if not holders or rng.random() < 0.01:
        return _hostile(rng)
    holder = rng.choice(holders[:12]) if rng.random() < 0.5 else rng.choice(holders)
    at = rng.randrange(len(holder))
    if isinstance(holder, Pairs):
        key, value = holder[at]
        kind = rng.randrange(10)
        if kind < 5:
            holder[at] = key, _other(value, rng)
        elif kind == 5:
            del holder[at]
        elif kind == 6:
            holder.insert(rng.randrange(len(holder) + 1), (key, _other(value, rng)))
        elif kind == 7:
            new = rng.choice((*KEYS, "", "\0", "a\nb", "\ud800", "\x1b[2J", "k" * 3000, key + "x"))
            holder[at] = new, value
        else:
            holder.append((rng.choice(KEYS), _other(value, rng)))
    elif rng.random() < 0.7:
        holder[at] = _other(holder[at], rng)
    elif rng.random() < 0.5:
        del holder[at]
    else:
        holder.append(_other(holder[at], rng))
    return document


def _other(value: Any, rng: random.Random) -> Any:
    """Another value in the place of one: near it, or of another type, or a word that some format knows."""
    kind = rng.randrange(6)
    if kind == 0 and isinstance(value, int) and not isinstance(value, bool):
        return rng.choice((value + 1, value - 1, value * 2, value // 2, -value, str(value), float(value), [value]))
    if kind == 0 and isinstance(value, str):
        return rng.choice((value + "x", value[:-1], value.upper(), value * 2, [value], {value: value}))
    if kind == 0 and isinstance(value, Pairs):
        return rng.choice((Pairs(), [value], [item for _, item in value], None))
    if kind == 1:
        return rng.choice(WORDS)
    if kind == 2:
        return Pairs(
            (rng.choice(KEYS), rng.choice((_hostile(rng), rng.choice(WORDS)))) for _ in range(rng.randrange(4))
        )
    return _hostile(rng)


def _hostile(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(HOSTILE))  # lists are changed in place


def _holders(document: Any) -> list[Any]:
    """Every list and object of a document, the outermost first."""
    found = [document] if isinstance(document, list) else []
    for holder in found:
        values = (item for _, item in holder) if isinstance(holder, Pairs) else holder
        found.extend(item for item in values if isinstance(item, list))
    return found


def encode(value: Any) -> str:
    """JSON text, with raw parts and doubled keys as they are."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{encode(item)}" for key, item in value) + "}"
    if isinstance(value, dict):
        return encode(Pairs(value.items()))
    if isinstance(value, list):
        return "[" + ",".join(map(encode, value)) + "]"
    return json.dumps(value)


def mutate_json_lines(content: bytes, rng: random.Random) -> bytes:
    """Change one line of a file of JSON lines, or their order."""
    lines = content.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    if rng.random() < 0.2:
        lines.insert(rng.randrange(len(lines) + 1), rng.choice((lines[at], b"\n", b"null\n", b"{}\n", b"[]\n")))
    else:
        lines[at] = mutate_json(lines[at], rng) + b"\n"
    return b"".join(lines)


# ------------------------------------------------------------------ YAML

_BOMB = "&a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"bomb{i}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9)
)
_YAML = (
    "2024-13-45",
    "!!python/object/apply:os.getcwd []",
    "!!binary 'not base64'",
    "!!timestamp x",
    "!!int x",
    "!!float x",
    "0b",
    "1_000",
    "1:60:60",
    "*nothing",
    "&loop [*loop]",
    "&loop {a: *loop}",
    "{? [a] : b}",
    "<<: x",
    "'\\0'",
    '"\\ud800\\x1b"',
    "|\n  a\n  b",
    ".inf",
    ".nan",
    _BOMB,
)


def mutate_yaml(content: bytes, rng: random.Random) -> bytes:
    """Change values and keys of a YAML document of ``key: value`` lines."""
    lines = content.decode().splitlines()
    if rng.random() < 0.5:
        value = json.loads(json.dumps(yaml.safe_load(content)), object_pairs_hook=Pairs)
        return encode(mutate_value(value, rng)).encode("utf-8", "surrogatepass")
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(lines))
        key = lines[at].partition(":")[0]
        lines[at] = f"{rng.choice((key, rng.choice(KEYS), '? [a]'))}: {rng.choice(_YAML)}"
    return "\n".join(lines).encode() + b"\n"


def mutate_card(content: bytes, rng: random.Random) -> bytes:
    """Change the fields at the head of a model card."""
    before, _, rest = content.partition(b"---\n")
    fields, mark, text = rest.partition(b"---\n")
    if not mark:
        return mutate_bytes(content, rng)
    return before + b"---\n" + mutate_yaml(fields, rng) + mark + text


# ------------------------------------------------------------------ binary formats


def mutate_safetensors(content: bytes, rng: random.Random) -> bytes:
    """Change the header: names, dtypes, shapes and offsets, and the header's own length."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length], object_pairs_hook=Pairs)
    if rng.random() < 0.5:
        header = mutate_value(header, rng)
    else:
        _, entry = header[rng.randrange(len(header))]
        for at, (key, value) in enumerate(entry):
            if rng.random() < 0.5:
                entry[at] = key, _entry_value(key, value, rng)
    text = encode(header).encode("utf-8", "surrogatepass")
    said = len(text) if rng.random() < 0.95 else rng.choice(_INTEGERS)
    return struct.pack("<Q", said) + text + content[8 + length :]


def _entry_value(key: str, value: Any, rng: random.Random) -> Any:
    if key == "dtype":
        return rng.choice(_DTYPES)
    if not isinstance(value, list) or not value:
        return _hostile(rng)
    numbers = list(value)
    numbers[rng.randrange(len(numbers))] = rng.choice((*_INTEGERS, -1, numbers[0] * 2, numbers[-1] // 2, True, 1.0))
    return rng.choice((numbers, numbers[::-1], numbers[1:], [*numbers, 1], [0, *numbers]))


def mutate_numbers(content: bytes, rng: random.Random) -> bytes:
    """Overwrite a number of 4 or 8 bytes in the first part of a file, where headers have counts and lengths."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, (width, layout) = rng.randrange(min(len(data), 3000)), rng.choice(((8, "<Q"), (4, "<I")))
        data[at : at + width] = struct.pack(layout, rng.choice(_INTEGERS) % (1 << 8 * width))
    return bytes(data)


def mutate_pickle(content: bytes, rng: random.Random) -> bytes:
    """Change values in the objects that a pickle describes."""
    try:
        return write_pickle(_pickled(read_pickle(content, what="seed"), rng, rng.randrange(1, 200)))
    except (CheckpointError, TypeError):  # no pickle, or one with objects that are only read
        return mutate_bytes(content, rng)


def mutate_archive(content: bytes, rng: random.Random) -> bytes:
    """Damage the pickle in what torch.save wrote."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            member = old.read(name)
            new.writestr(name, mutate_pickle(member, rng) if name.endswith("/data.pkl") else member)
    return file.getvalue()


def _pickled(value: Any, rng: random.Random, until: int) -> Any:
    """``value`` with about one in ``until`` of the values in it replaced."""
    if rng.randrange(until) == 0:
        plain = [item for item in HOSTILE if not isinstance(item, (Raw, list, dict))]
        return rng.choice(
            (*plain, (), (1, -1), [], {}, Name("a.b", "c"), Call(Name("torch", "Size"), ((3, -4),), False))
        )
    if isinstance(value, dict):
        return {_key(key, rng, until): _pickled(item, rng, until) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_pickled(item, rng, until) for item in value)
    if isinstance(value, Call):
        args, state = (_pickled(part, rng, until) for part in (value.args, value.state))
        call = dataclasses.replace(value, args=args if isinstance(args, tuple) else (args,), state=state)
        call.items, call.elements = value.items, value.elements
        return call
    return value


def _key(key: Any, rng: random.Random, until: int) -> Any:
    return rng.choice((0, None, "", "\x1b[2J", "a\nb", ("x", 1))) if rng.randrange(until) == 0 else key


_BY_NAME: dict[str, Mutation] = {
    "README.md": mutate_card,
    ".metadata": mutate_pickle,
}
_BY_SUFFIX: dict[str, Mutation] = {
    "json": mutate_json,
    "jsonl": mutate_json_lines,
    "yaml": mutate_yaml,
    "safetensors": mutate_safetensors,
    "gguf": mutate_numbers,
    "pt": mutate_archive,
}


def mutate(name: str, content: bytes, rng: random.Random) -> bytes:
    """Damage a file of that name, by what its format is or by its bytes."""
    own = _BY_NAME.get(name) or _BY_SUFFIX.get(name.rpartition(".")[2])
    if own is None or not content or rng.random() < 0.3:
        return mutate_bytes(content, rng)
    found = own(content, rng)
    return mutate_bytes(found, rng) if rng.random() < 0.1 else found
