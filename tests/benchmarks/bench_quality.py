"""Every algorithm in every number format: mean KL and loss against the source on held-out text, as markdown tables.

    python tests/benchmarks/bench_quality.py                   everything, all 197 windows
    python tests/benchmarks/bench_quality.py --quick           32 windows
    python tests/benchmarks/bench_quality.py --models hard --formats int8-static int4 --algorithms rtn awq smoothquant
    python tests/benchmarks/bench_quality.py --json FILE       what FILE has already is not made again (delete it when
                                                               the code has changed)

Models: the demo model; the same made hard (``tests/helpers/hard_model.py``: the same function, with the activation
outliers that large models have); and two that ``recipes/train_demo.py`` makes of Python's own library, once, in half an
hour each, kept in --cache: a mixture of 16 experts and a shared one (Qwen2-MoE), and one with normed queries and keys
and sliding windows (Gemma 3). Each is calibrated and judged on texts of its own.

Each cell is an export of 64 x 256 calibration tokens, in this process, decoded into float32 again and held against the
source, whose log-probabilities are computed once.

int3 has no checkpoint format. Its integers, -4..3, are among int4's: what is exported is an int4 checkpoint of a format
that rounds to those only (``three_bits``).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from torch import Tensor

from modelexport.assets import demo_model_path
from modelexport.errors import ModelExportError
from modelexport.exporting import export
from modelexport.quantization.formats import int4
from modelexport.quantization.formats.base import Grid
from modelexport.quantization.kernels import reference
from tests.benchmarks._fake_formats import Int3Format
from tests.benchmarks._measuring import add_write_option, written
from tests.benchmarks._quality import Figures, OwnText, Reference, demo_samples, trained_model, write_samples
from tests.helpers.hard_model import make_hard

SAMPLES, LENGTH = 64, 256
MODELS = ("demo", "hard", "moe", "sliding")
ALGORITHMS: dict[str, dict[str, Any]] = {
    "rtn": {},
    "mse": {},
    "smoothquant": {},
    "awq": {},
    "gptq": {},
    "gptq, asymmetry 0.5": {"algorithm": "gptq", "gptq_asymmetry": 0.5},
    "autoround": {},
    "rotation+rtn": {},
    "rotation+gptq": {},
    "smoothquant+gptq": {},
    "awq+gptq": {},
}
"""Name -> settings, of those that are more than the name."""
FORMATS: dict[str, dict[str, Any]] = {
    "int4 g128": {"quant": "int4", "group_size": 128},
    "int4 per channel": {"quant": "int4", "group_size": -1},
    "int3 g128": {"quant": "int4", "group_size": 128},
    "nvfp4": {"quant": "nvfp4"},
    "nvfp4-wo": {"quant": "nvfp4-wo"},
    "int8-static": {"quant": "int8-static"},
    "fp8-static": {"quant": "fp8-static"},
}


# ------------------------------------------------------------------------------------------------------- int3


class ThreeBitsInFour(int4.Int4Format):
    """The numbers -4..3 and the scales of :class:`Int3Format`, stored as int4 stores its own."""

    description: ClassVar[str] = "W3A16 in the layout of int4; for comparison only"
    limit: ClassVar[float] = 3.5

    def _fill(self, weight: Tensor, amax: Tensor | None, out: Mapping[str, Tensor]) -> int:
        own = Int3Format(group_size=self.group_size, observer=self.observer, scale_dtype=self.scale_dtype)
        numbers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        bad = own._fill(weight, amax, {"weight": numbers, "weight_scale": out["weight_scale"]})
        if bad < 0:
            out["weight_packed"].copy_(reference.pack(numbers, self.weight_bits))
        return bad

    def grid(self, tensors: Mapping[str, Tensor]) -> Grid:
        return replace(super().grid(tensors), low=-4.0, high=3.0)


@contextmanager
def three_bits() -> Iterator[None]:
    """Exports of this process to "int4" round to three bits."""
    before, int4.FORMAT = int4.FORMAT, ThreeBitsInFour
    try:
        yield
    finally:
        int4.FORMAT = before


# ------------------------------------------------------------------------------------------------------ cells


@dataclass
class Cell:
    """One export: how far it is from the source, or why there is none; seconds of the export."""

    model: str
    number_format: str
    algorithm: str
    windows: int
    figures: Figures | None
    refused: str = ""
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str, str, int]:
        return (self.model, self.number_format, self.algorithm, self.windows)


def measured(
    key: tuple[str, str, str], directory: Path, samples: Path, out: Path, yardstick: OwnText | Reference
) -> Cell:
    """Export a model, and judge what came of it."""
    _, number_format, algorithm = key
    began, windows = time.perf_counter(), yardstick.count
    settings: dict[str, Any] = {
        "model": str(directory),
        "out": str(out),
        "algorithm": algorithm,
        "calib": str(samples),
        "calib_samples": SAMPLES,
        "calib_length": LENGTH,
        "evaluate": False,
        "quiet": True,
        "overwrite": True,
        **ALGORITHMS[algorithm],
        **FORMATS[number_format],
    }
    try:
        with three_bits() if number_format.startswith("int3") else nullcontext():
            export(**settings)
    except ModelExportError as error:
        return Cell(*key, windows, None, refused=" ".join(str(error).split()))
    seconds = time.perf_counter() - began
    return Cell(*key, windows, yardstick.judge_checkpoint(out), seconds=seconds)


def read_cells(path: Path | None) -> dict[tuple[str, str, str, int], Cell]:
    """What an earlier run has written."""
    if path is None or not path.exists():
        return {}
    found = [
        Cell(**{**cell, "figures": Figures(**cell["figures"]) if cell["figures"] else None})
        for cell in json.loads(path.read_text())
    ]
    return {cell.key: cell for cell in found if cell.figures is not None}


# ------------------------------------------------------------------------------------------------------ report


def report(cells: list[Cell]) -> Iterator[str]:
    """For each model a table of KL and one of loss; what is not below rounding to nearest; one table of all models."""
    for model in dict.fromkeys(cell.model for cell in cells):
        own = {(cell.number_format, cell.algorithm): cell for cell in cells if cell.model == model}
        windows = next(iter(own.values())).windows
        yield f"\n{model}: mean KL to the source, nats a token (0.001), {windows} windows of 256 tokens\n"
        yield from _markdown(own, lambda found: f"{1e3 * found.kl:.2f} +- {1e3 * found.kl_error:.2f}")
        yield f"\n{model}: loss minus the source's, nats a token (0.001)\n"
        yield from _markdown(own, lambda found: f"{1e3 * found.loss:+.1f} +- {1e3 * found.loss_error:.1f}")
        yield ""
        yield from _verdict(own)


def together(cells: list[Cell]) -> Iterator[str]:
    """One table of all models: KL as a part of that of rounding to nearest, by formats and algorithms."""
    found = {(cell.model, cell.number_format, cell.algorithm): cell.figures for cell in cells}
    models = list(dict.fromkeys(cell.model for cell in cells))
    yield "\nKL as a part of rtn's\n"
    yield "| | " + " | ".join(models) + " |"
    yield "|---" * (len(models) + 1) + "|"
    for number_format, algorithm in dict.fromkeys((cell.number_format, cell.algorithm) for cell in cells):
        if algorithm == "rtn":
            continue
        shown = []
        for model in models:
            nearest, own = (found.get((model, number_format, name)) for name in ("rtn", algorithm))
            shown.append(f"{own.kl / nearest.kl:.2f}" if own and nearest else "")
        yield f"| {number_format}, {algorithm} | " + " | ".join(shown) + " |"


def _markdown(cells: Mapping[tuple[str, str], Cell], text: Any) -> Iterator[str]:
    formats = list(dict.fromkeys(number_format for number_format, _ in cells))
    yield "| | " + " | ".join(formats) + " |"
    yield "|---" * (len(formats) + 1) + "|"
    for algorithm in dict.fromkeys(algorithm for _, algorithm in cells):
        row = [cells.get((number_format, algorithm)) for number_format in formats]
        shown = ["" if cell is None else text(cell.figures) if cell.figures else "refused" for cell in row]
        yield f"| {algorithm} | " + " | ".join(shown) + " |"


def _verdict(cells: Mapping[tuple[str, str], Cell]) -> Iterator[str]:
    for (number_format, algorithm), cell in cells.items():
        if cell.refused:
            yield f"{number_format}, {algorithm}: refused: {cell.refused}"
            continue
        nearest = cells.get((number_format, "rtn"))
        if algorithm == "rtn" or nearest is None or nearest.figures is None or cell.figures is None:
            continue
        ratio = cell.figures.kl / nearest.figures.kl
        if ratio >= 1:
            yield f"{number_format}, {algorithm}: KL is {ratio:.2f} of rtn's: NOT BELOW"
        elif algorithm == "gptq":
            yield f"{number_format}, gptq: KL is {ratio:.2f} of rtn's"


# ------------------------------------------------------------------------------------------------------- running


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="32 windows of held-out text rather than all 197")
    parser.add_argument("--windows", type=int, help="so many windows")
    parser.add_argument("--cache", type=Path, help="of trained models (default: ~/.cache/modelexport/yardsticks)")
    parser.add_argument("--scratch", type=Path, help="where targets go (default: a temporary directory)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every cell here, and take what is there")
    add_write_option(parser)
    options = parser.parse_args()
    known, cells = read_cells(options.json), []
    with tempfile.TemporaryDirectory(prefix="bench_quality.", dir=options.scratch) as temporary:
        scratch = Path(temporary)
        cache = options.cache or Path.home() / ".cache" / "modelexport" / "yardsticks"
        yardsticks: dict[Path, OwnText | Reference] = {}
        for model in options.models:
            trained = model not in ("demo", "hard")
            source = trained_model(model, cache) if trained else demo_model_path()
            if source not in yardsticks:  # the hard model's function is the demo's: one for both
                count = options.windows or (32 if options.quick else None)
                yardsticks = {source: OwnText(source, count) if trained else Reference(source, count)}
            yardstick = yardsticks[source]
            windows = yardstick.count
            samples = write_samples(scratch / f"{model}.jsonl", demo_samples(source, SAMPLES, LENGTH))
            directory = source
            if model == "hard":
                directory = make_hard(source, scratch / "hard")
                print(f"hard, not quantised: KL {yardstick.judge_checkpoint(directory).kl_text()}", flush=True)
            for number_format in options.formats:
                for algorithm in options.algorithms:
                    key = (model, number_format, algorithm)
                    cell = known.get((*key, windows))
                    if cell is None:
                        cell = measured(key, directory, samples, scratch / "out", yardstick)
                        shown = cell.figures.kl_text() if cell.figures else cell.refused
                        print(f"{', '.join(key)}: {shown}, {cell.seconds:.1f} s", file=sys.stderr, flush=True)
                    cells.append(cell)
                    known[cell.key] = cell
                    if options.json:
                        options.json.write_text(json.dumps([asdict(c) for c in known.values()], indent=1) + "\n")
    with written(__file__, options.write):
        print("\n".join([*report(cells), *together(cells)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
