"""Log-probabilities of prompts in vLLM, which has an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

VLLM = os.environ.get("MODELEXPORT_VLLM_PYTHON")

needs_vllm = pytest.mark.skipif(VLLM is None, reason="MODELEXPORT_VLLM_PYTHON names no interpreter with vLLM")


def vllm_logprobs(
    directory: Path, ids: torch.Tensor, *, tp: int = 1, **settings: str
) -> tuple[torch.Tensor, list[str]]:
    """What vLLM gives each token of ``ids`` (``[prompts, length]``) after those before it, ``[prompts, length - 1]``.

    Args:
        settings: the variables of ``vllm_logprobs.py``: dtype, kernels, kv, load_format.

    Returns:
        These, and the reference kernels that stood in for vLLM's own.
    """
    script = Path(__file__).with_name("vllm_logprobs.py")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "PYTHON"))}
    environment |= {f"MODELEXPORT_VLLM_{key.upper()}": value for key, value in settings.items()}
    prompts = " , ".join(" ".join(map(str, row)) for row in ids.tolist()).split()
    done = subprocess.run(
        [str(VLLM), str(script), str(directory), str(tp), *prompts],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("LOGPROBS ", "KERNELS ")))
    assert "LOGPROBS" in lines, done.stdout[-2000:] + done.stderr[-2000:]
    got = torch.tensor(json.loads(lines["LOGPROBS"])).view(ids.shape[0], ids.shape[1] - 1)
    return got, json.loads(lines["KERNELS"])


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The same of a model's logits, ``[prompts, length, vocabulary]``."""
    scores = torch.log_softmax(logits.float(), dim=-1)
    return scores[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
