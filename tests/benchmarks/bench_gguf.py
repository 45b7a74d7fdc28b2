"""GGUF beside llama.cpp's own tools: KL at the same types, and the way from safetensors to a quantised file.

    MODELEXPORT_LLAMA_CPP=DIR python tests/benchmarks/bench_gguf.py
    python tests/benchmarks/bench_gguf.py --models demo --mixtures q4_k_m iq4_xs --windows 32
    python tests/benchmarks/bench_gguf.py --also awq+imatrix rotation+gptq       columns of further algorithms
    python tests/benchmarks/bench_gguf.py --chain                   seconds and memory of a 1.24 B-parameter Llama
    python tests/benchmarks/bench_gguf.py --json FILE               what FILE has already is not made again

DIR is a checkout of llama.cpp, with ``llama-quantize`` and ``llama-imatrix`` in its ``build/bin``. For ``--chain``,
MODELEXPORT_LLAMA_PYTHON names an interpreter that runs its ``convert_hf_to_gguf.py`` and has ``sentencepiece``.

Quality: the four models of bench_quality.py. Both quantise the same model, theirs the file of 16 bits that we write of
it; every mixture gives each tensor the same type on both sides (tests/conformance compares them), so that the files are
of one size. Both fit blocks with the importance of inputs or without: theirs by llama-imatrix, 64 chunks of 256 tokens
of the model's calibration text, ours by 64 samples of 256 tokens of it. KL is on held-out windows, of float32 models
with the blocks decoded by us, by ``modelexport.inspection.evaluate``.

Chain: theirs is convert_hf_to_gguf.py to F16, llama-imatrix over 8 x 512 tokens, llama-quantize; ours one command with
as many tokens. Wall, CPU seconds, private memory of the largest process; the files that llama.cpp maps are not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from modelexport.assets import demo_documents, demo_model_path
from modelexport.quantization import mixtures
from modelexport.system.tables import size_text, table
from tests.benchmarks._measuring import SELDOM, Run, add_write_option, become_reaper, run, written
from tests.benchmarks._quality import Figures, OwnText, Reference, demo_samples, trained_model, write_samples
from tests.benchmarks.bench_export import make_model
from tests.helpers.hard_model import make_hard

REPOSITORY = sys.path[0]
MODELS = ("demo", "hard", "moe", "sliding")
MIXTURES = (
    *("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_0", "q4_1", "q4_k_s", "q4_k_m", "q5_0", "q5_1", "q5_k_s", "q5_k_m"),
    *("q6_k", "q8_0", "iq4_nl", "iq4_xs"),
)
OURS = {"ours": "rtn", "ours, imatrix": "imatrix", "ours, gptq": "gptq"}
"""Columns of ours -> the algorithm."""
THEIRS = {"llama.cpp": False, "llama.cpp, imatrix": True}
"""Columns of theirs -> whether with importance."""
RIVALS = {"ours": "llama.cpp", "ours, imatrix": "llama.cpp, imatrix"}
SAMPLES, LENGTH = 64, 256
CHAIN_SAMPLES, CHAIN_LENGTH = 8, 512


@dataclass
class Cell:
    """The figures of one model in one mixture by one tool."""

    model: str
    mixture: str
    column: str
    size: int
    figures: Figures

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.model, self.mixture, self.column)

    def text(self) -> str:
        """KL and its standard error in 0.001 nats."""
        return f"{1e3 * self.figures.kl:.2f} +- {1e3 * self.figures.kl_error:.2f}"


def can(mixture: str, column: str) -> bool:
    """Returns whether a mixture can be made so: gptq wants levels that are evenly spaced."""
    found = mixtures.find(mixture)
    rounds = "gptq" in OURS.get(column, "")
    return found is None or not rounds or not mixtures.number_format_of(found.block_type).without_grid


def call(*command: str | Path) -> None:
    """Runs a command to its end; shows what it said where it fails."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(map(str, command))}: status {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}"
        )


def tool(name: str) -> Path:
    """A program of llama.cpp's."""
    found = Path(os.environ["MODELEXPORT_LLAMA_CPP"]) / "build" / "bin" / name
    if not found.exists():
        raise SystemExit(f"{found} is not there: build the target {name} of llama.cpp")
    return found


# ------------------------------------------------------------------------------------------------------- quality


class Yardstick:
    """A model with its samples, its file of 16 bits and llama.cpp's importance matrix of it."""

    def __init__(self, name: str, scratch: Path, windows: int | None, cache: Path) -> None:
        own = name in ("demo", "hard")
        source = demo_model_path() if own else trained_model(name, cache)
        self.name, self.scratch = name, scratch
        self.reference = Reference(source, windows) if own else OwnText(source, windows)
        self.directory = make_hard(source, scratch / name) if name == "hard" else source
        self.samples = write_samples(scratch / f"{name}.jsonl", demo_samples(source, SAMPLES, LENGTH))
        self.base, self.matrix = scratch / f"{name}_base", scratch / f"{name}_imatrix.gguf"
        text = scratch / f"{name}.txt"
        held = source / "calibration.txt"
        text.write_text(held.read_text() if held.exists() else "\n\n".join(demo_documents("calibration")))
        export = ("--quant", "none", "--format", "gguf", "--no-evaluate", "--quiet", "--out", self.base)
        call(sys.executable, "-m", "modelexport", "--model", self.directory, *export)
        call(
            *(tool("llama-imatrix"), "-m", self.base / "model.gguf", "-f", text, "-o", self.matrix),
            *("-c", str(LENGTH), "--chunks", str(SAMPLES), "--no-ppl"),
        )

    def theirs(self, mixture: str, importance: bool) -> Path:
        """The directory of the file that llama-quantize makes."""
        out = self._fresh()
        out.mkdir()
        for path in self.base.iterdir():
            if path.suffix == ".json" and path.name != "modelexport.json":
                shutil.copy(path, out)
        given = ("--imatrix", self.matrix) if importance else ()
        call(tool("llama-quantize"), *given, self.base / "model.gguf", out / "model.gguf", mixture.upper(), "1")
        return out

    def ours(self, mixture: str, algorithm: str) -> Path:
        """The directory that we write."""
        out = self._fresh()
        calibration = ("--calib", self.samples, "--calib-samples", str(SAMPLES), "--calib-length", str(LENGTH))
        call(
            *(sys.executable, "-m", "modelexport", "--model", self.directory, "--quant", mixture, "--format", "gguf"),
            *("--algorithm", algorithm, *(() if algorithm in ("rtn", "rotation") else calibration)),
            *("--no-evaluate", "--quiet", "--out", out),
        )
        return out

    def _fresh(self) -> Path:
        shutil.rmtree(self.scratch / "out", ignore_errors=True)
        return self.scratch / "out"

    def judge(self, mixture: str, column: str) -> Cell:
        """Makes a file and compares it."""
        out = self.theirs(mixture, THEIRS[column]) if column in THEIRS else self.ours(mixture, OURS[column])
        size = sum(path.stat().st_size for path in out.glob("*.gguf"))
        return Cell(self.name, mixture, column, size, self.reference.judge_checkpoint(out))


def quality(options: argparse.Namespace, scratch: Path) -> Iterator[str]:
    """The lines of a table for each model."""
    known = read_cells(options.json)
    columns = [column for column in (*THEIRS, *OURS) if not options.columns or column in options.columns]
    for name in options.models:
        wanted = [(name, mixture, column) for mixture in options.mixtures for column in columns if can(mixture, column)]
        yardstick = None
        for key in wanted:
            if key not in known:
                yardstick = yardstick or Yardstick(name, scratch, options.windows, options.cache)
                known[key] = yardstick.judge(*key[1:])
                print(f"{', '.join(key)}: {known[key].figures.kl_text()}", file=sys.stderr, flush=True)
                if options.json:
                    options.json.write_text(json.dumps([asdict(cell) for cell in known.values()], indent=1) + "\n")
        yield from ("", f"{name}: KL to the source, 0.001 nats a token", "")
        yield "| mixture | bytes, theirs / ours | " + " | ".join(columns) + " |"
        yield "|---" * (len(columns) + 2) + "|"
        for mixture in options.mixtures:
            cells = {column: known[name, mixture, column] for column in columns if can(mixture, column)}
            sizes = [
                max(c.size for k, c in cells.items() if k in group) for group in (THEIRS, OURS) if group & cells.keys()
            ]
            shown = [f"{cells[c].text()}{_mark(cells[c], cells)}" if c in cells else "" for c in columns]
            yield f"| {mixture} | {' / '.join(f'{size:,}' for size in sizes)} | " + " | ".join(shown) + " |"
    yield from ("", "(!): above llama.cpp's with the same information by more than its standard error")


def _mark(cell: Cell, cells: dict[str, Cell]) -> str:
    rival = cells.get(RIVALS.get(cell.column, ""))
    return " (!)" if rival is not None and cell.figures.kl > rival.figures.kl + cell.figures.kl_error else ""


def read_cells(path: Path | None) -> dict[tuple[str, str, str], Cell]:
    """Those that an earlier run has written."""
    if path is None or not path.exists():
        return {}
    cells = [Cell(**{**found, "figures": Figures(**found["figures"])}) for found in json.loads(path.read_text())]
    return {cell.key: cell for cell in cells}


# --------------------------------------------------------------------------------------------------------- chain


def chain(options: argparse.Namespace, scratch: Path) -> Iterator[str]:
    """A table of the steps of both."""
    model, text = scratch / "model", scratch / "text.txt"
    python = os.environ["MODELEXPORT_LLAMA_PYTHON"]
    make_model(model, options.layers)
    text.write_text("\n\n".join(demo_documents("calibration")))
    training = (
        "import sys, sentencepiece as s; s.SentencePieceTrainer.train(input=sys.argv[1], model_prefix=sys.argv[2], "
        "vocab_size=2000, model_type='bpe', byte_fallback=True, minloglevel=2)"
    )
    call(python, "-c", training, text, model / "tokenizer")
    shutil.copy(model / "tokenizer.model", scratch)
    samples = write_samples(scratch / "samples.jsonl", demo_samples(demo_model_path(), CHAIN_SAMPLES, CHAIN_LENGTH))
    wide, matrix = scratch / "wide.gguf", scratch / "imatrix.gguf"
    convert = Path(os.environ["MODELEXPORT_LLAMA_CPP"]) / "convert_hf_to_gguf.py"
    shape = ("-c", str(CHAIN_LENGTH), "--chunks", str(CHAIN_SAMPLES), "--no-ppl")
    steps = {
        "convert_hf_to_gguf.py": (python, convert, model, "--outtype", "f16", "--outfile", wide),
        "llama-imatrix": (tool("llama-imatrix"), "-m", wide, "-f", text, "-o", matrix, *shape),
        "llama-quantize": (tool("llama-quantize"), "--imatrix", matrix, wide, scratch / "theirs.gguf", options.mixture),
        "ours": (
            *(sys.executable, "-m", "modelexport", "--model", model, "--quant", options.mixture, "--format", "gguf"),
            *("--algorithm", "imatrix", "--calib", samples, "--calib-samples", str(CHAIN_SAMPLES)),
            *("--calib-length", str(CHAIN_LENGTH), "--tp", str(options.tp)),
            *("--no-evaluate", "--quiet", "--out", scratch / "ours"),
        ),
        "ours, without importance": (
            *(sys.executable, "-m", "modelexport", "--model", model, "--quant", options.mixture, "--format", "gguf"),
            *("--tp", str(options.tp), "--no-evaluate", "--quiet", "--out", scratch / "plain"),
        ),
        "cp of the model": ("cp", "-r", model, scratch / "copy"),
    }
    runs: dict[str, Run] = {}
    for name, command in steps.items():
        log = scratch / "log"
        runs[name] = run([str(part) for part in command], log, sample=True, timeout=3600, share=SELDOM)
        if runs[name].status:
            raise SystemExit(f"{name}: status {runs[name].status}\n{log.read_text(errors='replace')[-3000:]}")
        print(f"{name}: {runs[name].wall:.1f} s", file=sys.stderr, flush=True)
    peers = [runs[name] for name in list(steps)[:3]]
    rows = [*runs.items(), ("their three steps", None)]
    yield from table(
        ("", "wall s", "CPU s", "others", "peak/process"),
        [
            (name, f"{found.wall:.1f}", f"{found.cpu:.1f}", f"{found.others:.1f}", size_text(found.process_peak))
            if found is not None
            else (
                *(name, f"{sum(p.wall for p in peers):.1f}", f"{sum(p.cpu for p in peers):.1f}", ""),
                size_text(max(p.process_peak for p in peers)),
            )
            for name, found in rows
        ],
    )
    ours = runs["ours"]
    yield ""
    yield (
        f"theirs against ours: wall x {sum(p.wall for p in peers) / ours.wall:.2f}, "
        f"CPU x {sum(p.cpu for p in peers) / ours.cpu:.2f}, "
        f"memory x {max(p.process_peak for p in peers) / ours.process_peak:.2f} (above 1: ours is better)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--mixtures", nargs="+", default=list(MIXTURES), metavar="NAME")
    parser.add_argument("--columns", nargs="+", default=[], choices=[*THEIRS, *OURS], help="of the table; default: all")
    parser.add_argument("--also", nargs="+", default=[], metavar="ALGORITHM", help="columns of ours by these, too")
    parser.add_argument("--windows", type=int, default=64, help="held-out windows to judge by")
    parser.add_argument("--cache", type=Path, help="of trained models (default: ~/.cache/modelexport/yardsticks)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every cell here, and take what is there")
    parser.add_argument("--chain", action="store_true", help="measure seconds and memory instead")
    parser.add_argument("--mixture", default="q4_k_m", help="of --chain")
    parser.add_argument("--layers", type=int, default=16, help="of the model of --chain")
    parser.add_argument("--tp", type=int, default=1, help="our tensor-parallel ranks in --chain")
    parser.add_argument("--scratch", type=Path, help="where files go (default: a temporary directory)")
    add_write_option(parser)
    options = parser.parse_args()
    OURS.update((f"ours, {algorithm}", algorithm) for algorithm in options.also)
    options.cache = options.cache or Path.home() / ".cache" / "modelexport" / "yardsticks"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (REPOSITORY, os.environ.get("PYTHONPATH"))))
    if not os.environ.get("MODELEXPORT_LLAMA_CPP"):
        parser.error("MODELEXPORT_LLAMA_CPP names no checkout of llama.cpp")
    become_reaper()
    with tempfile.TemporaryDirectory(prefix="bench_gguf.", dir=options.scratch) as temporary:
        lines = list((chain if options.chain else quality)(options, Path(temporary)))
    with written(__file__, options.write):
        print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
