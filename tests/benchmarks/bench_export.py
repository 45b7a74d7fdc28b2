"""How long an export takes, against ``cp`` of the same bytes and a plain torch loop, in one run.

    python tests/benchmarks/bench_export.py                       all number formats, tp 1 2 4, gather direct
    python tests/benchmarks/bench_export.py --quant fp8 --tp 4 --gather direct shm --model DIR

Makes a 1.24 B-parameter Llama (2.47 GB of bf16) unless ``--model`` names a directory that has one already. Every
command is a process of its own, run ``--repeat`` times on warm page cache, into a fresh directory on one disk, after
a ``sync``, so that no run pays for another's writeback; the median counts.

The runs of one command follow each other, and its untimed run comes first: a virtual machine's host takes back pages
that lie free for some seconds, and whoever touches them next pays several times the copy (seen: 7.3 s in place of
3.6 s for one and the same export after a pause). ``cp`` is timed again at the end, to show how much the machine drifts.

Wall: until the command ends. CPU: user and system seconds of every process that it started, ranks included.
Memory: Pss_Anon + Pss_Shmem of the largest process, sampled every 20 ms in one extra run that is not timed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import statistics
import struct
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from modelexport.system.tables import size_text, table
from tests.benchmarks._measuring import Run, add_write_option, become_reaper, run, written

REPOSITORY = sys.path[0]
QUANTS = ("none", "int8", "fp8", "int4")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


# ------------------------------------------------------------------------------------------- the model


def model_tensors(config: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, in the order of the model."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (q, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (kv, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (kv, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, q)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)


def make_model(directory: Path, layers: int) -> None:
    """Write the model, streaming: normal weights (std 0.02), norms around 1; the same bytes every time."""
    import torch

    config = {**CONFIG, "num_hidden_layers": layers}
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in model_tensors(config):
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    directory.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(0)
    block = torch.empty(1 << 22)
    with open(directory / "model.safetensors.part", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, shape in model_tensors(config):
            left, mean, std = torch.Size(shape).numel(), float(len(shape) == 1), 0.02
            while left:
                part = block[: min(left, block.numel())].normal_(mean, std, generator=random)
                file.write(part.bfloat16().view(torch.int16).numpy().tobytes())
                left -= part.numel()
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    os.replace(directory / "model.safetensors.part", directory / "model.safetensors")


# ---------------------------------------------------------------------------- the plain torch loop


def torch_loop(source: Path, out: Path, quant: str) -> None:
    """What one writes in ten minutes: safe_open, quantise with plain torch, save_file."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (a safe_open is no dict)
                weight = file.get_tensor(name)
                if quant == "none" or not name.endswith("_proj.weight"):
                    tensors[name] = weight
                    continue
                for suffix, tensor in _quantised(weight, quant).items():
                    tensors[name.replace("weight", suffix)] = tensor
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(source / "config.json", out / "config.json")


def _quantised(weight, quant: str) -> dict:
    import torch

    if quant in ("int8", "fp8"):
        limit = 127.0 if quant == "int8" else 448.0
        scale = (weight.float().abs().amax(1, keepdim=True) / limit).bfloat16()
        ratio = weight.float() / scale.float()
        if quant == "int8":
            return {"weight": ratio.round().clamp(-128, 127).to(torch.int8), "weight_scale": scale}
        return {"weight": ratio.clamp(-limit, limit).to(torch.float8_e4m3fn), "weight_scale": scale}
    rows, cols = weight.shape
    groups = weight.float().view(rows, -1, 128)
    scale = (groups.abs().amax(2, keepdim=True) / 7.5).bfloat16()
    values = (groups / scale.float()).round().clamp(-8, 7).to(torch.int32).view(rows, -1, 8) + 8
    words = (values << (4 * torch.arange(8, dtype=torch.int32))).sum(2, dtype=torch.int32)
    shape = torch.tensor([rows, cols])
    return {"weight_packed": words, "weight_scale": scale.view(rows, -1), "weight_shape": shape}


# --------------------------------------------------------------------------------------- the cases


@dataclass
class Case:
    """A command under measurement; ``{out}`` in it stands for the target."""

    name: str
    tp: int
    command: list[str]
    runs: list[Run] = field(default_factory=list)
    sampled: Run | None = None
    sha256: str = ""

    def wall(self) -> float:
        """Median over the timed runs."""
        return statistics.median(run.wall for run in self.runs)

    def cpu(self) -> float:
        """Median over the timed runs."""
        return statistics.median(run.cpu for run in self.runs)


def cases(model: Path, options: argparse.Namespace) -> list[Case]:
    """``cp``, ``cp`` with its data on the disk, the plain loop, and every export asked for."""
    found = [
        Case("cp -r", 0, ["cp", "-r", str(model), "{out}"]),
        Case("cp -r, fsync", 0, ["sh", "-c", 'cp -r "$1" "$2" && sync "$2"/*', "sh", str(model), "{out}"]),
    ]
    if not options.no_torch_loop:
        for quant in options.quant:
            script = [sys.executable, __file__, "--torch-loop", quant, "--model", str(model), "--out", "{out}"]
            found.append(Case(f"torch loop {quant}", 1, script))
    for quant in options.quant:
        for gather in options.gather:
            for tp in options.tp:
                command = [sys.executable, "-m", "modelexport", "--model", str(model), "--quant", quant]
                command += ["--tp", str(tp), "--gather", gather, "--quiet", "--out", "{out}"]
                found.append(Case(f"export {quant}, {gather}", tp, command))
    found.append(Case("cp -r, again", 0, found[0].command))
    return found


def measure(case: Case, scratch: Path, model: Path, *, sample: bool, timeout: float) -> None:
    """One run of a case: settle the disk, warm the source, run, remove the target."""
    out, log = scratch / "out", scratch / "log"
    os.sync()
    warm(model)
    command = [str(out) if part == "{out}" else part for part in case.command]
    result = run(command, log, sample=sample, timeout=timeout)
    if result.status != 0:
        raise SystemExit(f"{' '.join(command)}\nended with status {result.status}:\n{log.read_text()[-3000:]}")
    if sample:
        case.sampled, case.sha256 = result, weights_sha256(out)
    else:
        case.runs.append(result)
    shutil.rmtree(out)


def warm(model: Path) -> None:
    """Bring the source into the page cache."""
    buffer = bytearray(8 << 20)
    for path in model.glob("*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def weights_sha256(directory: Path) -> str:
    """One hash over all weight files of a checkpoint."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while block := file.read(8 << 20):
                digest.update(block)
    return digest.hexdigest()


def report(found: list[Case], layer_bytes: int, options: argparse.Namespace) -> Iterator[str]:
    """The table and how it is to be read."""
    cp = found[0].wall()
    rows = []
    for case in found:
        assert case.sampled is not None
        walls = sorted(run.wall for run in case.runs)
        aim = f"{400 + 3 * layer_bytes / case.tp / 1e6:.0f} MB" if case.name.startswith("export") else "-"
        rows.append(
            (
                case.name,
                str(case.tp or "-"),
                f"{case.wall():.2f}",
                f"{walls[0]:.2f}-{walls[-1]:.2f}",
                f"{case.wall() / cp:.2f}",
                f"{case.cpu():.2f}",
                size_text(case.sampled.process_peak),
                aim,
                size_text(case.sampled.tree_peak),
                str(case.sampled.processes),
            )
        )
    header = ("command", "tp", "wall s", "range", "x cp", "CPU s", "peak/process", "aim", "peak sum", "processes")
    yield from table(header, rows)
    yield ""
    yield f"wall: median of {options.repeat}; aim for an export: 2 x cp + 3 s = {2 * cp + 3:.2f} s at every tp"
    others = [run.others for case in found for run in case.runs]
    yield (
        f"busy with other work meanwhile: {statistics.median(others):.2f} of {os.cpu_count()} cores (median; "
        f"at most {max(others):.2f}); figures with much of it are too high"
    )
    interval = statistics.median(case.sampled.interval for case in found if case.sampled)
    yield (
        f"peaks: Pss_Anon + Pss_Shmem, one extra run each, a sample every {1000 * interval:.0f} ms (median); "
        "aim per process: 400 MB + 3 x a layer's shard"
    )
    lingering = max((run.lingering, case.name) for case in found for run in case.runs)
    if lingering[0] > 0.1:
        yield f"longest that a process outlived its command: {lingering[0]:.2f} s ({lingering[1]})"
    for quant in options.quant:
        hashes = {case.sha256 for case in found if case.name.startswith(f"export {quant},")}
        same = "the same bytes" if len(hashes) == 1 else f"{len(hashes)} DIFFERENT results"
        yield f"{quant}: {same} for every tp and gather ({', '.join(sorted(h[:12] for h in hashes))})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="decoder layers of the model that is made")
    parser.add_argument("--quant", nargs="+", default=list(QUANTS), choices=QUANTS)
    parser.add_argument("--tp", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--gather", nargs="+", default=["direct"], choices=["direct", "shm"])
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each command")
    parser.add_argument("--model", type=Path, help="directory of the model: used if there, made there if not")
    parser.add_argument("--scratch", type=Path, help="where targets go, on the disk of the model (default: a temp dir)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a run is ended")
    parser.add_argument("--no-torch-loop", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run's figures here")
    add_write_option(parser)
    parser.add_argument("--torch-loop", choices=QUANTS, help=argparse.SUPPRESS)
    parser.add_argument("--make-model", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make_model:
        make_model(options.model, options.layers)
        return 0
    if options.torch_loop:
        torch_loop(options.model, options.out, options.torch_loop)
        return 0
    # The commands run this tree's package, wherever this is called from and whatever is installed.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (REPOSITORY, os.environ.get("PYTHONPATH"))))
    become_reaper()
    with tempfile.TemporaryDirectory(prefix="bench_export.", dir=options.scratch) as temporary:
        return _measure_all(Path(temporary), options)


def _measure_all(scratch: Path, options: argparse.Namespace) -> int:
    model = (options.model or scratch / "model").resolve()
    if not (model / "model.safetensors").exists():
        print(f"making a model of {options.layers} layers in {model}", flush=True)
        # In a process of its own: torch's threads and memory stay out of this one.
        maker = [sys.executable, __file__, "--make-model", "--model", str(model), "--layers", str(options.layers)]
        made = run(maker, scratch / "log", sample=False, timeout=options.timeout)
        if made.status != 0:
            raise SystemExit(f"the model could not be made:\n{(scratch / 'log').read_text()[-3000:]}")
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    print(f"{model}: {config['num_hidden_layers']} layers, {size_text(size)}; {os.cpu_count()} cores", flush=True)
    found = cases(model, options)
    for case in found:
        measure(case, scratch, model, sample=True, timeout=options.timeout)
        _progress(f"sampled: {case.name}, tp {case.tp}")
        for number in range(options.repeat):
            measure(case, scratch, model, sample=False, timeout=options.timeout)
            _progress(f"run {number + 1} of {options.repeat}: {case.name}, tp {case.tp}: {case.runs[-1].wall:.2f} s")
    with written(__file__, options.write):
        print("\n".join(report(found, _layer_bytes(config), options)))
    if options.json:
        options.json.write_text(json.dumps([asdict(case) for case in found], indent=1) + "\n")
    return 0


def _layer_bytes(config: dict) -> int:
    """Bytes of one decoder layer in bf16."""
    shapes = [shape for name, shape in model_tensors(config) if name.startswith("model.layers.0.")]
    return sum(2 * math.prod(shape) for shape in shapes)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
