"""Draft layers are carried through every job, or taken out of a checkpoint, of its config.json, and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from modelexport.checkpoints.safetensors.file import open_checkpoint
from modelexport.cli.summary import summary
from modelexport.errors import CheckpointError, PlanError, UsageError
from modelexport.exporting import convert, export
from modelexport.exporting.plan import build_plan
from modelexport.inspection.diff import diff_checkpoints
from modelexport.inspection.evaluate.models import PlainTensors
from modelexport.inspection.inspect import inspect_checkpoint
from modelexport.inspection.verify import verify_checkpoint
from modelexport.models.families.drafts import draft_counts, without_counts
from modelexport.models.matching import match
from modelexport.models.opening import open_model
from modelexport.quantization.assignment import Assignment
from modelexport.quantization.methods import read_quantization_config
from modelexport.recipe import ExportRecipe
from modelexport.resharding import reshard
from modelexport.sharding.plan import Parallelism
from tests.helpers.drafts import BELOW_MODEL, BELOW_MTP, KINDS, draft_checkpoint, draft_names
from tests.helpers.marks import few
from tests.helpers.models import copy_checkpoint, make_llama
from tests.helpers.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")

NESTED = {"num_nextn_predict_layers": 0, "text_config": {"mtp_num_hidden_layers": 2, "hidden_size": 8}, "x": [1]}


def test_counts_are_found_where_the_language_model_is_described() -> None:
    assert draft_counts(NESTED) == {"text_config.mtp_num_hidden_layers": 2}
    assert without_counts(NESTED) == {**NESTED, "text_config": {"mtp_num_hidden_layers": 0, "hidden_size": 8}}


@pytest.mark.parametrize("value", [-1, True, "1", 1.0, []])
def test_a_count_that_is_no_whole_number_is_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"num_mtp_modules is .*; a whole number, 0 or more, is needed"):
        draft_counts({"num_mtp_modules": value})


def exported(source: Path, out: Path, **settings: Any) -> Path:
    export(model=str(source), out=str(out), evaluate=False, quiet=True, **settings)
    return out


@pytest.mark.parametrize("kind", few(KINDS, "qwen3_next"))
def test_kept_ones_are_written_as_they_are(tmp_path: Path, kind: str) -> None:
    source = draft_checkpoint(kind)
    out = exported(source, tmp_path / "out", quant="int4", group_size=32)
    here, there = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    assert draft_names(out) == draft_names(source)
    assert all(here[name].equal(there[name]) for name in draft_names(source))
    assert verify_checkpoint(out, source).problems == []


@pytest.mark.parametrize("kind", few(KINDS, "deepseek_v3"))
def test_the_linears_of_quantised_ones_are_as_the_last_layers(tmp_path: Path, kind: str) -> None:
    source = draft_checkpoint(kind)
    out = exported(source, tmp_path / "out", quant="*.mlp.*=int4:32,*.self_attn.*=fp8", draft="quantise")
    assert verify_checkpoint(out, source).problems == []
    modules = match(open_checkpoint(out)).modules
    schemes = {module.place.name: module.scheme for module in modules}
    drafts = [module for module in modules if module.place.draft is not None]
    twins = [(module.scheme, schemes[module.place.draft.twin]) for module in drafts if module.place.draft.twin]
    assert {own is not None for own, _ in twins} == {True, False}
    assert all(own == other for own, other in twins)
    assert all(module.scheme is None for module in drafts if not module.place.draft.twin)


def test_attention_and_mlp_may_be_those_of_two_decoder_layers() -> None:
    """As MiMo-V2-Flash has it: attention as with a sliding window, which has sinks, and a dense MLP as in front."""
    modules = match(open_model(draft_checkpoint("mimo_v2_flash"))).modules
    drafts = {module.place.draft.path: module.place.draft for module in modules if module.place.draft is not None}
    twins = {path: draft.twin.removeprefix("model.layers.") for path, draft in drafts.items() if draft.twin}
    assert twins == {
        **{path: f"1.{path}" for path in twins if path.startswith("self_attn")},
        **{path: f"0.{path}" for path in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")},
        "input_layernorm": "0.input_layernorm",
        "pre_mlp_layernorm": "0.post_attention_layernorm",
    }
    assert len(twins) == 5 + 3 + 2


def test_a_draft_layers_number_format_does_not_depend_on_its_own_name(tmp_path: Path) -> None:
    out = exported(
        draft_checkpoint("qwen3_next"), tmp_path / "out", quant="model.layers.1.mlp.*=int8", draft="quantise"
    )
    quantised = {name for name in draft_names(out) if name.endswith("weight_scale")}
    assert {name.split(".")[3] for name in quantised} == {"mlp"}


@pytest.mark.parametrize("kind", few(KINDS, "glm4_moe"))
@pytest.mark.parametrize("draft", ["keep", "quantise"])
def test_they_are_cut_and_joined_again(tmp_path: Path, kind: str, draft: str) -> None:
    whole = exported(draft_checkpoint(kind), tmp_path / "whole", quant="int8", draft=draft)
    reshard(checkpoint=str(whole), out=str(tmp_path / "cut"), tp=2, quiet=True)
    reshard(checkpoint=str(tmp_path / "cut"), out=str(tmp_path / "back"), quiet=True)
    assert verify_checkpoint(tmp_path / "cut").problems == []
    assert diff_checkpoints(whole, tmp_path / "back").equal


@pytest.mark.parametrize("kind", KINDS)
def test_what_engines_join_two_inputs_by_is_whole_and_the_rest_cut_as_its_like(kind: str) -> None:
    checkpoint = open_model(draft_checkpoint(kind))
    plan = build_plan(checkpoint, Assignment.parse("int8"), Parallelism(), quantise_drafts=True)
    rules = {rule.name: rule for rule in plan.rules()}
    drafts = {task.place.name: task.place for step in plan.steps for task in step.tasks if task.place.draft}
    cut = {name: rules[f"{name}.weight"].dim for name in drafts if f"{name}.weight" in rules}
    twins = [(dim, rules[f"{drafts[name].draft.twin}.weight"].dim) for name, dim in cut.items() if drafts[name].path]
    assert all(own == other for own, other in twins)
    assert {0, 1} < {own for own, _ in twins}
    around = {name: dim for name, dim in cut.items() if not drafts[name].path}
    assert {name.rpartition(".")[2] for name, dim in around.items() if dim == 0} <= {"embed_tokens", "head"}
    assert any(name.endswith(("eh_proj", "fc")) and dim is None for name, dim in around.items())


def test_a_part_of_a_draft_layer_with_names_of_its_own_stays_as_it_is(tmp_path: Path) -> None:
    import torch

    own = {"mtp.layers.0.gates.table": torch.ones(3, 5), "mtp.joined.weight": torch.ones(64, 32, dtype=torch.bfloat16)}
    source = copy_checkpoint(draft_checkpoint("qwen3_next"), tmp_path / "source", tensors=lambda found: found | own)
    out = exported(source, tmp_path / "out", quant="int8", draft="quantise")
    here = load_file(out / "model.safetensors")
    assert all(here[name].equal(tensor) for name, tensor in own.items())
    assert verify_checkpoint(out, source).problems == []


def test_a_draft_layer_that_lacks_a_linear_is_refused_with_what_to_type(tmp_path: Path) -> None:
    name = "model.layers.2.self_attn.o_proj.weight"
    source = copy_checkpoint(
        draft_checkpoint("glm4_moe"),
        tmp_path / "source",
        tensors=lambda found: {key: value for key, value in found.items() if key != name},
    )
    with pytest.raises(CheckpointError, match=rf"{name} is missing \(of a draft layer: --draft drop"):
        exported(source, tmp_path / "out", quant="int8")
    exported(source, tmp_path / "out", quant="int8", draft="drop")


@pytest.mark.parametrize("kind", few(KINDS, "qwen3_next"))
def test_kept_ones_are_announced_by_the_names_that_engines_ask_for(tmp_path: Path, kind: str) -> None:
    source = draft_checkpoint(kind)
    config = json.loads((exported(source, tmp_path / "out", quant="int8") / "config.json").read_text())
    quantization = read_quantization_config(config)
    assert quantization is not None
    prefix = "mtp" if kind in BELOW_MTP else "model.mtp.layers.0" if kind in BELOW_MODEL else "model.layers.2"
    layer = f"{prefix}.layers.0" if kind in BELOW_MTP else prefix
    asked = [f"{layer}.mlp.experts", f"{layer}.mtp_block.self_attn.o_proj", f"{layer}.self_attn.qkv_proj"]
    asked += [f"{prefix}.fc", f"{prefix}.eh_proj", f"{layer}.head"]
    assert all(quantization.ignores(name) for name in asked)
    assert not quantization.ignores("model.layers.1.self_attn.o_proj")


def test_blocks_of_fp8_are_decoded_where_draft_layers_are_kept(tmp_path: Path) -> None:
    blocks = exported(draft_checkpoint("deepseek_v3"), tmp_path / "fp8", quant="fp8-block", draft="quantise")
    plain = exported(blocks, tmp_path / "plain", quant="none")
    out = exported(blocks, tmp_path / "out", quant="int8")
    here, there = load_file(out / "model.safetensors"), load_file(plain / "model.safetensors")
    assert all(here[name].equal(there[name]) for name in draft_names(plain))
    assert draft_names(out) == draft_names(plain)


def test_a_conversion_passes_the_numbers_of_draft_layers_on(tmp_path: Path) -> None:
    blocks = exported(
        draft_checkpoint("deepseek_v3"), tmp_path / "fp8", quant="fp8-block", draft="quantise", format="fp8-block"
    )
    convert(str(blocks), format="hf", out=str(tmp_path / "out"), quiet=True, evaluate=False)
    plain = exported(blocks, tmp_path / "plain", quant="none")
    assert diff_checkpoints(exported(tmp_path / "out", tmp_path / "again", quant="none"), plain).equal
    assert {name for name in draft_names(tmp_path / "out") if name.endswith("weight_scale")}


@pytest.mark.parametrize("kind", few(KINDS, "qwen3_next"))
def test_torchs_distributed_checkpoints_hold_them(tmp_path: Path, kind: str) -> None:
    source = draft_checkpoint(kind)
    reshard(checkpoint=str(source), out=str(tmp_path / "dcp"), format="dcp", tp=2, quiet=True)
    assert diff_checkpoints(tmp_path / "dcp", source).equal


@pytest.mark.parametrize("kind", few(KINDS, "glm4_moe"))
def test_they_are_counted_apart_from_the_layers(kind: str) -> None:
    found = inspect_checkpoint(draft_checkpoint(kind))
    layers = 3 if kind in BELOW_MODEL else 2
    assert found.layers_text == f"{layers} layers and 1 draft layer"
    assert sum(row.count for row in found.rows if row.name == "self_attn.o_proj") <= layers
    assert found.warnings == []


def test_evaluation_does_without_them(tmp_path: Path) -> None:
    out = exported(draft_checkpoint("deepseek_v3"), tmp_path / "out", quant="int8", draft="quantise")
    with PlainTensors(open_checkpoint(out)) as plain:
        for name in plain.names:
            if not name.startswith("model.layers.2."):
                plain.read(name)
        plain.check_all_read()


@pytest.mark.extended
@pytest.mark.parametrize("draft", ["keep", "quantise"])
def test_two_ranks_write_the_bytes_of_one(tmp_path: Path, draft: str) -> None:
    wholes = [
        exported(draft_checkpoint("deepseek_v3"), tmp_path / f"{tp}", quant="int4", group_size=32, draft=draft, tp=tp)
        for tp in (1, 2)
    ]
    one, two = ((whole / "model.safetensors").read_bytes() for whole in wholes)
    assert one == two


@pytest.mark.extended
@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_gguf_file_has_them_at_any_parallelism_and_gives_them_back(tmp_path: Path, kind: str) -> None:
    settings: dict[str, Any] = {"format": "gguf", "quant": "q8-0", "draft": "quantise"}
    one, two = (exported(draft_checkpoint(kind), tmp_path / f"{tp}", tp=tp, **settings) for tp in (1, 2))
    assert (one / "model.gguf").read_bytes() == (two / "model.gguf").read_bytes()
    plain = exported(draft_checkpoint(kind), tmp_path / "plain", format="gguf", quant="none", tp=1)
    reshard(checkpoint=str(plain), out=str(tmp_path / "back"), quiet=True)
    assert verify_checkpoint(tmp_path / "back", draft_checkpoint(kind)).problems == []
    assert draft_names(tmp_path / "back")


def test_decoder_layers_of_several_kinds_may_draft_one_after_the_other(tmp_path: Path) -> None:
    """As Nemotron-H has it: one with attention, which joins the inputs, and one with experts."""
    kinds = {"backbone.layers.2.": "mtp.layers.0.", "backbone.layers.1.": "mtp.layers.1."}

    def add(tensors: dict[str, Any]) -> dict[str, Any]:
        copies = {
            name.replace(layer, draft, 1): tensor.clone()
            for name, tensor in tensors.items()
            for layer, draft in kinds.items()
            if name.startswith(layer)
        }
        norm = tensors["backbone.norm_f.weight"]
        joined = norm.new_ones(len(norm), 2 * len(norm))
        return tensors | copies | {"mtp.layers.0.eh_proj.weight": joined, "mtp.layers.0.enorm.weight": norm.clone()}

    plain = tiny_checkpoint("nemotron_h")
    config = {"num_nextn_predict_layers": 1}
    source = copy_checkpoint(plain, tmp_path / "source", config=config, tensors=add)
    out = exported(source, tmp_path / "out", quant="int8", draft="quantise")
    assert verify_checkpoint(out, source).problems == []
    quantised = {name.removesuffix("_scale") for name in draft_names(out) if name.endswith("weight_scale")}
    assert len(quantised) == 4 + 2 * 4 + 2  # attention, two linears of each of four experts and of the shared one


def test_static_scales_are_refused_where_they_are_quantised() -> None:
    checkpoint = open_model(draft_checkpoint("qwen3_next"))
    assignment = Assignment.parse("fp8-static")
    with pytest.raises(PlanError, match="samples do not run through draft layers: choose --draft keep"):
        build_plan(checkpoint, assignment, Parallelism(), quantise_drafts=True)
    assert build_plan(checkpoint, assignment, Parallelism()).formats()


def test_a_calibrated_plan_says_how_they_are_rounded() -> None:
    checkpoint = open_model(draft_checkpoint("glm4_moe"))
    plan = build_plan(checkpoint, Assignment.parse("int8"), Parallelism(), rows=1, quantise_drafts=True)
    assert "19 linears of draft layers are rounded to nearest: samples do not run through them" in plan.notes


def test_quantising_them_goes_with_no_conversion(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--draft quantise rounds linears, and --quant keep"):
        convert(str(draft_checkpoint("glm4_moe")), draft="quantise", out=str(tmp_path / "out"), quiet=True)
    with pytest.raises(UsageError, match="did you mean 'quantise'"):
        ExportRecipe(draft="quantize")


def test_a_record_says_what_became_of_them_only_where_it_is_not_usual() -> None:
    assert "draft" not in ExportRecipe().recorded()
    assert ExportRecipe(draft="drop").recorded()["draft"] == "drop"


@pytest.mark.parametrize("kind", few(KINDS, "glm4_moe"))
def test_dropped_ones_are_named_and_no_longer_promised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    source, out = draft_checkpoint(kind), tmp_path / "out"
    result = export(model=str(source), quant="int8", out=str(out), evaluate=False, draft="drop")
    said = f"{len(draft_names(source))} tensors of draft layers (multi-token prediction) are not written: --draft drop"
    assert said in capsys.readouterr().err
    assert set(result.left_out) == draft_names(source)
    assert json.loads((out / "config.json").read_text()).get("num_nextn_predict_layers", 0) == 0
    record = json.loads((out / "modelexport.json").read_text())
    assert draft_names(source) == set(record["left_out"])
    assert any(said in warning for warning in record["warnings"])
    assert verify_checkpoint(out, source).problems == []
    for told in (summary(result), (out / "README.md").read_text()):
        assert min(draft_names(source)) in told
        assert "of a draft layer" in told


def test_promised_ones_that_are_not_there_are_no_longer_promised(tmp_path: Path) -> None:
    plain = {"tensors": lambda found: {k: v for k, v in found.items() if not k.startswith("model.layers.2.")}}
    source = copy_checkpoint(draft_checkpoint("glm4_moe"), tmp_path / "source", **plain)
    result = export(model=str(source), quant="int8", out=str(tmp_path / "out"), evaluate=False, quiet=True)
    assert "the source has no tensors of the draft layers that it promises" in result.warnings[0]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_rotated_models_are_written_without_them(tmp_path: Path) -> None:
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"input_ids": [3, 4, 5, 6, 7, 8, 9, 10]}\n')
    result = export(
        model=str(draft_checkpoint("deepseek_v3")),
        algorithm="rotation",
        quant="int8",
        dry_run=True,
        calib=str(samples),
        quiet=True,
    )
    assert "--algorithm rotation rotates the hidden states that they read" in result.warnings[0]


def test_formats_without_a_place_for_them_drop_them_and_say_so(tmp_path: Path) -> None:
    config = {"num_nextn_predict_layers": 1}
    source = copy_checkpoint(make_llama(layers=2), tmp_path / "source", config=config, tensors=doubled)
    result = reshard(checkpoint=str(source), out=str(tmp_path / "out"), format="megatron", quiet=True)
    assert "--format megatron has no place for them" in result.warnings[0]
    assert len(result.left_out) == 9


def doubled(tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors with a copy of the last layer behind it."""
    last = {name: tensor.clone() for name, tensor in tensors.items() if name.startswith("model.layers.1.")}
    return tensors | {name.replace("layers.1.", "layers.2.", 1): tensor for name, tensor in last.items()}
