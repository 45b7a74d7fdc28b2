"""Errors of a checkpoint by layer and kind of module, and its outliers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from modelexport.models.modules import StoredModule

__all__ = [
    "MOST_ROWS",
    "OUTLIER_DB",
    "UNQUANTISED",
    "Cell",
    "ErrorGrid",
    "KindOutputError",
    "ModuleKinds",
    "cell_of",
    "make_grid",
    "outliers",
    "output_errors",
]

OUTLIER_DB = 3.0
"""A linear that is this much below the median of its kind is an outlier."""
MOST_ROWS = 60
SEVERAL = "several"
"""In place of a number format: modules that are shown together have different ones."""
UNQUANTISED = ("bf16", "fp16", "fp32", "fp64", "none", SEVERAL, "-")
_MOST_CELLS = 4000
_NARROW = 16  # layers of a heat map whose cells have room for their figures


@dataclass(frozen=True)
class Cell:
    """Figures of one kind of linear in one layer, or in a few consecutive ones.

    Attributes:
        worst, mean: the least and the mean, in dB; more is better.
        name: the linear with the worst.
    """

    worst: float
    mean: float
    count: int
    name: str


@dataclass(frozen=True)
class ErrorGrid:
    """A figure in dB for each layer and kind of linear.

    Attributes:
        layers: the first layer of each column; a column is ``together`` layers.
        rows: kind -> its cells, None where there is no figure.
        outside: linears that are in no layer -> their figure.
        hidden: kinds that are not shown, since there are too many.
    """

    layers: list[int]
    together: int
    rows: dict[str, list[Cell | None]]
    outside: dict[str, float]
    hidden: int = 0

    @property
    def is_narrow(self) -> bool:
        """True if a heat map has room for a figure in each cell."""
        return len(self.layers) <= _NARROW

    @property
    def labelled_every(self) -> int:
        """Distance of the columns that a heat map has room to label."""
        if self.is_narrow:
            return 1
        return next(n for n in (2, 5, 10, 20, 50, 100, 1000, 1 << 30) if len(self.layers) <= n * 14)

    @property
    def has_many_modules_in_a_cell(self) -> bool:
        """True if a cell stands for several linears, as of experts."""
        return any(cell is not None and cell.count > 1 for cells in self.rows.values() for cell in cells)

    def total(self, kind: str) -> Cell:
        """Returns the figures of a kind over all layers."""
        cells = [cell for cell in self.rows[kind] if cell is not None]
        worst, count = min(cells, key=lambda cell: cell.worst), sum(cell.count for cell in cells)
        return Cell(worst.worst, math.fsum(cell.mean * cell.count for cell in cells) / count, count, worst.name)


@dataclass(frozen=True)
class KindOutputError:
    """Mean squared error of one kind of linear's outputs on the calibration samples, relative to their mean square.

    Attributes:
        before, after: means over its linears, rounded to nearest and as written.
        worst, worst_after: the linear with the largest error as written, and that error.
    """

    name: str
    count: int
    before: float
    after: float
    worst: str
    worst_after: float

    @property
    def gain_db(self) -> float:
        """Error before over error after, in dB."""
        return 10 * math.log10(self.before / self.after)


@dataclass(frozen=True)
class FormatGrid:
    """The number format of each kind of linear in each layer.

    Attributes:
        layers: their numbers.
        rows: kind -> for each layer its format as ``--quant`` spells it; :data:`SEVERAL` of experts that differ, ``""``
            where a layer has none of the kind.
    """

    layers: list[int]
    rows: dict[str, list[str]]

    @property
    def formats(self) -> list[str]:
        """The formats, in the order in which they appear."""
        return list(dict.fromkeys(name for row in self.rows.values() for name in row if name))


class ModuleKinds:
    """Modules by kind: their path within a layer, with the stack where there are several.

    Attributes:
        groups: name of the kind -> its modules.
    """

    def __init__(self, modules: Sequence[StoredModule], order: Sequence[str] = ()) -> None:
        """``order``: kinds that come first, in that order; the others follow in the checkpoint's."""
        self._stacks = {module.stack for module in modules if module.stack}
        self.modules = {module.name: module for module in modules}
        found: dict[str, list[StoredModule]] = {name: [] for name in order}
        for module in modules:
            found.setdefault(self.of(module), []).append(module)
        self.groups = {name: group for name, group in found.items() if group}

    def of(self, module: StoredModule) -> str:
        """Returns the name of a module's kind, as ``modelexport inspect`` prints it."""
        return f"{module.stack}.*.{module.path}" if module.stack and len(self._stacks) > 1 else module.path

    def of_name(self, name: str) -> str:
        """Returns the kind of a module or tensor by its name; the name itself where it is not in the checkpoint."""
        module = self.modules.get(name) or self.modules.get(name.rpartition(".")[0])
        return name if module is None else self.of(module)


def make_grid(figures: Mapping[str, float], kinds: ModuleKinds, *, most: int = _MOST_CELLS) -> ErrorGrid | None:
    """Returns figures by layer and kind; of more than ``most`` cells, consecutive layers are taken together."""
    outside: dict[str, float] = {}
    found: dict[str, dict[int, list[tuple[float, str]]]] = {}
    for kind, group in kinds.groups.items():
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
    return ErrorGrid([column[0] for column in columns], together, rows, outside, len(found) - len(shown))


def format_grid(chosen: Mapping[str, str], kinds: ModuleKinds) -> FormatGrid:
    """Returns number formats by layer and kind; ``chosen``: linear -> its format."""
    found: dict[str, dict[int, set[str]]] = {}
    for kind, group in kinds.groups.items():
        for module in group:
            if module.name in chosen and module.index is not None:
                found.setdefault(kind, {}).setdefault(module.index, set()).add(chosen[module.name])
    numbers = sorted({number for row in found.values() for number in row})[: _MOST_CELLS // MOST_ROWS]

    def of(names: set[str]) -> str:
        return SEVERAL if len(names) > 1 else next(iter(names), "")

    shown = list(found.items())[:MOST_ROWS]
    return FormatGrid(numbers, {kind: [of(row.get(number, set())) for number in numbers] for kind, row in shown})


def cell_of(figures: Sequence[tuple[float, str]]) -> Cell | None:
    """Returns the worst and the mean of figures, each with its linear's name; None where there are none."""
    if not figures:
        return None
    worst, name = min(figures)
    return Cell(worst, math.fsum(value for value, _ in figures) / len(figures), len(figures), name)


def outliers(figures: Mapping[str, float], kinds: ModuleKinds) -> list[str]:
    """Returns a line for each linear far below the median of its kind and number format, the worst first."""
    found = []
    for group in kinds.groups.values():
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


def output_errors(both: Mapping[str, tuple[float, float]], kinds: ModuleKinds) -> list[KindOutputError]:
    """Returns the errors of each kind; ``both``: linear -> its outputs' error rounded to nearest, and as written."""
    rows = []
    for name, group in kinds.groups.items():
        own = [(both[module.name], module.name) for module in group if module.name in both]
        if own:
            before, after = (math.fsum(pair[side] for pair, _ in own) / len(own) for side in (0, 1))
            worst_after, worst = max((pair[1], full) for pair, full in own)
            rows.append(KindOutputError(name, len(own), before, after, worst, worst_after))
    return rows[:MOST_ROWS]
