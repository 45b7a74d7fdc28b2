"""How an export grows with the size of the model and with ranks, beside ``cp`` of the source, in one run.

    python tests/benchmarks/bench_scale.py                                    everything: some hours, 60 GB of disk
    python tests/benchmarks/bench_scale.py --gigabytes 0.25 2.5 --kinds dense --quant fp8 --tp 1 2
    python tests/benchmarks/bench_scale.py --peers fp8 --gigabytes 0.25 2.5 16
    python tests/benchmarks/bench_scale.py --planning                         headers of 400 GB, planned alone
    ... --json FILE                                                           what FILE has already is not made again

Sources: a Llama with layers of 121.6 MB (hidden 2048, inner 8192), and a mixture of 256 experts a layer (Qwen3-MoE,
hidden 1024, inner 256: 404.9 MB a layer), in bf16, in files of at most 4 GB, as publishers cut them. Every export is
data-free. Before and after the exports of one source, ``cp -r`` of it, and with its data on the disk.

Wall: until the command ends. CPU: user and system seconds of all that it started. Peak: private memory of the largest
process, sampled now and then. Each command follows a ``sync``; the source is in the page cache where it fits, and read
from the disk where it doesn't, for ``cp`` as well. The line through the sizes of one kind, format and tp is by least
squares of relative errors: seconds at no bytes, and seconds for each GB of the source.

Peers (``--peers``), of dense sources: llm-compressor's oneshot and model_free_ptq, ModelOpt's mtq.quantize with
export_hf_checkpoint, by rounding to nearest in their own environments, whose interpreters
MODELEXPORT_LLMCOMPRESSOR_PYTHON and MODELEXPORT_MODELOPT_PYTHON name.

Planning: sparse files with the headers of DeepSeek-V3 (FP8 blocks, no data), ``modelexport --dry-run``.
"""

from __future__ import annotations

import argparse
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
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from modelexport.system.tables import size_text, table
from tests.benchmarks._measuring import SELDOM, Run, add_write_option, become_reaper, run, written
from tests.benchmarks.bench_export import CONFIG, model_tensors, warm

REPOSITORY = sys.path[0]
HERE = Path(__file__).resolve().parent
QUANTS = ("fp8", "int8-wo", "int4", "nvfp4-wo")
KINDS = ("dense", "experts")
FILE_BYTES = 4 << 30
PEERS = {"oneshot": "LLMCOMPRESSOR", "model_free": "LLMCOMPRESSOR", "modelopt": "MODELOPT"}
"""Peers' ways -> the environment, as MODELEXPORT_..._PYTHON names it."""
IMPORTS = "import torch"


# ------------------------------------------------------------------------------------------------------ the sources


class Tensor(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "BF16"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * {"BF16": 2, "F8_E4M3": 1, "F32": 4}[self.dtype]


def config_of(kind: str, layers: int) -> dict[str, Any]:
    """The config.json of a source."""
    if kind == "dense":
        return {**CONFIG, "num_hidden_layers": layers, "vocab_size": 4096, "bos_token_id": 0, "eos_token_id": 1}
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 256,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 4096,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def tensors_of(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, in the order of the model."""
    if config["model_type"] == "llama":
        yield from model_tensors(config)
        return
    hidden, inner, head = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        for name, shape in (("q", (q, hidden)), ("k", (kv, hidden)), ("v", (kv, hidden)), ("o", (hidden, q))):
            yield f"{layer}.self_attn.{name}_proj.weight", shape
        yield f"{layer}.self_attn.q_norm.weight", (head,)
        yield f"{layer}.self_attn.k_norm.weight", (head,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate.weight", (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            yield f"{layer}.mlp.experts.{expert}.gate_proj.weight", (inner, hidden)
            yield f"{layer}.mlp.experts.{expert}.up_proj.weight", (inner, hidden)
            yield f"{layer}.mlp.experts.{expert}.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)


def make_source(directory: Path, kind: str, gigabytes: float) -> None:
    """Writes a source of about that many GB: as many layers as come nearest."""
    one, two = (sum(2 * math.prod(shape) for _, shape in tensors_of(config_of(kind, n))) for n in (1, 2))
    layers = max(1, round((gigabytes * 1e9 - one) / (two - one)) + 1)
    config = config_of(kind, layers)
    write_checkpoint(directory, config, [Tensor(*found) for found in tensors_of(config)], numbers=True)


def write_checkpoint(directory: Path, config: dict[str, Any], tensors: list[Tensor], *, numbers: bool) -> None:
    """Writes config.json, the index and files of at most 4 GiB; without ``numbers`` they have holes for data.

    Weights are normal (std 0.02), of a block of four million that every tensor begins elsewhere in.
    """
    import torch

    pool = torch.empty(1 << 22).normal_(0, 0.02, generator=torch.Generator().manual_seed(0)).bfloat16()
    data = memoryview(pool.view(torch.int16).numpy().tobytes())
    files: list[list[Tensor]] = [[]]
    held = 0
    for tensor in tensors:
        if held + tensor.nbytes > FILE_BYTES and files[-1]:
            files.append([])
            held = 0
        files[-1].append(tensor)
        held += tensor.nbytes
    directory.mkdir(parents=True)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)}, "weight_map": {}}
    for number, inside in enumerate(files, 1):
        file_name = f"model-{number:05}-of-{len(files):05}.safetensors"
        index["weight_map"].update(dict.fromkeys((tensor.name for tensor in inside), file_name))
        header, at = {"__metadata__": {"format": "pt"}}, 0
        for tensor in inside:
            end = at + tensor.nbytes
            header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(directory / file_name, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for tensor in inside if numbers else ():
                left, begin = tensor.nbytes, 2 * (len(tensor.name) * 7919 % 4096)
                if len(tensor.shape) == 1:
                    file.write(torch.ones(tensor.shape).bfloat16().view(torch.int16).numpy().tobytes())
                    continue
                while left:
                    part = data[begin : begin + left]
                    file.write(part)
                    left, begin = left - len(part), 0
            file.truncate(8 + len(text) + at)
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def deepseek_headers(directory: Path) -> None:
    """The headers of DeepSeek-V3 as it is published: 61 layers and a draft layer, linears in FP8 with block scales."""
    hidden, inner, latent, rope, nope, value, heads, vocabulary = 7168, 2048, 512, 64, 128, 128, 128, 129280
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": hidden,
        "intermediate_size": 18432,
        "moe_intermediate_size": inner,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "kv_lora_rank": latent,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": nope,
        "v_head_dim": value,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }

    def linear(name: str, rows: int, columns: int) -> Iterator[Tensor]:
        yield Tensor(f"{name}.weight", (rows, columns), "F8_E4M3")
        yield Tensor(f"{name}.weight_scale_inv", (-(-rows // 128), -(-columns // 128)), "F32")

    def feed_forward(prefix: str, width: int) -> Iterator[Tensor]:
        yield from linear(f"{prefix}.gate_proj", width, hidden)
        yield from linear(f"{prefix}.up_proj", width, hidden)
        yield from linear(f"{prefix}.down_proj", hidden, width)

    def layer_tensors(number: int) -> Iterator[Tensor]:
        layer = f"model.layers.{number}"
        attention = f"{layer}.self_attn"
        yield Tensor(f"{layer}.input_layernorm.weight", (hidden,))
        yield from linear(f"{attention}.q_a_proj", 1536, hidden)
        yield Tensor(f"{attention}.q_a_layernorm.weight", (1536,))
        yield from linear(f"{attention}.q_b_proj", heads * (nope + rope), 1536)
        yield from linear(f"{attention}.kv_a_proj_with_mqa", latent + rope, hidden)
        yield Tensor(f"{attention}.kv_a_layernorm.weight", (latent,))
        yield from linear(f"{attention}.kv_b_proj", heads * (nope + value), latent)
        yield from linear(f"{attention}.o_proj", hidden, heads * value)
        yield Tensor(f"{layer}.post_attention_layernorm.weight", (hidden,))
        if number < 3:
            yield from feed_forward(f"{layer}.mlp", 18432)
            return
        yield Tensor(f"{layer}.mlp.gate.weight", (256, hidden))
        yield Tensor(f"{layer}.mlp.gate.e_score_correction_bias", (256,), "F32")
        for expert in range(256):
            yield from feed_forward(f"{layer}.mlp.experts.{expert}", inner)
        yield from feed_forward(f"{layer}.mlp.shared_experts", inner)

    draft = "model.layers.61"
    tensors = [Tensor("model.embed_tokens.weight", (vocabulary, hidden))]
    for number in range(62):
        tensors += layer_tensors(number)
    tensors += [
        Tensor(f"{draft}.embed_tokens.weight", (vocabulary, hidden)),
        Tensor(f"{draft}.enorm.weight", (hidden,)),
        Tensor(f"{draft}.hnorm.weight", (hidden,)),
        Tensor(f"{draft}.eh_proj.weight", (hidden, 2 * hidden)),
        Tensor(f"{draft}.shared_head.norm.weight", (hidden,)),
        Tensor(f"{draft}.shared_head.head.weight", (vocabulary, hidden)),
        Tensor("model.norm.weight", (hidden,)),
        Tensor("lm_head.weight", (vocabulary, hidden)),
    ]
    write_checkpoint(directory, config, tensors, numbers=False)


# ---------------------------------------------------------------------------------------------------------- the runs


@dataclass
class Case:
    """A command on a source; ``what`` is a number format, a peer's way, or "cp" and its like."""

    kind: str
    gigabytes: float
    what: str
    tp: int
    source_bytes: int = 0
    target_bytes: int = 0
    runs: list[Run] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, float, str, int]:
        return (self.kind, self.gigabytes, self.what, self.tp)

    @property
    def wall(self) -> float:
        return statistics.median(found.wall for found in self.runs)

    @property
    def cpu(self) -> float:
        return statistics.median(found.cpu for found in self.runs)

    @property
    def peak(self) -> int:
        return max(found.process_peak for found in self.runs)


def command(case: Case, source: Path, out: Path) -> list[str]:
    """The command line of a case."""
    if case.what.startswith("cp, fsync"):
        return ["sh", "-c", 'cp -r "$1" "$2" && sync "$2"/*', "sh", str(source), str(out)]
    if case.what.startswith("cp"):
        return ["cp", "-r", str(source), str(out)]
    if case.what.startswith("peer "):
        _, way, quant = case.what.split()
        python = os.environ[f"MODELEXPORT_{PEERS[way]}_PYTHON"]
        script = [python, str(HERE / "peer_datafree.py"), "--way", way, "--quant", quant]
        return [*script, "--model", str(source), "--out", str(out)]
    found = [sys.executable, "-m", "modelexport", "--model", str(source), "--quant", case.what]
    return [*found, "--tp", str(case.tp), "--no-evaluate", "--quiet", "--out", str(out)]


def measure(case: Case, source: Path, scratch: Path, timeout: float) -> None:
    """One run: settle the disk, read the source once where it fits into memory, run, remove the target."""
    out, log = scratch / "out", scratch / "log"
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if case.source_bytes < memory / 3:
        warm(source)
    asked = command(case, source, out)
    result = run(asked, log, sample=not case.what.startswith("cp"), timeout=timeout, share=SELDOM)
    if result.status != 0:
        raise SystemExit(f"{' '.join(asked)}\nended with status {result.status}:\n{log.read_text()[-3000:]}")
    case.runs.append(result)
    case.target_bytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    shutil.rmtree(out)


def cases(kind: str, gigabytes: float, options: argparse.Namespace) -> list[Case]:
    """What is run of one source, in this order."""
    found = [Case(kind, gigabytes, "cp", 0), Case(kind, gigabytes, "cp, fsync", 0)]
    found += [Case(kind, gigabytes, quant, tp) for quant in options.quant for tp in options.tp]
    if kind == "dense":
        ways = [way for way, name in PEERS.items() if os.environ.get(f"MODELEXPORT_{name}_PYTHON")]
        found += [Case(kind, gigabytes, f"peer {way} {quant}", 0) for quant in options.peers for way in ways]
    return [*found, Case(kind, gigabytes, "cp after", 0), Case(kind, gigabytes, "cp, fsync after", 0)]


def read_cases(path: Path | None) -> dict[tuple[str, float, str, int], Case]:
    """Those that an earlier run has written."""
    if path is None or not path.exists():
        return {}
    found = [Case(**{**case, "runs": [Run(**each) for each in case["runs"]]}) for case in json.loads(path.read_text())]
    return {case.key: case for case in found}


def measure_all(options: argparse.Namespace, scratch: Path) -> list[Case]:
    """Runs what is asked for and not known yet."""
    known = read_cases(options.json)
    wanted: list[Case] = []
    for kind in options.kinds:
        for gigabytes in options.gigabytes:
            source = scratch / f"{kind}-{gigabytes}"
            for case in cases(kind, gigabytes, options):
                if case.key not in known:
                    if not source.exists():
                        _progress(f"making {kind}, {gigabytes} GB")
                        make_source(source, kind, gigabytes)
                    case.source_bytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
                    for _ in range(options.repeat):
                        measure(case, source, scratch, options.timeout)
                    known[case.key] = case
                    _progress(f"{kind}, {gigabytes} GB, {case.what}, tp {case.tp}: {case.wall:.2f} s")
                    if options.json:
                        options.json.write_text(json.dumps([asdict(each) for each in known.values()], indent=1) + "\n")
                wanted.append(known[case.key])
            shutil.rmtree(source, ignore_errors=True)
    return wanted


# -------------------------------------------------------------------------------------------------------- the report


def report(found: list[Case], startup: float) -> Iterator[str]:
    """A table for each source, then the lines through sizes."""
    for kind, gigabytes in dict.fromkeys((case.kind, case.gigabytes) for case in found):
        here = [case for case in found if (case.kind, case.gigabytes) == (kind, gigabytes)]
        synced = [case.wall for case in here if case.what.startswith("cp, fsync")]
        size = here[0].source_bytes
        yield from ("", f"{kind}, {size / 1e9:.2f} GB")
        rows = [
            (
                case.what,
                str(case.tp or "-"),
                f"{case.wall:.2f}",
                f"{case.wall / statistics.mean(synced):.2f}",
                f"{case.cpu:.1f}",
                f"{size / case.wall / 1e9:.2f}",
                size_text(case.target_bytes),
                size_text(case.peak) if case.peak else "-",
            )
            for case in here
        ]
        header = ("", "tp", "wall s", "x cp, fsync", "CPU s", "GB/s", "written", "peak/process")
        yield from table(header, rows)
    yield from ("", f"importing torch: {startup:.2f} s")
    rows = []
    for kind, what, tp in dict.fromkeys((case.kind, case.what, case.tp) for case in found):
        own = [case for case in found if (case.kind, case.what, case.tp) == (kind, what, tp)]
        if len(own) > 1:
            at, slope = line([(case.source_bytes / 1e9, case.wall) for case in own])
            peaks = " / ".join(size_text(case.peak) for case in own) if own[0].peak else "-"
            rows.append((f"{kind}, {what}", str(tp or "-"), f"{at:.2f}", f"{slope:.2f}", peaks))
    if rows:
        yield from ("", *table(("", "tp", "seconds at 0", "seconds a GB", "peaks by size"), rows))
    others = [each.others for case in found for each in case.runs]
    yield ""
    yield (
        f"busy with other work meanwhile: {statistics.median(others):.2f} of {os.cpu_count()} cores (median; "
        f"at most {max(others):.2f})"
    )


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The line through points with the least sum of squared relative errors: its value at 0, and its slope."""
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    x = sum(w * p[0] for w, p in zip(weights, points, strict=True)) / total
    y = sum(w * p[1] for w, p in zip(weights, points, strict=True)) / total
    up = sum(w * (p[0] - x) * (p[1] - y) for w, p in zip(weights, points, strict=True))
    slope = up / sum(w * (p[0] - x) ** 2 for w, p in zip(weights, points, strict=True))
    return y - slope * x, slope


def planning(scratch: Path, options: argparse.Namespace) -> Iterator[str]:
    """Seconds and memory of a plan of hundreds of gigabytes."""
    source = scratch / "headers"
    deepseek_headers(source)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    size = index["metadata"]["total_size"]
    yield f"{len(index['weight_map']):,} tensors in {len(files)} files, {size / 1e9:.0f} GB"
    rows = []
    for tp in options.tp:
        asked = [sys.executable, "-m", "modelexport", "--model", str(source), "--quant", "int4", "--dry-run"]
        asked += ["--tp", str(tp), "--out", str(scratch / "out")]
        result = run(asked, scratch / "log", sample=True, timeout=options.timeout)
        if result.status:
            raise SystemExit((scratch / "log").read_text()[-3000:])
        rows.append((str(tp), f"{result.wall:.2f}", f"{result.cpu:.2f}", size_text(result.process_peak)))
    yield from table(("tp", "wall s", "CPU s", "peak/process"), rows)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", nargs="+", type=float, default=[0.25, 2.5, 16.0], help="of sources")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--quant", nargs="*", default=list(QUANTS), metavar="NAME")
    parser.add_argument("--tp", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--peers", nargs="*", default=[], choices=["fp8", "int4"], help="formats of other tools, too")
    parser.add_argument("--planning", action="store_true", help="the plan of a DeepSeek-V3's headers instead")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds after which a run is ended")
    parser.add_argument("--scratch", type=Path, help="where sources and targets go (default: a temporary directory)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every case here, and take what is there")
    add_write_option(parser)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (REPOSITORY, os.environ.get("PYTHONPATH"))))
    become_reaper()
    with tempfile.TemporaryDirectory(prefix="bench_scale.", dir=options.scratch) as temporary:
        scratch = Path(temporary)
        if options.planning:
            lines = list(planning(scratch, options))
        else:
            startup = run([sys.executable, "-c", IMPORTS], scratch / "log", sample=False, timeout=60).wall
            lines = list(report(measure_all(options, scratch), startup))
    with written(__file__, options.write):
        print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
