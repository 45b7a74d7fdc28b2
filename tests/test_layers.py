"""LayerConfig: merge is the inverse of cut, restore of split; parts that do not fit are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelexport.layers import Box, LayerConfig, ModuleConfig, TensorShard, merge, restore, split
from modelexport.sharding.plan import cut_along, even_cut, replicated

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


def cut(layer: LayerConfig, boxes: Mapping[str, Mapping[str, Box | None]]) -> LayerConfig:
    """One rank's part of a whole layer: the inverse of :func:`merge`.

    Args:
        layer: a layer whose tensors are whole.
        boxes: module name -> tensor name -> the rectangle the rank emits, or None where it emits nothing.
    """
    part = LayerConfig(layer.name, layer.index)
    for name, module in layer.modules.items():
        tensors = {}
        for tensor, shard in module.tensors.items():
            box = boxes[name][tensor]
            if box is None:
                continue
            index = tuple(slice(start, stop) for start, stop in box)
            tensors[tensor] = TensorShard(
                shard.dtype,
                shard.global_shape,
                tuple(start for start, _ in box),
                tuple(stop - start for start, stop in box),
                None if shard.data is None else shard.data[index],
            )
        part.modules[name] = replace(module, tensors=tensors)
    return part


def describe(layer: LayerConfig) -> LayerConfig:
    """The same layer without its data."""
    modules = {
        name: replace(module, tensors={t: replace(s, data=None) for t, s in module.tensors.items()})
        for name, module in layer.modules.items()
    }
    return replace(layer, modules=modules)


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bits, so every pattern of the dtype occurs: NaN payloads, negative zeros, denormals."""
    generator = torch.Generator().manual_seed(seed)
    kind = DTYPES[dtype]
    count = kind.itemsize
    for size in shape:
        count *= size
    high = 2 if dtype == "BOOL" else 256
    return torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator).view(kind).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes in row-major order: equal bits are equal, NaN or not."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def shard(dtype: str, shape: tuple[int, ...], seed: int = 0) -> TensorShard:
    return TensorShard(dtype, shape, (0,) * len(shape), shape, random_tensor(dtype, shape, seed))


def module(**tensors: TensorShard) -> ModuleConfig:
    shape = next(iter(tensors.values())).global_shape
    return ModuleConfig("linear", "mlp.up", "column", shape, shape, "int8", None, tensors)


def assert_same(left: LayerConfig, right: LayerConfig) -> None:
    """Equal in every field, in the order of every dict, and in every bit."""
    assert describe(left) == describe(right)
    assert list(left.modules) == list(right.modules)
    for path, theirs in right.modules.items():
        ours = left.modules[path].tensors
        assert list(ours) == list(theirs.tensors)
        for name, expected in theirs.tensors.items():
            found = ours[name].data
            assert (found is None) == (expected.data is None)
            if found is not None and expected.data is not None:
                assert found.dtype == expected.data.dtype
                assert found.shape == expected.data.shape
                assert bits(found) == bits(expected.data)


@st.composite
def layers_and_cuts(draw: st.DrawFn) -> tuple[LayerConfig, list[Mapping[str, Mapping[str, Box | None]]]]:
    """A layer of random modules, and for each rank the rectangles of it that the rank emits."""
    tp = draw(st.integers(1, 9))
    layer = LayerConfig("model.layers.7", draw(st.none() | st.integers(0, 99)))
    boxes: list[dict[str, dict[str, Box | None]]] = [{} for _ in range(tp)]
    for number in range(draw(st.integers(1, 4))):
        path = draw(st.sampled_from(["", "self_attn.q_proj", "norm", "a.b.c"])) + str(number)
        whole = ModuleConfig(
            kind=draw(st.sampled_from(["linear", "norm", "embedding", "head"])),
            role=f"role{number}",
            partition="column",
            global_shape=(1, 1),
            local_shape=(1, 1),
            group_size=draw(st.none() | st.just(32)),
        )
        layer.modules[path] = whole
        for i in range(draw(st.integers(1, 3))):
            shape = tuple(draw(st.lists(st.integers(1, 12), min_size=0, max_size=3)))
            whole.tensors[f"t{i}"] = shard(draw(st.sampled_from(sorted(DTYPES))), shape, seed=100 * number + i)
            dim = draw(st.sampled_from([None, *range(len(shape))]))
            parts = replicated(1, tp) if dim is None else cut_along(dim, even_cut(shape[dim], 1, tp))
            for rank in range(tp):
                span = parts.owned[rank]
                box = tuple(span if d == dim else (0, size) for d, size in enumerate(shape))
                boxes[rank].setdefault(path, {})[f"t{i}"] = box if parts.owns(rank) else None
    return layer, boxes


@given(layers_and_cuts(), st.randoms(use_true_random=False))
def test_merge_is_the_inverse_of_cut(case, random) -> None:  # type: ignore[no-untyped-def]
    layer, boxes = case
    parts = [cut(layer, box) for box in boxes]
    for part, box in zip(parts, boxes, strict=True):
        for path, tensors in box.items():
            emitted = {name: part.modules[path].tensors[name].box for name, want in tensors.items() if want is not None}
            assert emitted == {name: want for name, want in tensors.items() if want is not None}
    assert_same(merge(parts), layer)
    assert_same(merge([describe(part) for part in parts]), describe(layer))
    random.shuffle(parts)
    shuffled = merge(parts)
    for path, whole in layer.modules.items():  # in any order; only the order of a module's tensors may change
        assert set(shuffled.modules[path].tensors) == set(whole.tensors)
        for name, expected in whole.tensors.items():
            assert expected.data is not None
            found = shuffled.modules[path].tensors[name].data
            assert found is not None
            assert bits(found) == bits(expected.data)


@given(layers_and_cuts())
def test_restore_is_the_inverse_of_split(case) -> None:  # type: ignore[no-untyped-def]
    layer, boxes = case
    for part in (layer, describe(layer), *(cut(layer, box) for box in boxes)):
        text, tensors = split(part)
        assert text.isascii()
        assert_same(restore(text, tensors), part)


@given(layers_and_cuts())
def test_merging_in_two_goes_is_merging_at_once(case) -> None:  # type: ignore[no-untyped-def]
    """Neighbours first (two hosts, say), then the two halves."""
    layer, boxes = case
    parts = [cut(layer, box) for box in boxes]
    for middle in range(1, len(parts)):
        assert_same(merge([merge(parts[:middle]), merge(parts[middle:])]), layer)


def test_by_hand() -> None:
    data = torch.arange(12, dtype=torch.int32).view(3, 4)
    layer = LayerConfig("model.layers.0", 0)
    layer.modules["mlp.down_proj"] = module(weight=TensorShard("I32", (3, 4), (0, 0), (3, 4), data))
    left = cut(layer, {"mlp.down_proj": {"weight": ((0, 3), (0, 3))}})
    right = cut(layer, {"mlp.down_proj": {"weight": ((0, 3), (3, 4))}})
    assert left.modules["mlp.down_proj"].tensors["weight"].offset == (0, 0)
    found = right.modules["mlp.down_proj"].tensors["weight"]
    assert (found.offset, found.shape, found.box, found.is_whole) == ((0, 3), (3, 1), ((0, 3), (3, 4)), False)
    assert found.data is not None
    assert found.data.tolist() == [[3], [7], [11]]
    merged = merge([right, left]).modules["mlp.down_proj"].tensors["weight"]
    assert merged.is_whole
    assert merged.data is not None
    assert torch.equal(merged.data, data)


def test_parts_that_are_not_all_of_it_cover_their_bounding_box() -> None:
    layer = LayerConfig("l", None, {"": module(weight=shard("U8", (10, 2)))})
    parts = [cut(layer, {"": {"weight": ((a, b), (0, 2))}}) for a, b in [(2, 5), (5, 9)]]
    merged = merge(parts).modules[""].tensors["weight"]
    assert (merged.offset, merged.shape) == ((2, 0), (7, 2))


def test_tensor_names() -> None:
    assert LayerConfig("model.layers.3", 3).tensor_name("mlp.up_proj", "weight") == "model.layers.3.mlp.up_proj.weight"
    assert LayerConfig("lm_head", None).tensor_name("", "weight") == "lm_head.weight"


# ------------------------------------------------------------- what merge refuses


def parts_of(*spans: tuple[int, int], rows: int = 8) -> list[LayerConfig]:
    """Parts of an [8, 2] weight that cover these rows."""
    layer = LayerConfig("model.layers.1", 1, {"mlp.up_proj": module(weight=shard("I8", (rows, 2)))})
    return [cut(layer, {"mlp.up_proj": {"weight": (span, (0, 2))}}) for span in spans]


def change(part: LayerConfig, **fields: object) -> LayerConfig:
    weight = part.modules["mlp.up_proj"].tensors["weight"]
    changed = replace(part.modules["mlp.up_proj"], tensors={"weight": replace(weight, **fields)})
    return LayerConfig(part.name, part.index, {"mlp.up_proj": changed})


def refused(parts: list[LayerConfig], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        merge(parts)
    with pytest.raises(ValueError, match=words):
        merge([describe(part) for part in parts])


NAME = r"model\.layers\.1\.mlp\.up_proj\.weight: "


def test_a_hole_is_refused() -> None:
    refused(parts_of((0, 3), (4, 8)), NAME + "a part ends at 3 and the next begins at 4 along dimension 0")


def test_an_overlap_is_refused() -> None:
    refused(parts_of((0, 5), (4, 8)), NAME + "a part ends at 5 and the next begins at 4 along dimension 0")


def test_the_same_part_twice_is_refused() -> None:
    refused(parts_of((0, 4), (0, 4)), NAME + "2 parts do not tile it along one dimension")


def test_parts_that_differ_in_two_dimensions_are_refused() -> None:
    layer = LayerConfig("model.layers.1", 1, {"mlp.up_proj": module(weight=shard("I8", (4, 4)))})
    corners = [((0, 2), (0, 2)), ((2, 4), (2, 4))]
    refused([cut(layer, {"mlp.up_proj": {"weight": box}}) for box in corners], NAME + "2 parts do not tile")


def test_dtypes_that_disagree_are_refused() -> None:
    left, right = parts_of((0, 4), (4, 8))
    refused([left, change(right, dtype="U8")], NAME + r"parts disagree: I8 \[8, 2\] and U8 \[8, 2\]")


def test_shapes_that_disagree_are_refused() -> None:
    left, right = parts_of((0, 4), (4, 8))
    refused([left, change(right, global_shape=(9, 2))], NAME + r"parts disagree: I8 \[8, 2\] and I8 \[9, 2\]")


def test_some_with_data_and_some_without_is_refused() -> None:
    left, right = parts_of((0, 4), (4, 8))
    with pytest.raises(ValueError, match=NAME + "some parts have data and others have none"):
        merge([left, describe(right)])


@pytest.mark.parametrize(
    ("field", "value"),
    [("kind", "norm"), ("role", "mlp.gate"), ("partition", "row"), ("number_format", "fp8"), ("group_size", 64)],
)
def test_modules_that_disagree_are_refused(field: str, value: object) -> None:
    left, right = parts_of((0, 4), (4, 8))
    right.modules["mlp.up_proj"] = replace(right.modules["mlp.up_proj"], **{field: value})  # type: ignore[arg-type]
    refused([left, right], rf"model\.layers\.1 mlp\.up_proj: parts disagree: .*{value}")


def test_parts_of_different_layers_are_refused() -> None:
    left, right = parts_of((0, 4), (4, 8))
    refused([left, replace(right, name="model.layers.2")], r"different layers: model\.layers\.1 and model\.layers\.2")
    refused([left, LayerConfig(right.name, right.index)], r"parts have modules \['mlp\.up_proj'\] and \[\]")


def test_nothing_to_merge() -> None:
    with pytest.raises(ValueError, match="nothing to merge"):
        merge([])
