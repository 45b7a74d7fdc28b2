"""Stacks of experts taken apart, against stacks cut up by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from modelexport.checkpoints.safetensors.file import Checkpoint, Reader
from modelexport.errors import CheckpointError, PlanError, RankFailedError
from modelexport.exporting import convert, export
from modelexport.inspection.diff import diff_checkpoints
from modelexport.inspection.evaluate.models import PlainTensors
from modelexport.inspection.evaluate.streaming import through_layers
from modelexport.inspection.inspect import inspect_checkpoint
from modelexport.inspection.verify import verify_checkpoint
from modelexport.models.architecture import family_of
from modelexport.models.decoded import decoded
from modelexport.models.opening import open_model
from modelexport.models.stacked import experts_apart, experts_stacked
from modelexport.resharding import reshard
from tests.helpers.marks import few
from tests.helpers.models import copy_checkpoint
from tests.helpers.tiny_models import tiny_checkpoint

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

EXPERTS = 4  # of a layer of a tiny model
Parts = Mapping[str, Tensor]
TOKENS = torch.randint(3, 240, (2, 21), generator=torch.Generator().manual_seed(1))


def halves(stack: Tensor) -> list[Parts]:
    """Of ``[experts, 2 * intermediate, hidden]``: gate above up."""
    return [dict(zip(("gate_proj", "up_proj"), each.chunk(2), strict=True)) for each in stack]


def turned(cut: Callable[[Tensor], list[Parts]]) -> Callable[[Tensor], list[Parts]]:
    """The same of ``[experts, hidden, 2 * intermediate]``."""
    return lambda stack: cut(stack.transpose(1, 2))


def in_turn(stack: Tensor) -> list[Parts]:
    """Of features of gate and up in turn; of a bias, too."""
    return [{"gate_proj": each[0::2], "up_proj": each[1::2]} for each in stack]


def down(stack: Tensor) -> list[Parts]:
    return [{"down_proj": each} for each in stack]


def joined(name: str) -> Callable[[Tensor], list[Parts]]:
    """Of ``[experts * intermediate, hidden]``, as a linear of that name."""
    return lambda stack: [{name: each.t() if name == "w2" else each} for each in stack.chunk(EXPERTS)]


def only(name: str) -> Callable[[Tensor], list[Parts]]:
    """Of ``[experts, out, in]``, as a linear of that name."""
    return lambda stack: [{name: each} for each in stack]


CUTS: dict[str, dict[str, tuple[str, Callable[[Tensor], list[Parts]]]]] = {
    "granitemoe": {
        "block_sparse_moe.input_linear.weight": ("block_sparse_moe.experts", halves),
        "block_sparse_moe.output_linear.weight": ("block_sparse_moe.experts", down),
    },
    "aria_text": {
        "mlp.experts.fc1.weight": ("mlp.experts", turned(halves)),
        "mlp.experts.fc2.weight": ("mlp.experts", turned(down)),
    },
    "llama4": {
        "feed_forward.experts.gate_up_proj": ("feed_forward.experts", turned(halves)),
        "feed_forward.experts.down_proj": ("feed_forward.experts", turned(down)),
    },
    "dbrx": {f"ffn.experts.mlp.{name}": ("ffn.experts.mlp", joined(name)) for name in ("w1", "v1", "w2")},
    "jetmoe": {
        "mlp.input_linear.weight": ("mlp.experts", halves),
        "mlp.output_linear.weight": ("mlp.experts", down),
        "self_attention.experts.input_linear.weight": ("self_attention.experts", only("q_proj")),
        "self_attention.experts.output_linear.weight": ("self_attention.experts", only("o_proj")),
    },
    "gpt_oss": {
        "mlp.experts.gate_up_proj": ("mlp.experts", turned(in_turn)),
        "mlp.experts.gate_up_proj_bias": ("mlp.experts", in_turn),
        "mlp.experts.down_proj": ("mlp.experts", turned(down)),
        "mlp.experts.down_proj_bias": ("mlp.experts", down),
    },
}


def by_hand(model_type: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with linears of each expert in place of stacks."""
    found = {}
    for name, tensor in tensors.items():
        end = next((end for end in CUTS[model_type] if name.endswith(f".{end}")), None)
        if end is None:
            found[name] = tensor
            continue
        root, cut = CUTS[model_type][end]
        suffix = "bias" if end.endswith("_bias") else "weight"
        for e, parts in enumerate(cut(tensor)):
            for linear, part in parts.items():
                path = f"{name.removesuffix(end)}{root}.{e}.{linear}.{suffix}"
                found[path] = part.contiguous()
    return found


def apart(model_type: str, target: Path) -> Path:
    """A tiny checkpoint of the type with experts apart."""
    return copy_checkpoint(tiny_checkpoint(model_type), target, tensors=lambda tensors: by_hand(model_type, tensors))


def tensors_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    with Reader(checkpoint) as reader:
        return {name: reader.read(info) for name, info in checkpoint.infos.items() if len(info.shape) < 3}


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


@pytest.mark.parametrize("model_type", few(list(CUTS), "dbrx", "gpt_oss", "granitemoe", "jetmoe", "llama4"))
def test_every_expert_has_its_own_linears(model_type: str) -> None:
    source = tiny_checkpoint(model_type)
    found = tensors_of(experts_apart(open_model(source)))
    wanted = by_hand(model_type, load_file(source / "model.safetensors"))
    assert set(found) == {name for name, tensor in wanted.items() if tensor.dim() < 3}
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())


@pytest.mark.parametrize("model_type", few(list(CUTS), "dbrx", "gpt_oss", "granitemoe"))
def test_linears_of_each_expert_make_up_the_stacks_again(model_type: str) -> None:
    """Read whole, and in parts that begin and end within an expert."""
    source = tiny_checkpoint(model_type)
    found = experts_stacked(experts_apart(open_model(source)))
    wanted = load_file(source / "model.safetensors")
    assert found.infos.keys() == wanted.keys()
    with Reader(found) as reader:
        for name in found.computed:
            info, stack = found.infos[name], wanted[name]
            assert torch.equal(reader.read(info), stack)
            rows, cols = (1, info.shape[0] - 1), (3, info.shape[1] - 2)
            out = torch.empty_like(stack[1:-1, 3:-2])
            assert torch.equal(reader.read(info, rows=rows, cols=cols, out=out), stack[1:-1, 3:-2])


def test_a_model_with_a_missing_expert_is_as_it_is(tmp_path: Path) -> None:
    checkpoint = open_model(apart("granitemoe", tmp_path / "apart"))
    del checkpoint.infos["model.layers.0.block_sparse_moe.experts.3.down_proj.weight"]
    assert experts_stacked(checkpoint) is checkpoint


@pytest.mark.extended
@pytest.mark.parametrize("model_type", ["gpt_oss", "granitemoe"])
def test_what_a_gguf_file_has_apart_is_stacked_in_its_model_s_own_format(model_type: str, tmp_path: Path) -> None:
    """Unless experts are quantised: these are linears of their own in every format."""
    source = tiny_checkpoint(model_type)
    settings: dict[str, Any] = {"evaluate": False, "quiet": True}
    export(model=str(source), out=str(tmp_path / "file"), quant="none", format="gguf", **settings)
    export(model=str(tmp_path / "file"), out=str(tmp_path / "plain"), quant="none", tp=2, **settings)
    assert diff_checkpoints(tmp_path / "plain", source).equal
    assert open_model(tmp_path / "plain").infos.keys() == open_model(source).infos.keys()
    assert verify_checkpoint(tmp_path / "plain", against=tmp_path / "file").ok
    reshard(checkpoint=str(tmp_path / "file"), out=str(tmp_path / "again"), format="hf", quiet=True)
    assert weights(tmp_path / "again") == weights(tmp_path / "plain")
    export(model=str(tmp_path / "file"), out=str(tmp_path / "quantised"), quant="int8", **settings)
    assert any(".experts.0." in name for name in open_model(tmp_path / "quantised").infos)


@pytest.mark.parametrize("cols", [(0, 5), (32, 96)])
def test_a_part_of_a_transposed_expert_is_that_of_the_whole(cols: tuple[int, int]) -> None:
    checkpoint = experts_apart(open_model(tiny_checkpoint("gpt_oss")))
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    with Reader(checkpoint) as reader:
        whole = reader.read(checkpoint.infos[name])
        part = reader.read(checkpoint.infos[name], rows=(3, 40), cols=cols)
    assert torch.equal(part, whole[3:40, cols[0] : cols[1]])


@pytest.mark.parametrize("model_type", few(list(CUTS), "dbrx", "gpt_oss"))
def test_a_stacked_and_a_per_expert_source_give_the_same_bytes(model_type: str, tmp_path: Path) -> None:
    sources = {"stacked": tiny_checkpoint(model_type), "apart": apart(model_type, tmp_path / "source")}
    for name, source in sources.items():
        export(model=str(source), quant="int4:32", out=str(tmp_path / name), evaluate=False, quiet=True)
        assert verify_checkpoint(tmp_path / name, sources["stacked"]).ok
    assert weights(tmp_path / "stacked") == weights(tmp_path / "apart")
    assert diff_checkpoints(sources["stacked"], sources["apart"]).equal


@pytest.mark.extended
@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
@pytest.mark.parametrize("model_type", list(CUTS))
def test_ranks_change_nothing(model_type: str, algorithm: str, tmp_path: Path) -> None:
    text = tmp_path / "tokens.jsonl"
    text.write_text("".join(json.dumps({"input_ids": list(range(i, i + 24))}) + "\n" for i in (3, 40)))
    calibration: dict[str, Any] = {}
    if algorithm == "gptq":
        calibration = {"algorithm": "gptq", "calib": str(text), "calib_samples": 2, "calib_length": 16}
    for tp in (1, 2):
        export(
            model=str(tiny_checkpoint(model_type)),
            quant="int4:32",
            tp=tp,
            out=str(tmp_path / str(tp)),
            evaluate=False,
            quiet=True,
            **calibration,
        )
    assert weights(tmp_path / "1") == weights(tmp_path / "2")


@pytest.mark.parametrize("model_type", few(["aria_text", "dbrx", "gpt_oss", "granitemoe", "jetmoe"], "dbrx", "gpt_oss"))
def test_layer_by_layer_experts_apart_compute_the_same(model_type: str, tmp_path: Path) -> None:
    """Their products are watched, though transformers multiplies by the whole stack."""
    found = []
    for directory in (tiny_checkpoint(model_type), apart(model_type, tmp_path / "apart")):
        with PlainTensors(open_model(directory)) as tensors:
            outputs = through_layers(tensors, TOKENS)
            outputs.select(0, outputs.vocabulary)
            found.append(torch.cat([outputs.logits(number) for number in range(len(outputs.hidden))]))
    assert float((found[0] - found[1]).abs().max()) <= 1e-5 * float(found[0].abs().max())


def test_without_experts_to_round_stacks_stay(tmp_path: Path) -> None:
    quant = "*experts*=none,*=int8"
    export(model=str(tiny_checkpoint("granitemoe")), quant=quant, out=str(tmp_path / "out"), evaluate=False, quiet=True)
    assert "model.layers.0.block_sparse_moe.input_linear.weight" in open_model(tmp_path / "out").infos


def test_stacks_by_the_names_that_transformers_has_in_memory(tmp_path: Path) -> None:
    """Qwen3.5's are published so, and saved one by one."""

    def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
        for name in (name for name in tensors if name.endswith(".experts.0.gate_proj.weight")):
            root = name.removesuffix(".0.gate_proj.weight")
            own = [[tensors[f"{root}.{e}.{part}_proj.weight"] for e in range(4)] for part in ("gate", "up", "down")]
            found[f"{root}.gate_up_proj"] = torch.cat([torch.stack(own[0]), torch.stack(own[1])], dim=1)
            found[f"{root}.down_proj"] = torch.stack(own[2])
        return found

    source = tiny_checkpoint("qwen3_5_moe")
    published = copy_checkpoint(source, tmp_path / "published", tensors=stacked)
    for name, directory in (("stacked", published), ("apart", source)):
        export(model=str(directory), quant="fp8", out=str(tmp_path / name), evaluate=False, quiet=True)
    assert weights(tmp_path / "stacked") == weights(tmp_path / "apart")


def test_stacks_in_either_order_are_told_by_their_shapes(tmp_path: Path) -> None:
    """Qwen3-VL's are published as ``[experts, hidden, 2 * intermediate]``, and read in both orders."""
    source = tiny_checkpoint("qwen3_vl_moe")

    def swapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
            for name, tensor in tensors.items()
        }

    other = experts_apart(open_model(copy_checkpoint(source, tmp_path / "swapped", tensors=swapped)))
    found, wanted = tensors_of(other), tensors_of(experts_apart(open_model(source)))
    assert set(found) == set(wanted)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())


def test_a_stack_of_another_shape_is_refused(tmp_path: Path) -> None:
    def longer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        name = "model.layers.0.block_sparse_moe.output_linear.weight"
        return {**tensors, name: tensors[name][:, :-1].contiguous()}

    source = copy_checkpoint(tiny_checkpoint("granitemoe"), tmp_path / "source", tensors=longer)
    with pytest.raises(CheckpointError, match=r"output_linear\.weight is \[4, 127, 256\].*\[4, 128, 256\]"):
        experts_apart(open_model(source))


def test_a_family_is_as_the_checkpoint_has_it() -> None:
    source = open_model(tiny_checkpoint("granitemoe"))
    config = source.config or {}
    assert family_of(config, source.infos).has_stacks
    assert not family_of(config, experts_apart(source).infos).has_stacks


# ------------------------------------------------------------------------- MXFP4 blocks


def blocks_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Random blocks and scales in place of stacks."""
    found, generator = {}, torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if tensor.dim() != 3:
            found[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32)
        found[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        found[f"{name}_scales"] = torch.randint(115, 121, shape, dtype=torch.uint8, generator=generator)
    return found


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny gpt-oss as it was published."""
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    target = tmp_path_factory.mktemp("mxfp4") / "model"
    return copy_checkpoint(
        tiny_checkpoint("gpt_oss"), target, tensors=blocks_of, config={"quantization_config": quantization}
    )


def plain(source: Path) -> dict[str, Tensor]:
    """The tensors of a published checkpoint as transformers decodes them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, found = load_file(source / "model.safetensors"), {}
    for name, tensor in stored.items():
        if name.endswith("_blocks"):
            stack = name.removesuffix("_blocks")
            found[stack] = convert_moe_packed_tensors(tensor, stored[f"{stack}_scales"]).contiguous()
        elif not name.endswith("_scales"):
            found[name] = tensor
    return found


def test_blocks_are_decoded_as_transformers_does(published: Path, tmp_path: Path) -> None:
    export(model=str(published), quant="none", out=str(tmp_path / "none"), evaluate=False, quiet=True)
    found, wanted = load_file(tmp_path / "none" / "model.safetensors"), plain(published)
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    with Reader(checkpoint := decoded(open_model(published))) as reader:
        name = "model.layers.0.mlp.experts.gate_up_proj"
        part = reader.read(checkpoint.infos[name], rows=(1, 3), cols=(33, 70))
    assert torch.equal(part, wanted[name][1:3, 33:70])


def test_blocks_are_quantised_as_their_decoded_weights(published: Path, tmp_path: Path) -> None:
    source = copy_checkpoint(tiny_checkpoint("gpt_oss"), tmp_path / "plain", tensors=lambda _: plain(published))
    for name, directory in (("blocks", published), ("plain-int4", source)):
        export(model=str(directory), quant="int4:32", out=str(tmp_path / name), evaluate=False, quiet=True)
    assert weights(tmp_path / "blocks") == weights(tmp_path / "plain-int4")


def test_mxfp4_of_blocks_is_exact(published: Path, tmp_path: Path) -> None:
    quant = "*experts*=mxfp4-wo,*=none"
    export(model=str(published), quant=quant, out=str(tmp_path / "out"), evaluate=False, quiet=True)
    found = tensors_of(decoded(open_model(tmp_path / "out")))
    wanted = by_hand("gpt_oss", plain(published))
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items() if "experts" in name)


def test_blocks_are_sharded_and_joined(published: Path, tmp_path: Path) -> None:
    reshard(checkpoint=str(published), tp=2, ep=2, out=str(tmp_path / "two"), quiet=True)
    reshard(checkpoint=str(tmp_path / "two"), out=str(tmp_path / "one"), quiet=True)
    assert diff_checkpoints(published, tmp_path / "one").equal
    export(model=str(tmp_path / "two"), quant="int4:32", out=str(tmp_path / "a"), evaluate=False, quiet=True)
    export(model=str(published), quant="int4:32", out=str(tmp_path / "b"), evaluate=False, quiet=True)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


def test_blocks_are_described(published: Path) -> None:
    rows = {row.name: (row.count, row.number_format) for row in inspect_checkpoint(published).rows}
    assert rows["mlp.experts.gate_up_proj"] == (2, "mxfp4")


def test_the_published_format_is_written_expert_by_expert(tmp_path: Path) -> None:
    """What transformers decodes of it is what compressed-tensors' MXFP4 of the same experts stands for."""
    source, quant = tiny_checkpoint("gpt_oss"), "*experts*=mxfp4-wo,*=none"
    for name, settings in {"one": {"format": "mxfp4"}, "two": {"format": "mxfp4", "tp": 2}, "plain": {}}.items():
        export(model=str(source), quant=quant, out=str(tmp_path / name), evaluate=False, quiet=True, **(settings or {}))
    assert weights(tmp_path / "one") == weights(tmp_path / "two")
    found = by_hand("gpt_oss", plain(tmp_path / "one"))
    wanted = tensors_of(decoded(open_model(tmp_path / "plain")))
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    checked = verify_checkpoint(tmp_path / "one", source)
    assert checked.ok
    assert checked.hashes == len(wanted) + 24  # blocks and scales for a weight of 2 layers, 4 experts, 3 linears each


@pytest.mark.parametrize(
    ("quant", "says"),
    [("mxfp4-wo", "q_proj.blocks is quantised"), ("*experts*=int8,*=none", "holds experts in mxfp4-wo, not int8")],
)
def test_the_published_format_holds_experts_alone(quant: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=says):
        export(model=str(tiny_checkpoint("gpt_oss")), quant=quant, format="mxfp4", out=str(tmp_path / "out"))


# ------------------------------------------------------------------------- FP8 with one scale


STACKED_FP8 = {
    "quant_algo": "FP8",
    "quant_method": "modelopt",
    "ignore": ["*self_attn*", "*shared_expert*", "*router*", "*lm_head*", "*vision*", "*projector*"],
}


def fp8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """ModelOpt's tensors of Llama 4's experts: stacks of numbers, and one scale for each."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            scale = tensor.float().abs().amax() / 448
            found[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            found[f"{name}_weight_scale"], found[f"{name}_input_scale"] = scale, torch.tensor(0.5)
    return found


def by_expert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same expert by expert, as ModelOpt has linears."""
    stacks = fp8(tensors)
    found = by_hand("llama4", {name: tensor for name, tensor in stacks.items() if not name.endswith("put_scale")})
    for name in [name for name in found if name.endswith("_weight_scale")]:
        scale, root = found.pop(name), name.rpartition(".")[0]
        parts = ("down_proj",) if "down_proj" in name else ("gate_proj", "up_proj")
        for linear in (f"{root}.{e}.{part}" for e in range(EXPERTS) for part in parts):
            found[f"{linear}.weight_scale"], found[f"{linear}.input_scale"] = scale.clone(), torch.tensor(0.5)
    return {name: tensor for name, tensor in found.items() if not name.endswith("proj_input_scale")}


def scaled(tensors: Callable[[dict[str, Tensor]], dict[str, Tensor]], target: Path) -> Path:
    return copy_checkpoint(
        tiny_checkpoint("llama4_text"), target, tensors=tensors, config={"quantization_config": STACKED_FP8}
    )


def test_stacks_in_fp8_are_decoded(tmp_path: Path) -> None:
    """And taken apart to the same as ModelOpt's linears of each expert."""
    source = tiny_checkpoint("llama4_text")
    stacked, one_by_one = scaled(fp8, tmp_path / "stacked"), scaled(by_expert, tmp_path / "apart")
    for name, directory in (("a", stacked), ("b", one_by_one)):
        export(model=str(directory), quant="int4:32", out=str(tmp_path / name), evaluate=False, quiet=True)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    assert verify_checkpoint(tmp_path / "a", stacked).ok
    stored = fp8(load_file(source / "model.safetensors"))
    name = "model.layers.1.feed_forward.experts.gate_up_proj"
    with Reader(checkpoint := decoded(open_model(stacked))) as reader:
        part = reader.read(checkpoint.infos[name], rows=(1, 3), cols=(33, 70))
    wanted = (stored[name].float() * stored[f"{name}_weight_scale"]).bfloat16()
    assert torch.equal(part, wanted[1:3, 33:70])


def test_stacks_that_are_not_quantised_in_such_a_checkpoint(tmp_path: Path) -> None:
    export(model=str(scaled(dict, tmp_path / "plain")), quant="int4:32", out=str(tmp_path / "a"), quiet=True)
    export(model=str(tiny_checkpoint("llama4_text")), quant="int4:32", out=str(tmp_path / "b"), quiet=True)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


def test_a_scale_that_is_not_a_number_is_named(tmp_path: Path) -> None:
    def damaged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        name = "model.layers.0.feed_forward.experts.down_proj_weight_scale"
        return {**fp8(tensors), name: torch.tensor(float("nan"))}

    with pytest.raises(RankFailedError, match=r"experts\.down_proj: weight_scale holds NaN"):
        export(model=str(scaled(damaged, tmp_path / "source")), quant="int8", out=str(tmp_path / "out"), quiet=True)


def test_stacks_in_fp8_are_not_converted(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"experts of a layer are quantised in one tensor.*--quant fp8-static"):
        convert(str(scaled(fp8, tmp_path / "source")), out=str(tmp_path / "out"), format="hf", quiet=True)
