"""autoquant beside uniform formats, auto-round's AutoScheme and ModelOpt's auto_quantize: KL at the same mean bits.

    MODELEXPORT_AUTOROUND_PYTHON=... MODELEXPORT_MODELOPT_PYTHON=... python tests/benchmarks/bench_autoquant.py
    python tests/benchmarks/bench_autoquant.py --models demo --contests weights --budgets 5 6 --windows 32
    python tests/benchmarks/bench_autoquant.py --json FILE      what FILE has already is not made again

Everybody reads the same token ids and chooses among the same formats; then what each chose, a format for each linear,
is written by our exporter, rounded to nearest, and judged on held-out text. So the rounding is the same for all, and
nothing but the choice differs. Peers run in their own environments, whose interpreters the variables name (one without
is left out, and said to be). They are told which linears engines fuse, as far as they do not know it themselves.

Mean bits are ours for everybody: of the decoder's linears, scales included. A peer counts in a way of its own
(ModelOpt 4 for int4, whatever its scales take; auto-round zero points that are not there): it is
given the largest budget, in steps of 1/32, whose choice is within ours by our count.

Uniform formats are those of the contest and, for formats that round weights alone, all others of ours that are within
the budget. A choice is marked where its KL is above that of another in its column by more than its standard error.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

from modelexport.assets import demo_model_path
from modelexport.checkpoints.safetensors.file import Checkpoint, torch_dtype
from modelexport.exporting import export
from modelexport.exporting.calibrated.autoquant import assigned, fused_groups
from modelexport.models.architecture import family_of, read_dimensions
from modelexport.models.opening import open_model
from modelexport.models.stacked import experts_apart
from modelexport.quantization import formats
from modelexport.quantization.algorithms import autoquant
from modelexport.quantization.formats.base import NumberFormat
from modelexport.quantization.sensitivity import TOKENS, stored_bits
from modelexport.recipe import ExportRecipe
from tests.benchmarks._measuring import add_write_option, become_reaper, run, written
from tests.benchmarks._quality import Figures, OwnText, Reference, demo_samples, trained_model, write_samples
from tests.helpers.hard_model import make_hard

REPOSITORY = sys.path[0]
HERE = Path(__file__).resolve().parent
MODELS = ("demo", "hard", "moe", "sliding")
BUDGETS = (4.5, 5.0, 6.0, 8.0)
LENGTH = 256
SAMPLES = TOKENS // LENGTH  # what ours reads, were there more
PEERS = {
    "AutoScheme": ("MODELEXPORT_AUTOROUND_PYTHON", "peer_autoscheme.py", ()),
    "auto_quantize": ("MODELEXPORT_MODELOPT_PYTHON", "peer_autoquantize.py", ("--method", "gradient")),
    "auto_quantize, KL": ("MODELEXPORT_MODELOPT_PYTHON", "peer_autoquantize.py", ("--method", "kl_div")),
}
"""Name -> the variable with its interpreter, its script, and what that is told besides."""
OURS = "autoquant"
NO_CHOICE = "no choice within the budget"


@dataclass(frozen=True)
class Contest:
    """Formats that all can choose from, and further uniform ones to hold a choice against."""

    candidates: tuple[str, ...]
    beside: tuple[str, ...] = ()
    with_peers: bool = True


CONTESTS = {
    "weights": Contest(("int4:128", "int8-wo:128", "none")),
    "both": Contest(("int4:128", "fp8-static", "none")),
    "activations": Contest(("nvfp4", "fp8-static", "none")),
    "all": Contest(
        ("int4:128", "int4:32", "nvfp4-wo", "fp8", "int8-wo:128", "none"),
        ("int4:64", "int4-asym:128", "mxfp4-wo"),
        with_peers=False,
    ),
}


# ------------------------------------------------------------------------------------------------------ choices


@dataclass
class Cell:
    """What one tool, or a uniform format, comes to within a budget."""

    model: str
    contest: str
    tool: str
    budget: float
    bits: float = 0.0
    quant: str = ""
    windows: int = 0
    figures: Figures | None = None
    failed: str = ""

    @property
    def key(self) -> tuple[str, str, str, float, int]:
        return (self.model, self.contest, self.tool, self.budget, self.windows)

    @property
    def kl(self) -> float:
        assert self.figures is not None
        return self.figures.kl


@dataclass
class Model:
    """A model with its samples and what judges it."""

    name: str
    directory: Path
    samples: Path
    checkpoint: Checkpoint
    make_reference: Callable[[], Reference | OwnText]
    judged: dict[str, Figures] = field(default_factory=dict)

    @functools.cached_property
    def reference(self) -> Reference | OwnText:
        return self.make_reference()

    def groups(self) -> list[list[str]]:
        """The linears that engines fuse, of all layers."""
        family = family_of(self.checkpoint.config or {}, self.checkpoint.infos)
        layers, _ = fused_groups(family, read_dimensions(self.checkpoint.config or {}, family))
        return [group for layer in layers for group in layer]

    def bits_of(self, name: str, spelled: str) -> int:
        """The bits of a linear in a format, scales included."""
        info = self.checkpoint.infos[f"{name}.weight"]
        return stored_bits(number_format(spelled), (info.shape[0], info.shape[1]), torch_dtype(info.dtype))

    def judge(self, quant: str, scratch: Path) -> Figures:
        """The KL of an export with that ``--quant``, rounded to nearest; of equal ones once."""
        if quant not in self.judged:
            export(
                model=str(self.directory),
                out=str(scratch / "out"),
                quant=quant,
                algorithm="rtn",
                calib=[str(self.samples)],
                calib_samples=SAMPLES,
                calib_length=LENGTH,
                evaluate=False,
                quiet=True,
                overwrite=True,
            )
            self.judged[quant] = self.reference.judge_checkpoint(scratch / "out")
        return self.judged[quant]


def number_format(spelled: str) -> NumberFormat:
    name, _, size = spelled.partition(":")
    return formats.get(name, group_size=int(size) if size else None)


def mean_bits(model: Model, chosen: Mapping[str, str]) -> float:
    """Bits per weight, scales included, of a format for each linear."""
    spent = sum(model.bits_of(name, spelled) for name, spelled in chosen.items())
    return spent / sum(math.prod(model.checkpoint.infos[f"{name}.weight"].shape) for name in chosen)


def our_choices(model: Model, contest: Contest, budgets: list[float]) -> dict[float, dict[str, str]]:
    """Budget -> linear -> format."""
    recipe = ExportRecipe(
        model=str(model.directory),
        algorithm=OURS,
        autoquant_candidates=",".join(contest.candidates),
        calib=[str(model.samples)],
        calib_samples=SAMPLES,
        calib_length=LENGTH,
    )
    found = assigned(model.checkpoint, recipe, model.directory, budgets=budgets)
    return {budget: each.formats for budget, each in zip(budgets, found, strict=True)}


def peer_choices(
    tool: str, model: Model, contest: Contest, budgets: list[float], scratch: Path, timeout: float
) -> dict[float, dict[str, str]]:
    """The same of a peer; a budget that it has no choice for is missing.

    Raises:
        RuntimeError: it ended in an error.
    """
    variable, script, more = PEERS[tool]
    problem, report, log = scratch / "problem.json", scratch / "report.json", scratch / "log"
    groups = model.groups()
    sizes = {
        name: {spelled: model.bits_of(name, spelled) for spelled in contest.candidates}
        for group in groups
        for name in group
    }
    weights = sum(math.prod(model.checkpoint.infos[f"{name}.weight"].shape) for name in sizes)
    problem.write_text(json.dumps({"groups": groups, "sizes": sizes, "weights": weights, "budgets": budgets}))
    command = [os.environ[variable], str(HERE / script), "--model", str(model.directory), *more]
    command += ["--samples", str(model.samples), "--problem", str(problem), "--report", str(report)]
    if run([*command, "--candidates", *contest.candidates], log, sample=False, timeout=timeout).status != 0:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise RuntimeError(last[-1] if last else "it said nothing")
    choices = json.loads(report.read_text())["choices"]
    return {each["budget"]: {name: each["formats"].get(name, "none") for name in sizes} for each in choices}


def uniform_choices(
    model: Model, contest: Contest, budget: float, linears: list[str]
) -> Iterator[tuple[str, dict[str, str]]]:
    for spelled in (*contest.candidates, *contest.beside):
        chosen = dict.fromkeys(linears, spelled)
        if spelled != "none" and mean_bits(model, chosen) <= budget:
            yield spelled, chosen


def cells_of(model: Model, name: str, options: argparse.Namespace, scratch: Path, known: dict[Any, Cell]) -> list[Cell]:
    """Every cell of a contest on a model; those that are known already are taken."""
    contest, windows = CONTESTS[name], options.windows or 0
    linears = [linear for group in model.groups() for linear in group]
    found: list[Cell] = []

    def add(tool: str, budget: float, chosen: Mapping[str, str] | None, failed: str = "") -> None:
        cell = Cell(model.name, name, tool, budget, windows=windows, failed=failed)
        if chosen is not None:
            cell.bits, cell.quant = mean_bits(model, chosen), autoquant.patterns(chosen, "model.layers")
            cell.figures = model.judge(cell.quant, scratch)
        shown = cell.figures.kl_text() if cell.figures else failed
        print(f"{', '.join(map(str, cell.key))}: {cell.bits:.3f} bits, {shown}", file=sys.stderr, flush=True)
        found.append(cell)
        known[cell.key] = cell
        if options.json:
            options.json.write_text(json.dumps([asdict(each) for each in known.values()], indent=1) + "\n")

    for tool in (OURS, *(PEERS if contest.with_peers else ())):
        before = [known.get((model.name, name, tool, budget, windows)) for budget in options.budgets]
        cells = [cell for cell in before if cell is not None and (cell.figures or cell.failed == NO_CHOICE)]
        if len(cells) == len(options.budgets):
            found += cells
        elif tool == OURS:
            for budget, chosen in our_choices(model, contest, options.budgets).items():
                add(tool, budget, chosen)
        elif tool not in options.without and os.environ.get(PEERS[tool][0]):
            try:
                choices = peer_choices(tool, model, contest, options.budgets, scratch, options.timeout)
            except RuntimeError as error:
                for budget in options.budgets:
                    add(tool, budget, None, str(error))
                continue
            for budget in options.budgets:
                add(tool, budget, choices.get(budget), "" if budget in choices else NO_CHOICE)
    for budget in options.budgets:
        for spelled, chosen in uniform_choices(model, contest, budget, linears):
            cell = known.get((model.name, name, spelled, budget, windows))
            if cell is None:
                add(spelled, budget, chosen)
            else:
                found.append(cell)
    return found


# ------------------------------------------------------------------------------------------------------- report


def report(cells: list[Cell]) -> Iterator[str]:
    """For each contest a table of KL by model, tool and budget; then what is worse than another."""
    budgets = sorted({cell.budget for cell in cells})
    for name in dict.fromkeys(cell.contest for cell in cells):
        mine = [cell for cell in cells if cell.contest == name]
        yield f"\n{', '.join(CONTESTS[name].candidates)}: KL to the source, 0.001 nats a token (and mean bits)\n"
        yield "| at most | " + " | ".join(f"{budget:g} bits" for budget in budgets) + " |"
        yield "|---" * (len(budgets) + 1) + "|"
        for model in dict.fromkeys(cell.model for cell in mine):
            for tool in (OURS, *PEERS):
                own = {cell.budget: cell for cell in mine if (cell.model, cell.tool) == (model, tool)}
                if own:
                    yield f"| {model}, {tool} | " + " | ".join(_shown(own.get(budget)) for budget in budgets) + " |"
            best = [_best(uniform(mine, model, budget)) for budget in budgets]
            yield f"| {model}, best uniform | " + " | ".join(_shown(cell, named=True) for cell in best) + " |"
    yield ""
    yield from _verdict(cells)


def uniform(cells: list[Cell], model: str, budget: float) -> list[Cell]:
    return [cell for cell in cells if (cell.model, cell.budget) == (model, budget) and cell.tool not in (OURS, *PEERS)]


def _best(cells: list[Cell]) -> Cell | None:
    return min((cell for cell in cells if cell.figures), key=lambda cell: cell.kl, default=None)


def _shown(cell: Cell | None, *, named: bool = False) -> str:
    if cell is None:
        return ""
    if cell.figures is None:
        return "none" if cell.failed == NO_CHOICE else "failed"
    which = f"{cell.tool}, " if named else ""
    return f"{1e3 * cell.figures.kl:.2f} +- {1e3 * cell.figures.kl_error:.2f} ({which}{cell.bits:.2f})"


def _verdict(cells: list[Cell]) -> Iterator[str]:
    """Says where ours is above another by more than its standard error."""
    found = 0
    for mine in (cell for cell in cells if cell.tool == OURS and cell.figures is not None):
        others = [
            cell for cell in cells
            if (cell.model, cell.contest, cell.budget) == (mine.model, mine.contest, mine.budget)
            and cell.tool != OURS and cell.figures is not None
        ]  # fmt: skip
        assert mine.figures is not None
        for other in others:
            if mine.kl > other.kl + mine.figures.kl_error:
                found += 1
                yield (
                    f"WORSE: {mine.model}, {mine.contest}, {mine.budget:g} bits: {mine.kl / other.kl:.2f} of the KL of "
                    f"{other.tool}"
                )
    if not found:
        yield f"{OURS} is nowhere above another choice or format by more than its standard error."


# ------------------------------------------------------------------------------------------------------ running


def models(options: argparse.Namespace, scratch: Path) -> Iterator[Model]:
    cache = options.cache or Path.home() / ".cache" / "modelexport" / "yardsticks"
    for name in options.models:
        trained = name not in ("demo", "hard")
        directory = source = trained_model(name, cache) if trained else demo_model_path()
        make = OwnText if trained else Reference
        samples = write_samples(scratch / f"{name}.jsonl", demo_samples(source, SAMPLES, LENGTH))
        if name == "hard":
            directory = make_hard(source, scratch / name)
        checkpoint = experts_apart(open_model(directory, None))
        yield Model(name, directory, samples, checkpoint, functools.partial(make, source, options.windows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["demo", "hard"], choices=MODELS)
    parser.add_argument("--contests", nargs="+", default=list(CONTESTS), choices=list(CONTESTS))
    parser.add_argument("--budgets", nargs="+", type=float, default=list(BUDGETS), metavar="BITS")
    parser.add_argument("--windows", type=int, help="held-out windows to judge by (default: all 197)")
    parser.add_argument("--without", nargs="+", default=[], choices=list(PEERS), help="leave these peers out")
    parser.add_argument("--cache", type=Path, help="of trained models (default: ~/.cache/modelexport/yardsticks)")
    parser.add_argument("--scratch", type=Path, help="where targets go (default: a temporary directory)")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds after which a peer is ended")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every cell here, and take what is there")
    add_write_option(parser)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (REPOSITORY, os.environ.get("PYTHONPATH"))))
    for tool, (variable, *_) in PEERS.items():
        if not os.environ.get(variable):
            print(f"{tool} is left out: {variable} names no interpreter", flush=True)
    become_reaper()
    known = {}
    if options.json and options.json.exists():
        for entry in json.loads(options.json.read_text()):
            cell = Cell(**{**entry, "figures": Figures(**entry["figures"]) if entry["figures"] else None})
            known[cell.key] = cell
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="bench_autoquant.", dir=options.scratch) as temporary:
        for model in models(options, Path(temporary)):
            model.judged = {
                cell.quant: cell.figures
                for cell in known.values()
                if (cell.model, cell.windows) == (model.name, options.windows or 0) and cell.figures
            }
            for name in options.contests:
                cells += cells_of(model, name, options, Path(temporary), known)
    with written(__file__, options.write):
        print("\n".join(report(cells)))
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
