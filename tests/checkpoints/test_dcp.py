"""dcp: what we write is read back by us and by torch; what runs leave behind is found, whatever it is called."""

from __future__ import annotations

import json
import math
import os
import struct
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from modelexport.checkpoints.formats import dcp
from modelexport.checkpoints.safetensors.arrays import Array, Share
from modelexport.checkpoints.safetensors.file import Checkpoint, dtype_names
from modelexport.checkpoints.torch_archive import dcp_container
from modelexport.checkpoints.torch_archive.dcp_metadata import Chunk, StoredTensor, metadata_bytes, read_metadata
from modelexport.checkpoints.torch_archive.pickle_reading import Call, Name, read_pickle
from modelexport.checkpoints.torch_archive.pickle_writing import write_pickle
from modelexport.checkpoints.torch_archive.zip import dtype_to_torch
from modelexport.errors import CheckpointError
from modelexport.models.rules import expected_rules
from tests.helpers.dcp_models import ALONE, assert_same, plan_of, read_all, rules_of, values_of, write
from tests.helpers.models import LlamaShape, config_json

SMALL = LlamaShape(hidden=32, heads=4, kv_heads=2, intermediate=24, vocab=37, layers=2)
CONFIG = config_json(SMALL)
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def alone() -> Any:
    """torch's DCP in a single process says so in a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        yield


def save(directory: Path, state: dict[str, Any]) -> Path:
    torch_dcp.save(state, checkpoint_id=str(directory), **ALONE)
    return directory


def opened(directory: Path, config: dict[str, Any] | None = None) -> Any:
    return dcp.open(directory, config, expected_rules)


# ----------------------------------------------------------------- round trip


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        (SMALL, {}),
        (SMALL, {"tp": 4, "pp": 2}),
        (LlamaShape(hidden=32, heads=4, intermediate=24, vocab=37, layers=3, model_type="phi3"), {"tp": 2, "pp": 3}),
        (LlamaShape(hidden=32, heads=4, intermediate=24, vocab=37, model_type="mixtral"), {"tp": 2, "ep": 4}),
        (LlamaShape(hidden=32, heads=4, intermediate=24, vocab=37, model_type="qwen2", tied=True), {"tp": 2, "pp": 2}),
    ],
)
@pytest.mark.usefixtures("alone")
def test_ours_is_read_by_us_and_by_torch(tmp_path: Path, shape: LlamaShape, grid: dict[str, int]) -> None:
    values = values_of(shape)
    config = config_json(shape)
    plan = plan_of(rules_of(shape, values), **grid)
    write(dcp, tmp_path, plan, config, values)
    assert dcp.recognises(tmp_path)
    checkpoint = opened(tmp_path)
    assert (checkpoint.format, dict(checkpoint.left_out), checkpoint.config) == ("dcp", {}, config)
    assert list(checkpoint.infos) == list(plan.rules)
    assert_same(read_all(checkpoint), values)
    stored = sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    assert stored < sum(v.nbytes for v in values.values()) + 2000 * len(values) * plan.parallelism.size
    loaded = {name: torch.zeros_like(value) for name, value in values.items()}
    torch_dcp.load(loaded, checkpoint_id=str(tmp_path), **ALONE)
    assert_same(loaded, values)


@pytest.mark.usefixtures("alone")
def test_every_dtype_is_read_by_torch_and_torchs_by_us(tmp_path: Path) -> None:
    """Keys of no model: the container alone."""
    values = {}
    for dtype in sorted(set(dtype_names()) - {"F4", "F6_E2M3", "F6_E3M2"}):
        kind = getattr(torch, dtype_to_torch(dtype), None)
        if kind is None:  # an older torch
            continue
        for shape in ((), (3,), (2, 5)):
            count = int(torch.tensor(shape).prod()) * kind.itemsize
            values[f"{dtype}.{len(shape)}"] = (torch.arange(count) % 2).to(torch.uint8).view(kind).view(shape)
    arrays = [
        Array("__0_0.distcp", name, name[:-2], tuple(v.shape), (), ((0,) * v.dim(), tuple(v.shape)))
        for name, v in values.items()
    ]
    tensors = dcp_container.stored_tensors(arrays)
    layout = dcp_container.lay_out(arrays, {})
    layout.create(tmp_path)
    with (tmp_path / "__0_0.distcp").open("r+b") as stream:
        for tensor in tensors:
            head = dcp_container.envelope(tensor.dtype, tensor.shape).head
            stream.seek(tensor.chunks[0].start + len(head))
            stream.write(values[tensor.key].reshape(-1).view(torch.uint8).numpy().tobytes())
    (tmp_path / ".metadata").write_bytes(metadata_bytes(tensors))
    loaded = {name: torch.zeros_like(value) for name, value in values.items()}
    torch_dcp.load(loaded, checkpoint_id=str(tmp_path), **ALONE)
    assert_same(loaded, values)
    save(tmp_path / "theirs", values)
    metadata = read_metadata(tmp_path / "theirs")
    shapes = {name: metadata.tensor(name).shape for name in metadata.keys}
    chosen = {}
    for name, shape in shapes.items():
        whole = Share(name, tuple((0, n) for n in shape), (0,) * len(shape))
        chosen[name] = (dcp_container.StoredKey(name, shape, (whole,)),)
    infos, places = dcp_container.bind(tmp_path / "theirs", metadata, chosen, shapes, "")
    assert_same(read_all(Checkpoint(tmp_path, infos, None, {}, places)), values)


SCHEMES: dict[str, dict[str, Any]] = {
    "pack-quantized": {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 8},
    "float-quantized": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
}


@pytest.mark.parametrize("form", SCHEMES)
@pytest.mark.usefixtures("alone")
def test_quantised_models(tmp_path: Path, form: str) -> None:
    """Packed int32, fp8, int64 shapes, scales: cut over two ranks, read back by us and by torch."""
    group = {"targets": ["Linear"], "weights": SCHEMES[form], "input_activations": None, "output_activations": None}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    shape = LlamaShape(hidden=128, heads=4, kv_heads=2, intermediate=256, vocab=64, layers=2)
    config = config_json(shape) | {"quantization_config": quantization}
    rules = expected_rules(config, "BF16")
    kinds = {"BF16": torch.bfloat16, "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn}
    values = {}
    for number, rule in enumerate(rules):
        count = math.prod(rule.shape) * kinds[rule.dtype].itemsize
        values[rule.name] = (
            ((torch.arange(count) + number) % 127).to(torch.uint8).view(kinds[rule.dtype]).view(rule.shape)
        )
    assert {rule.dtype for rule in rules} == ({"BF16", "I32", "I64"} if form[0] == "p" else {"BF16", "F8_E4M3"})
    write(dcp, tmp_path, plan_of(rules, tp=2), config, values)
    assert_same(read_all(opened(tmp_path)), values)
    loaded = {name: torch.zeros_like(value) for name, value in values.items()}
    torch_dcp.load(loaded, checkpoint_id=str(tmp_path), **ALONE)
    assert_same(loaded, values)
    if form == "float-quantized":  # the names of an unquantised model
        return
    os.remove(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"\d+ of the model's 21 tensors are missing"):
        opened(tmp_path, config_json(shape))


def test_the_layout_can_be_resumed(tmp_path: Path) -> None:
    values = values_of(SMALL)
    layout = dcp.lay_out(plan_of(rules_of(SMALL, values), tp=2), CONFIG)
    assert layout.create(tmp_path) == ("__0_0.distcp", "__1_0.distcp")
    assert layout.create(tmp_path) == ()
    starts = [at for file in layout.files for at, _ in file.inserts]
    assert all(place.offset % 64 == 0 for name in values for place in layout.placements[name])
    assert len(starts) == 2 * sum(len(places) for places in layout.placements.values())


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize("prefix", ["", "model.", "app.model.", "state_dict.model."])
@pytest.mark.usefixtures("alone")
def test_a_prefix_and_everything_else_that_a_run_keeps(tmp_path: Path, prefix: str) -> None:
    values = values_of(SMALL, torch.float32)
    state = {prefix + name: value for name, value in values.items()}
    for name, value in values.items():
        state[f"optim.state.{name}.exp_avg"] = torch.zeros_like(value)
        state[f"optim.state.{name}.step"] = torch.tensor(3.0)
    state |= {"lr_scheduler.last_epoch": 7, "train_state": {"step": torch.tensor(3)}, "dataloader": b"abc", "odd": 1}
    save(tmp_path, state)
    checkpoint = opened(tmp_path, CONFIG)
    assert_same(read_all(checkpoint), values)
    assert checkpoint.infos["lm_head.weight"].dtype == "F32"
    assert checkpoint.left_out == {
        "optim.*": f"optimizer state, {2 * len(values)} entries",
        "lr_scheduler.last_epoch": "learning-rate schedule",
        "train_state.step": "training progress",
        "dataloader": "position in the training data",
        "odd": "no tensor of the model",
    }


@pytest.mark.usefixtures("alone")
def test_other_forms_of_a_tensor(tmp_path: Path) -> None:
    """Column by column, a parameter, one with attributes; and what is no plain tensor is refused by its kind."""
    values = values_of(SMALL)
    state: dict[str, Any] = dict(values)
    state[Q] = values[Q].t().contiguous().t()
    state["lm_head.weight"] = torch.nn.Parameter(values["lm_head.weight"])
    tagged = values["model.norm.weight"].clone()
    tagged.sequence_parallel = True
    state["model.norm.weight"] = tagged
    save(tmp_path / "good", state)
    checkpoint = opened(tmp_path / "good", CONFIG)
    assert checkpoint.placements[Q][0].strides == (2, 64)
    assert_same(read_all(checkpoint), values)
    state[Q] = values[Q].to(torch.complex128)
    save(tmp_path / "bad", state)
    with pytest.raises(CheckpointError, match=r"q_proj.weight': its dtype torch.complex128 is none that can be read"):
        opened(tmp_path / "bad", CONFIG)


@pytest.mark.usefixtures("alone")
def test_two_copies_of_the_model(tmp_path: Path) -> None:
    """An average of the weights is not the model; of two actors nobody can tell."""
    values = values_of(SMALL)
    copies = {f"ema.{name}": torch.zeros_like(value) for name, value in values.items()}
    state = {f"model.{name}": value for name, value in values.items()}
    save(tmp_path / "average", {**copies, **state})
    checkpoint = opened(tmp_path / "average", CONFIG)
    assert_same(read_all(checkpoint), values)
    assert checkpoint.left_out == {"ema.*": f"another copy of the model's tensors, {len(values)} entries"}
    save(tmp_path / "actors", {**{f"other.{name}": value for name, value in values.items()}, **state})
    with pytest.raises(
        CheckpointError, match=r"21 of the model's tensors are there 2 times, behind 'model.', 'other.'"
    ):
        opened(tmp_path / "actors", CONFIG)


@pytest.mark.usefixtures("alone")
def test_a_tied_head_is_left_out(tmp_path: Path) -> None:
    values = values_of(replace(SMALL, tied=True))
    save(tmp_path, {**values, "lm_head.weight": values["model.embed_tokens.weight"].clone()})
    checkpoint = opened(tmp_path, CONFIG | {"tie_word_embeddings": True})
    assert_same(read_all(checkpoint), values)
    assert checkpoint.left_out == {"lm_head.weight": "a head that config.json ties to the embedding"}


def titan(values: dict[str, torch.Tensor], shape: LlamaShape, fused: str) -> dict[str, torch.Tensor]:
    """torchtitan's Llama: the inverse of what Hugging Face's own conversion of Meta's weights does."""
    size = shape.hidden // shape.heads
    found = {
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    state = {theirs: values[ours] for theirs, ours in found.items()}
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        q, k, v = (values[f"{layer}self_attn.{n}_proj.weight"] for n in "qkv")
        q, k = (w.view(-1, 2, size // 2, shape.hidden).transpose(1, 2).reshape(w.shape) for w in (q, k))
        if fused == "wqkv":
            groups = (w.view(shape.kv_heads, -1, size, shape.hidden) for w in (q, k, v))
            state[f"layers.{i}.attention.qkv_linear.wqkv.weight"] = torch.cat(list(groups), 1).reshape(-1, shape.hidden)
        else:
            for name, weight in (("wq", q), ("wk", k), ("wv", v)):
                state[f"layers.{i}.attention.{fused}{name}.weight"] = weight
        for theirs, ours in {
            "attention.wo": "self_attn.o_proj",
            "feed_forward.w1": "mlp.gate_proj",
            "feed_forward.w2": "mlp.down_proj",
            "feed_forward.w3": "mlp.up_proj",
            "attention_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
        }.items():
            state[f"layers.{i}.{theirs}.weight"] = values[f"{layer}{ours}.weight"]
    return state


@pytest.mark.parametrize(("prefix", "fused"), [("", ""), ("model.", ""), ("", "qkv_linear."), ("model.", "wqkv")])
@pytest.mark.usefixtures("alone")
def test_torchtitans_llama(tmp_path: Path, prefix: str, fused: str) -> None:
    values = values_of(SMALL)
    state = {prefix + name: value for name, value in titan(values, SMALL, fused).items()}
    if fused == "qkv_linear.":
        state["lm_head.weight"] = state.pop("output.weight")
    state[f"{prefix}freqs_cis"] = torch.zeros(4, 4)
    save(tmp_path, state)
    checkpoint = opened(tmp_path, CONFIG)
    assert_same(read_all(checkpoint), values)
    assert checkpoint.left_out == {f"{prefix}freqs_cis": "a buffer that every engine computes itself"}


def test_the_rotary_order_by_hand(tmp_path: Path) -> None:
    """One head of four features: theirs pairs neighbours (0 1)(2 3), ours halves (0 2)(1 3)."""
    shape = LlamaShape(hidden=4, heads=1, kv_heads=1, intermediate=4, vocab=4, layers=1)
    rules = {rule.role: rule for rule in rules_of(shape, values_of(shape))}
    ((stored,),) = dcp.titan_options(rules["attention.q"], (1, 1, 4))[:1]
    found = {}
    for share in stored.shares:
        (start, stop), _ = share.box
        for n in range(stop - start):
            found[start + n] = share.origin[0] + n * (share.steps or (1, 1))[0]
    assert found == {0: 0, 1: 2, 2: 1, 3: 3}


@st.composite
def shares_and_chunks(draw: st.DrawFn) -> tuple[Share, tuple[tuple[int, int], ...], int]:
    step, start, count = draw(st.integers(1, 3)), draw(st.integers(0, 4)), draw(st.integers(1, 8))
    origin, total = draw(st.integers(0, 5)), 40
    low = draw(st.integers(0, total - 1))
    chunk = ((low, draw(st.integers(low + 1, total))),)
    return Share("w", ((start, start + count),), (origin,), (step,)), chunk, total


@given(shares_and_chunks())
def test_clipping_to_a_chunk_keeps_what_lies_in_it(case: Any) -> None:
    share, chunk, _ = case
    (start, stop), step = share.box[0], share.steps[0]
    low, high = chunk[0]
    wanted = {i: share.origin[0] + (i - start) * step - low for i in range(start, stop)}
    wanted = {i: at for i, at in wanted.items() if 0 <= at < high - low}
    found = dcp_container.clip(share, chunk)
    got = {} if found is None else {i: found.origin[0] + (i - found.box[0][0]) * step for i in range(*found.box[0])}
    assert got == wanted


# --------------------------------------------------------------------- errors


def test_no_config_is_asked_for_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"without a config.json; give --config DIR, the directory or file"):
        opened(tmp_path)


@pytest.mark.usefixtures("alone")
def test_all_that_is_missing_is_listed(tmp_path: Path) -> None:
    values = values_of(SMALL)
    del values["model.layers.0.mlp.up_proj.weight"], values["model.norm.weight"]
    save(tmp_path, values)
    with pytest.raises(
        CheckpointError, match=r"2 of the model's 21 tensors are missing:\n  .*0.mlp.up_proj.*\n  .*norm"
    ):
        opened(tmp_path, CONFIG)


@pytest.mark.usefixtures("alone")
def test_another_model_altogether(tmp_path: Path) -> None:
    save(tmp_path, {"vision.patch": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"none of its 1 tensors is of the model.*it has vision.patch"):
        opened(tmp_path, CONFIG)


def ours(directory: Path, change: Any = None) -> Path:
    """A checkpoint of ours, its metadata changed."""
    values = values_of(SMALL)
    plan = plan_of(rules_of(SMALL, values), tp=2)
    write(dcp, directory, plan, CONFIG, values)
    if change is not None:
        tensors = {t.key: t for t in dcp_container.stored_tensors(dcp.arrays(plan, CONFIG))}
        (directory / ".metadata").write_bytes(metadata_bytes(change(tensors)))
    return directory


def changed(tensor: StoredTensor, number: int = 0, **fields: Any) -> StoredTensor:
    chunks = list(tensor.chunks)
    chunks[number] = Chunk(**{**vars(chunks[number]), **fields})
    return StoredTensor(tensor.key, tensor.dtype, tensor.shape, tuple(chunks))


WRONG = {
    "escape": ({"file": "../__0_0.distcp"}, r"'\.\./__0_0\.distcp' is not the name of a file"),
    "absolute": ({"file": "/etc/passwd"}, r"'/etc/passwd' is not the name of a file"),
    "overlap": ({"box": ((8, 24), (0, 32))}, r"leave out \[8, 32\] at \[0, 0\]"),
    "outside": ({"box": ((24, 40), (0, 32))}, r"the chunk of size \[16, 32\] at \[24, 0\] is outside it"),
    "gap": ({"box": ((0, 8), (0, 32))}, r"is not whole: its 2 chunks leave out \[8, 32\] at \[8, 0\]"),
    "too much": ({"box": ((0, 17), (0, 32))}, r"its chunks overlap: they have 1,056 elements, the tensor 1,024"),
    "behind the end": ({"start": 1 << 40}, r"cut short: it ends at byte 1,099,"),
    "huge": ({"length": 1 << 59}, r"cut short: it ends at byte 576,"),
    "elsewhere": ({"start": 7}, r"damaged|no zip directory"),
    "no file": ({"file": "__9_0.distcp"}, r"__9_0.distcp: cannot be read: No such file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_chunk_that_cannot_be(tmp_path: Path, name: str) -> None:
    fields, text = WRONG[name]
    ours(tmp_path, lambda tensors: [*({**tensors, Q: changed(tensors[Q], **fields)}).values()])
    with pytest.raises(CheckpointError, match=text):
        opened(tmp_path)


def test_all_problems_at_once(tmp_path: Path) -> None:
    def change(tensors: dict[str, StoredTensor]) -> list[StoredTensor]:
        tensors[Q] = changed(tensors[Q], box=((0, 8), (0, 32)))
        tensors["lm_head.weight"] = changed(tensors["lm_head.weight"], file="..")
        norm = tensors["model.norm.weight"]
        tensors["model.norm.weight"] = StoredTensor(norm.key, "F16", norm.shape, norm.chunks)
        return list(tensors.values())

    ours(tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path)
    text = str(caught.value)
    assert f"{Q!r} of shape [32, 32] is not whole" in text
    assert "'lm_head.weight': '..' is not the name of a file" in text
    assert "'model.norm.weight' at byte" in text
    assert "holds BF16 [32], the metadata says F16 [32]" in text


def test_files_cut_short_and_damaged(tmp_path: Path) -> None:
    directory = ours(tmp_path)
    path = directory / "__1_0.distcp"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"__1_0.distcp: .*cut short: it ends at byte"):
        opened(directory)
    path.write_bytes(bytes(len(content)))
    with pytest.raises(CheckpointError, match="no zip directory"):
        opened(directory)


@settings(max_examples=150)
@given(st.data())
def test_damaged_metadata_and_archives_never_do_more_than_say_so(tmp_path_factory: Any, data: st.DataObject) -> None:
    """Bytes changed at random: an error of ours, or a checkpoint that is still whole."""
    directory = tmp_path_factory.getbasetemp() / "fuzzed"
    if not directory.exists():
        ours(directory)
    path = directory / data.draw(st.sampled_from([".metadata", "__0_0.distcp"]))
    content = bytearray(path.read_bytes())
    try:
        spoilt = bytearray(content)
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(content) - 1))
            spoilt[at] = data.draw(st.integers(0, 255))
        if data.draw(st.booleans()):
            del spoilt[data.draw(st.integers(0, len(spoilt) - 1)) :]
        path.write_bytes(spoilt)
        try:
            checkpoint = opened(directory)
        except CheckpointError:
            return
        for places in checkpoint.placements.values():
            assert all(place.path.parent == directory and place.offset >= 0 for place in places)
    finally:
        path.write_bytes(content)


def test_what_is_recognised(tmp_path: Path) -> None:
    assert not dcp.recognises(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"")
    assert dcp.recognises(tmp_path)
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    assert not dcp.recognises(tmp_path)


def test_an_archive_of_another_program(tmp_path: Path) -> None:
    def change(tensors: dict[str, StoredTensor]) -> list[StoredTensor]:
        norm = tensors["model.norm.weight"]
        tensors["model.norm.weight"] = changed(norm, file="other", start=0, length=(tmp_path / "other").stat().st_size)
        return list(tensors.values())

    with zipfile.ZipFile(tmp_path / "other", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"x" * 100)
    ours(tmp_path, change)
    with pytest.raises(CheckpointError, match=r"data\.pkl is compressed or encrypted"):
        opened(tmp_path)
    (tmp_path / "other").write_bytes(struct.pack("<I", 0x04034B50) * 10)
    ours(tmp_path, change)
    with pytest.raises(CheckpointError, match="no zip directory at its end"):
        opened(tmp_path)


def edited(directory: Path, edit: Any) -> Path:
    """A checkpoint of ours whose metadata has been changed as data: ``edit(state of Metadata)``."""
    ours(directory)
    path = directory / ".metadata"
    record = read_pickle(path.read_bytes(), what="it")
    edit(record.state)
    path.write_bytes(write_pickle(record))
    return directory


def entry(state: dict[str, Any], key: str = "model.norm.weight") -> tuple[Any, Any]:
    """A tensor's description and the record of its file."""
    index = next(index for index in state["storage_data"] if index.state["fqn"] == key)
    return state["state_dict_metadata"][key], index


def test_metadata_of_other_versions(tmp_path: Path) -> None:
    """Properties as a dict, sizes as plain tuples, no planner data: what some versions and other programs write."""

    def edit(state: dict[str, Any]) -> None:
        described, index = entry(state)
        properties = described.state["properties"]
        properties.state = {"dtype": properties.state[0], "layout": None}
        described.state["size"] = (32,)
        index.state["offset"] = [0]
        state["planner_data"] = None
        del state["version"], state["storage_meta"]

    assert_same(read_all(opened(edited(tmp_path, edit))), values_of(SMALL))


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda s: s["storage_data"][entry(s)[1]].state.update(transform_descriptors=["zstd"]), r"through \['zstd'\]"),
        (lambda s: s["storage_data"].pop(entry(s)[1]), r"no file is given for its chunk at \[0\]"),
        (lambda s: entry(s)[0].state.update(size=(1 << 61,)), "'model.norm.weight': its size is"),
        (lambda s: entry(s)[0].state.update(properties=None), "its dtype None is none that can be read"),
        (lambda s: entry(s)[0].state["chunks"].append(3), "a chunk's offset and size are None and None"),
        (lambda s: s["storage_data"][entry(s)[1]].state.update(offset=-1), "takes [0-9]+ bytes from -1"),
        (lambda s: s["state_dict_metadata"].update({3: None}), "a key is 3; every key must be text"),
        (lambda s: s.update(storage_data=[]), "it lists neither tensors nor files"),
        (lambda s: s["state_dict_metadata"].pop("model.norm.weight"), "1 of the model's 21 tensors are missing"),
    ],
)
def test_metadata_that_makes_no_sense(tmp_path: Path, edit: Any, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        opened(edited(tmp_path, edit))


def test_metadata_with_a_call_in_it(tmp_path: Path) -> None:
    """os.system where a size should be: named in the error, never called."""
    touched = tmp_path / "touched"

    def edit(state: dict[str, Any]) -> None:
        entry(state)[0].state["size"] = Call(Name("os", "system"), (f"touch {touched}",))

    with pytest.raises(CheckpointError, match=r"'model.norm.weight': its size is <os.system\(...\)>"):
        opened(edited(tmp_path, edit))
    assert not touched.exists()
