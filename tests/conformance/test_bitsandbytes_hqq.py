"""bitsandbytes' and HQQ's linears as they are decoded, against a decoder that takes number by number, and their own."""

from __future__ import annotations

import os
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from modelexport import export
from modelexport.checkpoints.safetensors.file import Reader, open_checkpoint
from modelexport.models.decoded import decoded
from tests.conformance._bitsandbytes_hqq import Stored, eight_bits, four_bits, hqq
from tests.helpers.models import copy_checkpoint, make_llama

SCRIPT = Path(__file__).with_name("bitsandbytes_hqq_oracle.py")
LAYOUTS = {
    "nf4 twice": four_bits("nf4", 64, nested=True),
    "fp4 in words": four_bits("fp4", 64, nested=False, storage="f2"),
    "nf4 over the ends of rows": four_bits("nf4", 256, nested=True),
    "int8": eight_bits(),
    "hqq of 4 bits": hqq(4, 1, 64),
    "hqq of 3 bits": hqq(3, 1, 64),
    "hqq of 2 bits down the columns": hqq(2, 0, 32),
    "hqq of 8 bits by rows": hqq(8, 1, None),
}


def written(layout: Stored, directory: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A Llama whose linears are stored in a layout; and their weights, float32."""
    weights = {}

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            rows, cols = tensors.pop(name).shape
            random = np.random.default_rng(zlib.crc32(name.encode()))
            stored, weights[name] = layout.encoded(random, rows, cols)
            module = name.removesuffix("weight")
            tensors |= {module + suffix: torch.tensor(array) for suffix, array in stored.items()}

    model = make_llama(hidden=64, heads=2, kv_heads=1, intermediate=192, layers=1)
    return copy_checkpoint(
        model, directory, tensors=change, config={"quantization_config": layout.quantization}
    ), weights


def decoded_parts(directory: Path, cut: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Every linear's weight, put together from parts: rows, and columns of these."""
    checkpoint = decoded(open_checkpoint(directory))
    with Reader(checkpoint) as reader:
        for name in checkpoint.computed:
            info = checkpoint.infos[name]
            (rows, cols), half = info.shape, info.shape[1] // 2
            yield (
                name,
                torch.cat(
                    [
                        torch.cat([reader.read(info, rows=part, cols=side) for side in ((0, half), (half, cols))], 1)
                        for part in ((0, cut), (cut, rows - 5), (rows - 5, rows))
                    ]
                ),
            )


@pytest.mark.parametrize("which", LAYOUTS)
def test_decoded_as_the_format_says(which: str, tmp_path: Path) -> None:
    directory, weights = written(LAYOUTS[which], tmp_path / "source")
    found = dict(decoded_parts(directory, 19))
    assert found.keys() == weights.keys()
    wrong = [name for name in found if not torch.equal(found[name], torch.tensor(weights[name]).bfloat16())]
    assert not wrong


def test_ranks_write_what_a_decoded_copy_gives(tmp_path: Path) -> None:
    directory, _ = written(LAYOUTS["nf4 twice"], tmp_path / "source")
    common = {"evaluate": False, "quiet": True}
    export(model=str(directory), out=str(tmp_path / "plain"), quant="none", **common)
    export(model=str(tmp_path / "plain"), out=str(tmp_path / "twice"), quant="int4", group_size=32, **common)
    export(model=str(directory), out=str(tmp_path / "once"), quant="int4", group_size=32, tp=2, **common)
    once, twice = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("once", "twice"))
    assert once == twice


@pytest.mark.extended
@pytest.mark.parametrize("which", [name for name in LAYOUTS if name != "nf4 twice"])
def test_every_layout_at_two_ranks(which: str, tmp_path: Path) -> None:
    directory, weights = written(LAYOUTS[which], tmp_path / "source")
    export(model=str(directory), out=str(tmp_path / "plain"), quant="none", tp=2, evaluate=False, quiet=True)
    found = load_file(tmp_path / "plain" / "model.safetensors")
    assert all(torch.equal(found[name], torch.tensor(weights[name]).bfloat16()) for name in weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        *("nf4", "nf4-nested", "fp4-nested", "int8"),
        *("hqq-4-1-64", "hqq-3-1-64", "hqq-2-0-64", "hqq-8-1-none", "hqq-1-0-64-float"),
    ],
)
def test_decoded_as_its_own_library_does(kind: str, tmp_path: Path) -> None:
    python = os.environ.get("MODELEXPORT_BITSANDBYTES_PYTHON")
    if python is None:
        pytest.skip("MODELEXPORT_BITSANDBYTES_PYTHON names no interpreter with bitsandbytes and hqq")
    source = make_llama(intermediate=320)
    subprocess.run(
        [python, SCRIPT, kind, source, tmp_path], check=True, timeout=120, env={**os.environ, "PYTHONPATH": ""}
    )
    found, wanted = dict(decoded_parts(tmp_path / "stored", 19)), load_file(tmp_path / "decoded.safetensors")
    assert found.keys() == wanted.keys()
    assert not [name for name in wanted if not torch.equal(found[name], wanted[name])]
