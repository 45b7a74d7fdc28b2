"""Peak private memory is that of a few layers, not of the model."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.benchmarks._measuring import descendants, private_bytes
from tests.helpers.marks import few
from tests.helpers.models import LlamaShape, config_json, tensor_shapes

WIDE = {"hidden": 1024, "heads": 8, "kv_heads": 8, "intermediate": 3072, "vocab": 512}
LAYER = 2 * (4 * 1024 * 1024 + 3 * 1024 * 3072)  # bytes of a layer's weights in bf16


def save(directory: Path, layers: int) -> Path:
    """A checkpoint of that many layers; every tensor of one shape holds the same numbers."""
    directory.mkdir()
    shape = LlamaShape(layers=layers, **WIDE)
    numbers = {size: torch.randn(size).to(torch.bfloat16) for size in set(tensor_shapes(shape).values())}
    tensors = {name: numbers[size].clone() for name, size in tensor_shapes(shape).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config_json(shape)))
    return directory


def peak(source: Path, out: Path, *arguments: object) -> int:
    """Largest Pss_Anon + Pss_Shmem in bytes that any process of the export had when it was looked at."""
    command = [sys.executable, "-m", "modelexport", "--quiet", "--model", source, "--out", out, *arguments]
    process = subprocess.Popen([str(part) for part in command])
    most = 0
    while process.poll() is None:
        most = max(most, *(private_bytes(pid) for pid in [process.pid, *descendants(process.pid)]))
        time.sleep(0.005)
    assert process.returncode == 0
    return most


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("tp", "gather", "more"),
    few(
        [(2, "shm", 6), (1, "direct", 16), (4, "direct", 16), (4, "shm", 16)],
        (2, "shm", 6),
        slow=[(1, "direct", 16), (4, "direct", 16)],
    ),
)
def test_memory_does_not_grow_with_the_model(tmp_path: Path, tp: int, gather: str, more: int) -> None:
    arguments = ("--tp", tp, "--gather", gather, "--quant", "int8")
    layers = 4 if more > 6 else 2
    shallow = peak(save(tmp_path / "shallow", layers), tmp_path / "out-shallow", *arguments)
    deep = peak(save(tmp_path / "deep", layers + more), tmp_path / "out-deep", *arguments)
    assert deep < 400e6 + 3 * LAYER
    assert deep - shallow < 2 * LAYER, f"{more} more layers of {LAYER} bytes took {deep - shallow} bytes more"
