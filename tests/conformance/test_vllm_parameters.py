"""vLLM's own loader fills every parameter of its models from our exports: no expert stays uninitialised.

Of every declared family, and of derived types with experts, towers and indexers, in int4, fp8, nvfp4 and unquantised.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelexport.models.engines import Linear, warnings
from tests.conformance import vllm_rules
from tests.conformance._vllm import needs_vllm
from tests.conformance._vllm_parameters import CASES, DOCUMENT, fill, page

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    return fill(CASES, tmp_path_factory.mktemp("filled"))


@pytest.mark.parametrize(("model_type", "quant"), CASES)
def test_every_parameter_is_filled(results: dict[tuple[str, str], dict[str, Any]], model_type: str, quant: str) -> None:
    result = results[model_type, quant]
    assert "error" not in result, result["error"]
    assert result["missing"] == []


def test_the_page_is_what_was_found(results: dict[tuple[str, str], dict[str, Any]]) -> None:
    assert DOCUMENT.read_text() == page(results)


def test_the_rules_have_what_vllm_says(tmp_path: Path) -> None:
    printed = fill([(kind, "int4") for kind in vllm_rules.types()], tmp_path, "--modules")
    recorded = json.loads(Path(vllm_rules.__file__).with_name("vllm_modules.json").read_text())
    for (kind, _), result in printed.items():
        assert result["asked"] == recorded[kind], kind


def test_embeddings_are_read_or_warned_of(tmp_path: Path) -> None:
    """Some of vLLM's models tell their embedding its name, some its number format alone, and some neither."""
    kinds = ("llama", "qwen3", "gemma3_text", "deepseek_v3", "gemma2", "mixtral")
    quant = "*=int4:32,*embed_tokens=int4:32,lm_head=int8"
    found = {kind: result for (kind, _), result in fill([(kind, quant) for kind in kinds], tmp_path).items()}
    unread = {kind for kind, result in found.items() if result.get("error") or result["missing"]}
    embedding = Linear("model.embed_tokens", "int4", (256, 128), 32, "embedding", "column")
    warned = {
        kind for kind in kinds if any("makes its embedding" in line for line in warnings("hf", [embedding], model=kind))
    }
    assert unread == warned == {"gemma2", "mixtral"}
