"""The number format of a module, told from its tensors."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from modelexport.checkpoints.safetensors.file import TensorInfo
from modelexport.models.modules import recognise


@pytest.mark.parametrize(
    ("blocks", "shape"),
    [
        ((4, 2, 34), (4, 64)),  # Q8_0
        ((4, 2, 36), (4, 128)),  # NVFP4
        ((4, 2, 144), (4, 512)),  # Q4_K
        ((4, 2, 18, 1), (4, 64)),  # IQ4_NL
    ],
)
def test_the_width_of_gguf_s_blocks_is_told_by_their_bytes(blocks: tuple[int, ...], shape: tuple[int, int]) -> None:
    """config.json tells one shape for all layers, and some models have heads of another size in some."""
    info = TensorInfo("weight", "U8", blocks, Path("model.gguf"), 0, math.prod(blocks))
    stored = recognise({"weight": info}, None, "gguf")
    assert stored.shape == shape
    assert stored.unit == (1, shape[1] // 2)
