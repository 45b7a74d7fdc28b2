"""verify calls good what we export, also of models whose heads, stacks and parameters are named or laid out apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelexport.exporting import export
from modelexport.inspection.verify import verify_checkpoint
from tests.conformance._published import published_checkpoint

TYPES = {
    "llama4": "a head below language_model",
    "qwen3_vl_moe": "stacks of experts in the other order of dims",
    "deepseek_v4": "integers beside a router's weight",
    "gemma3n_text": "parameters called scales that are none of quantisation",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", TYPES)
def test_ours_is_good(tmp_path: Path, model_type: str) -> None:
    source, out = published_checkpoint(model_type, tmp_path / "source"), tmp_path / "out"
    export(model=str(source), quant="int4", group_size=32, out=str(out), evaluate=False, quiet=True)
    assert verify_checkpoint(out, source).problems == []
