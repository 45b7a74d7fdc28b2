"""Engines load what we write, and compute what our own dequantised weights do in the plain architecture.

transformers on the demo model here, and for every number format in ``test_transformers_formats.py``; vLLM where an
environment of its own holds it, since it pins its own torch and transformers: the variable MODELEXPORT_VLLM_PYTHON
names its interpreter. vLLM's CPU build has kernels for some formats, which are tried in bfloat16. Its parsing of
config.json and its loading of weights are tried for all, in float32, with the kernels of ``vllm_reference_kernels.py``
where it has none: then nothing but the order of sums is left to differ by.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from modelexport.assets import demo_documents, demo_model_path
from modelexport.exporting import export
from modelexport.inspection.evaluate import tokenise
from modelexport.inspection.evaluate.models import load_dequantised
from modelexport.quantization import formats
from tests.conformance._kv_cache import round_kv_cache
from tests.conformance._vllm import needs_vllm, token_logprobs, vllm_logprobs

PROMPTS, LENGTH = 8, 12


def prompt_ids(prompts: int, length: int) -> torch.Tensor:
    """int64 ``[prompts, length]``: the beginning of the held-out text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    return tokenise(tokenizer, demo_documents("heldout"))[: prompts * length].view(prompts, length)


def logits_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(input_ids=ids).logits.float()


@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore")  # transformers' and compressed-tensors' own, many and changing
@pytest.mark.parametrize("quant", ["fp8", "int4"])
def test_transformers_loads_it_and_computes_the_same(tmp_path: Path, quant: str) -> None:
    from transformers import AutoModelForCausalLM

    export(out=str(tmp_path / "out"), quant=quant, tp=2, quiet=True, evaluate=False)
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = prompt_ids(1, 64)
    expected = logits_of(load_dequantised(tmp_path / "out"), ids)
    difference = (logits_of(theirs, ids) - expected).abs()
    print(f"demo {quant}: logits differ by {difference.mean():.5f} on average, {difference.max():.5f} at most")
    if quant == "int4":
        assert difference.max() <= 1e-3
    else:  # activations are rounded: the last bit of a sum can tip one over
        assert difference.mean() <= 0.05 * expected.std()


@dataclass(frozen=True)
class Loaded:
    """What vLLM made of a checkpoint.

    Attributes:
        difference: of its log-probabilities from the reference's, ``[prompts, length - 1]``, not negative.
        kernels: reference kernels that it used.
    """

    difference: torch.Tensor
    kernels: list[str]

    def describe(self, what: str) -> str:
        """A line to print."""
        kernels = ", ".join(self.kernels) or "its own kernels"
        same = int((self.difference.amax(dim=1) <= 1e-3).sum())
        return (
            f"{what}, {kernels}: log-probabilities differ by {self.difference.mean():.5f} on average, "
            f"{self.difference.max():.5f} at most; by no more than 0.001 in {same} of {PROMPTS} prompts"
        )


def in_vllm(directory: Path, *, tp: int = 1, **settings: str) -> Loaded:
    """Load a checkpoint in vLLM, compare with the reference in the same dtype; settings are the script's variables."""
    ids = prompt_ids(PROMPTS, LENGTH)
    got, kernels = vllm_logprobs(directory, ids, tp=tp, **settings)
    reference = load_dequantised(directory, dtype=getattr(torch, settings.get("dtype", "bfloat16")))
    return Loaded((got - token_logprobs(logits_of(reference, ids), ids)).abs(), kernels)


@pytest.mark.slow
@pytest.mark.timeout(400)
@needs_vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("quant", "form", "tp"),
    [
        *((quant, "hf", tp) for quant in ("none", "int8", "fp8", "int4") for tp in (1, 2)),
        *((quant, "hf", 1) for quant in ("int4-asym", "int8-static")),
        *((quant, form, 1) for quant, form in (("int4", "awq"), ("int4-asym", "awq"), ("int4", "gptq"))),
    ],
)
def test_vllm_with_kernels_of_its_own(tmp_path: Path, quant: str, form: str, tp: int) -> None:
    export(out=str(tmp_path / "out"), quant=quant, format=form, tp=4, quiet=True, evaluate=False)
    loaded = in_vllm(tmp_path / "out", tp=tp)
    print(loaded.describe(f"{quant} as {form}, tp {tp}, bfloat16"))
    assert loaded.kernels == []
    weights_only = formats.get(quant).input_arguments() is None
    assert loaded.difference.mean() <= (0.03 if weights_only else 0.1)


MIXED = "*.0.*down_proj=none,*.down_proj=fp8-static,*self_attn*=int8,*gate_proj=int4:32,*up_proj=int4:32"
READ = [
    *(("hf", quant) for quant in (*formats.names(), "int8-wo:32", "int4:-1", MIXED)),
    *(("modelopt", quant) for quant in ("fp8", "fp8-static", "fp8-block", "nvfp4", "nvfp4-wo", "mxfp8")),
    ("modelopt", "*self_attn*=fp8-static,*mlp*=nvfp4"),
    *(("awq", quant) for quant in ("int4", "int4-asym")),
    *(("gptq", quant) for quant in ("int4", "int8-wo")),  # vLLM takes no asymmetric ones
    ("fp8-block", "fp8-block"),
]
HEADS = [
    *(("hf", f"*=int4,lm_head={name}") for name in ("int8", "int8-wo", "int4:32", "int4-asym", "fp8", "nvfp4-wo")),
    ("hf", "*=nvfp4,lm_head=nvfp4"),
    ("awq", "*=int4,lm_head=int4"),
    ("gptq", "*=int4,lm_head=int4"),
    ("modelopt", "*=fp8-static,lm_head=fp8-static"),
]


@pytest.mark.slow
@pytest.mark.timeout(400)
@needs_vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("form", "quant"), [*READ, *HEADS])
def test_vllm_reads_every_format(tmp_path: Path, form: str, quant: str) -> None:
    export(out=str(tmp_path / "out"), quant=quant, format=form, quiet=True, evaluate=False)
    # vLLM's word for MXFP4 does not tell whether inputs are rounded: that depends on the GPU.
    kernels = "weights" if quant == "mxfp4-wo" else "reference"
    loaded = in_vllm(tmp_path / "out", dtype="float32", kernels=kernels)
    print(loaded.describe(f"{quant} as {form}, float32"))
    if "=" not in quant and formats.get(quant.partition(":")[0]).input_arguments() is None:
        assert loaded.difference.max() <= 1e-3
    else:
        # The last bit of a sum can tip a rounding over, and the prompt is another one from there: but not all prompts.
        assert loaded.difference.mean() <= 0.03
        assert (loaded.difference.amax(dim=1) <= 1e-3).sum() >= PROMPTS // 4


CALIBRATED = [
    ("hf", "int4", "gptq"),
    ("hf", "int4", "awq"),
    ("hf", "int8", "smoothquant"),
    ("hf", "int8-static", "smoothquant"),
    ("hf", "int4", "rotation+gptq"),  # whose head is no longer the embedding
    ("awq", "int4", "gptq"),
    ("awq", "int4-asym", "gptq"),
    ("gptq", "int4", "gptq"),
]
FEW: dict[str, Any] = {"calib_samples": 4, "calib_length": 64, "quiet": True, "evaluate": False}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("quant", "algorithm"), [case[1:] for case in CALIBRATED if case[0] == "hf"])
def test_transformers_computes_what_was_calibrated(tmp_path: Path, quant: str, algorithm: str) -> None:
    from transformers import AutoModelForCausalLM

    export(out=str(tmp_path / "out"), quant=quant, algorithm=algorithm, **FEW)
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = prompt_ids(1, 64)
    expected = torch.log_softmax(logits_of(load_dequantised(tmp_path / "out"), ids), dim=-1)
    difference = (torch.log_softmax(logits_of(theirs, ids), dim=-1) - expected).abs()
    print(f"{algorithm} {quant}: log-probabilities differ by {difference.mean():.5f}, {difference.max():.5f} at most")
    if formats.get(quant).input_arguments() is None:
        assert difference.max() <= 1e-3
    else:  # compressed-tensors lays the largest input on 127.5, where it does not read a scale
        assert difference.mean() <= 0.05 * expected.std()


@pytest.mark.slow
@pytest.mark.timeout(400)
@needs_vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("form", "quant", "algorithm"), CALIBRATED)
def test_vllm_computes_what_was_calibrated(tmp_path: Path, form: str, quant: str, algorithm: str) -> None:
    export(out=str(tmp_path / "out"), quant=quant, algorithm=algorithm, format=form, tp=2, **FEW)
    loaded = in_vllm(tmp_path / "out", dtype="float32", kernels="reference")
    print(loaded.describe(f"{algorithm} {quant} as {form}, float32"))
    if formats.get(quant).input_arguments() is None:
        assert loaded.difference.max() <= 1e-3
    else:
        assert loaded.difference.mean() <= 0.03
        assert (loaded.difference.amax(dim=1) <= 1e-3).sum() >= PROMPTS // 4


@pytest.mark.slow
@pytest.mark.timeout(400)
@needs_vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("form", "quant"), [("hf", "none"), ("hf", "int4"), ("modelopt", "nvfp4-wo")])
def test_vllm_takes_the_kv_cache_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, quant: str) -> None:
    export(out=str(tmp_path / "out"), quant=quant, format=form, kv_cache="fp8", quiet=True, evaluate=False)
    round_kv_cache(monkeypatch, tmp_path / "out", towards_zero=True)  # as vLLM's CPU build does; on a GPU it does not
    loaded = in_vllm(tmp_path / "out", dtype="float32", kernels="reference", kv="fp8")
    print(loaded.describe(f"{quant} as {form}, KV cache in fp8, float32"))
    assert loaded.difference.mean() <= 0.03
