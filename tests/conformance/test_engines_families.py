"""vLLM loads what we export of the families, declared and derived, and computes what the decoded weights do.

Tiny models that transformers saved, in float32: nothing but the order of sums is left to differ by. Kernels that vLLM's
CPU build lacks are those of ``vllm_reference_kernels.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from modelexport.exporting import export
from tests.conformance._vllm import needs_vllm, token_logprobs, vllm_logprobs
from tests.helpers.tiny_models import model_class, tiny_checkpoint

PROMPTS, LENGTH = 4, 12
FEW = {"quiet": True, "evaluate": False}
DECLARED = (  # not cohere2: vLLM 0.32 and transformers differ on an unquantised one by as much as on a quantised one
    "gemma2",
    "gemma3_text",
    "glm4",
    "gpt_neox",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "starcoder2",
)
DERIVED = ("cohere", "exaone4", "nemotron", "opt", "phi", "stablelm")
EXPERTS = ("mixtral", "olmoe", "qwen3_moe")  # vLLM's CPU build has no kernel for quantised experts
CASES = [*((kind, "int4") for kind in (*DECLARED, *DERIVED)), *((kind, "none") for kind in EXPERTS)]


@pytest.mark.slow
@pytest.mark.timeout(400)
@needs_vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model_type", "quant"), CASES)
def test_vllm_loads_the_family(tmp_path: Path, model_type: str, quant: str) -> None:
    source, out, decoded = tmp_path / "source", tmp_path / "out", tmp_path / "decoded"
    kind = model_class(model_type)
    kind.from_pretrained(tiny_checkpoint(model_type), dtype=torch.float32).save_pretrained(source)
    groups = {} if quant == "none" else {"group_size": 32}
    export(model=str(source), quant=quant, out=str(out), tp=2, **groups, **FEW)
    export(model=str(out), quant="none", out=str(decoded), **FEW)
    reference = kind.from_pretrained(decoded, dtype=torch.float32).eval()
    vocabulary = reference.get_input_embeddings().weight.shape[0]
    ids = torch.randint(3, vocabulary - 3, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(1))
    got, kernels = vllm_logprobs(out, ids, dtype="float32", kernels="reference")
    with torch.inference_mode():
        difference = (got - token_logprobs(reference(input_ids=ids).logits, ids)).abs()
    print(
        f"{model_type} {quant}, {', '.join(kernels) or 'its own kernels'}: log-probabilities differ by "
        f"{difference.mean():.6f} on average, {difference.max():.6f} at most"
    )
    assert difference.max() <= 2e-3
