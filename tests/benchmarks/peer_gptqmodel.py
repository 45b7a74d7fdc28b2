"""Quantise a model with GPTQModel, in its own environment; bench_peers.py starts this as a process.

    python peer_gptqmodel.py --model DIR --samples FILE.jsonl --algorithm gptq --out DIR --report FILE.json

Its defaults, in groups of 128; "foem" is GPTQ with terms of the first order (Zheng et al., 2025), at the share that
GPTQModel itself recommends. Written as GPTQ checkpoints are. Its AWQ wants a CUDA device.
"""

from __future__ import annotations

import time

BEGAN = time.perf_counter()

import argparse
import json
import os
import tempfile
from pathlib import Path

CALLED_FROM = Path.cwd()
os.chdir(tempfile.mkdtemp(prefix="gptqmodel."))  # for the logs that it writes where it is imported
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # of two cores it takes one, and asks for two of its workers then

import torch
import transformers
from gptqmodel import GPTQModel, QuantizeConfig
from gptqmodel import __version__ as gptqmodel_version
from gptqmodel.quantization import FOEMConfig

IMPORTED = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--samples", type=Path, required=True, help="JSON lines of input_ids, all of one length")
    parser.add_argument("--algorithm", choices=["gptq", "foem"], required=True)
    parser.add_argument("--dtype", default="auto", help="of weights and arithmetic; auto: the checkpoint's")
    parser.add_argument("--batch", type=int, default=1, help="samples in one pass")
    parser.add_argument("--threads", type=int, help="of torch; by default its own choice")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    options = parser.parse_args()
    for name in ("model", "samples", "out", "report"):
        setattr(options, name, CALLED_FROM / getattr(options, name))
    if options.threads:
        torch.set_num_threads(options.threads)

    began = time.perf_counter()
    ids = [json.loads(line)["input_ids"] for line in options.samples.read_text().splitlines()]
    data = [{"input_ids": sample, "attention_mask": [1] * len(sample)} for sample in ids]
    first_order = FOEMConfig(alpha=0.0, beta=0.2) if options.algorithm == "foem" else None
    settings = QuantizeConfig(bits=4, group_size=128, foem=first_order)
    model = GPTQModel.load(str(options.model), settings, device="cpu", dtype=options.dtype)
    loaded = time.perf_counter()
    model.quantize(data, batch_size=options.batch)
    quantised = time.perf_counter()
    model.save(str(options.out))
    saved = time.perf_counter()
    report = {
        "versions": {
            "gptqmodel": gptqmodel_version,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "dtype": options.dtype,
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
