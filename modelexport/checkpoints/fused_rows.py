"""The row order of a fused query/key/value projection that trainers keep: group by group, as Megatron-LM does.

For each key/value head in turn: the rows of the query heads that attend to it, then its k rows, then its v rows. So a
tensor-parallel rank's share is one block of rows for any number of ranks that divides the key/value heads.
"""

from __future__ import annotations

from collections.abc import Iterable

from modelexport.sharding.rules import CutRange, TensorRule

Span = tuple[int, int, int]
"""Rows ``[start, stop)`` of a tensor and the row of the fused one at which they begin."""


Heads = tuple[int, int, int]
"""Query heads, key/value heads, features of a head."""


def heads_of(rules: Iterable[TensorRule]) -> Heads:
    """The heads of a model, all layers alike; zeros where none of its tensors has any."""
    parts = {part.role: part for rule in rules for part in rule.parts if part.heads}
    q, k = parts.get("attention.q"), parts.get("attention.k")
    return (q.heads, k.heads, q.size // q.heads) if q and k else (0, 0, 0)


def row_spans(rule: TensorRule, heads: Heads) -> tuple[int, list[Span]]:
    """The rows in the fused tensor of a query, key or value tensor, or of all three one after the other.

    Returns:
        (rows of the fused tensor, a span for each run of rows).
    """
    spans = [span for part in rule.parts for span in part_spans(part, part.start, part.stop, heads)]
    query, groups, size = heads
    return (query + 2 * groups) * size, spans


def part_spans(part: CutRange, start: int, stop: int, heads: Heads) -> list[Span]:
    """The same for rows ``[start, stop)`` of one part (a tensor, or q, k or v of a fused one)."""
    query, groups, size = heads
    each = query // groups
    block = (each + 2) * size
    run, first = {"attention.q": (each, 0), "attention.k": (1, each), "attention.v": (1, each + 1)}[part.role]
    run *= size
    spans = []
    at = start
    while at < stop:
        group, within = divmod(at - part.start, run)
        end = min(stop, part.start + (group + 1) * run)
        spans.append((at, end, group * block + first * size + within))
        at = end
    return spans
