"""How long a calibrated export takes and what it holds in memory, against a plain forward pass, in one run.

    python tests/benchmarks/bench_calibration.py                              gptq int4, 16 x 512 tokens, tp 1 2 4
    python tests/benchmarks/bench_calibration.py --model DIR --layers 4 --tp 1 2 --algorithm awq smoothquant+gptq

Makes the 1.24 B-parameter Llama of bench_export.py (2.47 GB of bf16) unless ``--model`` names a directory that has one
already. Beside ``cp`` of it stands the yardstick: the same tokens through the same model in plain torch and
transformers, all of it in memory as float32, one pass, nothing observed. A calibrated export passes them three times
(observe, observe with scales folded in, run again quantised), and does its work on the weights.

Wall: until the command ends; medians of --repeat runs. CPU: of every process that it started. Memory: Pss_Anon +
Pss_Shmem of the largest process, sampled in one extra run (--no-memory: without it). All tp must give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from modelexport.system.tables import size_text, table
from tests.benchmarks._measuring import Run, add_write_option, become_reaper, run, written
from tests.benchmarks.bench_export import make_model, warm, weights_sha256

REPOSITORY = sys.path[0]


def plain_forward(model: Path, samples: Path) -> None:
    """What one writes in two minutes: load everything in float32, one sample after the other."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
    with torch.inference_mode():
        for line in samples.read_text().splitlines():
            ids = torch.tensor([json.loads(line)["input_ids"]])
            loaded.model(input_ids=ids, use_cache=False)


@dataclass
class Case:
    """A command under measurement; ``{out}`` in it stands for the target."""

    name: str
    tp: int
    command: list[str]
    runs: list[Run] = field(default_factory=list)
    sampled: Run | None = None
    hashes: set[str] = field(default_factory=set)

    def wall(self) -> float:
        return statistics.median(run.wall for run in self.runs)

    def cpu(self) -> float:
        return statistics.median(run.cpu for run in self.runs)


def cases(model: Path, samples: Path, options: argparse.Namespace) -> list[Case]:
    """``cp``, the forward pass, and every export asked for."""
    forward = [sys.executable, __file__, "--plain-forward", str(samples), "--model", str(model)]
    found = [Case("cp -r", 0, ["cp", "-r", str(model), "{out}"])]
    if not options.no_forward:
        found.append(Case("forward, torch", 0, forward))
    for algorithm in options.algorithm:
        for tp in options.tp:
            command = [sys.executable, "-m", "modelexport", "--model", str(model), "--quant", options.quant]
            command += ["--algorithm", algorithm, "--calib", str(samples), "--calib-samples", str(options.samples)]
            command += ["--calib-length", str(options.length), "--tp", str(tp), "--quiet", "--out", "{out}"]
            found.append(Case(f"{options.quant} {algorithm}", tp, command))
    return found


def measure(case: Case, scratch: Path, model: Path, *, sample: bool, timeout: float) -> None:
    """One run, from warm page cache into a fresh directory."""
    out, log = scratch / "out", scratch / "log"
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    warm(model)
    command = [str(out) if part == "{out}" else part for part in case.command]
    result = run(command, log, sample=sample, timeout=timeout)
    if result.status != 0:
        raise SystemExit(f"{' '.join(command)}\nended with status {result.status}:\n{log.read_text()[-3000:]}")
    if sample:
        case.sampled = result
    else:
        case.runs.append(result)
    if case.tp:
        case.hashes.add(weights_sha256(out))


def report(found: list[Case], layer: int) -> Iterator[str]:
    """The table and how it is to be read; ``layer``: bytes of one in float32."""
    yardstick = next((case for case in found if case.name.startswith("forward")), None)
    rows = []
    for case in found:
        peaks = ["-", "-", "-"]
        if case.sampled is not None:
            whole, largest = case.sampled.tree_peak, case.sampled.process_peak
            peaks = [size_text(largest), f"{largest / (layer / max(1, case.tp)):.1f}", size_text(whole)]
        ratio = "-" if yardstick is None else f"{case.wall() / yardstick.wall():.2f}"
        times = [f"{case.wall():.1f}", ratio, f"{case.cpu():.1f}"]
        times.append(f"{statistics.median(run.others for run in case.runs):.1f}")
        rows.append((case.name, str(case.tp or "-"), *times, *peaks))
    header = ("command", "tp", "wall s", "x forward", "CPU s", "others", "peak/process", "x layer", "peak sum")
    yield from table(header, rows)
    yield ""
    yield f"x layer: of the float32 bytes of a decoder layer's shard; a layer has {size_text(layer)}"
    yield f"others: cores busy with other work meanwhile, of {os.cpu_count()}; walls with much of it are too long"
    for name in dict.fromkeys(case.name for case in found if case.tp):
        hashes = {one for case in found if case.name == name for one in case.hashes}
        tps = ", ".join(str(case.tp) for case in found if case.name == name)
        same = "the same bytes" if len(hashes) == 1 else f"{len(hashes)} DIFFERENT results"
        yield f"{name}: {same} at tp {tps} ({', '.join(sorted(h[:12] for h in hashes))})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of the model: used if there, made there if not")
    parser.add_argument("--layers", type=int, default=16, help="decoder layers of the model that is made")
    parser.add_argument("--quant", default="int4")
    parser.add_argument("--algorithm", nargs="+", default=["gptq"])
    parser.add_argument("--tp", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=1, help="timed runs of each command")
    parser.add_argument("--no-memory", action="store_true", help="without the extra run that samples memory")
    parser.add_argument("--no-forward", action="store_true", help="without the yardstick (which needs 5 GB)")
    parser.add_argument("--scratch", type=Path, help="where targets go, on the disk of the model (default: a temp dir)")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds after which a run is ended")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run's figures here")
    add_write_option(parser)
    parser.add_argument("--plain-forward", type=Path, metavar="SAMPLES", help=argparse.SUPPRESS)
    parser.add_argument("--prepare", type=Path, metavar="SAMPLES", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain_forward:
        plain_forward(options.model, options.plain_forward)
        return 0
    if options.prepare:
        prepare(options)
        return 0
    # The commands run this tree's package, wherever this is called from and whatever is installed.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (REPOSITORY, os.environ.get("PYTHONPATH"))))
    become_reaper()
    with tempfile.TemporaryDirectory(prefix="bench_calibration.", dir=options.scratch) as temporary:
        return _measure_all(Path(temporary), options)


def prepare(options: argparse.Namespace) -> None:
    """Make the model where there is none, and write the samples."""
    from tests.benchmarks._quality import random_samples, write_samples

    if not (options.model / "model.safetensors").exists():
        make_model(options.model, options.layers)
    write_samples(options.prepare, random_samples(options.model, options.samples, options.length))


def _measure_all(scratch: Path, options: argparse.Namespace) -> int:
    model, samples = (options.model or scratch / "model").resolve(), scratch / "samples.jsonl"
    # In a process of its own: torch's threads and memory stay out of this one.
    maker = [sys.executable, __file__, "--prepare", str(samples), "--model", str(model)]
    maker += ["--layers", str(options.layers), "--samples", str(options.samples), "--length", str(options.length)]
    if run(maker, scratch / "log", sample=False, timeout=options.timeout).status != 0:
        raise SystemExit(f"model or samples could not be made:\n{(scratch / 'log').read_text()[-3000:]}")
    config = json.loads((model / "config.json").read_text())
    print(
        f"{model}: {config['num_hidden_layers']} layers, {options.samples} x {options.length} tokens; "
        f"{os.cpu_count()} cores",
        flush=True,
    )
    found = cases(model, samples, options)
    for case in found:
        for number in range(options.repeat):
            measure(case, scratch, model, sample=False, timeout=options.timeout)
            text = f"run {number + 1} of {options.repeat}: {case.name}, tp {case.tp}: {case.runs[-1].wall:.1f} s"
            print(text, file=sys.stderr, flush=True)
        if not options.no_memory:
            measure(case, scratch, model, sample=True, timeout=options.timeout)
        if options.json:
            figures = [{**asdict(one), "hashes": sorted(one.hashes)} for one in found]
            options.json.write_text(json.dumps(figures, indent=1) + "\n")
    with written(__file__, options.write):
        print("\n".join(report(found, _layer_bytes(config))))
    return 0


def _layer_bytes(config: dict) -> int:
    """Bytes of a dense decoder layer's linears in float32."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return 4 * hidden * (2 * q + 2 * kv + 3 * inner)


if __name__ == "__main__":
    sys.exit(main())
