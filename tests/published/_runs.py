"""The tool run over one published layout: what each command comes to, in its own words where it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelexport.errors import ModelExportError
from modelexport.exporting import convert, export
from modelexport.inspection.evaluate.text import evaluate_on_text
from modelexport.inspection.inspect import inspect_checkpoint
from modelexport.inspection.verify import verify_checkpoint
from modelexport.resharding import reshard
from tests.published._models import Layout
from tests.published._writing import write

STEPS = ("inspect", "plan", "none", "int4", "fp8", "nvfp4", "gptq", "eval", "reshard", "convert")
DONE = "yes"
NOT_DONE = "-"


@dataclass
class Outcome:
    """What came of a layout.

    Attributes:
        cells: step -> ``yes``, what refused it, or ``-`` where there was nothing to do.
        quantised: how many weights int4 quantised, and their part of all.
        real: bits per weight of int4 at the real size, and how many weights these are; ``-`` where one is unknown.
        engine: of exports by number formats, how many parameters vLLM fills, or what it says instead; empty if it was
            not run.
    """

    cells: dict[str, str] = field(default_factory=dict)
    quantised: str = "-"
    real: str = "-"
    engine: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """True where nothing refused."""
        return all(cell in (DONE, NOT_DONE) for cell in self.cells.values())

    @contextmanager
    def step(self, name: str, root: Path) -> Iterator[None]:
        """Runs a step: what it refuses is noted, what it fails in is raised."""
        self.cells[name] = DONE
        try:
            yield
        except ModelExportError as error:
            self.cells[name] = shortened(str(error), root)


def shortened(message: str, root: Path) -> str:
    """A message without the paths of this run, in one line."""
    message = " ".join(message.replace(f"{root}/", "").split())
    return re.sub(r"^(source|out\S*): ", "", message)


def examine(layout: Layout, root: Path, steps: tuple[str, ...] = STEPS) -> Outcome:
    """Runs the steps over a layout."""
    source, outcome = write(layout, root / "source"), Outcome()
    text = root / "tokens.jsonl"
    lines = ({"input_ids": [(7 * i + j) % 199 + 3 for j in range(24)]} for i in range(2))
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    calibration = {"calib": str(text), "calib_samples": 2, "calib_length": 16}

    def exported(quant: str, name: str = "", **settings: Any) -> Path:
        out = root / f"out-{name or quant}"
        result = export(model=str(source), quant=quant, out=str(out), quiet=True, **settings)
        if quant == "int4":
            rows = [row for row in result.rows if row.number_format == quant]
            part = sum(row.weights for row in rows) / sum(row.weights for row in result.rows)
            outcome.quantised = f"{sum(row.count for row in rows)} ({100 * part:.0f} %)"
        found = verify_checkpoint(out, source)
        if not found.ok:
            raise ModelExportError(f"verify: {found.problems[0]}")
        return out

    todo: dict[str, Callable[[], Any]] = {
        "inspect": lambda: inspect_checkpoint(source),
        "plan": lambda: export(model=str(source), quant="int4", dry_run=True, quiet=True),
        "none": lambda: exported("none"),
        "int4": lambda: exported("int4"),
        "fp8": lambda: exported("fp8"),
        "nvfp4": lambda: exported("nvfp4-wo", "nvfp4"),
        "gptq": lambda: exported("int4", "gptq", algorithm="gptq", **calibration),
        "eval": lambda: evaluate_on_text(source, None, text, windows=2, window=16),
        "reshard": lambda: _there_and_back(source, root),
        "convert": lambda: _converted(source, root, layout),
    }
    for name in steps:
        with outcome.step(name, root):
            if todo[name]() is None:
                outcome.cells[name] = NOT_DONE
    return outcome


def _there_and_back(source: Path, root: Path) -> Path:
    """The source for two ranks, and for one again: the same tensors."""
    reshard(checkpoint=str(source), tp=2, out=str(root / "tp2"), quiet=True)
    reshard(checkpoint=str(root / "tp2"), out=str(root / "tp1"), quiet=True)
    reshard(checkpoint=str(source), out=str(root / "once"), quiet=True)
    weights = [(root / name / "model.safetensors").read_bytes() for name in ("tp1", "once")]
    assert weights[0] == weights[1]
    return root / "tp1"


def _converted(source: Path, root: Path, layout: Layout) -> Path | None:
    """A quantised source by compressed-tensors, or one that we quantised."""
    own = root / "out-int4"
    if not own.exists():
        return None
    return root / convert(str(own), format="gptq", out=str(root / "converted"), quiet=True).format
