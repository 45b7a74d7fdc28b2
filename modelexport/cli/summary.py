"""The text that a person reads at the end of an export, and of a dry run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from modelexport.exporting.result import CutRow, ExportResult
from modelexport.quantization import algorithms
from modelexport.quantization.algorithms.rtn import RoundToNearest
from modelexport.recipe import ExportRecipe
from modelexport.resharding.result import ReshardResult
from modelexport.system.tables import size_text, table
from modelexport.system.terminal import columns

if TYPE_CHECKING:
    from modelexport.exporting.calibrated.device_memory import DeviceMemory

_ERROR = f"error: {RoundToNearest.name}"


def summary(result: ExportResult) -> str:
    """The whole report of an export or a dry run."""
    calibrated = any(row.error_after is not None for row in result.rows)
    head = ("module", "count", "format", "bits/weight", "size", "worst SQNR", _ERROR, "written")
    rows = [
        (
            row.name,
            str(row.count),
            row.number_format,
            f"{row.bits:.2f}" if row.weights else "-",
            size_text(row.nbytes),
            "-" if row.sqnr_db is None else f"{row.sqnr_db:.2f} dB",
            "-" if row.error_before is None else f"{row.error_before:.2e}",
            "-" if row.error_after is None else f"{row.error_after:.2e}",
        )
        for row in result.rows
    ]
    width = len(head) if calibrated else len(head) - 2
    optional = ("count", "bits/weight", _ERROR, "worst SQNR")
    lines = list(table(head[:width], [row[:width] for row in rows], width=columns(), optional=optional))
    ratio = result.source_bytes / max(1, result.output_bytes)
    lines.append("")
    lines.append(
        f"weights: {size_text(result.source_bytes)} -> {size_text(result.output_bytes)} ({ratio:.2f} times "
        f"smaller) in {len(result.files)} file{'s' if len(result.files) > 1 else ''}"
        f"{'' if result.format == ExportRecipe.format and not result.target else _written_for(result)}"
    )
    lines += (f"note: {note}" for note in result.notes)
    lines += _notes("not quantised", result.unquantised)
    lines += _notes("not written", result.left_out)
    if result.calibration is not None:
        seen = result.calibration
        what = "calibrated on" if calibrated else "static scales from"
        lines.append(f"{what} {seen['samples']} samples of {seen['length']} tokens of {seen['text']}")
        lines += _notes("rounded to nearest" if calibrated else "scale of its siblings", _unseen(seen))
        rounding = [algorithm.name for algorithm in algorithms.used(result.algorithm) if algorithm.kind == "round"]
        lines += _notes("".join(rounding), seen.get("notes", {}))
        lines += _notes("seen little", {name: f"{n} tokens" for name, n in seen.get("rare_experts", {}).items()})
    sizes = ", ".join(map(str, result.tensor_parallel_sizes))
    lines.append(f"loads at tensor-parallel sizes: {sizes}")
    if result.kernels not in ("fused", "plain", "triton"):
        lines.append(f"kernels: {result.kernels}, which are many times slower")
    if result.out is None:
        lines += ["", *_plan(result), *(["", "the checkpoint's ranks:", *result.target] if result.target else [])]
        lines.append(
            f"dry run, nothing written: {result.tp} rank{'s' if result.tp > 1 else ''}, buffers of at most "
            f"{size_text(result.peak_rank_bytes)} each, beside what importing torch takes"
        )
        if result.calibrated_bytes is not None:
            layer, hidden = map(size_text, result.calibrated_bytes)
            lines.append(
                f"calibration holds more: a layer in float32, {layer} of weights shared by the ranks, with its "
                f"statistics; and on each rank {hidden} of the samples' hidden states (--calib-memory bounds them)"
            )
        if result.device_memory is not None:
            lines.append(_device_memory(result.device_memory))
    else:
        if result.evaluation is not None:
            lines += result.evaluation.lines()
        lines.append(f"wrote {result.out} in {result.seconds:.1f} s")
        if result.pushed is not None:
            lines.append(f"pushed to {result.pushed}")
    return "\n".join(lines)


def _device_memory(memory: DeviceMemory) -> str:
    """The line on what a rank takes of its GPU."""
    there = "as much as there is" if memory.budget is None else size_text(memory.budget)
    parts = ", ".join(f"{size_text(size)} for {name}" for name, size in memory.parts.items())
    cuts = "".join(f"; {cut}" for cut in memory.cuts())
    return f"device memory: {size_text(memory.predicted)} predicted of {there}, at most in {memory.step}: {parts}{cuts}"


def _unseen(seen: dict[str, Any]) -> dict[str, str]:
    return dict.fromkeys(seen["unseen_experts"], "no token came to this expert (--calib-experts all shows it all)")


def _written_for(result: ExportResult) -> str:
    return f", format {result.format}" + (f", for {result.target[0]}" if result.target else "")


def reshard_summary(result: ReshardResult) -> str:
    """The report of a resharding or of its dry run."""
    lines = []
    if result.out is None:
        lines = [*result.plan, ""]
        shares = ", ".join(f"{rank}: {size_text(nbytes)}" for rank, nbytes in enumerate(result.reads))
        lines.append(f"read by process {shares}; every byte once")
    lines += (f"note: {note}" for note in result.notes)
    lines += _notes("left out", result.left_out)
    ways = ", ".join(f"{axis} {size}" for axis, size in (("tp", result.tp), ("pp", result.pp), ("ep", result.ep)))
    lines.append(
        f"{result.source} ({result.source_format}) -> {result.format} for {ways}: {result.tensors} tensors, "
        f"{size_text(result.nbytes)}; {len(result.files)} file{'s' if len(result.files) > 1 else ''}, "
        f"{size_text(result.stored_bytes)}"
    )
    if result.out is None:
        lines.append("dry run, nothing written")
    else:
        speed = size_text(result.nbytes / max(result.seconds, 1e-9))
        sent = f", {size_text(result.bytes_sent)} exchanged" if result.bytes_sent else ""
        lines.append(f"wrote {result.out} in {result.seconds:.1f} s ({speed}/s{sent}); compared with the source: equal")
    return "\n".join(lines)


def _plan(result: ExportResult) -> Iterator[str]:
    """The elements along the cut that each rank reads, or their range where there are many ranks."""
    few = result.tp <= 8
    ranks = [f"rank {rank}" for rank in range(result.tp)] if few else ["least", "most"]
    rows = [_cut(row, few) for row in result.cuts]
    yield from table(("who reads what", "cut", *ranks), rows)
    if any(cell.startswith("(") for row in rows for cell in row):
        yield "(in brackets: what a rank holds too, but another one reads)"


def _cut(row: CutRow, few: bool) -> tuple[str, ...]:
    if row.dim is None:
        return (row.name, "whole", *(["all", *["-"] * (len(row.owned) - 1)] if few else ["-", "all"]))
    what = f"dim {row.dim} of {list(row.shape)}"
    if not few:
        return (row.name, what, str(min(row.owned)), str(max(row.owned)))
    pairs = zip(row.owned, row.held, strict=True)
    return (row.name, what, *(str(owned) if owned or not held else f"({held})" for owned, held in pairs))


def _notes(title: str, notes: dict[str, str]) -> Iterator[str]:
    """One line per reason, with the names it holds for (the first three, then a count)."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in notes.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"{title}: {', '.join(names[:3])}{more} ({reason})"
