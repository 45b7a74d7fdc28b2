"""``modelexport inspect``: the contents of a checkpoint."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from modelexport.inspection.inspect import Inspection, inspect_checkpoint, shape_text
from modelexport.system.tables import size_text, table
from modelexport.system.terminal import columns, show

_TARGETS = 20  # of a group, before only the first are shown


def run(given: Namespace) -> int:
    """Runs the command; returns its exit status."""
    return print_inspection(given.checkpoint, given.config, as_json=given.json)


def print_inspection(directory: Path, config: Path | None = None, *, as_json: bool) -> int:
    """Prints the contents of a checkpoint; returns the exit status, 0."""
    inspection = inspect_checkpoint(directory, config)
    if as_json:
        show(json.dumps(inspection.as_json(), indent=1))
    else:
        show("\n".join(_report(inspection)))
    return 0


def _report(inspection: Inspection) -> Iterator[str]:
    names = ", ".join(inspection.architectures) or "no architecture named"
    tied = {True: ", tied embeddings", False: "", None: ""}[inspection.tied_embeddings]
    kind = inspection.model_type or "no model_type"
    yield f"{inspection.directory}: {names} ({kind}), {inspection.layers_text}{tied}"
    yield ""
    cells = [
        (
            row.name,
            str(row.count),
            row.number_format,
            _first(map(shape_text, row.shapes), len(row.shapes)),
            _first(row.scales, len(row.scales)),
            f"{row.bits:.2f}" if row.parameters else "-",
            size_text(row.nbytes),
        )
        for row in inspection.rows
    ]
    header = ("module", "count", "format", "shape", "scales", "bits/weight", "size")
    yield from table(header, cells, width=columns(), optional=("scales", "count", "shape", "bits/weight"))
    yield ""
    files = f"{len(inspection.files)} file{'s' if len(inspection.files) > 1 else ''}"
    yield (
        f"total: {inspection.parameters:,} parameters, {size_text(inspection.nbytes)} in {inspection.tensors} tensors, "
        f"{files} ({inspection.format}); "
        f"{inspection.bits:.2f} bits a parameter, {inspection.ratio:.2f} times smaller than in 16 bits"
    )
    yield from _quantization_lines(inspection)
    if inspection.tensor_parallel_sizes:
        yield f"loads at tensor-parallel sizes: {', '.join(map(str, inspection.tensor_parallel_sizes))}"
    else:
        yield f"tensor-parallel sizes: not known ({inspection.tensor_parallel_note})"
    yield from _record_lines(inspection.record)
    yield from (f"note: {text}" for text in inspection.notes)
    shown = inspection.warnings[:10]
    yield from (f"warning: {text}" for text in shown)
    if len(inspection.warnings) > len(shown):
        yield f"warning: and {len(inspection.warnings) - len(shown)} more (--json lists all)"


def _first(texts: Any, count: int) -> str:
    texts = list(texts)
    return (texts[0] if count == 1 else f"{texts[0]} and {count - 1} more") if texts else "-"


def _quantization_lines(inspection: Inspection) -> Iterator[str]:
    quantization = inspection.quantization
    if quantization is None:
        yield "quantization_config: none"
        return
    status = quantization["quantization_status"]
    yield (
        f"quantization_config: {quantization['quant_method']}"
        + (f", {quantization['format']}" if quantization["format"] else "")
        + (f", {status}" if status else "")
    )
    for name, group in quantization["config_groups"].items():
        targets = group["targets"]
        if len(targets) > _TARGETS:
            targets = [*targets[:3], f"and {len(targets) - 3} more (--json lists all)"]
        yield f"  {name}: {', '.join(targets)}: {group['scheme']}"
    yield f"  ignore: {', '.join(quantization['ignore']) or 'nothing'}"
    scheme = quantization["kv_cache_scheme"]
    yield f"  KV cache: {'in the dtype of the model' if scheme is None else json.dumps(scheme)}"
    kept = Counter(name.rpartition(".")[2] for name in inspection.kept)
    if kept:
        yield f"  linears kept as they are: {', '.join(f'{count} {name}' for name, count in kept.items())}"


def _record_lines(record: Mapping[str, Any] | None) -> Iterator[str]:
    if record is None:
        return
    recipe = ", ".join(f"{key} {value}" for key, value in record["recipe"].items() if value is not None)
    versions = ", ".join(f"{key} {value}" for key, value in record["versions"].items() if value is not None)
    yield f"made from {record['source']} by {' '.join(map(str, record['producer'].values()))} ({versions})"
    yield f"  recipe: {recipe}"
    worst = record["worst_sqnr"]
    if worst is not None:
        yield f"  worst SQNR: {worst['db']:.2f} dB, {worst['module']}"
