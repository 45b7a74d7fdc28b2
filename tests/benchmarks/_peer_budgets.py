"""What the scripts that ask peers for number formats share: their options, and budgets by one count of bits.

It runs in the peers' environments: nothing of ours is imported.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

STEPS, FIRST, LAST = 32, 8, -24
"""A peer is offered budgets from 8/32 above to 24/32 of a bit below the one that counts, the largest first."""

Choose = Callable[[float], "dict[str, str] | None"]
"""A budget, as the peer counts -> linear -> candidate; None where the peer refuses the budget."""


def options_of(description: str | None, candidates: Collection[str]) -> argparse.ArgumentParser:
    """Returns a parser of what all these scripts take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--samples", type=Path, required=True, help="JSON lines of input_ids, all of one length")
    parser.add_argument("--candidates", nargs="+", choices=list(candidates), required=True)
    parser.add_argument("--problem", type=Path, required=True, help="JSON: groups of linears, sizes, budgets")
    parser.add_argument("--report", type=Path, required=True)
    return parser


def samples_of(options: argparse.Namespace) -> list[list[int]]:
    return [json.loads(line)["input_ids"] for line in options.samples.read_text().splitlines()]


def answer(options: argparse.Namespace, problem: dict[str, Any], choose: Choose, versions: dict[str, str]) -> None:
    """Writes, for each budget, the choice for the largest budget of the peer's with which it is within ours.

    Args:
        problem: ``groups``: lists of linears that have one format; ``sizes``: linear -> candidate -> bits of the whole
            linear, scales included; ``weights``: in all; ``budgets``: bits per weight.
    """
    choices = []
    for budget in problem["budgets"]:
        for step in range(FIRST, LAST - 1, -1):
            chosen = choose(budget + step / STEPS)
            if chosen is None:
                continue
            spent = sum(sizes[chosen.get(name, "none")] for name, sizes in problem["sizes"].items())
            if spent <= budget * problem["weights"] * (1 + 1e-9):
                choices.append({"budget": budget, "asked": budget + step / STEPS, "formats": chosen})
                break
    options.report.write_text(json.dumps({"versions": versions, "choices": choices}, indent=1) + "\n")
