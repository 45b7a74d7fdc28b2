"""What bitsandbytes and HQQ decode of what they saved is what we decode, to the bit (but for int8's last bit)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelexport.checkpoints.safetensors.file import Reader, open_checkpoint
from modelexport.models.library_formats import plain

PYTHON = os.environ.get("MODELEXPORT_LIBRARIES_PYTHON")
KINDS = {
    "bitsandbytes": ("nf4", "nf4-nested", "fp4", "fp4-nested", "int8"),
    "hqq": ("hqq8", "hqq4", "hqq2"),
}
CASES = [(method, kind) for method, kinds in KINDS.items() for kind in kinds]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(PYTHON is None, reason="MODELEXPORT_LIBRARIES_PYTHON names no interpreter with both libraries"),
]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    file = tmp_path_factory.mktemp("libraries") / "all.safetensors"
    script = Path(__file__).with_name("library_weights.py")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "PYTHON"))}
    done = subprocess.run(
        [str(PYTHON), str(script), str(file)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env=environment,
    )
    assert file.exists(), done.stderr[-2000:]
    return load_file(file)


@pytest.mark.parametrize(("method", "kind"), CASES)
def test_we_decode_what_the_library_does(method: str, kind: str, stored: dict[str, Tensor], tmp_path: Path) -> None:
    tensors = {name.replace("/", "."): tensor for name, tensor in stored.items() if name.startswith(f"{kind}/")}
    wanted = tensors.pop(f"{kind}.decoded")
    save_file(tensors, tmp_path / "model.safetensors")
    config = f'{{"dtype": "bfloat16", "quantization_config": {{"quant_method": "{method}"}}}}'
    (tmp_path / "config.json").write_text(config)
    checkpoint = plain(open_checkpoint(tmp_path))
    with Reader(checkpoint) as reader:
        found = reader.read(checkpoint.infos[f"{kind}.weight"])
    if kind == "int8":
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)
    else:
        assert torch.equal(found.bfloat16(), wanted)
