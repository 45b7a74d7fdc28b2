"""vLLM loads AWQ's and GPTQ's layouts as we write them, with its own kernels, and computes the same.

vLLM lives in an environment of its own, whose interpreter the variable MODELEXPORT_VLLM_PYTHON names.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelexport.quantization import formats
from modelexport.quantization.methods import of_method
from modelexport.quantization.methods.base import ModelQuantization, WeightSlice
from tests.helpers.models import make_llama

VLLM = os.environ.get("MODELEXPORT_VLLM_PYTHON")
CASES = [
    ("awq", "int4-asym", 32),
    ("awq", "int4", 64),
    ("awq", "int4-asym", -1),
    ("gptq", "int4", 32),
    ("gptq", "int4", -1),
]


def quantised(method_name: str, quant: str, group: int, out: Path) -> dict[str, torch.Tensor]:
    """Writes a tiny Llama in that method's layout; returns its weights as they dequantise."""
    method, source = of_method(method_name), make_llama()
    number_format = formats.get(quant, group_size=group, scale_dtype=torch.float16)
    stored, dequantised, linears = {}, {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = dequantised[name] = tensor
            continue
        module = name.removesuffix(".weight")
        shape = (tensor.shape[0], tensor.shape[1])
        assert method.refusal(number_format, shape) is None
        native = number_format.quantise(tensor, name=name)
        encoded = method.encode(number_format, native, WeightSlice.whole(shape))
        stored |= {f"{module}.{suffix}": value for suffix, value in encoded.items()}
        dequantised[name] = number_format.dequantise(native, dtype=torch.bfloat16)
        linears[module] = number_format
    out.mkdir()
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = method.quantization_files(ModelQuantization(linears, ["lm_head"])).config
    (out / "config.json").write_text(json.dumps(config))
    return dequantised


def reference(weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of each token after the first, of the plain model with these weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(make_llama()), dtype=torch.bfloat16)
    model.load_state_dict(weights)
    with torch.inference_mode():
        scores = torch.log_softmax(model.eval()(input_ids=ids[None]).logits[0].float(), dim=-1)
    return scores[:-1].gather(-1, ids[1:, None])[:, 0]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(VLLM is None, reason="MODELEXPORT_VLLM_PYTHON names no interpreter with vLLM")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "quant", "group"), CASES)
def test_vllm_loads_it_and_computes_the_same(tmp_path: Path, method: str, quant: str, group: int) -> None:
    ids = torch.randint(0, 211, (48,), generator=torch.Generator().manual_seed(0))
    weights = quantised(method, quant, group, tmp_path / "out")
    script = Path(__file__).with_name("vllm_logprobs.py")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "PYTHON"))}
    done = subprocess.run(
        [str(VLLM), str(script), str(tmp_path / "out"), "1", *map(str, ids.tolist())],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOGPROBS ")]
    assert lines, done.stdout[-2000:] + done.stderr[-2000:]
    got = torch.tensor(json.loads(lines[0].removeprefix("LOGPROBS ")))
    expected = reference(weights, ids)
    unquantised = reference(load_file(make_llama() / "model.safetensors"), ids)
    noise, effect = (got - expected).abs().mean(), (unquantised - expected).abs().mean()
    print(f"{method} {quant} {group}: log-probabilities differ by {noise:.4f}, by quantising {effect:.4f}")
    assert noise <= 0.03
    assert noise <= effect / 4  # the right weights, not any
