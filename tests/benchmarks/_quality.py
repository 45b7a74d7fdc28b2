"""What the benchmarks of calibrated quantisation share: samples that every tool reads, held-out text, a yardstick.

Samples are token ids in a JSON-lines file, so that no tokenizer, seed or packing of documents differs between tools.
The source model is run over the held-out windows once; every quantised model is then held against what was kept of it,
with the formula of ``modelexport.inspection.evaluate``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelexport.assets import demo_documents, demo_model_path
from modelexport.inspection.evaluate import load_dequantised, load_reference, token_kl, tokenise
from modelexport.inspection.evaluate.losses import Comparison, comparison_of, cut_windows
from modelexport.inspection.evaluate.text import POOL, evaluate_on_text
from modelexport.quantization.calibration.text import TokenDocuments, token_batches_from

WINDOW = 256
_BATCH = 16  # windows in one pass

SMALL_LLAMA = {
    "vocab_size": 28000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
"""128.0 M parameters, of which 84.9 M are the linears that are quantised."""


# ------------------------------------------------------------------------------------------- samples and models


def write_samples(path: Path, windows: Tensor) -> Path:
    """Token ids, int64 ``[samples, length]``, a line each: what ``--calib FILE.jsonl`` and the peers' scripts read."""
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in windows.tolist()))
    return path


def demo_samples(model: Path, samples: int, length: int) -> Tensor:
    """Of the text beside a model, or else of the text that comes with the package, the ones of ``--calib-seed 0``."""
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    own = model / "calibration.txt"
    text = str(own) if own.exists() else None
    return token_batches_from(text, model, vocabulary=vocabulary, samples=samples, length=length)


def trained_model(kind: str, cache: Path) -> Path:
    """A model that ``recipes/train_demo.py`` makes, with its texts beside it; once, which takes half an hour."""
    directory = cache / kind
    if not (directory / "model.safetensors").exists():
        print(f"training {directory}, once: about half an hour on two cores", file=sys.stderr, flush=True)
        recipe = Path(__file__).resolve().parents[2] / "recipes" / "train_demo.py"
        making = directory.with_name(f"{kind}.making")
        command = [sys.executable, str(recipe), "--kind", kind, "--text", "python", "--out", str(making)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        making.rename(directory)
    return directory


def random_samples(model: Path, samples: int, length: int) -> Tensor:
    """Any tokens, for a model that has learnt nothing; the same every time."""
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    return torch.randint(vocabulary, (samples, length), generator=torch.Generator().manual_seed(0))


def make_small_llama(directory: Path) -> Path:
    """Write a random Llama of 128 M parameters (:data:`SMALL_LLAMA`) in bfloat16; the same bytes every time.

    With the demo model's tokenizer beside it: llm-compressor wants one, also where samples are token ids.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL_LLAMA)).bfloat16().save_pretrained(directory)
    for path in demo_model_path().glob("tokenizer*"):
        shutil.copy(path, directory)
    return directory


# ---------------------------------------------------------------------------------------------------- judging


@dataclass(frozen=True)
class Figures:
    """How far a model is from its source: nats a token, each with its standard error over windows."""

    kl: float
    kl_error: float
    loss: float
    loss_error: float

    @classmethod
    def of(cls, comparison: Comparison | Mapping[str, Any]) -> Figures:
        """From our comparison, or from its JSON form as a peer's script gives it."""
        found = comparison if isinstance(comparison, Mapping) else vars(comparison)
        names = ("mean_kl", "kl_standard_error", "loss_difference", "loss_standard_error")
        return cls(*(float(found[name]) for name in names))

    def kl_text(self) -> str:
        return f"{self.kl:.5f} +- {self.kl_error:.5f}"

    def loss_text(self) -> str:
        return f"{self.loss:+.4f} +- {self.loss_error:.4f}"


def heldout_ids(model: Path) -> Tensor:
    """int64 ``[tokens]``: the held-out text of the package."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True, trust_remote_code=False)
    return tokenise(tokenizer, demo_documents("heldout"))


class Reference:
    """A source's next-token log-probabilities on held-out text, computed once and kept (2 MB a window of the demo's).

    Args:
        directory: of the unquantised model, with its tokenizer.
        windows: how many windows of :data:`WINDOW` tokens, spread over the text; None: all.
    """

    def __init__(self, directory: Path, windows: int | None) -> None:
        self.ids = heldout_ids(directory)
        self.windows = cut_windows(self.ids, WINDOW, windows)
        self.count = len(self.windows.inputs)
        model = load_reference(directory)
        self._kept = [_log_probabilities(model, inputs) for inputs, _ in self._batches()]
        targets = [targets for _, targets in self._batches()]
        self._losses = [
            loss for kept, wanted in zip(self._kept, targets, strict=True) for loss in _losses(kept, wanted)
        ]

    def judge(self, model: nn.Module) -> Figures:
        """A model in memory against the source."""
        losses: list[float] = []
        divergences: list[Tensor] = []
        same_top: list[Tensor] = []
        for kept, (inputs, targets) in zip(self._kept, self._batches(), strict=True):
            got = _log_probabilities(model, inputs)
            losses += _losses(got, targets)
            divergences.append(token_kl(kept, got))
            same_top.append(kept.argmax(-1) == got.argmax(-1))
        return Figures.of(comparison_of(self._losses, losses, torch.cat(divergences), torch.cat(same_top)))

    def judge_checkpoint(self, directory: Path) -> Figures:
        """A checkpoint, quantised or not, decoded into float32."""
        return self.judge(load_dequantised(directory))

    def _batches(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.windows.inputs.split(_BATCH), self.windows.targets.split(_BATCH), strict=True))


class OwnText:
    """A source on the held-out text beside it, layer by layer, whatever transformers stacks; anew for each checkpoint.

    Args:
        directory: of the unquantised model, with its tokenizer and ``heldout.txt``.
        windows: how many windows of :data:`WINDOW` tokens, spread over the text; None: 128.
    """

    def __init__(self, directory: Path, windows: int | None) -> None:
        self._directory, self.count = directory, windows or 128

    @property
    def ids(self) -> Tensor:
        """int64 ``[tokens]``: what the windows are spread over."""
        text = self._directory / "heldout.txt"
        vocabulary = json.loads((self._directory / "config.json").read_text())["vocab_size"]
        documents = TokenDocuments(text, self._directory, vocabulary)
        return torch.tensor(documents.first(POOL * self.count * WINDOW))

    def judge_checkpoint(self, directory: Path) -> Figures:
        """A checkpoint, quantised or not."""
        text = self._directory / "heldout.txt"
        found = evaluate_on_text(directory, self._directory, text, windows=self.count, window=WINDOW).comparison
        assert found is not None
        return Figures.of(found)


def _log_probabilities(model: nn.Module, inputs: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.log_softmax(model(input_ids=inputs, use_cache=False).logits.float(), dim=-1)


def _losses(log_probabilities: Tensor, targets: Tensor) -> list[float]:
    """Mean loss of each window."""
    chosen = log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    found: list[float] = (-chosen).double().mean(-1).tolist()
    return found
