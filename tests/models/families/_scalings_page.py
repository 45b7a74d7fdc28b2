"""docs/scalings.md: what scales into what in each model type, written and read again."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from modelexport.errors import ModelExportError
from modelexport.models.architecture import language_config
from modelexport.models.derived import derive
from modelexport.models.derived.scalings import Proofs, prove
from tests.helpers.tiny_models import tiny_checkpoint

DOCUMENT = Path(__file__).parents[3] / "docs" / "scalings.md"
_ABOUT = """\
# What scales into what

Made by `tests/models/families/test_derived_scalings.py` with transformers {version}; do not edit. `awq` and
`smoothquant` move scales out of a norm, or of a linear, into the linears that read it ([algorithms.md](algorithms.md)).
Where no family file says which these are, a small random model of the type is run, and what computes the same with
scales moved is proved. The rows are of tiny models of each type's default configuration: of `a > b, c` the first is
divided and the others are multiplied; `a[2/2]` is the second half of a linear's rows. It is not said which layers have
them.

**{proved} of {all} types have such places.**

| model type | proved | not proved |
| --- | --- | --- |
"""


def proofs(model_type: str) -> Proofs:
    """What is proved of the tiny model of a type, derived even where a file declares its family."""
    config = json.loads((tiny_checkpoint(model_type) / "config.json").read_text())
    return prove(derive(config), language_config(config))


@functools.cache
def row(model_type: str) -> str:
    """The line of a type."""
    try:
        found = proofs(model_type)
    except ModelExportError as error:
        return f"| `{model_type}` | - | {str(error).partition(': choose what needs')[0].replace('|', '/')} |"
    pairs: dict[str, dict[str, None]] = {}
    for scaling in found.scalings:
        share = "" if scaling.share is None else f"[{scaling.share[0] + 1}/{scaling.share[1]}]"
        part = f"[{scaling.part.rpartition('.')[2]}]" if scaling.part else share
        into = ", ".join(path.rpartition(".")[2] for path in scaling.into)
        pairs.setdefault(f"{scaling.source.replace('.*', '')}{part} > {into}", None)
    refused = "; ".join(f"{path}: {why}" for path, why in found.refused.items())
    return f"| `{model_type}` | {'; '.join(pairs) or '-'} | {refused or '-'} |"


def document(rows: dict[str, str], version: str) -> str:
    """The whole page."""
    proved = sum(row.split(" | ")[1] != "-" for row in rows.values())
    return _ABOUT.format(version=version, proved=proved, all=len(rows)) + "\n".join(rows.values()) + "\n"


def committed() -> dict[str, str]:
    """The lines of the page, by model type."""
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines() if DOCUMENT.is_file() else []
    return {line.split("`")[1]: line for line in lines if line.startswith("| `")}
