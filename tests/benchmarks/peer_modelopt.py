"""Quantise a model with NVIDIA's modelopt, in its own environment; bench_peers.py starts this as a process.

    python peer_modelopt.py --model DIR --samples FILE.jsonl --algorithm awq --report FILE.json [--heldout FILE.json]

modelopt quantises in memory ("fake": weights and activations are rounded where they are used), and that model is what
is judged here, rather than one of the several layouts that it exports: ``modelexport.inspection.evaluate.compare``,
called in this process, so that the formula is the one for all. Judging is not part of the seconds. Neither is writing
a checkpoint: what it takes is in the other tools' figures only.
"""

from __future__ import annotations

import time

BEGAN = time.perf_counter()

import argparse
import copy
import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it names the versions of transformers that it was tested with
    import modelopt
    import modelopt.torch.quantization as mtq
from transformers import AutoModelForCausalLM

IMPORTED = time.perf_counter()
REPOSITORY = Path(__file__).resolve().parents[2]

PRESETS = {
    "awq": "INT4_AWQ_CFG",
    "smoothquant": "INT8_SMOOTHQUANT_CFG",
    "nvfp4": "NVFP4_DEFAULT_CFG",
    "nvfp4-mse": "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG",
    "nvfp4-hessian": "NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG",
}
"""int4 in groups of 128 (``awq_lite``); int8 per channel, activations with one scale each, found on the samples; NVFP4
with scales by the largest magnitudes, by a search for the least squared error, and for that of the outputs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--samples", type=Path, required=True, help="JSON lines of input_ids, all of one length")
    parser.add_argument("--algorithm", choices=PRESETS, required=True)
    parser.add_argument("--dtype", default="auto", help="of weights and arithmetic; auto: the checkpoint's")
    parser.add_argument("--batch", type=int, default=1, help="samples in one pass")
    parser.add_argument("--threads", type=int, help="of torch; by default its own choice")
    parser.add_argument("--heldout", type=Path, help="JSON: input_ids, window, windows; without it, nothing is judged")
    parser.add_argument("--report", type=Path, required=True)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)

    began = time.perf_counter()
    samples = torch.tensor([json.loads(line)["input_ids"] for line in options.samples.read_text().splitlines()])
    model = _load(options.model, options.dtype)
    loaded = time.perf_counter()

    def forward_loop(quantised: torch.nn.Module) -> None:
        with torch.inference_mode():
            for batch in samples.split(options.batch):
                quantised(input_ids=batch, use_cache=False)

    mtq.quantize(model, copy.deepcopy(getattr(mtq, PRESETS[options.algorithm])), forward_loop)
    quantised = time.perf_counter()
    report = {
        "versions": {
            "modelopt": modelopt.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "seconds": {"imports": IMPORTED - BEGAN, "load": loaded - began, "quantise": quantised - loaded},
    }
    if options.heldout:
        report["comparison"] = _judge(options.model, model, json.loads(options.heldout.read_text()))
    options.report.write_text(json.dumps(report, indent=1) + "\n")


def _load(directory: Path, dtype: str) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
    return model.eval()


def _judge(directory: Path, model: torch.nn.Module, heldout: dict) -> dict:
    """The quantised model against the source, both in float32."""
    sys.path.insert(0, str(REPOSITORY))
    from modelexport.inspection.evaluate import compare

    reference = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
    )
    ids = torch.tensor(heldout["input_ids"])
    found = asdict(compare(reference, model.float(), ids, window=heldout["window"], max_windows=heldout["windows"]))
    del found["reference"]["window_losses"], found["model"]["window_losses"]
    return found


if __name__ == "__main__":
    main()
