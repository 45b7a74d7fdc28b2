"""autoquant: of the number formats allowed, each group of modules gets the one that serves the whole model best.

Given what every format would do to every group (see :mod:`~modelexport.quantization.sensitivity`) and how many bits it
takes, formats are chosen so that the errors' sum is least within a budget: the multiple-choice knapsack problem. It is
solved by lists of undominated totals, as Nemhauser and Ullmann (1969) do for the plain knapsack: group after group, of
all totals (bits, error) only those are kept that no other betters in both. Layers of a model being alike, there are few
of them, and the choice is exact; where there are more than :data:`STATES`, they are thinned out, the best of each
stretch of sizes staying, and it is exact but for that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

from modelexport.errors import PlanError, UsageError
from modelexport.quantization.algorithms.base import Algorithm, Kind
from modelexport.quantization.calibration.cut import general
from modelexport.settings import setting

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from modelexport.quantization.formats.base import NumberFormat

__all__ = ["ALGORITHM", "FRONT_POINTS", "STATES", "AutoQuant", "AutoQuantSettings", "choose", "front", "patterns"]

STATES = 1 << 14
"""Totals kept after each group."""
FRONT_POINTS = 64
"""Of the whole front, so many at most, spread over sizes."""


Group = TypeVar("Group", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class AutoQuantSettings:
    """The settings of :class:`AutoQuant`."""

    bits: float = setting(5.0, "bits per weight that the decoder's linears may take", metavar="B")
    candidates: str = setting("int4,fp8,none", "number formats to choose from", metavar="NAMES")

    def __post_init__(self) -> None:
        if not 0 < self.bits <= 32:
            raise UsageError(
                f"--autoquant-bits {self.bits:g}: a number above 0, at most 32, is needed, e.g. --autoquant-bits 5"
            )

    @property
    def candidates_flag(self) -> str:
        """The flag as it was given, for messages."""
        return f"--autoquant-candidates {self.candidates}"

    def number_formats(self, group_size: int | None) -> dict[str, NumberFormat]:
        """The candidates by how ``--quant`` spells them; ``group_size``: of those that name none.

        Raises:
            UsageError: one is unknown, or there are fewer than two.
        """
        from modelexport.quantization import formats

        found = {}
        for spelled in (name.strip() for name in self.candidates.split(",") if name.strip()):
            name, _, size = spelled.partition(":")
            if size and size != "-1" and not size.isdecimal():
                raise UsageError(f"{self.candidates_flag}: '{size}' is no group size; e.g. {name}:64")
            own = int(size) if size else group_size if formats.has_groups(name) else None
            found[spelled if size or own is None else f"{name}:{own}"] = formats.get(name, group_size=own)
        if len(found) < 2:
            raise UsageError(f"{self.candidates_flag}: at least two number formats are needed, e.g. int4,fp8,none")
        return found


class AutoQuant(Algorithm):
    """See the file: :func:`choose`."""

    name: ClassVar[str] = "autoquant"
    description: ClassVar[str] = "a number format for each group of modules, within a budget of bits per weight"
    kind: ClassVar[Kind] = "assign"
    Settings = AutoQuantSettings


ALGORITHM = AutoQuant


def choose(
    sensitivities: Mapping[Group, Mapping[str, float]],
    weights: Mapping[Group, int],
    bits: Mapping[Group, Mapping[str, float]],
    budget: float,
) -> dict[Group, str]:
    """A format for each group: the least sum of errors of all that are within the budget.

    Of equal errors the smaller size counts, then the format named first. The outcome depends on nothing but the
    arguments and their order.

    Args:
        sensitivities: group -> format -> error that it makes; what is not finite is not chosen. The formats named are
            those that the group can have.
        weights: group -> how many weights it has.
        bits: group -> format -> bits per weight, scales and all.
        budget: bits per weight, on average over all groups.

    Returns:
        group -> format, in the order of ``sensitivities``.

    Raises:
        PlanError: the smallest formats need more than the budget.
    """
    groups = list(sensitivities)
    tables = [_table(group, sensitivities[group], weights[group], bits[group]) for group in groups]
    total = sum(weights[group] for group in groups)
    least = sum(table[0].size for table in tables)
    if least > round(budget * total):
        raise PlanError(
            f"--autoquant-bits {budget:g}: the smallest of the candidates take {least / total:.3f} bits per weight: "
            f"give --autoquant-bits {math.ceil(least / total * 100) / 100:g} or more, or a smaller format in "
            "--autoquant-candidates"
        )
    picked = _picked(_solve(tables, round(budget * total)).steps)
    return {group: table[index].name for group, table, index in zip(groups, tables, picked, strict=True)}


def front(
    sensitivities: Mapping[Group, Mapping[str, float]],
    weights: Mapping[Group, int],
    bits: Mapping[Group, Mapping[str, float]],
) -> list[tuple[float, float]]:
    """The least sum of errors for every budget: the choices that no other betters in both size and error.

    Args:
        sensitivities, weights, bits: see :func:`choose`.

    Returns:
        ``(bits per weight, error)``, the smallest first; of more than :data:`FRONT_POINTS` those with the least error
        of each stretch of sizes, and the smallest.
    """
    import numpy as np

    tables = [_table(group, sensitivities[group], weights[group], bits[group]) for group in sensitivities]
    total = sum(weights[group] for group in sensitivities)
    totals = _solve(tables, sum(table[-1].size for table in tables))
    kept = _thinned(np.arange(len(totals.sizes)), totals.sizes, FRONT_POINTS - 1)
    shown = kept if kept[0] == 0 else np.concatenate([[0], kept])
    return [(float(totals.sizes[place]) / total, float(totals.errors[place])) for place in shown]


class _Row(NamedTuple):
    """A format that a group may have: what it takes, in bits, and the error that it makes."""

    name: str
    size: int
    error: float


def _table(group: Hashable, errors: Mapping[str, float], weights: int, bits: Mapping[str, float]) -> list[_Row]:
    """Of the formats those that no other betters, the smallest first."""
    found = [_Row(name, round(bits[name] * weights), error) for name, error in errors.items() if math.isfinite(error)]
    if not found:
        raise PlanError(f"autoquant: none of the candidates {', '.join(errors)} is of use to {group}")
    kept: list[_Row] = []
    for row in sorted(found, key=lambda row: (row.size, row.error)):
        if not kept or row.error < kept[-1].error:
            kept.append(row)
    return kept


class _Totals(NamedTuple):
    """Undominated totals over all groups, the smallest first, and for each group which row and which total before it
    they came from."""

    sizes: NDArray[np.int64]
    errors: NDArray[np.float64]
    steps: list[tuple[NDArray[np.intp], NDArray[np.intp]]]


def _solve(tables: Sequence[Sequence[_Row]], capacity: int) -> _Totals:
    """Returns the totals of ``capacity`` bits at most."""
    import numpy as np

    left = sum(table[0].size for table in tables)  # what the groups to come take at least
    sizes, errors = np.zeros(1, dtype=np.int64), np.zeros(1)
    steps: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []
    for table in tables:
        left -= table[0].size
        size = np.concatenate([sizes + row.size for row in table])
        error = np.concatenate([errors + row.error for row in table])
        order = np.lexsort((error, size))
        order = order[size[order] <= capacity - left]
        best_before = np.minimum.accumulate(np.concatenate([[np.inf], error[order]]))[:-1]
        order = _thinned(order[error[order] < best_before], size, STATES)
        steps.append(np.divmod(order, len(sizes)))
        sizes, errors = size[order], error[order]
    return _Totals(sizes, errors, steps)


def _picked(steps: Sequence[tuple[NDArray[np.intp], NDArray[np.intp]]]) -> list[int]:
    """Returns, for each table, the row of the largest total, which has the least error of the undominated ones."""
    state = -1
    picked = []
    for row_of, came_from in reversed(steps):
        picked.append(int(row_of[state]))
        state = int(came_from[state])
    return picked[::-1]


def _thinned(order: NDArray[np.intp], size: NDArray[np.int64], most: int) -> NDArray[np.intp]:
    """Undominated totals, ``most`` of them: of each stretch of sizes the one with the least error."""
    import numpy as np

    if len(order) <= most:
        return order
    ascending = size[order]
    stretch = (ascending - ascending[0]) * most // (ascending[-1] - ascending[0] + 1)
    return order[np.append(stretch[1:] != stretch[:-1], True)]


def patterns(choice: Mapping[str, str], layers: str) -> str:
    """``--quant`` for a format of each linear, short where layers agree.

    Of each of a layer's linears the most frequent format is said once, with ``*`` for the layer, after the layers that
    have another (the first pattern that fits counts). The experts of a layer are one ``*`` where they agree.

    Args:
        choice: linear, by its module's name -> format. Others are named by nothing, and stay as they are.
        layers: what the names of the decoder's layers begin with, e.g. ``model.layers``.
    """
    found: dict[str, dict[str, str]] = {}  # path within a layer -> layer -> format
    for name, chosen in choice.items():
        number, _, path = name.removeprefix(f"{layers}.").partition(".")
        found.setdefault(path, {})[number] = chosen
    rules = []
    for path, of_layer in _experts_together(found).items():
        frequent = Counter(of_layer.values()).most_common(1)[0][0]
        rules += [f"{layers}.{number}.{path}={chosen}" for number, chosen in of_layer.items() if chosen != frequent]
        rules.append(f"{layers}.*.{path}={frequent}")
    return ",".join(rules)


def _experts_together(found: Mapping[str, Mapping[str, str]]) -> dict[str, Mapping[str, str]]:
    """The same with ``*`` for the numbers of experts that have the same format in every layer."""
    siblings: dict[str, list[str]] = {}
    for path in found:
        siblings.setdefault(general(path), []).append(path)
    out: dict[str, Mapping[str, str]] = {}
    for together, paths in siblings.items():
        alike = all(found[path] == found[paths[0]] for path in paths)
        out.update({together: found[paths[0]]} if alike else {path: found[path] for path in paths})
    return out
