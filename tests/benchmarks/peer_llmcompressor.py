"""Quantise a model with llm-compressor, in its own environment; bench_peers.py starts this as a process.

    python peer_llmcompressor.py --model DIR --samples FILE.jsonl --algorithm gptq --out DIR --report FILE.json

Each recipe is the one of llm-compressor's own examples, in a number format that modelexport has, too. Writes the
compressed-tensors checkpoint, and how long each step took: loading, quantising and saving are told apart from
importing, which a tool pays once however large the model.
"""

from __future__ import annotations

import time

BEGAN = time.perf_counter()

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.quantization import preset_name_to_scheme
from datasets import Dataset
from llmcompressor import __version__ as llmcompressor_version
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM

IMPORTED = time.perf_counter()

WHERE = {"targets": "Linear", "ignore": ["lm_head"]}


def observed(scheme: str, observer: str) -> dict[str, Any]:
    """A preset whose weights' scales are chosen by another observer."""
    found = preset_name_to_scheme(scheme, ["Linear"])
    found.weights.observer = observer
    return {"config_groups": {"group_0": found}, "ignore": WHERE["ignore"]}


RECIPES = {
    "rtn": lambda: [QuantizationModifier(scheme="W4A16", **WHERE)],
    "gptq": lambda: [GPTQModifier(scheme="W4A16", **WHERE)],
    "imatrix": lambda: [QuantizationModifier(**observed("W4A16", "imatrix_mse"))],
    "imatrix+gptq": lambda: [GPTQModifier(**observed("W4A16", "imatrix_mse"))],
    "nvfp4": lambda: [QuantizationModifier(scheme="NVFP4", **WHERE)],
    "nvfp4-imatrix": lambda: [QuantizationModifier(**observed("NVFP4", "nvfp4_expanded_imatrix"))],
    "nvfp4-gptq": lambda: [GPTQModifier(scheme="NVFP4", **WHERE)],
    "awq": lambda: [AWQModifier(duo_scaling="both"), QuantizationModifier(scheme="W4A16", **WHERE)],
    "awq+gptq": lambda: [AWQModifier(duo_scaling="both"), GPTQModifier(scheme="W4A16", **WHERE)],
    "smoothquant": lambda: [SmoothQuantModifier(smoothing_strength=0.8), QuantizationModifier(scheme="W8A8", **WHERE)],
    "smoothquant+gptq": lambda: [SmoothQuantModifier(smoothing_strength=0.8), GPTQModifier(scheme="W8A8", **WHERE)],
}
"""As in its README and examples; its usual int8 recipe is the last. Formats: int4 in groups of 128, and int8 for
weights (per channel) and activations (per token, scales taken as they come)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--samples", type=Path, required=True, help="JSON lines of input_ids, all of one length")
    parser.add_argument("--algorithm", choices=RECIPES, required=True)
    parser.add_argument("--dtype", default="auto", help="of weights and arithmetic; auto: the checkpoint's")
    parser.add_argument("--batch", type=int, default=1, help="samples in one pass (its default is 1)")
    parser.add_argument("--threads", type=int, help="of torch; by default its own choice")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if not torch.accelerator.is_available():
        # Its AWQ (0.14) pins memory for copies to an accelerator, which torch refuses where there is none.
        IntermediatesCache.pin_memory = lambda *_, **__: None

    began = time.perf_counter()
    lines = options.samples.read_text().splitlines()
    ids = [json.loads(line)["input_ids"] for line in lines]
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(sample) for sample in ids]})
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype, local_files_only=True)
    loaded = time.perf_counter()
    oneshot(
        model=model,
        dataset=data,
        recipe=RECIPES[options.algorithm](),
        batch_size=options.batch,
        max_seq_length=len(ids[0]),
        num_calibration_samples=len(ids),
        shuffle_calibration_samples=False,
    )
    quantised = time.perf_counter()
    model.save_pretrained(options.out, save_compressed=True)
    saved = time.perf_counter()
    report = {
        "versions": {
            "llm-compressor": llmcompressor_version,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "seconds": {
            "imports": IMPORTED - BEGAN,
            "load": loaded - began,
            "quantise": quantised - loaded,
            "save": saved - quantised,
        },
    }
    options.report.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
