"""Config trees: split and restore are exact inverses, and data names no code."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from modelexport.distributed.transport import payload
from modelexport.distributed.transport.tree import register_config, restore, split
from modelexport.errors import GatherError


@register_config
@dataclasses.dataclass(frozen=True)
class Frozen:
    name: str
    parts: tuple[Any, ...] = ()
    computed: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "computed", 41)


@register_config
@dataclasses.dataclass
class WithSlots:
    __slots__ = ("a", "b")
    a: Any
    b: Any


@dataclasses.dataclass
class Unregistered:
    a: int = 1


def same(a: Any, b: Any) -> bool:
    """Equal in type and value, to the bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(payload.as_bytes(a), payload.as_bytes(b))
    if isinstance(a, float):
        return math.copysign(1, a) == math.copysign(1, b) and (a == b or (math.isnan(a) and math.isnan(b)))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same, a, b)) and all(same(a[key], b[key]) for key in a)
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a))
    return bool(a == b)


def round_trip(tree: Any) -> Any:
    text, tensors = split(tree)
    return restore(text, tensors)


keys = st.one_of(st.text(max_size=4), st.integers(-3, 3), st.none(), st.booleans(), st.sampled_from(["$", "a.b"]))
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5),
    st.sampled_from([torch.bfloat16, torch.float8_e4m3fn, torch.Size([2, 0]), torch.tensor(2.5), torch.empty(0, 3)]),
    st.lists(st.integers(0, 1), max_size=3).map(lambda v: torch.tensor(v, dtype=torch.bool)),
)  # fmt: skip
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.builds(Frozen, st.text(max_size=3), st.tuples(inner)),
        st.builds(WithSlots, inner, inner),
    ),
    max_leaves=12,
)


@given(trees)
@example(float("nan"))
@example(-float("nan"))
@example([float("inf"), -float("inf"), -0.0, 5e-324])
def test_restore_is_the_inverse_of_split(tree: Any) -> None:
    assert same(round_trip(tree), tree)
    packed = payload.pack(tree)
    data = b"".join(bytes(payload.as_bytes(tensor).tolist()) for tensor in packed.tensors)
    text, entries = payload.parse_header(packed.header)
    view = memoryview(bytearray(data))
    views = [view[entry.start : entry.end] if entry.nbytes else None for entry in entries]
    assert same(payload.unpack(text, entries, views), tree)


def test_a_tensor_is_handed_over_by_its_path_and_not_copied() -> None:
    weight = torch.randn(3, 2, requires_grad=True)
    text, tensors = split({"layers": [{"weight": weight}], "a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})
    assert list(tensors) == ["layers.0.weight", "a.b", "a.b#2"]
    assert tensors["layers.0.weight"].data_ptr() == weight.data_ptr()
    assert not tensors["layers.0.weight"].requires_grad
    assert json.loads(text)["layers"] == [{"weight": {"$": "tensor", "name": "layers.0.weight"}}]
    assert list(split({"__metadata__": torch.ones(1)})[1]) == ["__metadata__#2"]


def test_a_shared_tensor_stays_shared() -> None:
    tensor = torch.arange(6.0)
    text, tensors = split({"tied": tensor, "again": [tensor, tensor.view(6)], "other": tensor.view(2, 3)})
    assert list(tensors) == ["tied", "other"]
    restored = restore(text, {name: value.clone() for name, value in tensors.items()})
    assert restored["tied"] is restored["again"][0] is restored["again"][1]


def test_a_dataclass_comes_back_without_running_its_code() -> None:
    config = Frozen("x")
    object.__setattr__(config, "computed", 7)
    assert round_trip(config) == config
    assert round_trip(config).computed == 7


@pytest.mark.parametrize(
    ("tree", "where"),
    [
        ({"a": [1, {2}]}, "'a.1'"),
        ({"a": Unregistered()}, "register_config"),
        ([torch.ones(2).to_sparse()], "sparse"),
        ([torch.empty(2, device="meta")], "meta"),
        (dataclasses, "its root"),
    ],
)
def test_what_cannot_travel_is_named(tree: Any, where: str) -> None:
    with pytest.raises(TypeError, match=where):
        split(tree)


def test_a_tree_that_contains_itself() -> None:
    tree: list[Any] = []
    tree.append({"deep": tree})
    with pytest.raises(ValueError, match=r"contains itself at '0\.deep'"):
        split(tree)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ('{"$": "config", "class": "os:system", "fields": {}}', "not registered"),
        (f'{{"$": "config", "class": "{__name__}:Frozen", "fields": {{"name": 1}}}}', "same version"),
        ('{"$": "tensor", "name": "w"}', "did not come"),
        ('{"$": "python"}', "unknown kind"),
        ('{"$": ["x"]}', "unknown kind"),
        ('{"$": "dtype", "name": "nn"}', "damaged"),
        ('[{"$": "dict", "items": [[1]]}]', "damaged"),
    ],
)
def test_damaged_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(GatherError, match=message):
        restore(text, {})


def test_register_config_takes_dataclasses_only() -> None:
    with pytest.raises(TypeError, match="takes a dataclass"):
        register_config(int)


def test_a_payload_is_a_safetensors_file() -> None:
    safetensors_torch = pytest.importorskip("safetensors.torch")
    tree = {
        "w": torch.randn(3, 2).to(torch.bfloat16),
        "s": torch.tensor(1.5),
        "c": torch.ones(2, dtype=torch.complex128),
    }
    packed = payload.pack(tree)
    raw = packed.header + b"".join(bytes(payload.as_bytes(tensor).tolist()) for tensor in packed.tensors)
    assert len(raw) == packed.nbytes
    assert (len(packed.header) - 8) % 8 == 0
    loaded = safetensors_torch.load(raw)
    assert torch.equal(loaded["w"], tree["w"])
    assert torch.equal(loaded["s"], tree["s"])
    assert torch.equal(loaded["c"].view(torch.complex128).reshape(2), tree["c"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda fields: fields["w"].update(data_offsets=[8, 32]),
        lambda fields: fields["w"].update(shape=[5]),
        lambda fields: fields["w"].update(dtype="F99"),
        lambda fields: fields["w"].update(shape=[-2, -3]),
        lambda fields: fields.pop("__metadata__"),
        lambda fields: fields["w"].pop("dtype"),
    ],
)
def test_a_damaged_header_is_refused(damage: Any) -> None:
    header = payload.pack({"w": torch.ones(6)}).header
    fields = json.loads(header[8:])
    damage(fields)
    body = json.dumps(fields).encode()
    with pytest.raises(payload.DamagedPayloadError):
        payload.parse_header(len(body).to_bytes(8, "little") + body)
    with pytest.raises(payload.DamagedPayloadError):
        payload.parse_header(header[:-1])
