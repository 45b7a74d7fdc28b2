"""What we keep unquantised, vLLM takes for unquantised, and what we quantise for quantised: by its own rules.

The rules are in ``vllm_rules.py``, the names in ``vllm_modules.json``, as vLLM 0.32 printed them. The models are those
whose names differ most: stacks of experts, towers, indexers. ``test_vllm_parameters.py`` asks vLLM itself, about more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelexport.exporting import prepare
from modelexport.exporting.prepare import quantization_files
from modelexport.recipe import ExportRecipe
from tests.conformance import vllm_rules
from tests.conformance._published import published_checkpoint
from tests.helpers.marks import few
from tests.helpers.models import copy_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")


def quantization_config(model_type: str, directory: Path) -> dict[str, object]:
    source = published_checkpoint(model_type, directory / "source")
    announced = quantization_files(prepare(ExportRecipe(model=str(source), quant="int4", group_size=32)).plan)
    assert announced is not None
    return announced.config


@pytest.mark.parametrize("model_type", vllm_rules.types())
def test_vllm_takes_for_quantised_what_is(tmp_path: Path, model_type: str) -> None:
    config = quantization_config(model_type, tmp_path)
    assert vllm_rules.asked(model_type, config) == vllm_rules.expected(model_type)
    assert set(vllm_rules.expected(model_type).values()) == {True, False}


@pytest.mark.parametrize("model_type", few(vllm_rules.types(), "aria", "granitemoe", "mixtral", "glm4v"))
def test_vllm_takes_nothing_for_quantised_that_structure_keeps(tmp_path: Path, model_type: str) -> None:
    source = copy_checkpoint(
        published_checkpoint(model_type, tmp_path / "known"), tmp_path / "source", config={"model_type": "unheard_of"}
    )
    settings: dict[str, Any] = {"quant": "int4", "group_size": 32, "unknown_architecture": "structure"}
    plan = prepare(ExportRecipe(model=str(source), **settings)).plan
    announced = quantization_files(plan)
    assert announced is not None
    asked, expected = vllm_rules.asked(model_type, announced.config), vllm_rules.expected(model_type)
    has_stacks = any(module.stacked for module in plan.family.layer)
    kept = [name for name in asked if not expected[name] or (has_stacks and name.endswith("routed_experts"))]
    assert [name for name in kept if asked[name]] == []


def test_names_on_disk_alone_would_not_do(tmp_path: Path) -> None:
    config = quantization_config("glm4v", tmp_path)
    config["ignore"] = [name for name in config["ignore"] if not name.startswith("re:")]  # type: ignore[attr-defined]
    asked, expected = vllm_rules.asked("glm4v", config), vllm_rules.expected("glm4v")
    assert [name for name in asked if asked[name] != expected[name]] == [f"visual.blocks.{i}.attn.qkv" for i in (0, 1)]
