"""Quantise a model with auto-round, in its own environment; bench_peers.py starts this as a process.

    python peer_autoround.py --model DIR --samples FILE.jsonl --algorithm autoround --out DIR --report FILE.json

Its defaults: 200 steps of 8 samples, the search for ranges along with the rounding. Written in its own format for
llm-compressor's readers (compressed-tensors), so that whoever judges other checkpoints can judge this.
"""

from __future__ import annotations

import time

BEGAN = time.perf_counter()

import argparse
import json
from pathlib import Path

import torch
import transformers
from auto_round import AutoRound
from auto_round import __version__ as autoround_version
from transformers import AutoModelForCausalLM, AutoTokenizer

IMPORTED = time.perf_counter()

SCHEMES = {"autoround": "W4A16", "autoround-nvfp4": "NVFP4"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--samples", type=Path, required=True, help="JSON lines of input_ids, all of one length")
    parser.add_argument("--algorithm", choices=SCHEMES, required=True)
    parser.add_argument("--dtype", default="auto", help="of weights; auto: the checkpoint's")
    parser.add_argument("--batch", type=int, help="not of use: its steps have batches of their own")
    parser.add_argument("--threads", type=int, help="of torch; by default its own choice")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)

    began = time.perf_counter()
    lines = options.samples.read_text().splitlines()
    ids = torch.tensor([json.loads(line)["input_ids"] for line in lines])
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=False)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    loaded = time.perf_counter()
    rounding = AutoRound(
        model,
        tokenizer,
        scheme=SCHEMES[options.algorithm],
        dataset=loader,
        nsamples=len(ids),
        seqlen=ids.shape[1],
        amp=options.dtype != "float32",
        device_map="cpu",
    )
    rounding.quantize_and_save(str(options.out), format="llm_compressor")
    if not (options.out / "config.json").exists():  # it is in a directory with a name of its own
        (inside,) = options.out.iterdir()
        for path in inside.iterdir():
            path.rename(options.out / path.name)
    saved = time.perf_counter()
    report = {
        "versions": {
            "auto-round": autoround_version,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "seconds": {
            "imports": IMPORTED - BEGAN,
            "load": loaded - began,
            "quantise": saved - loaded,
            "save": 0.0,
        },
    }
    options.report.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
