"""Types that transformers does not know, exported by the names and shapes of their tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from modelexport.cli.summary import summary
from modelexport.errors import PlanError, UsageError
from modelexport.exporting import convert, export
from modelexport.exporting.prepare import prepare, quantization_files
from modelexport.exporting.result import ExportResult
from modelexport.inspection.diff import diff_checkpoints
from modelexport.inspection.inspect import inspect_checkpoint
from modelexport.inspection.verify import verify_checkpoint
from modelexport.models.derived.structure import KEY
from modelexport.recipe import ExportRecipe
from modelexport.resharding import reshard
from tests.helpers.marks import few
from tests.helpers.models import copy_checkpoint, make_llama
from tests.helpers.tiny_models import tiny_checkpoint

UNKNOWN = {"model_type": "unheard_of"}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "llama, tied": {"tied": True},
    "phi3": {"model_type": "phi3"},
    "mixtral": {"model_type": "mixtral"},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {"model_type": "qwen3_moe"},
}


def exported(source: Path, out: Path, **settings: Any) -> Path:
    run(source, out, **settings)
    return out


def run(source: Path, out: Path, **settings: Any) -> ExportResult:
    given = {"quant": "int4", "group_size": 32, "unknown_architecture": "structure", **settings}
    return export(model=str(source), out=str(out), evaluate=False, quiet=True, **given)


def plan_of(source: Path, **settings: Any) -> Any:
    given = {"quant": "int4", "group_size": 32, "unknown_architecture": "structure", **settings}
    return prepare(ExportRecipe(model=str(source), dry_run=True, quiet=True, **given)).plan


def config_of(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    return found


@pytest.fixture(scope="module")
def unheard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama by a name that nothing knows."""
    return copy_checkpoint(make_llama(), tmp_path_factory.mktemp("unknown") / "source", config=UNKNOWN)


@pytest.fixture(scope="module")
def written(unheard: Path) -> Path:
    """Its export."""
    return exported(unheard, unheard.parent / "written")


@pytest.mark.parametrize("name", few(list(SHAPES), "llama", "mixtral", "phi3"))
@pytest.mark.parametrize("quant", few(["int4", "nvfp4-wo"], "nvfp4-wo"))
def test_a_renamed_model_has_the_same_tensors(tmp_path: Path, name: str, quant: str) -> None:
    known = make_llama(**SHAPES[name])
    source = copy_checkpoint(known, tmp_path / "source", config=UNKNOWN)
    size = 32 if quant == "int4" else None
    here = load_file(exported(source, tmp_path / "a", quant=quant, group_size=size) / "model.safetensors")
    there = load_file(exported(known, tmp_path / "b", quant=quant, group_size=size) / "model.safetensors")
    assert {key: value.view(-1).tolist() for key, value in here.items()} == {
        key: value.view(-1).tolist() for key, value in there.items()
    }


def test_a_renamed_model_has_the_same_quantization_config(tmp_path: Path, written: Path) -> None:
    known = exported(make_llama(), tmp_path / "known")
    assert config_of(written)["quantization_config"] == config_of(known)["quantization_config"]


@pytest.mark.parametrize("model_type", few(["mamba2", "qwen3_next", "llama4_text", "bloom"], "mamba2"))
def test_engines_are_told_of_every_matrix_that_stays(tmp_path: Path, model_type: str) -> None:
    plan = plan_of(copy_checkpoint(tiny_checkpoint(model_type), tmp_path / "source", config=UNKNOWN))
    announced = quantization_files(plan)
    assert announced is not None
    embeddings = [module.path for module in plan.family.before if module.kind == "embedding"]
    matrices = {
        name.removesuffix(".weight")
        for name, _, shape in plan.outputs()
        if name.endswith(".weight") and len(shape) == 2 and name.removesuffix(".weight") not in embeddings
    }
    assert matrices <= set(announced.config["ignore"])


def test_stacked_experts_stay_and_are_listed(tmp_path: Path) -> None:
    plan = plan_of(copy_checkpoint(tiny_checkpoint("llama4_text"), tmp_path / "source", config=UNKNOWN))
    why = {reason for name, reason in plan.unquantised.items() if name.endswith(".experts")}
    assert why == {
        "all experts of a layer in one tensor, whose names and shapes do not say how they are laid out in it"
    }


def test_the_summary_says_what_was_taken_for_linears(tmp_path: Path, unheard: Path) -> None:
    text = summary(run(unheard, tmp_path / "out"))
    assert "note: unheard_of: not known to transformers: what its tensors are is told by their names and shapes" in text
    assert "linears of the 2 layers of model.layers: down_proj, gate_proj, up_proj, k_proj, o_proj, q_proj" in text


def test_verify_compares_it_with_its_source(unheard: Path, written: Path) -> None:
    result = verify_checkpoint(written, against=unheard)
    assert result.problems == []
    assert len(result.modules) == 14


def test_verify_finds_what_is_missing(tmp_path: Path, written: Path) -> None:
    spoilt = copy_checkpoint(
        written, tmp_path / "spoilt", tensors=lambda found: {k: v for k, v in found.items() if "q_proj" not in k}
    )
    (spoilt / "modelexport.json").unlink()
    assert any("q_proj.weight_packed is missing" in problem for problem in verify_checkpoint(spoilt).problems)


def test_inspect_knows_its_weights(written: Path) -> None:
    assert inspect_checkpoint(written).tensor_parallel_sizes == [1]


def test_reshard_writes_the_same_tensors(tmp_path: Path, written: Path) -> None:
    reshard(checkpoint=str(written), out=str(tmp_path / "out"), format="dcp", quiet=True)
    assert diff_checkpoints(written, tmp_path / "out").equal


def test_reshard_to_several_ranks_is_refused(tmp_path: Path, written: Path) -> None:
    with pytest.raises(PlanError, match=r"^--tp 2: .*: 1 rank has them whole: --tp 1$"):
        reshard(checkpoint=str(written), out=str(tmp_path / "out"), tp=2, quiet=True)


def test_convert_keeps_its_numbers(tmp_path: Path, written: Path) -> None:
    convert(str(written), out=str(tmp_path / "gptq"), format="gptq", quiet=True)
    assert verify_checkpoint(tmp_path / "gptq").problems == []


def test_it_is_decoded_without_the_setting(tmp_path: Path, written: Path, unheard: Path) -> None:
    out = exported(written, tmp_path / "out", quant="none", group_size=None, unknown_architecture="refuse")
    assert load_file(out / "model.safetensors").keys() == load_file(unheard / "model.safetensors").keys()


QUANTISED = {"fp8": "hf", "int4": "gptq", "int4-asym": "awq", "fp8-block": "fp8-block", "nvfp4-wo": "modelopt"}


@pytest.mark.parametrize("quant", few(list(QUANTISED), "int4", "fp8-block"))
def test_a_quantised_source_is_decoded(tmp_path: Path, quant: str) -> None:
    size = 32 if quant.startswith("int4") else None
    known = exported(make_llama(), tmp_path / "known", quant=quant, format=QUANTISED[quant], group_size=size)
    source = copy_checkpoint(known, tmp_path / "source", config=UNKNOWN)
    decoded = [
        exported(each, tmp_path / f"{each.name}-plain", quant="none", group_size=None) for each in (known, source)
    ]
    assert diff_checkpoints(*decoded).equal
    assert verify_checkpoint(decoded[1], against=source).problems == []


@pytest.mark.parametrize("flag", ["tp", "target_tp", "target_pp", "target_ep"])
def test_several_ranks_are_refused(unheard: Path, flag: str) -> None:
    with pytest.raises(PlanError, match=rf"^--{flag.replace('_', '-')} 2: .* --{flag.replace('_', '-')} 1$"):
        plan_of(unheard, **{flag: 2})


def test_without_the_setting_it_is_refused_and_the_setting_named(unheard: Path) -> None:
    with pytest.raises(PlanError, match="modelexport --unknown-architecture structure exports it"):
        plan_of(unheard, unknown_architecture="refuse")


def test_the_setting_changes_nothing_of_a_known_type(tmp_path: Path) -> None:
    assert KEY not in config_of(exported(make_llama(), tmp_path / "out"))


def test_another_word_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown-architecture"):
        ExportRecipe(unknown_architecture="guess")
