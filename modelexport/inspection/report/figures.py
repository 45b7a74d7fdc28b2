"""A checkpoint's figures by layer and projection: what is far off, and where."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from modelexport.models.modules import StoredModule

__all__ = ["OUTLIER_DB", "Cell", "Grid", "Naming", "OutputError", "cell_of", "make_grid", "outliers", "output_errors"]

OUTLIER_DB = 3.0
"""A linear that is this much below the median of its kind is named."""
MOST_CELLS = 4000
MOST_ROWS = 60


@dataclass(frozen=True)
class Cell:
    """Figures of one kind of linear in one layer (or in a few consecutive ones): of many experts, their worst and mean.

    Attributes:
        worst, mean: the least and the mean, in dB; more is better.
        name: the linear with the worst.
    """

    worst: float
    mean: float
    count: int
    name: str


@dataclass(frozen=True)
class Grid:
    """A figure in dB for each layer and projection.

    Attributes:
        layers: the first layer of each column; a column is ``together`` layers.
        rows: projection -> its cells, None where there is no figure.
        outside: linears that are in no layer -> their figure.
        hidden: projections that are not shown, since there are too many.
    """

    layers: list[int]
    together: int
    rows: dict[str, list[Cell | None]]
    outside: dict[str, float]
    hidden: int = 0


@dataclass(frozen=True)
class OutputError:
    """Mean squared error of one kind of linear's outputs on the calibration samples, as a part of their own square.

    Attributes:
        before, after: means over its linears, rounded to nearest and as written.
        worst, worst_after: the linear with the largest error as written, and that.
    """

    name: str
    count: int
    before: float
    after: float
    worst: str
    worst_after: float


class Naming:
    """What modules are called together: by their path within a layer, with the stack where there are several.

    Attributes:
        groups: that name -> its modules.
    """

    def __init__(self, modules: Sequence[StoredModule], order: Sequence[str] = ()) -> None:
        """``order``: names that come first, in that order; the others follow in the checkpoint's."""
        self._stacks = {module.stack for module in modules if module.stack}
        self.modules = {module.name: module for module in modules}
        found: dict[str, list[StoredModule]] = {name: [] for name in order}
        for module in modules:
            found.setdefault(self.of(module), []).append(module)
        self.groups = {name: group for name, group in found.items() if group}

    def of(self, module: StoredModule) -> str:
        """The name of a module's kind, as ``modelexport inspect`` has it."""
        return f"{module.stack}.*.{module.path}" if module.stack and len(self._stacks) > 1 else module.path

    def of_name(self, name: str) -> str:
        """The same of a module, or a tensor, that may not be there."""
        module = self.modules.get(name) or self.modules.get(name.rpartition(".")[0])
        return name if module is None else self.of(module)


def make_grid(figures: Mapping[str, float], naming: Naming, *, most: int = MOST_CELLS) -> Grid | None:
    """Figures by layer and projection; of more than ``most`` cells, consecutive layers are taken together."""
    outside: dict[str, float] = {}
    found: dict[str, dict[int, list[tuple[float, str]]]] = {}
    for kind, group in naming.groups.items():
        for module in group:
            figure = figures.get(module.name)
            if figure is not None and module.index is None:
                outside[module.name] = figure
            elif figure is not None and module.index is not None:
                found.setdefault(kind, {}).setdefault(module.index, []).append((figure, module.name))
    if not found and not outside:
        return None
    shown = dict(list(found.items())[:MOST_ROWS])
    numbers = sorted({number for row in shown.values() for number in row})
    together = max(1, math.ceil(len(numbers) * len(shown) / most))
    columns = [numbers[start : start + together] for start in range(0, len(numbers), together)]
    rows = {
        name: [cell_of([figure for number in column for figure in row.get(number, ())]) for column in columns]
        for name, row in shown.items()
    }
    return Grid([column[0] for column in columns], together, rows, outside, len(found) - len(shown))


def cell_of(figures: Sequence[tuple[float, str]]) -> Cell | None:
    """Of those of one kind, each with its linear's name; None where there are none."""
    if not figures:
        return None
    worst, name = min(figures)
    return Cell(worst, math.fsum(value for value, _ in figures) / len(figures), len(figures), name)


def outliers(figures: Mapping[str, float], naming: Naming) -> list[str]:
    """Linears that are far below the median of their kind and number format, the worst first, in words."""
    found = []
    for group in naming.groups.values():
        alike: dict[str, list[tuple[float, str]]] = {}
        for module in group:
            if module.name in figures:
                alike.setdefault(module.stored.number_format, []).append((figures[module.name], module.name))
        for own in map(sorted, alike.values()):
            median = own[len(own) // 2][0]
            found += [(value, name, median) for value, name in own if value <= median - OUTLIER_DB]
    return [
        f"{name}: SQNR {value:.2f} dB, {median - value:.1f} dB below the median of its kind"
        for value, name, median in sorted(found)
    ]


def output_errors(both: Mapping[str, tuple[float, float]], naming: Naming) -> list[OutputError]:
    """One for each kind; ``both``: linear -> its outputs' error rounded to nearest, and as written."""
    rows = []
    for name, group in naming.groups.items():
        own = [(both[module.name], module.name) for module in group if module.name in both]
        if own:
            before, after = (math.fsum(pair[side] for pair, _ in own) / len(own) for side in (0, 1))
            worst_after, worst = max((pair[1], full) for pair, full in own)
            rows.append(OutputError(name, len(own), before, after, worst, worst_after))
    return rows[:MOST_ROWS]
