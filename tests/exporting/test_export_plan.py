"""The export plan: who reads and emits what, and everything that is refused before a weight is read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelexport.checkpoints.safetensors.file import Checkpoint, Reader, open_checkpoint, torch_dtype
from modelexport.errors import CheckpointError, ModelExportError, PlanError, UsageError
from modelexport.exporting import plan as export_plan
from modelexport.exporting.plan import ExportPlan, ExportStep, TensorTask, build_plan, full_name
from modelexport.layers import Box, LayerConfig, ModuleConfig, TensorShard, merge
from modelexport.models.rules import tensor_rules
from modelexport.quantization.assignment import Assignment
from modelexport.quantization.methods import WeightSlice, of_method
from modelexport.sharding.plan import Parallelism
from modelexport.sharding.shard_plan import part_problem
from tests.helpers.models import (
    LlamaShape,
    copy_checkpoint,
    headers_only,
    make_llama,
    quantised_headers,
    tensor_shapes,
    with_tensor,
    without,
)
from tests.helpers.tiny_models import tiny_checkpoint
from tests.quantization._weights import NAMES

FORMATS = [("none", None), ("int8", None), ("fp8", None), ("int4", 32), ("int4", 64)]


def plan_for(
    source: Checkpoint | Path,
    quant: str = "fp8",
    *,
    group_size: int | None = None,
    tp: int = 1,
    observer: str = "amax",
    method: str = "compressed-tensors",
    rows: int | None = None,
) -> ExportPlan:
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    assignment = Assignment.parse(quant, group_size=group_size, observer=observer)
    return build_plan(checkpoint, assignment, Parallelism(tp=tp), method=method, rows=rows)


@st.composite
def cases(draw: st.DrawFn) -> tuple[LlamaShape, str, int | None, int, int]:
    """A shape that suits the format, the format, its group size, tp, and bytes in a slab of the embedding."""
    quant, group = draw(st.sampled_from(FORMATS))
    unit = group or 1
    kv_heads, per_group = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    head_dim = draw(st.integers(1, 24))
    head_dim *= unit // math.gcd(unit, kv_heads * per_group * head_dim)
    shape = LlamaShape(
        hidden=draw(st.integers(1, 3)) * (group or draw(st.integers(1, 40))),
        heads=kv_heads * per_group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=draw(st.integers(1, 7)) * (group or draw(st.integers(1, 30))),
        vocab=draw(st.integers(1, 300)),
        layers=1,
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        model_type=draw(st.sampled_from(["llama", "llama", "mixtral", "phi3", "qwen2"])),
        experts=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
    )
    return shape, quant, group, draw(st.integers(1, 9)), draw(st.sampled_from([64 << 20, 4096]))


def every_task(plan: ExportPlan) -> Iterator[tuple[ExportStep, TensorTask]]:
    for step in plan.steps:
        for task in step.tasks:
            yield step, task


def count_cover(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    """How often each element of a tensor lies in a box."""
    counts = np.zeros(shape, np.int16)
    for box in boxes:
        assert all(0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True)), (box, shape)
        counts[tuple(slice(start, stop) for start, stop in box)] += 1
    return counts


@given(cases())
@settings(max_examples=150)
@example((LlamaShape(heads=8, kv_heads=2, layers=1, vocab=101), "fp8", None, 4, 4096))
@example((LlamaShape(heads=6, kv_heads=2, head_dim=32, layers=1), "int4", 64, 4, 64 << 20))
@example((LlamaShape(heads=3, kv_heads=3, head_dim=32, layers=1), "int8", None, 8, 64 << 20))
def test_ranks_and_slabs_tile_every_tensor_exactly_once(case: tuple[LlamaShape, str, int | None, int, int]) -> None:
    shape, quant, group, tp, slab_bytes = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_plan, "SLAB_BYTES", slab_bytes)
        plan = plan_for(headers_only(shape), quant, group_size=group, tp=tp)
    read: dict[str, list[Box]] = {}
    written: dict[str, list[Box]] = {}
    for step, task in every_task(plan):
        for rank in range(tp):
            owned = task.owned_box(rank)
            if owned is not None:
                read.setdefault(task.info.name, []).append(owned)
                assert all(stop > start for start, stop in owned)
            for out in task.outputs:
                box = task.output_box(out, rank)
                assert (box is None) or (owned is not None), "a rank emits only what it read"
                if box is not None:
                    written.setdefault(full_name(step.layer, task.path, out.name), []).append(box)
    assert {name: info.shape for name, info in headers_only(shape).infos.items()} == tensor_shapes(shape)
    for name, size in tensor_shapes(shape).items():
        assert (count_cover(size, read.pop(name)) == 1).all(), f"{name} is not read exactly once"
    assert not read
    for name, _, size in plan.outputs():
        assert (count_cover(size, written.pop(name)) == 1).all(), f"{name} is not written exactly once"
    assert not written


@given(cases())
def test_each_rank_emits_what_its_format_makes_of_what_it_read(
    case: tuple[LlamaShape, str, int | None, int, int],
) -> None:
    """The shapes that quantising the rectangle gives are those of the rectangles announced."""
    shape, quant, group, tp, _ = case
    plan = plan_for(headers_only(shape), quant, group_size=group, tp=tp)
    for _, task in every_task(plan):
        for rank in range(tp):
            owned = task.owned_box(rank)
            if owned is None:
                continue
            extent = tuple(stop - start for start, stop in owned)
            made = {task.parameter: extent}
            if task.quantised:
                assert task.number_format is not None
                specs = task.number_format.specs((extent[0], extent[1]), torch_dtype(task.info.dtype))
                made = {spec.suffix: spec.shape for spec in specs}
            assert set(made) == {out.name for out in task.outputs}
            for out in task.outputs:
                box = task.output_box(out, rank)
                if box is not None:
                    assert tuple(stop - start for start, stop in box) == made[out.name], (task.info.name, out.name)


@given(cases())
def test_what_a_rank_holds_fits_together(case: tuple[LlamaShape, str, int | None, int, int]) -> None:
    """The forward pass of a rank's query heads and hidden units needs nothing that another rank holds."""
    shape, quant, group, tp, _ = case
    plan = plan_for(headers_only(shape), quant, group_size=group, tp=tp)
    held = {task.path: task.cut.held for _, task in every_task(plan) if task.parameter == "weight"}
    head_dim, per_group = shape.head_dim or 0, shape.heads // shape.kv_heads
    mlps = {"mlp": ("gate_proj", "up_proj", "down_proj")}
    if shape.model_type == "mixtral":
        mlps = {f"block_sparse_moe.experts.{e}": ("w1", "w3", "w2") for e in range(shape.experts)}
    for rank in range(tp if shape.model_type != "phi3" else 0):  # what is fused on disk is cut as it comes
        start, stop = held["self_attn.q_proj"][rank]
        assert start % head_dim == 0
        assert stop % head_dim == 0
        attended = {head // per_group for head in range(start // head_dim, stop // head_dim)}
        for path in ("self_attn.k_proj", "self_attn.v_proj"):
            a, b = held[path][rank]
            assert set(range(a // head_dim, b // head_dim)) == attended
        assert held["self_attn.o_proj"][rank] == (start, stop)
        for mlp, names in mlps.items():
            assert len({held[f"{mlp}.{name}"][rank] for name in names}) == 1
    for _, task in every_task(plan):
        if task.parameter == "bias":  # added to the rank's own outputs, or, where those are partial sums, once
            whole = ((0, task.info.shape[0]),) * tp
            assert task.cut.held == (held[task.path] if task.module.partition == "column" else whole)
        for (a, b), (c, d) in zip(task.cut.held, task.cut.owned, strict=True):
            assert c == d or a <= c < d <= b, "what is owned is held"
        for rank in range(tp):
            assert len(task.held_shape(rank)) == len(task.info.shape)


@given(cases())
def test_groups_are_never_separated(case: tuple[LlamaShape, str, int | None, int, int]) -> None:
    shape, _, _, tp, _ = case
    group = 32
    shape = replace(shape, head_dim=32, hidden=64, intermediate=32 * shape.intermediate)
    plan = plan_for(headers_only(shape), "int4", group_size=group, tp=tp)
    for _, task in every_task(plan):
        if task.quantised and task.cut.dim == 1:
            assert all(start % group == 0 and stop % group == 0 for start, stop in task.cut.owned)


@given(cases())
def test_the_files_do_not_depend_on_the_ranks(case: tuple[LlamaShape, str, int | None, int, int]) -> None:
    shape, quant, group, tp, _ = case
    one, many = (plan_for(headers_only(shape), quant, group_size=group, tp=n) for n in (1, tp))
    assert list(one.outputs()) == list(many.outputs())
    assert [step.id for step in one.steps] == [step.id for step in many.steps]
    assert [step.output_bytes for step in one.steps] == [step.output_bytes for step in many.steps]
    assert one.admissible_tp() == many.admissible_tp()
    assert one.unquantised == many.unquantised


# ------------------------------------------- the parts, quantised, are the whole


INPUTS = 3.0  # the largest magnitude of every linear's inputs


def largest(
    step: ExportStep, task: TensorTask, weights: dict[str, torch.Tensor], rows: tuple[int, int]
) -> Tensor | None:
    """What a task's scales depend on beyond its own shard, from the whole weights."""
    number_format = task.number_format
    assert number_format is not None
    if number_format.scale_granularity == "block" or number_format.searches_whole:
        return None
    if number_format.scale_granularity == "row":
        return number_format.amax(weights[task.info.name])[slice(*rows)]
    sharing = [weights[t.info.name] for t in step.tasks if t.quantised and t.shared_scale == task.shared_scale]
    return torch.stack([number_format.amax(weight) for weight in sharing]).amax(dim=0)


def quantise_by_parts(plan: ExportPlan, step: ExportStep, weights: dict[str, torch.Tensor]) -> LayerConfig:
    """What the ranks of a step emit, merged: a plain loop over ranks, without processes or files."""
    parts, method = [], of_method(plan.method)
    for rank in range(plan.parallelism.tp):
        part = LayerConfig(step.layer, step.index)
        for task in step.tasks:
            module = ModuleConfig(task.module.kind, task.module.role, task.module.partition, (), ())
            module = part.modules.setdefault(task.path, module)
            owned = task.owned_box(rank)
            if owned is None:
                continue
            whole = weights[task.info.name]
            data = whole[tuple(slice(start, stop) for start, stop in owned)]
            made = {task.parameter: data}
            if task.number_format is not None:
                amax = largest(step, task, weights, owned[0])
                inputs = INPUTS if task.number_format.has_static_inputs else None
                made = task.number_format.quantise(data, amax=amax, inputs=inputs, global_shape=task.full_shape)
                of = WeightSlice(task.full_shape, (owned[0][0], owned[1][0]), (data.shape[0], data.shape[1]))
                made = method.encode(task.number_format, made, of)
            for out in task.outputs:
                box = task.output_box(out, rank)
                if box is not None:
                    start, extent = tuple(a for a, _ in box), tuple(b - a for a, b in box)
                    module.tensors[out.name] = TensorShard(out.dtype, out.shape, start, extent, made[out.name])
        parts.append(part)
    return merge(parts)


EVERY = [
    *FORMATS,
    *((name, None) for name in NAMES if name not in ("none", "int8", "fp8", "int4")),
    ("int4", -1),
    ("int4-asym", -1),
    ("int8-wo", 32),
]


@pytest.mark.parametrize(("quant", "group"), EVERY)
@pytest.mark.parametrize("tp", [2, 3, 4, 8])
def test_quantising_the_parts_is_quantising_the_whole(quant: str, group: int | None, tp: int) -> None:
    directory = make_llama(
        hidden=256,
        intermediate=384,
        heads=8,
        kv_heads=4,
        head_dim=32,
        vocab=101,
        layers=1,
        attention_bias=True,
        mlp_bias=True,
    )
    assert parts_are_the_whole(plan_for(directory, quant, group_size=group, tp=tp))


@pytest.mark.parametrize("quant", ["int8", "fp8", "int4", "fp8-block", "nvfp4", "int4-asym"])
def test_parts_with_searched_scales_are_the_whole(quant: str) -> None:
    directory = make_llama(hidden=128, intermediate=256, heads=8, kv_heads=4, head_dim=16, vocab=101, layers=1)
    assert parts_are_the_whole(plan_for(directory, quant, tp=3, observer="mse"))


SPELT = [
    ("awq", "int4-asym", 64),
    ("gptq", "int4", 64),
    ("gptq", "int8-wo", 64),
    ("fp8", "fp8-block", None),
    ("modelopt", "fp8-static", None),
    ("modelopt", "nvfp4", None),
    ("modelopt", "mxfp8", None),
]


@pytest.mark.parametrize(("method", "quant", "group"), SPELT)
@pytest.mark.parametrize("tp", [3, 4])
def test_spelling_the_parts_is_spelling_the_whole(method: str, quant: str, group: int | None, tp: int) -> None:
    directory = make_llama(hidden=256, intermediate=384, heads=8, kv_heads=4, head_dim=32, vocab=101, layers=1)
    assert parts_are_the_whole(plan_for(directory, quant, group_size=group, tp=tp, method=method))


def parts_are_the_whole(plan: ExportPlan) -> int:
    """Asserts that what the ranks make is, merged, what one makes of whole weights; how many tensors were compared."""
    checkpoint = open_checkpoint(plan.steps[0].tasks[0].info.path.parent)
    with Reader(checkpoint) as reader:
        weights = {name: reader.read(info) for name, info in checkpoint.infos.items()}
    made = 0
    for step in plan.steps:
        layer = quantise_by_parts(plan, step, weights)
        for task in step.tasks:
            whole = weights[task.info.name]
            expected = {task.parameter: whole}
            if task.number_format is not None:
                amax = largest(step, task, weights, (0, whole.shape[0]))
                inputs = INPUTS if task.number_format.has_static_inputs else None
                native = task.number_format.quantise(whole, amax=amax, inputs=inputs)
                expected = of_method(plan.method).encode(task.number_format, native, WeightSlice.whole(task.full_shape))
            tensors = layer.modules[task.path].tensors
            assert {out.name for out in task.outputs} == set(expected)
            for out in task.outputs:
                shard, want = tensors[out.name], expected[out.name]
                assert shard.is_whole
                assert shard.data is not None
                assert (shard.data.dtype, tuple(shard.data.shape)) == (want.dtype, out.shape)
                assert torch_dtype(out.dtype) == want.dtype
                assert torch.equal(_raw(shard.data), _raw(want)), f"{task.info.name}: {out.name}"
                made += 1
    assert made == len(list(plan.outputs()))
    return made


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


# ----------------------------------------------------------------- what is in it


def test_steps_follow_the_model() -> None:
    plan = plan_for(headers_only(layers=3), "int8", tp=2)
    names = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(3)), "model.norm", "lm_head"]
    assert [step.id for step in plan.steps] == names
    assert [step.index for step in plan.steps] == [None, 0, 1, 2, None, None]
    assert plan.unquantised == {
        "model.embed_tokens": "embedding: engines look rows up in the model's dtype",
        "lm_head": "head: its error goes straight into the logits",
    }
    shape = LlamaShape(layers=3)
    elements = sum(math.prod(size) for size in tensor_shapes(shape).values())
    assert sum(step.source_bytes for step in plan.steps) == 2 * elements
    linears = {name: size for name, size in tensor_shapes(shape).items() if name.endswith("_proj.weight")}
    saved = sum(math.prod(size) - 2 * size[0] for size in linears.values())
    assert sum(step.output_bytes for step in plan.steps) == 2 * elements - saved


def test_none_says_what_it_leaves() -> None:
    plan = plan_for(headers_only(layers=1), "none")
    assert plan.unquantised["model.layers.0.mlp.up_proj"] == "--quant none"
    assert {name: shape for name, _, shape in plan.outputs()} == tensor_shapes(LlamaShape(layers=1))


@pytest.mark.filterwarnings("ignore")  # transformers warns of many things
def test_linears_beside_the_blocks_that_are_narrower_than_a_group_stay_as_they_are() -> None:
    """Gemma 3n's low-rank linears; where ``--quant`` names them, they are refused as others are."""
    source = tiny_checkpoint("gemma3n_text")
    plan = plan_for(source, "int4")
    kept = {name.partition("layers.0.")[2]: why for name, why in plan.unquantised.items() if ".layers.0." in name}
    assert kept.keys() >= {"laurel.linear_right", "per_layer_projection"}
    assert "32 features, fewer than a group of 128 columns: --group-size 32" in kept["laurel.linear_right"]
    assert "model.layers.0.mlp.up_proj" in plan.formats()
    assert "laurel.linear_right" not in plan_for(source, "int4", group_size=32).unquantised
    with pytest.raises(PlanError, match="in_features 32 is not divisible by the group size 128"):
        plan_for(source, "*laurel*=int4")


def test_a_large_embedding_comes_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_plan, "SLAB_BYTES", 100 * 256)  # 100 rows of 128 bf16
    plan = plan_for(headers_only(vocab=211, layers=1), tp=2)
    slabs = [step for step in plan.steps if step.layer == "model.embed_tokens"]
    assert [step.id for step in slabs] == [
        f"model.embed_tokens[{a}:{b}]" for a, b in [(0, 100), (100, 200), (200, 211)]
    ]
    assert [step.output_bytes for step in slabs] == [25600, 25600, 11 * 256]
    assert slabs[2].tasks[0].owned_box(0) == ((200, 206), (0, 128))
    assert slabs[2].tasks[0].owned_box(1) == ((206, 211), (0, 128))
    assert sum(step.output_bytes for step in slabs) == 211 * 256


def test_a_large_layer_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_checkpoint("qwen3_moe")
    whole = plan_for(source, "fp8")
    monkeypatch.setattr(export_plan, "STEP_BYTES", 4096)
    plan = plan_for(source, "fp8")
    parts = [step for step in plan.steps if step.index == 0]
    assert [step.id for step in parts[:2]] == [f"model.layers.0 ({n} of {len(parts)})" for n in (1, 2)]
    assert {len(step.tasks) for step in parts} > {1}, "small modules share a step"
    assert list(plan.outputs()) == list(whole.outputs())
    assert plan.peak_rank_bytes() < whole.peak_rank_bytes() / 2


@pytest.mark.parametrize("observer", ["amax", "mse"])
def test_modules_stay_together_whose_common_scale_is_searched_for(
    monkeypatch: pytest.MonkeyPatch, observer: str
) -> None:
    monkeypatch.setattr(export_plan, "STEP_BYTES", 1)
    plan = plan_for(tiny_checkpoint("qwen3_moe"), "fp8-static", observer=observer)
    tasks = [(step, task) for step in plan.steps for task in step.tasks if task.quantised]
    steps: dict[tuple[str, str], set[str]] = {}
    for step, task in tasks:
        steps.setdefault((step.layer, task.shared_scale), set()).add(step.id)
    for step, task in tasks:
        is_told = id(task) in {id(each) for each in step.scaled_with}
        assert is_told == (len(steps[step.layer, task.shared_scale]) > 1)
    assert all(len(found) == 1 for found in steps.values()) == (observer == "mse")


def test_samples_run_through_whole_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_plan, "STEP_BYTES", 1)
    plan = plan_for(tiny_checkpoint("qwen3_moe"), "fp8", rows=128)
    assert [step.id for step in plan.steps if step.index is not None] == ["model.layers.0", "model.layers.1"]


def test_buffers_of_old_checkpoints_are_left_out_and_said() -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    plan = plan_for(with_tensor(headers_only(), name, (16,), "F32"))
    assert plan.left_out == {name: "a buffer that every engine computes itself"}
    assert name not in {output for output, _, _ in plan.outputs()}


def test_memory_of_a_rank_shrinks_with_the_ranks() -> None:
    shape = LlamaShape(hidden=256, heads=8, kv_heads=8, intermediate=512, vocab=64)
    peaks = {tp: plan_for(headers_only(shape), "fp8", tp=tp).peak_rank_bytes() for tp in (1, 2, 4)}
    layer = 4 * 256 * 256 + 3 * 256 * 512
    assert 2 * 2 * layer <= peaks[1] <= 2 * 3.1 * layer, "two layers of bf16 in, two of fp8 out"
    assert peaks[2] == pytest.approx(peaks[1] / 2, rel=0.05)
    assert peaks[4] == pytest.approx(peaks[1] / 4, rel=0.05)


BIG = LlamaShape(hidden=8192, heads=64, kv_heads=8, head_dim=128, intermediate=29568, vocab=152064, layers=2)


@pytest.mark.parametrize(
    ("quant", "shape", "expected"),
    [
        ("int4", BIG, [1]),  # 29568 = 231 * 128
        ("fp8", BIG, [1, 2, 4, 8, 16, 32, 64]),
        ("none", BIG, [1, 2, 4, 8, 16, 32, 64]),
        ("int4", replace(BIG, intermediate=28672), [1, 2, 4, 8, 16, 32]),  # 224 groups
        ("int8", LlamaShape(heads=6, kv_heads=2, head_dim=32, intermediate=384), [1, 2, 6]),
        ("int8", LlamaShape(heads=6, kv_heads=3, head_dim=32, intermediate=384), [1, 3, 6]),
        ("int8", LlamaShape(heads=4, kv_heads=4, intermediate=386), [1, 2]),
        ("int4", LlamaShape(heads=4, kv_heads=4, head_dim=64, intermediate=512), [1, 2]),  # 2 groups of o_proj inputs
        ("fp8", LlamaShape(heads=7, kv_heads=1, head_dim=16, intermediate=384, vocab=101), [1]),
    ],
)
def test_tensor_parallel_sizes_that_engines_can_load(quant: str, shape: LlamaShape, expected: list[int]) -> None:
    plan = plan_for(headers_only(shape), quant, tp=4)
    assert plan.admissible_tp() == expected


# ------------------------------------------------------------ tied embeddings


def test_tied_embeddings_are_written_once(tmp_path: Path) -> None:
    tied = make_llama(tied=True)
    assert "lm_head.weight" not in {name for name, _, _ in plan_for(tied).outputs()}
    assert "serves as the head" in plan_for(tied).unquantised["model.embed_tokens"]

    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    plan = plan_for(copy_checkpoint(tied, tmp_path / "copy", tensors=add_head))
    assert plan.left_out == {"lm_head.weight": "tied to model.embed_tokens.weight, written once"}
    assert list(plan.outputs()) == list(plan_for(tied).outputs())


@pytest.mark.parametrize("change", ["value", "dtype", "shape"])
def test_a_tied_head_that_differs_is_refused(tmp_path: Path, change: str) -> None:
    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        head = tensors["model.embed_tokens.weight"].clone()
        if change == "value":
            head[-1, -1] += 1
        tensors["lm_head.weight"] = {"dtype": head.half(), "shape": head[:-1]}.get(change, head).contiguous()

    spoilt = copy_checkpoint(make_llama(tied=True), tmp_path / "copy", tensors=add_head)
    with pytest.raises(CheckpointError, match=r"ties the embeddings, but lm_head\.weight differs.*tie_word_embeddings"):
        plan_for(spoilt)


def test_an_untied_head_is_written_even_if_it_is_equal(tmp_path: Path) -> None:
    def copy_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    plan = plan_for(copy_checkpoint(make_llama(), tmp_path / "copy", tensors=copy_head))
    assert "lm_head.weight" in {name for name, _, _ in plan.outputs()}
    assert plan.left_out == {}


# ---------------------------------------------------------------- what is refused


def refused(
    checkpoint: Checkpoint, kind: type[ModelExportError], *words: str, quant: str = "fp8", **options: Any
) -> str:
    """The message of the refusal; ``headers_only`` has no weights to read, so it came before any was."""
    with pytest.raises(kind) as caught:
        plan_for(checkpoint, quant, **options)
    text = str(caught.value)
    for word in words:
        assert word in text, text
    return text


def test_headers_are_enough() -> None:
    """The fake checkpoints of this file would fail at the first read: their file does not exist."""
    checkpoint = headers_only()
    with pytest.raises(CheckpointError):
        Reader(checkpoint).read(checkpoint.infos["model.norm.weight"])


def test_no_config() -> None:
    refused(
        replace(headers_only(), config=None), CheckpointError, "/nonexistent has no config.json", "give --config DIR"
    )


def test_no_config_on_disk(tmp_path: Path) -> None:
    directory = copy_checkpoint(make_llama(), tmp_path / "copy")
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"copy has no config\.json"):
        plan_for(directory)


@pytest.mark.parametrize(
    ("key", "value", "kind", "parts"),
    [
        ("quantization_config", {"quant_method": "eetq"}, PlanError, ["quant_method 'eetq'", "known for awq, "]),
        ("quantization_config", {"bits": 4}, PlanError, ["quant_method 'unknown'"]),
        ("quantization_config", "fp8", CheckpointError, ["quantization_config must be an object, is str"]),
        ("compression_config", {"quant_method": "gptq", "bits": "4"}, CheckpointError, ["bits"]),
    ],
)
def test_quantised_otherwise_than_it_says(
    key: str, value: object, kind: type[ModelExportError], parts: list[str]
) -> None:
    refused(without(headers_only(), **{key: value}), kind, *parts)


def test_what_is_quantised_is_decoded_or_kept() -> None:
    quantised = quantised_headers("int4", hidden=256, intermediate=256, heads=4, kv_heads=4, head_dim=64)
    again = plan_for(quantised, "int8")
    assert {number_format.name for number_format in again.formats().values()} == {"int8"}
    assert again.source_bytes == sum(info.nbytes for info in quantised.infos.values())
    plan = plan_for(quantised, "none")
    assert {dtype for _, dtype, _ in plan.outputs()} == {"BF16"}
    kept = build_plan(quantised, None, Parallelism(tp=2))
    assert {number_format.name for number_format in kept.formats().values()} == {"int4"}
    assert {name for name, _, _ in kept.outputs()} == set(quantised.infos)


# ------------------------------------------------------------ patterns of --quant


def test_first_pattern_wins_and_the_rest_is_kept() -> None:
    plan = plan_for(headers_only(), "*.layers.0.mlp.*=none, *.mlp.*=int4:32, re:.*q_proj=fp8,*.[kv]_proj=fp8")
    found = {name: number_format.name for name, number_format in plan.formats().items()}
    assert found["model.layers.1.mlp.up_proj"] == "int4"
    assert found["model.layers.0.self_attn.q_proj"] == "fp8"
    assert plan.unquantised["model.layers.0.mlp.up_proj"] == "--quant none"
    assert plan.unquantised["model.layers.0.self_attn.o_proj"] == "no pattern of --quant names it"
    assert "model.layers.0.self_attn.o_proj" in plan.ignored()
    assert plan.formats()["model.layers.1.mlp.down_proj"].group_size == 32


@pytest.mark.parametrize(
    ("quant", "kind", "parts"),
    [
        ("*.q_proj=fp8", PlanError, ["one matrix", "q_proj fp8", "k_proj none", "self_attn.qkv_proj"]),
        ("*.mlp.gate_proj=int4:32,*=int8", PlanError, ["one matrix", "gate_proj int4", "up_proj int8"]),
        ("*=int8,*.mlq.*=int4:32", PlanError, ["'*.mlq.*=int4': no linear of the model's"]),
        ("*.mlp.*=int5", UsageError, ["unknown number format 'int5'"]),
        ("*.mlp.*=int4:x", UsageError, ["'x' is no group size"]),
        ("*.mlp.*=int4:48", UsageError, ["no group size 48", "32, 64, 128"]),
        ("*.mlp.*=fp8:32", UsageError, ["fp8 has no groups"]),
        ("fp8,*=int4", UsageError, ["'fp8' is no PATTERN=FORMAT"]),
        ("re:(=int4", UsageError, ["is no regular expression"]),
    ],
)
def test_patterns_that_are_refused(quant: str, kind: type[ModelExportError], parts: list[str]) -> None:
    with pytest.raises(kind) as caught:
        plan_for(headers_only(), quant)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_unknown_architecture() -> None:
    parts = ("'lama'; did you mean 'llama'", "modelexport models lists all ")
    refused(without(headers_only(), model_type="lama"), PlanError, *parts)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.1.self_attn.k_proj", (64, 128)),
        ("model.layers.0.self_attn.o_proj", (128, 128)),
        ("model.layers.0.mlp.down_proj", (128, 384)),
        ("model.layers.1.input_layernorm", (128,)),
        ("model.embed_tokens", (211, 128)),
        ("lm_head", (211, 128)),
    ],
)
@pytest.mark.parametrize("wrong", ["transposed", "longer", "flat"])
def test_a_shape_that_config_contradicts(name: str, expected: tuple[int, ...], wrong: str) -> None:
    found = {
        "transposed": (*expected[::-1], 1) if expected == expected[::-1] else expected[::-1],
        "longer": (expected[0] + 1, *expected[1:]),
        "flat": (math.prod(expected), 1),
    }[wrong]
    spoilt = with_tensor(headers_only(), f"{name}.weight", found)
    text = f"{name}.weight is {list(found)} but config.json makes it {list(expected)}"
    refused(spoilt, CheckpointError, text)


def test_a_bias_of_the_wrong_length() -> None:
    spoilt = with_tensor(headers_only(attention_bias=True), "model.layers.0.self_attn.k_proj.bias", (63,))
    refused(spoilt, CheckpointError, "self_attn.k_proj.bias is [63] but config.json makes it [64]")


def test_a_missing_tensor_is_named_with_what_is_like_it() -> None:
    spoilt = without(headers_only(), "model.layers.1.mlp.up_proj.weight")
    text = refused(spoilt, CheckpointError, "/nonexistent: model.layers.1.mlp.up_proj.weight is missing")
    assert "did you mean" not in text, "the other layer's up_proj has its own place"
    renamed = with_tensor(spoilt, "model.layers.1.mlp.upp_proj.weight", (384, 128))
    text = refused(
        renamed, CheckpointError, "up_proj.weight is missing; did you mean 'model.layers.1.mlp.upp_proj.weight'?"
    )
    assert "1 tensor(s) are not part of a llama model of 2 layers: model.layers.1.mlp.upp_proj.weight" in text


def test_a_missing_head_is_an_error_unless_tied() -> None:
    refused(without(headers_only(), "lm_head.weight"), CheckpointError, "lm_head.weight is missing")
    assert plan_for(without(headers_only(), "lm_head.weight", tie_word_embeddings=True)).left_out == {}


@pytest.mark.parametrize(("key", "module"), [("attention_bias", "self_attn.o_proj"), ("mlp_bias", "mlp.gate_proj")])
def test_a_missing_bias_that_config_announces(key: str, module: str) -> None:
    spoilt = without(headers_only(attention_bias=True, mlp_bias=True), f"model.layers.1.{module}.bias")
    refused(spoilt, CheckpointError, f"model.layers.1.{module}.bias is missing, though config.json says {key}")


def test_a_layer_too_many_and_one_too_few() -> None:
    refused(
        without(headers_only(), num_hidden_layers=1), CheckpointError, "9 tensor(s) are not part of a llama model of 1"
    )
    refused(
        without(headers_only(), num_hidden_layers=3),
        CheckpointError,
        "model.layers.2.input_layernorm.weight is missing",
    )


def test_unknown_tensors_are_counted_and_the_first_named() -> None:
    spoilt = headers_only()
    for i in range(5):
        spoilt = with_tensor(spoilt, f"vision.block{i}.weight", (4, 4))
    refused(
        spoilt, CheckpointError, "5 tensor(s) are not part", "vision.block0.weight, vision.block1.weight, ", ", ..."
    )


def test_all_that_is_wrong_is_said_at_once() -> None:
    spoilt = without(headers_only(), "model.norm.weight", "model.layers.0.mlp.up_proj.weight")
    spoilt = with_tensor(spoilt, "lm_head.weight", (3, 3))
    text = refused(spoilt, CheckpointError, "model.norm.weight is missing", "up_proj.weight is missing", "[3, 3]")
    assert text.count("; ") == 2


def test_a_long_list_is_cut_and_counted() -> None:
    spoilt = headers_only(layers=2)
    names = [name for name in spoilt.infos if name.endswith("norm.weight") or "self_attn" in name]
    text = refused(without(spoilt, *names), CheckpointError, "; and 5 more")
    assert len(names) == 13
    assert text.count(" is missing") == 8


def test_routers_stay_as_they_are_and_engines_are_told() -> None:
    plan = plan_for(headers_only(model_type="mixtral", layers=2), "int8", tp=2)
    gates = [f"model.layers.{i}.block_sparse_moe.gate" for i in range(2)]
    assert plan.ignored() == ["lm_head", *gates]
    assert [name for name in plan.unquantised if name in gates] == gates
    assert plan.unquantised[gates[0]] == "router: it picks experts by small differences"
    assert ("model.layers.1.block_sparse_moe.gate.weight", "BF16", (4, 128)) in set(plan.outputs())
    assert plan_for(headers_only(tied=True)).ignored() == ["lm_head"], "engines make one of the embeddings"


def test_experts_share_a_row_of_the_summary() -> None:
    plan = plan_for(headers_only(model_type="mixtral", layers=2, experts=3), "int8", tp=2)
    names = {plan.general_path(step, task) for step, task in every_task(plan)}
    assert {name for name in names if "experts" in name} == {
        f"block_sparse_moe.experts.*.{name}" for name in ("w1", "w2", "w3")
    }
    assert {"model.embed_tokens", "self_attn.q_proj", "block_sparse_moe.gate"} <= names


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "phi3", "mixtral"])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_sizes_that_engines_load_are_those_of_the_shard_plan(model_type: str, scheme: str) -> None:
    """Two ways to the same answer: limits on each dimension, and the plan of the checkpoint that is written."""
    for heads, kv_heads, intermediate in [(8, 4, 1024), (6, 2, 384), (12, 3, 1536)]:
        shape = LlamaShape(
            model_type=model_type, hidden=256, heads=heads, kv_heads=kv_heads, head_dim=64, intermediate=intermediate
        )
        rules = tensor_rules(quantised_headers(scheme, shape, layers=1))
        parts = {part for rule in rules for part in rule.parts}
        works = [tp for tp in range(1, 65) if all(part_problem(part, tp) is None for part in parts)]
        assert plan_for(headers_only(shape, layers=1), scheme).admissible_tp() == works


def test_an_absurd_number_of_layers_is_refused_at_once() -> None:
    refused(
        without(headers_only(), num_hidden_layers=10**12), CheckpointError, "1000000000000 layers", "only 21 tensors"
    )
    mixtral = without(headers_only(model_type="mixtral"), num_local_experts=10**12)
    refused(mixtral, CheckpointError, "2 layers of 1000000000000 experts", "only 41 tensors")


@pytest.mark.parametrize("group", [None, 128])
def test_a_group_that_does_not_divide_is_refused_with_the_choices(group: int | None) -> None:
    source = headers_only(hidden=192, heads=6, kv_heads=6, head_dim=32, intermediate=384)
    text = refused(source, PlanError, "192 is not divisible by", quant="int4", group_size=group, tp=4)
    for choice in ("32", "64", "--quant fp8", "--quant int8"):
        assert choice in text
    assert text.startswith("*.self_attn.q_proj, *.self_attn.k_proj, ")
    assert "down_proj" not in text, "384 inputs suit the group"
    assert text.count("q_proj") == 1, "said once, not once a layer"
    assert text.count("128") == 1, "and not once a module"


def test_a_width_that_no_group_divides() -> None:
    refused(headers_only(intermediate=100), PlanError, "down_proj", "100", "128", "--quant fp8", quant="int4", tp=2)
    assert plan_for(headers_only(intermediate=100), "int8", tp=2)


def test_weights_that_cannot_be_quantised() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    for dtype in ("F8_E4M3", "I8"):
        spoilt = with_tensor(headers_only(), name, (384, 128), dtype)
        refused(spoilt, CheckpointError, f"{name} is {dtype} [384, 128] but config.json makes it BF16 or F16 or F32")
    spoilt = with_tensor(headers_only(), name, (384, 128), "F64")
    refused(spoilt, CheckpointError, f"{name} is F64; only BF16, F16, F32 weights can be quantised")
    assert plan_for(with_tensor(headers_only(), name, (384, 128), "F64"), "none")


def test_the_numbers_of_config_are_checked_first() -> None:
    refused(without(headers_only(), num_attention_heads=0), CheckpointError, "num_attention_heads is 0")


def test_checkpoints_of_transformers_are_planned_whole(tmp_path: Path) -> None:
    """Real files, several of them, and the awkward shape."""
    directory = make_llama(heads=6, hidden=96, kv_heads=2, head_dim=32, attention_bias=True, max_shard_size="100KB")
    assert (directory / "model.safetensors.index.json").exists()
    plan = plan_for(directory, "int4", group_size=32, tp=4)
    stored = {name for name, _, _ in plan.outputs()}
    assert "model.layers.1.self_attn.o_proj.weight_packed" in stored
    assert "model.layers.1.self_attn.o_proj.bias" in stored
    assert sum(step.source_bytes for step in plan.steps) == sum(
        i.nbytes for i in open_checkpoint(directory).infos.values()
    )
