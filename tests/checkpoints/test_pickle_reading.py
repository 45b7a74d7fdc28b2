"""Pickles looked into: as data, with the values that Python's own unpickler gives, and never more than looked into."""

from __future__ import annotations

import collections
import io
import math
import os
import pickle
import pickletools
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelexport.checkpoints.torch_archive import pickle_reading
from modelexport.checkpoints.torch_archive.pickle_reading import Call, Name, Persistent, read_pickle, shown
from modelexport.checkpoints.torch_archive.pickle_writing import write_pickle
from modelexport.errors import CheckpointError

PROTOCOLS = (2, 3, 4, 5)

keys = st.one_of(
    st.text(max_size=5), st.integers(), st.booleans(), st.none(), st.tuples(st.text(max_size=3), st.integers())
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=300)
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.tuples(inner, inner), st.tuples(inner), st.dictionaries(keys, inner, max_size=5)
    ),
    max_leaves=20,
)
# Python 2's way for bytes and sets, by a call, in protocol 2: so those come with the later ones only.
newer = st.one_of(values, st.binary(max_size=300), st.sets(st.integers()), st.frozensets(st.text(max_size=3)))


@given(newer, st.sampled_from(PROTOCOLS[1:]))
def test_plain_values_are_what_python_makes_of_them(value: Any, protocol: int) -> None:
    found = read_pickle(pickle.dumps(value, protocol), what="it")
    if not (protocol == 3 and isinstance(value, (set, frozenset))):
        assert found == value


@given(values, st.sampled_from(PROTOCOLS))
def test_plain_values_of_every_protocol(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol), what="it") == value


@given(values)
def test_what_is_written_is_read_by_python_and_by_us(value: Any) -> None:
    written = write_pickle(value)
    assert pickle.loads(written) == value
    assert read_pickle(written, what="it") == value
    pickletools.dis(written, out=io.StringIO())  # it complains about a stack or memo that does not add up


def test_long_lists_and_dicts(tmp_path: Path) -> None:
    value = {
        "list": list(range(5000)),
        "dict": {f"k{i}": (i, -i) for i in range(2500)},
        "big": 1 << 300,
        "inf": math.inf,
    }
    assert pickle.loads(write_pickle(value)) == value
    for protocol in PROTOCOLS:
        assert read_pickle(pickle.dumps(value, protocol), what="it") == value
    with pytest.raises(TypeError, match="complex is not written"):
        write_pickle({"a": 1j})


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_objects_become_records(protocol: int) -> None:
    counted = collections.OrderedDict(a=1, b=[2])
    deque = collections.deque([1, 2])
    path = Path("x")
    shared, called, queue, made = read_pickle(pickle.dumps((counted, counted, deque, path), protocol), what="it")
    assert shared is called
    assert (shared.function, shared.items) == (Name("collections", "OrderedDict"), [("a", 1), ("b", [2])])
    assert (queue.name, queue.elements) == ("deque", [1, 2])
    assert isinstance(made, Call)
    assert made.args[0] == "x"
    assert str(shared.function) == "collections.OrderedDict"
    assert repr(shared) == "<collections.OrderedDict(...)>"


def test_records_of_our_own_making_are_objects_to_python() -> None:
    record = Call(Name("collections", "Counter"), new=True, state={"seen": 1})
    found = pickle.loads(write_pickle([record, record.function, Call(Name("builtins", "complex"), (1.0, 2.0))]))
    assert (type(found[0]), vars(found[0])) == (collections.Counter, {"seen": 1})
    assert found[1:] == [collections.Counter, 1 + 2j]
    again = read_pickle(write_pickle(record), what="it")
    assert (again.function, again.new, again.state) == (record.function, True, {"seen": 1})


class Storage:
    """What a pickle's owner keeps elsewhere."""


class StoragePickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", "0", 5) if isinstance(obj, Storage) else None


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_is_kept_elsewhere_is_named_only(protocol: int) -> None:
    stream = io.BytesIO()
    StoragePickler(stream, protocol).dump([Storage()])
    (found,) = read_pickle(stream.getvalue(), what="it")
    assert isinstance(found, Persistent)
    assert found.id == ("storage", "0", 5)
    (again,) = read_pickle(write_pickle([found]), what="it")
    assert again.id == found.id


class Evil:
    """What an attacker pickles."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nothing_is_ever_called(tmp_path: Path, protocol: int) -> None:
    touched = tmp_path / "touched"
    content = pickle.dumps({"a": Evil(touched)}, protocol)
    found = read_pickle(content, what="it")["a"]
    assert (found.name, found.args) == ("system", (f"touch {touched}",))
    assert not touched.exists()
    for text in (b"cos\nsystem\n(S'true'\ntR.", b"(S'true'\nios\nsystem\n.", b"\x80\x02\x82\x01."):
        with pytest.raises(CheckpointError, match="has no place in a checkpoint"):
            read_pickle(text, what="it")


HOSTILE = {
    "empty": (b"", r"it: damaged pickle: it .* at byte 0 of 0"),
    "no stop": (b"\x80\x02N", "damaged pickle"),
    "cut short": (pickle.dumps({"a": list(range(10))}, 4)[:-6], "damaged pickle: it ends too early at byte"),
    "trailing bytes": (b"N.N", "contradicts itself"),
    "left over": (b"NN.", "contradicts itself"),
    "open mark": (b"(N.", "contradicts itself"),
    "pop of nothing": (b"0.", "damaged"),
    "no mark": (b"t.", "damaged"),
    "unknown memo": (b"h\x05.", "contradicts itself"),
    "bytes of 2**63": (b"\x8e" + struct.pack("<Q", 1 << 63) + b"x.", "ends too early"),
    "text of 4 GiB": (b"X\xff\xff\xff\xffabc.", "ends too early"),
    "number of 4 GiB": (b"\x8b\xff\xff\xff\xff1.", "a whole number of 4,294,967,295 bytes"),
    "text that is none": (b"\x8c\x02\xff\xff.", "contradicts itself"),
    "odd items": (b"}(NNNu.", "contradicts itself"),
    "list as a key": (b"}(]Nu.", "contradicts itself"),
    "append to text": (b"\x8c\x01aNa.", "contradicts itself"),
    "build of a list": (b"]Nb.", "contradicts itself"),
    "call with a list": (b"cos\nsystem\n]R.", "contradicts itself"),
    "name of no text": (b"NN\x93.", "contradicts itself"),
    "waiting values": (b"N" * (1 << 21) + b".", "more than 1,048,576 values are waiting"),
    "marks": (b"(" * (1 << 21) + b".", "more than 1,048,576 values are waiting"),
    "deep key": (b"}" + b"N" + b"\x85" * 100_000 + b"Ns.", "contradicts itself"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_refused(name: str) -> None:
    content, text = HOSTILE[name]
    with pytest.raises(CheckpointError, match=text):
        read_pickle(content, what="it")


def test_depth_and_circles_are_only_data() -> None:
    found = read_pickle(b"]" + b"]" * 50_000 + b"a" * 50_000 + b".", what="it")
    assert len(shown(found)) < 200
    deep = read_pickle(b"N" + b"\x85" * 200_000 + b".", what="it")
    assert len(shown(deep)) < 200
    del found, deep  # taking them apart again is no recursion either
    circle = read_pickle(b"]q\x00h\x00a.", what="it")
    assert circle[0] is circle
    assert len(shown(circle)) < 200


def test_doubling_lists_are_shared_not_copied() -> None:
    """Sixty lists, each holding the one before twice: 2**60 elements for who would walk them."""
    steps = b"".join(bytes([ord("q"), i]) + b"](" + bytes([ord("h"), i]) * 2 + b"e" for i in range(60))
    found = read_pickle(b"(]" + steps + b"l.", what="it")
    assert len(found) == 61
    assert len(shown(found)) < 2000


def test_the_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_reading, "MAX_PICKLE_BYTES", 10)
    with pytest.raises(CheckpointError, match=r"it: 11 bytes; at most 10 are read"):
        read_pickle(bytes(11), what="it")


def read_or_refuse(content: bytes) -> None:
    """Nothing but an error of ours may come of it, and whatever is read can be shown."""
    try:
        found = read_pickle(content, what="it")
    except CheckpointError:
        return
    assert len(shown(found)) < 2000


@settings(max_examples=300)
@given(st.data())
def test_damage_is_an_error_or_other_data(data: st.DataObject) -> None:
    content = bytearray(
        pickle.dumps(
            [Path("a"), collections.OrderedDict(b=(1, 2.5)), {"k": [b"x", "y"]}], data.draw(st.sampled_from(PROTOCOLS))
        )
    )
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    read_or_refuse(bytes(content))


@given(st.binary(max_size=60))
def test_noise_is_an_error_or_data(content: bytes) -> None:
    read_or_refuse(content)
