"""The same model, samples and format through other tools and modelexport: KL, time, memory.

    MODELEXPORT_LLMCOMPRESSOR_PYTHON=... MODELEXPORT_MODELOPT_PYTHON=... MODELEXPORT_AUTOROUND_PYTHON=... \
        MODELEXPORT_GPTQMODEL_PYTHON=... python tests/benchmarks/bench_peers.py
    python tests/benchmarks/bench_peers.py --only ours gptq         rows whose names have one of these in them
    python tests/benchmarks/bench_peers.py --ours mse               our side with another algorithm: tries the harness
    python tests/benchmarks/bench_peers.py --models demo moe --windows 64 --memory along --json FILE
                                                            what FILE has already is not made again

Models: the four of bench_quality.py (64 samples of 256 tokens; judged on held-out text) and a random Llama of 128 M
parameters (16 x 128; nothing to judge). Peers run in their own environments, whose interpreters the variables name (a
tool without one is left out, and said to be); each with the recipe that its own examples give. Everybody reads the
same token ids.

KL and loss are of float32 models on held-out windows by ``modelexport.inspection.evaluate``: compressed-tensors
checkpoints and GPTQ's are decoded by us. modelopt's models are judged where they are, in memory, by
the same function called in its environment; it writes no checkpoint, and what that would cost is not in its figures.

Wall: until the command ends, with the interpreter's start. Work: without importing (peers: loading, quantising and
saving, as their scripts take the time; ours: the wall less that of a process which imports the same and ends). CPU:
user and system seconds of everything that it started, less disturbed by what else the machine does. Memory: private
memory of the largest process and of all, sampled in one extra run, or now and then in the timed one. Judging is in no
figure. Medians of --repeat runs. At the end one table of all models.
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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from modelexport.assets import demo_model_path
from modelexport.system.tables import size_text, table
from tests.benchmarks._measuring import SELDOM, Run, add_write_option, become_reaper, run, written
from tests.benchmarks._quality import (
    WINDOW,
    Figures,
    OwnText,
    Reference,
    demo_samples,
    make_small_llama,
    random_samples,
    trained_model,
    write_samples,
)
from tests.helpers.hard_model import make_hard

REPOSITORY = sys.path[0]
HERE = Path(__file__).resolve().parent
PEERS = {
    "llm-compressor": "MODELEXPORT_LLMCOMPRESSOR_PYTHON",
    "modelopt": "MODELEXPORT_MODELOPT_PYTHON",
    "auto-round": "MODELEXPORT_AUTOROUND_PYTHON",
    "gptqmodel": "MODELEXPORT_GPTQMODEL_PYTHON",
}
SCRIPTS = {
    "llm-compressor": "peer_llmcompressor.py",
    "modelopt": "peer_modelopt.py",
    "auto-round": "peer_autoround.py",
    "gptqmodel": "peer_gptqmodel.py",
}
JUDGED, UNTRAINED = ("demo", "hard", "moe", "sliding"), "128M"
SIZES = {**dict.fromkeys(JUDGED, (64, 256)), UNTRAINED: (16, 128)}  # samples, tokens of each

CONTESTS = (
    (
        "int4 g128, GPTQ",
        (("llm-compressor", "gptq"), ("gptqmodel", "gptq"), ("gptqmodel", "foem"), ("ours", "int4 gptq")),
    ),
    ("int4 g128, AWQ", (("llm-compressor", "awq"), ("modelopt", "awq"), ("ours", "int4 awq"))),
    (
        "int4 g128, scales by importance",
        (("llm-compressor", "imatrix"), ("llm-compressor", "imatrix+gptq"), ("ours", "int4 imatrix")),
    ),
    ("int4 g128, signed gradients", (("auto-round", "autoround"), ("ours", "int4 autoround"))),
    (
        "nvfp4, scales by importance",
        (("llm-compressor", "nvfp4-imatrix"), ("modelopt", "nvfp4-hessian"), ("ours", "nvfp4 imatrix")),
    ),
    ("nvfp4, GPTQ", (("llm-compressor", "nvfp4-gptq"), ("ours", "nvfp4 gptq"))),
    ("nvfp4, signed gradients", (("auto-round", "autoround-nvfp4"), ("ours", "nvfp4 autoround"))),
    (
        "int8, activations a token at a time, SmoothQuant",
        (("llm-compressor", "smoothquant"), ("ours", "int8 smoothquant")),
    ),
    (
        "int8, activations a token at a time, SmoothQuant and GPTQ (llm-compressor's usual int8 recipe)",
        (("llm-compressor", "smoothquant+gptq"), ("ours", "int8 smoothquant+gptq")),
    ),
    ("int8, static activations, SmoothQuant", (("modelopt", "smoothquant"), ("ours", "int8-static smoothquant"))),
)
"""What is compared with what: the tool, and what it is asked for (ours: number format and algorithm)."""
EVERYWHERE = ("int4", "nvfp4")
"""Beginnings of contests that are on for all models; the others are on for the demo model and the untrained one."""

IMPORTS = "import torch, modelexport.exporting.calibrated.rank, transformers.models.llama.modeling_llama"


@dataclass
class Model:
    """A model with its samples; ``reference`` where there is something to judge."""

    name: str
    directory: Path
    samples: Path
    reference: Reference | OwnText | None
    heldout: Path


@dataclass
class Row:
    """One tool with one recipe on one model."""

    contest: str
    tool: str
    task: str
    model: str
    runs: list[Run] = field(default_factory=list)
    sampled: Run | None = None
    work: list[float] = field(default_factory=list)
    steps: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    figures: Figures | None = None
    failed: str = ""

    @property
    def name(self) -> str:
        return f"{self.tool} {self.task}"

    @property
    def key(self) -> tuple[str, str, str, str]:
        return (self.contest, self.tool, self.task, self.model)

    def wall(self) -> float:
        return statistics.median(run.wall for run in self.runs)

    def cpu(self) -> float:
        return statistics.median(run.cpu for run in self.runs)


# ------------------------------------------------------------------------------------------------- the commands


def command(row: Row, model: Model, scratch: Path, options: argparse.Namespace, *, judged: bool) -> list[str]:
    """What is run: the target is ``scratch/out``, a peer's report ``scratch/report.json``."""
    out, samples, length = str(scratch / "out"), *SIZES[model.name]
    if row.tool == "ours":
        quant, algorithm = row.task.split()
        found = [sys.executable, "-m", "modelexport", "--model", str(model.directory), "--quant", quant]
        found += ["--algorithm", algorithm, "--calib", str(model.samples)]
        found += ["--calib-samples", str(samples), "--calib-length", str(length)]
        return [*found, "--tp", str(options.tp), "--no-evaluate", "--quiet", "--json", "--out", out]
    found = [os.environ[PEERS[row.tool]], str(HERE / SCRIPTS[row.tool]), "--model", str(model.directory)]
    found += ["--samples", str(model.samples), "--algorithm", row.task]
    found += ["--dtype", options.dtype, "--batch", str(options.batch), "--report", str(scratch / "report.json")]
    if row.tool != "modelopt":
        found += ["--out", out]
    elif judged:
        found += ["--heldout", str(model.heldout)]
    return found


def measure(row: Row, model: Model, scratch: Path, options: argparse.Namespace, *, sample: bool, judged: bool) -> None:
    """One run. A modelopt run that is judged in its process is no run whose time counts."""
    log = scratch / "log"
    shutil.rmtree(scratch / "out", ignore_errors=True)
    share = SELDOM if options.memory == "along" else 1.0
    asked = command(row, model, scratch, options, judged=judged)
    result = run(asked, log, sample=sample, timeout=options.timeout, share=share)
    if result.status != 0:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        row.failed = f"ended with status {result.status}: {last[-1] if last else 'it said nothing'}"
        return
    report = _report_of(row, scratch)
    if sample:
        row.sampled = result
    if (not sample or options.memory == "along") and not (judged and row.tool == "modelopt"):
        row.runs.append(result)
        row.work.append(report["work"] or result.wall - startup(scratch, options))
        row.steps, row.versions = report["steps"], report["versions"]
    if judged and model.reference is not None:
        on_disk = row.tool != "modelopt"
        row.figures = model.reference.judge_checkpoint(scratch / "out") if on_disk else Figures.of(report["comparison"])


def startup(scratch: Path, options: argparse.Namespace) -> float:
    """Wall seconds of a process that only imports what ours needs; taken next to the run, for a machine drifts."""
    return run([sys.executable, "-c", IMPORTS], scratch / "log", sample=False, timeout=options.timeout).wall


def _report_of(row: Row, scratch: Path) -> dict[str, Any]:
    """What a peer's script says, and its seconds without start-up."""
    if row.tool == "ours":
        return {"work": None, "steps": {}, "versions": {}}
    report = json.loads((scratch / "report.json").read_text())
    steps = report["seconds"]
    work = sum(seconds for step, seconds in steps.items() if step != "imports")
    return {**report, "work": work, "steps": steps}


def read_rows(path: Path | None) -> dict[tuple[str, str, str, str], Row]:
    """What an earlier run has written; failed ones are made again."""
    if path is None or not path.exists():
        return {}
    rows = []
    for found in json.loads(path.read_text()):
        row = Row(**found)
        row.runs = [Run(**run) for run in found["runs"]]
        row.sampled = Run(**found["sampled"]) if found["sampled"] else None
        row.figures = Figures(**found["figures"]) if found["figures"] else None
        rows.append(row)
    return {row.key: row for row in rows if not row.failed}


# --------------------------------------------------------------------------------------------------- the report


def report(rows: list[Row]) -> Iterator[str]:
    """A table for each model and contest, ours last; then who won by how much."""
    for model in dict.fromkeys(row.model for row in rows):
        for contest in dict.fromkeys(row.contest for row in rows):
            found = [row for row in rows if (row.model, row.contest) == (model, contest)]
            done = [row for row in found if row.runs and not row.failed]
            if not found:
                continue
            yield from ("", f"{model}: {contest}")
            if done:
                yield from table(_HEADER, [_cells(row) for row in done])
            for row in found:
                if row.failed:
                    yield f"{row.name}: {row.failed}"
            yield from _verdict(done)
    yield from _together([row for row in rows if row.figures])
    others = [run.others for row in rows for run in row.runs]
    if others:
        yield ""
        for versions in dict.fromkeys(tuple(row.versions.items()) for row in rows if row.versions):
            yield ", ".join(f"{name} {version}" for name, version in versions)
        yield (
            f"busy with other work meanwhile: {statistics.median(others):.2f} of {os.cpu_count()} cores (median; "
            f"at most {max(others):.2f}); walls with much of it are too long, CPU seconds less so"
        )


def _together(rows: list[Row]) -> Iterator[str]:
    """One table of all models: KL in thousandths of a nat, with its standard error; CPU seconds; largest process."""
    found = {(row.contest, row.name, row.model): row for row in rows}
    models = list(dict.fromkeys(row.model for row in rows))
    if len(models) < 2:
        return
    header = "mean KL, 0.001 nats a token; CPU s; MB"
    yield from ("", f"| {header} | " + " | ".join(models) + " |", "|---" * (len(models) + 1) + "|")
    for contest, name in dict.fromkeys((row.contest, row.name) for row in rows):
        cells = (found.get((contest, name, model)) for model in models)
        yield f"| {contest}: {name} | " + " | ".join("" if row is None else _cell(row) for row in cells) + " |"


def _cell(row: Row) -> str:
    assert row.figures is not None
    found = [f"{1e3 * row.figures.kl:.2f} +- {1e3 * row.figures.kl_error:.2f}"]
    found += [f"{row.cpu():.0f}"] if row.runs else []
    found += [f"{row.sampled.process_peak / 1e6:.0f}"] if row.sampled is not None else []
    return "; ".join(found)


_HEADER = ("", "mean KL", "loss", "wall s", "work s", "CPU s", "others", "peak/process", "peak sum")


def _cells(row: Row) -> tuple[str, ...]:
    peaks = ("-", "-")
    if row.sampled is not None:
        peaks = (size_text(row.sampled.process_peak), size_text(row.sampled.tree_peak))
    return (
        row.name,
        row.figures.kl_text() if row.figures else "-",
        row.figures.loss_text() if row.figures else "-",
        f"{row.wall():.1f}",
        f"{statistics.median(row.work):.1f}",
        f"{row.cpu():.1f}",
        f"{statistics.median(run.others for run in row.runs):.1f}",
        *peaks,
    )


def _verdict(done: list[Row]) -> Iterator[str]:
    ours = [row for row in done if row.tool == "ours"]
    for row in done:
        if row.tool == "ours" or not ours:
            continue
        mine = ours[0]
        words = [f"wall x {row.wall() / mine.wall():.1f}", f"work x {_work(row) / _work(mine):.1f}"]
        words.append(f"CPU x {row.cpu() / mine.cpu():.1f}")
        if row.figures and mine.figures:
            words.append(f"KL x {row.figures.kl / mine.figures.kl:.2f}")
        yield f"{row.tool} against ours: {', '.join(words)} (above 1: ours is better)"


def _work(row: Row) -> float:
    return statistics.median(row.work)


# ------------------------------------------------------------------------------------------------------- running


def models(names: list[str], scratch: Path, windows: int | None, cache: Path) -> Iterator[Model]:
    """The models asked for, with their samples and held-out tokens written."""
    for name in names:
        samples, length = SIZES[name]
        path, heldout = scratch / f"samples_{name}.jsonl", scratch / f"heldout_{name}.json"
        if name == UNTRAINED:
            directory = make_small_llama(scratch / name)
            write_samples(path, random_samples(directory, samples, length))
            yield Model(name, directory, path, None, heldout)
            continue
        own = name in ("demo", "hard")
        directory = source = demo_model_path() if own else trained_model(name, cache)
        reference = Reference(source, windows) if own else OwnText(source, windows)
        held = {"input_ids": reference.ids.tolist(), "window": WINDOW, "windows": reference.count}
        heldout.write_text(json.dumps(held))
        write_samples(path, demo_samples(source, samples, length))
        if name == "hard":
            directory = make_hard(source, scratch / name)
        yield Model(name, directory, path, reference, heldout)


def rows_of(model: Model, only: list[str], algorithm: str | None) -> list[Row]:
    """What is to be run: tools there are, names with one of ``only`` in them; our ``algorithm`` in place of all."""
    found = [
        Row(contest, tool, task, model.name)
        for contest, sides in CONTESTS
        for tool, task in sides
        if model.name in ("demo", UNTRAINED) or contest.startswith(EVERYWHERE)
    ]
    known = [row for row in found if row.tool == "ours" or os.environ.get(PEERS[row.tool])]
    for row in known:
        if row.tool == "ours" and algorithm:
            row.task = f"{row.task.split()[0]} {algorithm}"
    return [row for row in known if not only or any(word in row.name for word in only)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="rows whose names have one of these")
    parser.add_argument("--windows", type=int, help="held-out windows to judge by (default: all 197)")
    parser.add_argument("--repeat", type=int, default=1, help="timed runs of each")
    memory = ("apart", "along", "no")
    parser.add_argument(
        "--memory", default="apart", choices=memory, help="sampled in a run of its own, in the timed one"
    )
    parser.add_argument("--cache", type=Path, help="of trained models (default: ~/.cache/modelexport/yardsticks)")
    parser.add_argument("--dtype", default="auto", help="of the peers' weights and arithmetic (default: the model's)")
    parser.add_argument("--batch", type=int, default=1, help="samples in one pass of the peers")
    parser.add_argument("--tp", type=int, default=1, help="our tensor-parallel ranks")
    parser.add_argument("--ours", metavar="ALGORITHM", help="in place of each of our algorithms")
    parser.add_argument("--scratch", type=Path, help="where targets go (default: a temporary directory)")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds after which a run is ended")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every row here, and take what is there")
    add_write_option(parser)
    options = parser.parse_args()
    # Our commands run this tree's package, wherever this is called from and whatever is installed.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (REPOSITORY, os.environ.get("PYTHONPATH"))))
    for tool, variable in PEERS.items():
        if not os.environ.get(variable):
            print(f"{tool} is left out: {variable} names no interpreter", flush=True)
    become_reaper()
    rows: list[Row] = []
    known = read_rows(options.json)
    with tempfile.TemporaryDirectory(prefix="bench_peers.", dir=options.scratch) as temporary:
        cache = options.cache or Path.home() / ".cache" / "modelexport" / "yardsticks"
        for model in models(options.models, Path(temporary), options.windows, cache):
            for row in rows_of(model, options.only, options.ours):
                if row.key in known:
                    rows.append(known[row.key])
                    continue
                rows.append(row)
                _all_runs(row, model, Path(temporary), options)
                known[row.key] = row
                if options.json:  # after every row: it is a long way to the end
                    options.json.write_text(json.dumps([asdict(row) for row in known.values()], indent=1) + "\n")
    with written(__file__, options.write):
        print("\n".join(report(rows)))
    return 1 if any(row.failed for row in rows) else 0


def _all_runs(row: Row, model: Model, scratch: Path, options: argparse.Namespace) -> None:
    for number in range(options.repeat):
        judged = number == 0 and model.reference is not None and row.tool != "modelopt"
        measure(row, model, scratch, options, sample=options.memory == "along", judged=judged)
        if row.failed:
            break
        print(f"{model.name}, {row.name}: {row.runs[-1].wall:.1f} s", file=sys.stderr, flush=True)
    if not row.failed and options.memory == "apart":
        measure(row, model, scratch, options, sample=True, judged=False)
    if not row.failed and model.reference is not None and row.tool == "modelopt":
        measure(row, model, scratch, options, sample=False, judged=True)
    if row.failed:
        print(f"{model.name}, {row.name}: {row.failed}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
