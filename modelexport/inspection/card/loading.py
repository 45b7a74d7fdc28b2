"""The part of a model card about the engines that load the checkpoint, as the conformance tests ran them."""

from __future__ import annotations

from collections.abc import Iterator

from modelexport.inspection.card.markdown import code, plain
from modelexport.inspection.record.reading import ExportRecord
from modelexport.inspection.record.rows import linears_of, stored_of
from modelexport.models.checkpoint_formats import CardFacts
from modelexport.models.engines import warnings
from modelexport.models.loading import CheckpointKind, Loading, Verdict, candidates

__all__ = ["loading_lines"]

_TRTLLM = ("fp8", "fp8-static", "int8-static", "int4:64", "nvfp4")
"""Number formats in which ModelOpt's own export wrote the same files, to the bit (tests/conformance)."""


def loading_lines(record: ExportRecord) -> Iterator[str]:
    """Yields lines of Markdown."""
    stored, size = stored_of(record), record.recipe.get("target_tp", 1)
    tp = size if isinstance(size, int) else 1
    refused = warnings(stored.format, linears_of(record), tp=tp, model=stored.model_type or "", cache=stored.kv_cache)
    yield "## Loading it"
    yield ""
    seen = 0
    for row, verdict in candidates(stored):
        if any(line.startswith(row.engine) for line in refused):
            continue
        seen += 1
        yield from (f"**{plain(row.engine)}**", "", "```python")
        yield from row.command.replace("{tp}", str(tp)).rstrip("\n").split("\n")
        yield from ("```", "", _test_result(row, stored, verdict), "")
    if not seen:
        yield "No engine has been run on such a checkpoint by modelexport's tests, so that none is named here."
        yield ""
    if stored.format == "trtllm":
        yield _modelopt_comparison(stored)
        yield ""
    if refused:
        yield "Known not to work, or not without more:"
        yield ""
        yield from (f"- {plain(line)}" for line in refused)
        yield ""
    sizes = record.tensor_parallel_sizes
    if not stored.sharded and len(sizes) > 1 and CardFacts.of(stored.format).loads_tensor_parallel:
        yield (
            f"Heads, widths and groups can be divided among {', '.join(map(plain, sizes))} tensor-parallel ranks "
            "(worked out from the shapes)."
        )


def _test_result(row: Loading, stored: CheckpointKind, verdict: Verdict) -> str:
    numbers = " and ".join(code(name) for name in stored.number_formats)
    types = " and ".join(code(name) for name, known in row.ran.items() if set(stored.number_formats) <= set(known))
    mixed = len(stored.number_formats) > 1
    what = "several number formats in one checkpoint" if mixed else f"{numbers} as {code(stored.format)}"
    if verdict == "run":
        return f"In modelexport's tests, with a small {code(stored.model_type)} model and {what}: {plain(row.seen)}."
    own = "this type of model" if stored.model_type is None else f"{code(stored.model_type)} models"
    of = types or " and ".join(map(code, row.ran))
    return f"In modelexport's tests, with small {of} models and {what}: {plain(row.seen)}. With {own} it was not run."


def _modelopt_comparison(stored: CheckpointKind) -> str:
    if len(stored.number_formats) == 1 and stored.number_formats[0] in _TRTLLM:
        return (
            "TensorRT-LLM itself was not run. NVIDIA ModelOpt 0.47 writes the same files, to the bit, for small llama "
            "models in this number format."
        )
    return "TensorRT-LLM itself was not run."
