"""Formats of engines hold the models that were tried with them, whatever others have the same names."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelexport.errors import PlanError
from modelexport.resharding import reshard
from tests.helpers.tiny_models import tiny_checkpoint


@pytest.mark.timeout(120)
@pytest.mark.parametrize("format", ["megatron", "vllm-sharded", "trtllm"])
@pytest.mark.parametrize("model_type", ["granite", "gemma"])  # Llama's names; a few multipliers, another norm
def test_a_model_that_only_has_the_names_is_refused(tmp_path: Path, format: str, model_type: str) -> None:
    with pytest.raises(PlanError, match=rf"{model_type}|{model_type.capitalize()}"):
        reshard(checkpoint=str(tiny_checkpoint(model_type)), format=format, out=str(tmp_path / "out"), quiet=True)
    assert not (tmp_path / "out").exists()
