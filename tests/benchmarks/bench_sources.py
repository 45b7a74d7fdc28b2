"""How long an export of a quantised source takes, against that of the same model in bfloat16, in one run.

    python tests/benchmarks/bench_sources.py              a Llama and a DeepSeek-V3, about 500 MB of bf16 each
    python tests/benchmarks/bench_sources.py --only llama --tp 1 --repeat 5

The Llama comes in FP8 blocks and in AWQ's words, the DeepSeek-V3 (latent attention, routed experts, a draft layer) in
FP8 blocks; both are made by ``modelexport`` from random bf16 weights, in the layouts of tests/published. Each export of
a quantised source is timed in turn with that of the bf16 source, so that what else the machine does falls on both; the
ratio is that of the medians. Results must have the same bytes at every tp.

Wall and memory as in bench_export.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from modelexport.system.tables import size_text, table
from tests.benchmarks._measuring import add_write_option, become_reaper, run, written
from tests.benchmarks.bench_export import Case, measure

REPOSITORY = sys.path[0]
LLAMA = {
    "hidden": 2048,
    "mlp": 8192,
    "layers": 4,
    "heads": 32,
    "kv_heads": 8,
    "head": 64,
    "vocabulary": 8192,
}
DEEPSEEK = {
    "hidden": 1024,
    "mlp": 4096,
    "layers": 4,
    "heads": 16,
    "kv_heads": 16,
    "head": 64,
    "vocabulary": 8192,
    "q_lora": 512,
    "kv_lora": 256,
    "nope": 64,
    "rope": 64,
    "value": 64,
    "expert_mlp": 512,
    "experts": 32,
    "shared_experts": 1,
}
CALIBRATED = ["--algorithm", "gptq", "--calib-samples", "4", "--calib-length", "128"]


@dataclass(frozen=True)
class Model:
    """A model in bf16 and in other encodings.

    Attributes:
        layout: the layout of tests/published that it is, and without encoded linears.
        sizes: its sizes.
        sources: name -> the flags that make it of the bf16 model.
        exports: source, flags of the export; each is held against the same of the bf16 model.
        tp: what it is exported at.
    """

    layout: str
    sizes: dict[str, int]
    layers: tuple[int, ...]
    sources: dict[str, list[str]]
    exports: list[tuple[str, list[str]]]
    tp: tuple[int, ...]


FP8_BLOCKS = ["--quant", "fp8-block", "--format", "fp8-block", "--draft", "quantise"]
MODELS = {
    "llama": Model(
        "Llama 3.1",
        LLAMA,
        (),
        {"fp8 blocks": FP8_BLOCKS[:-2], "awq": ["--quant", "int4-asym", "--format", "awq"]},
        [
            ("fp8 blocks", ["--quant", "int4"]),
            ("fp8 blocks", ["--quant", "nvfp4-wo"]),
            ("awq", ["--quant", "fp8"]),
        ],
        (1, 2),
    ),
    "deepseek": Model(
        "DeepSeek-V3",
        DEEPSEEK,
        (0, 1, 1, 1, 2),
        {"fp8 blocks": FP8_BLOCKS},
        [("fp8 blocks", ["--quant", "nvfp4-wo"]), ("fp8 blocks", ["--quant", "int4", *CALIBRATED])],
        (1, 2, 4),
    ),
}


def make(model: Model, directory: Path) -> None:
    """Writes a model in bf16, streaming: normal weights (std 0.02), norms around 1; the same bytes every time."""
    import torch

    from tests.published._layouts import LAYOUTS
    from tests.published._real import Real, at_real_size

    layout = at_real_size(LAYOUTS[model.layout], Real(0.0, model.sizes, model.layers))
    tensors = {name: shape for name, (_, shape) in layout.tensors.items() if "_scale" not in name}
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors.items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    said = json.dumps(header).encode()
    said += b" " * (-len(said) % 8)
    directory.mkdir(parents=True)
    config = {key: value for key, value in layout.config.items() if key != "quantization_config"}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    random = torch.Generator().manual_seed(0)
    with open(directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(said)) + said)
        for shape in tensors.values():
            part = torch.empty(shape).normal_(float(len(shape) == 1), 0.02, generator=random)
            file.write(part.bfloat16().view(torch.int16).numpy().tobytes())


def exports(model: Model, sources: dict[str, Path], text: Path, timeout: float) -> Iterator[tuple[str, Case, Case]]:
    """For each export and tp: the source, the case of bf16, that of the quantised source."""
    for source, flags in model.exports:
        name = " ".join(flag for flag in flags if flag in ("int4", "nvfp4-wo", "fp8", "gptq"))
        calibration = ["--calib", str(text)] if "--algorithm" in flags else []
        for tp in model.tp:
            pair = []
            for path in (sources["bf16"], sources[source]):
                command = [sys.executable, "-m", "modelexport", "--model", str(path), *flags, *calibration]
                pair.append(Case(name, tp, [*command, "--tp", str(tp), "--quiet", "--out", "{out}"]))
            yield source, pair[0], pair[1]


def report(name: str, rows: list[tuple[str, Case, Case]]) -> Iterator[str]:
    """A model's table, and whether its results have the same bytes at every tp."""
    cells = []
    for source, plain, case in rows:
        assert plain.sampled is not None
        assert case.sampled is not None
        cells.append(
            (
                f"{name}, {source}",
                case.name,
                str(case.tp),
                f"{plain.wall():.2f}",
                f"{case.wall():.2f}",
                f"{case.wall() / plain.wall():.2f}",
                f"{case.cpu() / plain.cpu():.2f}",
                size_text(plain.sampled.process_peak),
                size_text(case.sampled.process_peak),
            )
        )
    header = ("source", "to", "tp", "bf16 s", "s", "ratio", "CPU ratio", "bf16 peak/process", "peak/process")
    yield from table(header, cells)
    for source, to in dict.fromkeys((source, case.name) for source, _, case in rows):
        hashes = {case.sha256 for found, _, case in rows if (found, case.name) == (source, to)}
        yield f"{source} to {to}: {'the same bytes' if len(hashes) == 1 else 'DIFFERENT bytes'} at every tp"
    yield ""


def main() -> int:
    """Returns 0 once all is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), help="the models")
    parser.add_argument("--tp", nargs="+", type=int, help="in place of the models' own")
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each command")
    parser.add_argument("--scratch", type=Path, help="where all is written (default: a temp dir)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a run is ended")
    add_write_option(parser)
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make(MODELS[options.make[0]], Path(options.make[1]))
        return 0
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (REPOSITORY, os.environ.get("PYTHONPATH"))))
    become_reaper()
    with tempfile.TemporaryDirectory(prefix="bench_sources.", dir=options.scratch) as temporary:
        lines = [line for name in options.only for line in _measured(name, Path(temporary), options)]
    with written(__file__, options.write):
        print("\n".join(lines).strip())
    return 0


def _measured(name: str, scratch: Path, options: argparse.Namespace) -> list[str]:
    model, home = MODELS[name], scratch / name
    sources = {"bf16": home / "bf16", **{source: home / source.replace(" ", "-") for source in model.sources}}
    home.mkdir()
    _done([sys.executable, __file__, "--make", name, str(sources["bf16"])], scratch, options)  # torch stays out of here
    for source, flags in model.sources.items():
        command = [sys.executable, "-m", "modelexport", "--model", str(sources["bf16"]), *flags]
        _done([*command, "--quiet", "--out", str(sources[source])], scratch, options)
    text = home / "tokens.jsonl"
    samples = ({"input_ids": [(7 * i + j * j) % 4093 + 3 for j in range(160)]} for i in range(4))
    text.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    model = model if options.tp is None else Model(**{**vars(model), "tp": tuple(options.tp)})
    rows = list(exports(model, sources, text, options.timeout))
    for source, *pair in rows:
        for case, path in zip(pair, (sources["bf16"], sources[source]), strict=True):
            measure(case, scratch, path, sample=True, timeout=options.timeout)
        for _ in range(options.repeat):
            for case, path in zip(pair, (sources["bf16"], sources[source]), strict=True):
                measure(case, scratch, path, sample=False, timeout=options.timeout)
        walls = [statistics.median(run.wall for run in case.runs) for case in pair]
        print(f"{name}, {source} to {pair[0].name}, tp {pair[0].tp}: {walls[0]:.2f}, {walls[1]:.2f} s", file=sys.stderr)
    return list(report(name, rows))


def _done(command: list[str], scratch: Path, options: argparse.Namespace) -> None:
    log = scratch / "log"
    if run(command, log, sample=False, timeout=options.timeout).status != 0:
        raise SystemExit(f"{' '.join(command)}\nfailed:\n{log.read_text()[-3000:]}")


if __name__ == "__main__":
    sys.exit(main())
