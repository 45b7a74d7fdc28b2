"""modelexport: post-training quantisation and export of language models under tensor parallelism.

    import modelexport

    result = modelexport.export(model="models/llama", quant="int4", tp=4, out="ckpt")
    print(result.output_bytes, modelexport.verify("ckpt", against="models/llama").ok)

Every function takes the settings that the command of its name takes, and returns an object with fields; ``as_json()``
gives what ``--json`` prints. Nothing is printed but progress bars and warnings on stderr, and these not with
``quiet=True``. Importing the package is cheap: what a function needs is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelexport.errors import (
        CheckpointError,
        GatherError,
        HubError,
        LimitError,
        ModelExportError,
        OutputError,
        PlanError,
        RankFailedError,
        UsageError,
        ValuesError,
    )
    from modelexport.exporting import convert, export
    from modelexport.exporting.stream import quantise
    from modelexport.inspection.diff import diff_checkpoints as diff
    from modelexport.inspection.evaluate.text import evaluate_on_text as evaluate
    from modelexport.inspection.inspect import inspect_checkpoint as inspect
    from modelexport.inspection.report import report
    from modelexport.inspection.verify import verify_checkpoint as verify
    from modelexport.jobs.hub import push
    from modelexport.layers import LayerConfig
    from modelexport.recipe import ExportRecipe, ReshardRecipe
    from modelexport.resharding import reshard

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ExportRecipe",
    "GatherError",
    "HubError",
    "LayerConfig",
    "LimitError",
    "ModelExportError",
    "OutputError",
    "PlanError",
    "RankFailedError",
    "ReshardRecipe",
    "UsageError",
    "ValuesError",
    "convert",
    "diff",
    "evaluate",
    "export",
    "inspect",
    "push",
    "quantise",
    "report",
    "reshard",
    "verify",
]

_HOMES = {  # where a name is defined, and under which name there, if not in errors.py
    "ExportRecipe": ("recipe", "ExportRecipe"),
    "LayerConfig": ("layers", "LayerConfig"),
    "ReshardRecipe": ("recipe", "ReshardRecipe"),
    "convert": ("exporting", "convert"),
    "diff": ("inspection.diff", "diff_checkpoints"),
    "evaluate": ("inspection.evaluate.text", "evaluate_on_text"),
    "export": ("exporting", "export"),
    "inspect": ("inspection.inspect", "inspect_checkpoint"),
    "push": ("jobs.hub", "push"),
    "quantise": ("exporting.stream", "quantise"),
    "report": ("inspection.report", "report"),
    "reshard": ("resharding", "reshard"),
    "verify": ("inspection.verify", "verify_checkpoint"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, own = _HOMES.get(name, ("errors", name))
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), own)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
