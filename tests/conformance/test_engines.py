"""Engines load what we write: transformers always, vLLM where an environment of its own holds it.

vLLM pins its own torch and transformers, so it lives in another environment, named by the variable
MODELEXPORT_VLLM_PYTHON (its interpreter). The references are our own dequantised weights in the plain architecture,
with the activations rounded as the format says.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from modelexport.assets import demo_documents, demo_model_path
from modelexport.exporter import export
from modelexport.inspection.evaluate import tokenise
from modelexport.inspection.models import load_dequantised
from tests._models import make_llama

QUANTS = ("none", "int8", "fp8", "int4")
VLLM = os.environ.get("MODELEXPORT_VLLM_PYTHON")


def prompt_ids(length: int) -> torch.Tensor:
    """int64 ``[1, length]``: the beginning of the held-out text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    return tokenise(tokenizer, demo_documents("heldout"))[None, :length]


def logits_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(input_ids=ids).logits.float()


@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore")  # transformers' and compressed-tensors' own, many and changing
@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("model", ["demo", "awkward"])
def test_transformers_loads_it_and_computes_the_same(tmp_path: Path, model: str, quant: str) -> None:
    from transformers import AutoModelForCausalLM

    source = None
    ids = prompt_ids(64)
    if model == "awkward":
        source = str(make_llama(kv_heads=2, vocab=1003, hidden=256, attention_bias=True, mlp_bias=True))
        ids = ids % 1003
    export(model=source, out=str(tmp_path / "out"), quant=quant, tp=2, quiet=True, evaluate=False)
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = logits_of(load_dequantised(tmp_path / "out"), ids)
    got = logits_of(theirs, ids)
    assert torch.isfinite(got).all()
    difference = (got - expected).abs()
    print(f"{model} {quant}: logits differ by {difference.mean():.5f} on average, {difference.max():.5f} at most")
    if quant in ("none", "int4"):
        assert difference.max() <= 0.05
    else:
        # Activations are rounded: the last bit of a sum can tip one over. (And compressed-tensors lays int8
        # activations on amax / 127.5, where vLLM and we use 127.)
        assert difference.mean() <= 0.05 * expected.std()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(VLLM is None, reason="MODELEXPORT_VLLM_PYTHON names no interpreter with vLLM")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("quant", QUANTS)
def test_vllm_loads_it_and_computes_the_same(tmp_path: Path, quant: str, tp: int) -> None:
    export(out=str(tmp_path / "out"), quant=quant, tp=4, quiet=True, evaluate=False)
    ids = prompt_ids(48)
    script = Path(__file__).with_name("vllm_logprobs.py")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "PYTHON"))}
    done = subprocess.run(
        [str(VLLM), str(script), str(tmp_path / "out"), str(tp), *map(str, ids[0].tolist())],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOGPROBS ")]
    assert lines, done.stdout[-2000:] + done.stderr[-2000:]
    got = torch.tensor(json.loads(lines[0].removeprefix("LOGPROBS ")))
    scores = torch.log_softmax(logits_of(load_dequantised(tmp_path / "out", dtype=torch.bfloat16), ids), dim=-1)
    expected = scores[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    difference = (got - expected).abs()
    mean, most = difference.mean(), difference.max()
    print(f"{quant} tp {tp}: log-probabilities differ by {mean:.4f} on average, {most:.4f} at most")
    assert difference.mean() <= (0.03 if quant in ("none", "int4") else 0.1)
