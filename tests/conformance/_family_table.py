"""docs/families.md: the table of what :mod:`tests.conformance._family_matrix` found, written and read again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from modelexport.models import derived
from tests.conformance._family_matrix import Outcome
from tests.helpers.tiny_models import NOT_MADE, causal_types

DOCUMENT = Path(__file__).parents[2] / "docs" / "families.md"
HEADER = ("type", "class", "family", "tp", "quantised", "stays, and why", "rank of 2 holds", "int8", "int4")
DECLARED, PLANNED, WHOLE = "declared", "derived", "derived, no plan"

# Number formats, what transformers says when it does not load them -> why, in the table's words.
_BY_EXPERT = (
    r"missing_keys.*(experts\.(gate_up|down)_proj|experts\.mlp\.w1|input_linear\.weight).*"
    r"unexpected_keys.*experts\.(mlp\.)?0\."
)
LIMITS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("int8", "int4"),
        _BY_EXPERT,
        "transformers has these experts of a layer in one tensor, in its files too, and does not read them one by one, "
        "as they are quantised",
    ),
    (
        ("int8", "int4"),
        r"Concatenate on tensors destined for \S*(conv1d|vision_tower\S*experts)",
        "transformers joins tensors as it loads them (the convolutions of q, k and v; the experts of a vision tower), "
        "and finds none of those that are not quantised once a checkpoint has a quantization_config",
    ),
    (
        ("int8",),
        rf"^(?!.*{_BY_EXPERT}).*experts\.(gate_up_proj|down_proj|up_proj|gate_proj)\b",
        "transformers stacks experts as it loads them, and does not decode int8 ones (int4 and FP8 ones it does)",
    ),
    (
        ("int8", "int4"),
        r"can only have one to many",
        "transformers takes fused linears apart as it loads them, and cannot once a checkpoint has a "
        "quantization_config, even where they are not quantised",
    ),
)

_ORDINARY = ("embedding", "head: ", "router: ")  # of these each model has some
_USUAL = ("q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down", "w1", "w3", "w2")


def limit_of(quant: str, answer: str) -> int:
    """The number of the limit, from 1, that an answer of ``no`` shows.

    Raises:
        AssertionError: it is none that is known.
    """
    for number, (quants, pattern, _) in enumerate(LIMITS, 1):
        if quant in quants and re.search(pattern, answer):
            return number
    raise AssertionError(f"{quant}: transformers refuses for a reason that is not known: {answer}")


def row_of(outcome: Outcome, how: str) -> str:
    """One line of the table."""
    answers = [loads(quant, outcome.loads[quant]) for quant in ("int8", "int4")]
    cells = (
        outcome.model_type,
        causal_types()[outcome.model_type],
        how,
        ", ".join(map(str, outcome.sizes)),
        shortened(outcome.quantised) or "nothing",
        stays(outcome.kept),
        f"{100 * outcome.share:.0f} %",
        *answers,
    )
    return f"| {' | '.join(cells)} |"


def loads(quant: str, answer: str) -> str:
    """Whether transformers loads it, as a cell."""
    return f"no ({limit_of(quant, answer)})" if answer.startswith("no") else answer


def shortened(names: Sequence[str]) -> str:
    """Names of linears as ``self_attn: q k v o; mlp: gate up down``."""
    places: dict[str, list[str]] = {}
    for name in names:
        inside = name.partition(".*.")[2] or name
        *place, leaf = [part for part in inside.split(".") if part != "*"]
        leaf = leaf if leaf == "c_proj" else re.sub(r"_(proj|lin|linear)$", "", leaf)
        leaves = places.setdefault(".".join(place), [])
        if leaf not in leaves:
            leaves.append(leaf)
    order = {leaf: number for number, leaf in enumerate(_USUAL)}
    told = {place: sorted(leaves, key=lambda leaf: order.get(leaf, len(order))) for place, leaves in places.items()}
    return "; ".join(f"{place}: {' '.join(leaves)}" if place else " ".join(leaves) for place, leaves in told.items())


def stays(kept: Mapping[str, str]) -> str:
    """What is not quantised beside embedding, head and routers, by reason."""
    plain = {name: [part for part in name.split(".") if part not in ("model", "*")] for name in kept}
    towers = {parts[0] for name, parts in plain.items() if _outside(kept[name]) and any(map(str.isdecimal, parts))}
    reasons: dict[str, dict[str, None]] = {}
    for name, why in kept.items():
        if not why.startswith(_ORDINARY):
            parts = [part for part in plain[name] if not part.isdecimal()]
            told = parts[0] if _outside(why) and parts[0] in towers else parts[-1]
            reasons.setdefault(why, {})[told] = None
    cells = []
    for why, found in reasons.items():
        names = list(found)
        cells.append(f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}: {why.partition(':')[0]}")
    return "; ".join(cells) or "-"


def _outside(why: str) -> bool:
    return why.startswith("outside")


def document(rows: Mapping[str, str], versions: str) -> str:
    """The whole page.

    Args:
        rows: model type -> its line.
        versions: what it was made with.
    """
    types = causal_types()
    planned = {kind for kind, plan in derived.model_types().items() if plan == derived.PLANNED}
    counts = {how: sum(f"| {how} |" in row for row in rows.values()) for how in (DECLARED, PLANNED, WHOLE)}
    lines = [
        "# Model families",
        "",
        f"Made by `tests/conformance/test_family_matrix.py` with {versions}; do not edit.",
        "A tiny random model of the default architecture of each causal language model that transformers knows was",
        "saved by transformers, exported by 1, 2 and 4 rank processes in bf16, int8 and int4 (groups of 32), and",
        "loaded again.",
        "",
        f"**{len(rows)} of {len(types)} types are supported**: {counts[DECLARED]} declared in a file of their own,",
        f"{counts[PLANNED]} derived from transformers' tensor-parallel plan, and {counts[WHOLE]} derived without one:",
        "they are quantised all the same, and a target of several ranks holds whole layers on each. Of the",
        f"{len(planned)} types that transformers has a plan for, in their own config class or in that of their",
        f"language model, {len(planned & rows.keys())} are.",
        "",
        "Supported means, for each: the directories that 1, 2 and 4 processes write are equal to the byte; what is not",
        "quantised is the source's to the bit; the quantised weights, decoded by us, lie as near to the source as",
        "their number format explains; written for two tensor-parallel ranks (`--target-tp 2`) it holds the same",
        "tensors (the table says how much of them a rank has); transformers loads the bf16 export and computes the",
        "same logits to the bit.",
        "",
        "The last two columns are about transformers as the engine of quantised checkpoints. `yes`: its weights are",
        "equal to ours, its logits within what rounding explains. `on loading`: so with",
        "`quantization_config=CompressedTensorsConfig(dequantize=True)`, as its code uses a weight that is still",
        "packed otherwise. `no`: it does not load what we wrote, for one of these reasons, and our own decoding was",
        "compared instead:",
        "",
        *(f"{number}. {words}." for number, (_, _, words) in enumerate(LIMITS, 1)),
        "",
        "Embedding, head and routers stay in bf16 in every model. Sizes are those of tiny models: what is said to be",
        "too small here need not be so in a large one.",
        "",
        "Not supported:",
        "",
        *(f"- `{kind}`: {NOT_MADE.get(kind, 'not exported')}" for kind in types if kind not in rows),
        "",
        f"| {' | '.join(HEADER)} |",
        f"| {' | '.join('---' for _ in HEADER)} |",
        *(rows[kind] for kind in sorted(rows)),
    ]
    return "\n".join(lines) + "\n"


def committed_rows() -> dict[str, str]:
    """Model type -> its line in the document as it is now; nothing where there is none."""
    if not DOCUMENT.is_file():
        return {}
    lines = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines[2:]}


def cells_of(row: str) -> dict[str, str]:
    """Column -> cell."""
    return dict(zip(HEADER, row.removeprefix("| ").removesuffix(" |").split(" | "), strict=True))
