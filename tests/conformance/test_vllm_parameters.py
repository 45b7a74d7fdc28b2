"""vLLM's own loader fills every parameter of its models from our exports: no expert stays uninitialised.

Of every declared family, and of derived types with experts, towers and indexers, in int4, fp8, nvfp4 and unquantised.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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
