"""docs/models.md: what the tool makes of each published layout, written and read again."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from pathlib import Path

from tests.published._layouts import LAYOUTS
from tests.published._runs import DONE, NOT_DONE, STEPS, Outcome

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
_ABOUT = """\
# Published models

Made by `tests/published/test_layouts.py` with transformers {version}; do not edit. Each row is a layout as its makers
published it: the names and dtypes of all tensors and the keys of config.json are theirs, the sizes are tiny and the
numbers random. Models that share a layout are not listed again: what holds for Llama 3.1 8B holds for the 70B.

- `inspect`: it is described.
- `plan`: `--dry-run` plans int4 of it.
- `none`, `int4`, `fp8`, `nvfp4` (`nvfp4-wo`): the export is written, and verified against the source.
- `gptq`: int4 by `--algorithm gptq`, calibrated on token ids.
- `eval`: the source's loss on token ids, by transformers' own decoder layers.
- `reshard`: written for two tensor-parallel ranks, and for one again: the same bytes as written for one at once.
- `convert`: the int4 export as `--format gptq`.
- `quantised`: how many linears int4 quantises, and their part of the (tiny) model's weights.
- `real size`: bits per weight of int4 at the size that was published, with embeddings and all else that is kept, and of
  how many weights; by `--dry-run`, from config.json and headers alone. In groups of 128, or as it says. Other models of
  the layout follow by name.
- `vLLM`: how many parameters vLLM 0.32's own classes have for the exports by `none`, `int4` (groups of 32; experts of
  gpt-oss as `mxfp4`) and `fp8`, with `+` those of its class of draft layers. Its own loader fills all of them, by their
  bytes. A letter: it builds no such model, or leaves some as they were, with the words below. Found by
  `tests/conformance/test_vllm_published.py`.

`yes`: done. A number: refused, with the words below. `-`: there was nothing to do it with.

**{complete} of {all} layouts are complete.**

"""
_HEADER = ("layout", "as in", "model_type", "quantised", "real size", "vLLM", *STEPS)
_LETTERS = string.ascii_lowercase
_COUNT = re.compile(r"[\d+ ]+")


def document(outcomes: Mapping[str, Outcome], version: str) -> str:
    """The whole page."""
    refusals = list(
        dict.fromkeys(
            cell for name in LAYOUTS for cell in outcomes[name].cells.values() if cell not in (DONE, NOT_DONE)
        )
    )
    unfilled = list(
        dict.fromkeys(part for name in LAYOUTS for part in outcomes[name].engine if not _COUNT.fullmatch(part))
    )
    complete = sum(outcome.complete for outcome in outcomes.values())
    lines = [_line(_HEADER), _line(["---"] * len(_HEADER))]
    for name, layout in LAYOUTS.items():
        outcome = outcomes[name]
        cells = [str(refusals.index(cell) + 1) if cell in refusals else cell for cell in outcome.cells.values()]
        kind = layout.config.get("model_type", "-")
        parts = [_LETTERS[unfilled.index(part)] if part in unfilled else part for part in outcome.engine]
        engine = " / ".join(parts) or NOT_DONE
        lines.append(_line([name, f"`{layout.like}`", f"`{kind}`", outcome.quantised, outcome.real, engine, *cells]))
    told = [f"{number}. {refusal}" for number, refusal in enumerate(refusals, 1)]
    about = _ABOUT.format(version=version, complete=complete, all=len(LAYOUTS))
    refused = ["", "Refused, in the tool's words:", "", *told] if told else []
    said = [f"- {letter}: {words}" for letter, words in zip(_LETTERS, unfilled, strict=False)]
    engines = ["", "Of vLLM, in its words or those of its loader:", "", *said] if said else []
    return about + "\n".join([*lines, *refused, *engines]) + "\n"


def _line(cells: object) -> str:
    assert isinstance(cells, (list, tuple))
    return f"| {' | '.join(map(str, cells))} |"


def committed() -> dict[str, Outcome]:
    """What the page says of each layout."""
    if not DOCUMENT.is_file():
        return {}
    content = DOCUMENT.read_text(encoding="utf-8")
    refusals = dict(re.findall(r"^(\d+)\. (.*)$", content, re.M))
    unfilled = dict(re.findall(r"^- ([a-z]): (.*)$", content, re.M))
    found = {}
    for line in content.splitlines():
        name, *cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if name in LAYOUTS and len(cells) == len(_HEADER) - 1:
            told = {step: refusals.get(cell, cell) for step, cell in zip(STEPS, cells[5:], strict=True)}
            parts = cells[4].split(" / ") if cells[4] != NOT_DONE else []
            found[name] = Outcome(told, cells[2], cells[3], tuple(unfilled.get(part, part) for part in parts))
    return found
