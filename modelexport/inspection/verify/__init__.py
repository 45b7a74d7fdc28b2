"""``modelexport verify``: is a checkpoint whole, is it what was exported, and how far is it from its source?

structure    every module has exactly the tensors that config.json promises
values       no NaN or Inf, scales positive; in a sharded checkpoint, replicas equal
record       every tensor's SHA-256, and everything else that modelexport.json holds (our own checkpoints)
source       dequantised error per linear, the rest equal to the byte (``--against``); without a record, linears that
             were rounded to nearest are rounded again and compared to the bit
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport.checkpoints.adapters import parse_setting, read_adapter
from modelexport.checkpoints.formats.hf import RECORD
from modelexport.checkpoints.replicas import odd_replicas
from modelexport.checkpoints.safetensors.file import Checkpoint
from modelexport.checkpoints.source import directory_of
from modelexport.errors import CheckpointError, PlanError, UsageError, shown
from modelexport.inspection.record.reading import ExportRecord, read_record
from modelexport.inspection.verify.comparison import HeaderComparison, compare_headers, plan_items
from modelexport.inspection.verify.record import check_record
from modelexport.inspection.verify.structure import check_structure
from modelexport.models.adapted import adapted
from modelexport.models.decoded import decoded
from modelexport.models.language_part import part_as
from modelexport.models.matching import places, too_many_blocks
from modelexport.models.modules import Architecture, StoredModule, read_architecture, read_modules
from modelexport.models.opening import open_model
from modelexport.models.stacked import apart_as, as_written, stacked_as
from modelexport.models.structure import described_as
from modelexport.quantization import algorithms
from modelexport.quantization.methods import QuantizationConfig, methods, read_quantization_config
from modelexport.system.small_files import file_sha256

if TYPE_CHECKING:
    from modelexport.inspection.verify.items import AuditItem, ModuleCheck

FAR_DB = 6.0
"""A linear that is this much worse than rounding its source to nearest was made from something else."""
NOTICEABLE_DB = 1.0
RECORD_TOLERANCE_DB = 0.02


@dataclass(frozen=True)
class ModuleError:
    """The quantisation error of one linear against its source.

    Attributes:
        sqnr_db: signal to quantisation noise; None where nothing was lost.
        nearest_db: what rounding the source to nearest gives in the same format.
        recorded_db: what modelexport.json says, or None.
    """

    name: str
    path: str
    number_format: str
    sqnr_db: float | None
    nearest_db: float | None
    recorded_db: float | None


@dataclass
class Verification:
    """The findings of a verification.

    Attributes:
        problems: what is wrong, one line each; empty: the checkpoint is good.
        notes: what was not compared, or is unusual, and why.
        unchecked: bytes that may be others than were written: there is nothing to tell; empty: every byte is known.
        requantised: linears found equal, to the bit, to what rounding the source to nearest gives; without a record.
        hashes: tensors whose SHA-256 was compared with the record; 0 where there is none.
        identical: tensors found equal to the source's to the byte.
        modules: the linears' errors, the worst first (with ``against``).
    """

    checkpoint: str
    against: str | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    tensors: int = 0
    nbytes: int = 0
    hashes: int = 0
    identical: int = 0
    requantised: int = 0
    modules: list[ModuleError] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if no problem was found."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """JSON-able form, for ``--json``."""
        return {"ok": self.ok, **asdict(self)}


def verify_checkpoint(
    directory: Path | str,
    against: Path | str | None = None,
    config: Path | str | None = None,
    *,
    adapters: Sequence[str] = (),
    threads: int | None = None,
) -> Verification:
    """Check a checkpoint; see the module's docstring.

    Args:
        against: the checkpoint that it was made from; a quantised one is decoded.
        config: the model's config.json, where the checkpoint has none of its own.
        adapters: of LoRA, as ``--adapter`` of an export takes them, to be merged into ``against`` first.
        threads: that read and compare side by side; None: one for every core this process may use.

    Returns:
        What was found; a damaged checkpoint is a result, not an exception.

    Raises:
        UsageError: ``directory`` is no directory; or adapters are given without ``against``, or are not those that the
            checkpoint's record has.
        CheckpointError: ``against`` or an adapter cannot be read, or holds NaN or Inf.

    Example:
        ::

            >>> modelexport.verify("ckpt").ok
            True
    """
    directory = directory_of(directory)
    if not directory.is_dir():
        found = "a file" if directory.exists() else "no such directory"
        raise UsageError(f"{directory}: {found}; give the directory of a checkpoint")
    result = Verification(str(directory), None if against is None else str(against))
    source = None if against is None else open_model(against)
    if adapters and source is None:
        raise UsageError(f"--adapter {adapters[0]} is merged into the source to compare with: add --against SOURCE")
    try:
        checkpoint = open_model(directory, config)
        quantization = read_quantization_config(checkpoint.config)
    except (CheckpointError, PlanError) as error:
        result.problems.append(str(error))
        return result
    result.notes += checkpoint.notes
    record = None
    try:
        record = read_record(directory)
        if record is None:
            result.notes.append(f"there is no {RECORD}: no hashes to compare with")
        else:
            checkpoint = as_written(checkpoint, record.sha256)
    except CheckpointError as error:
        result.problems.append(str(error))
    if source is not None:
        source = _plain(source, checkpoint, adapters)
    result.tensors = len(checkpoint.infos)
    result.nbytes = sum(info.nbytes for info in checkpoint.infos.values())
    architecture = read_architecture(checkpoint.config, checkpoint.infos)
    modules = read_modules(checkpoint, architecture, quantization)
    result.problems += check_structure(checkpoint, architecture, quantization, modules)
    if architecture.family is None:
        result.notes.append(f"whether modules are missing was not checked: {architecture.reason}")
    if quantization is not None and quantization.method not in methods():
        result.notes.append(f"which tensors quant_method '{quantization.method}' promises is not known here")
    if record is not None:
        result.problems += check_record(record, checkpoint, modules, quantization)
        if source is not None:
            _check_adapters(directory, record, adapters)
    comparison = compare_headers(checkpoint, modules, architecture, record, source)
    result.problems += comparison.problems
    try:
        _check_values(result, checkpoint, modules, architecture, comparison, source, record, quantization, threads)
    except (CheckpointError, PlanError) as error:  # a file that ends early, numbers that nothing here can say
        result.problems.append(str(error))
    result.notes += comparison.notes
    return result


def _plain(source: Checkpoint, checkpoint: Checkpoint, adapters: Sequence[str]) -> Checkpoint:
    """The source to compare a checkpoint with: decoded, with experts as that has them, and adapters merged into it."""
    merged = [read_adapter(*parse_setting(text)) for text in adapters]
    model = decoded(described_as(source, checkpoint))
    return part_as(adapted(stacked_as(apart_as(model, checkpoint), checkpoint), merged)[0], checkpoint)


def _check_adapters(directory: Path, record: ExportRecord, adapters: Sequence[str]) -> None:
    """Refuse to compare with a source that has other adapters than the record.

    Raises:
        UsageError: it has.
    """
    wanted = [(adapter.get("sha256"), adapter.get("weight")) for adapter in record.adapters]
    given = [(file_sha256(found.file), found.weight) for found in (read_adapter(*parse_setting(a)) for a in adapters)]
    if wanted != given:
        names = (f"{adapter.get('name', '?')}, weight {adapter.get('weight', '?')}" for adapter in record.adapters)
        made = shown("; ".join(names)) if wanted else "no adapter"
        raise UsageError(
            f"{directory} was made with {made}: give the same with --adapter DIR[=WEIGHT], in that order"
            if wanted
            else f"{directory} was made with {made}: leave --adapter out"
        )


def _check_values(
    result: Verification,
    checkpoint: Checkpoint,
    modules: Sequence[StoredModule],
    architecture: Architecture,
    comparison: HeaderComparison,
    source: Checkpoint | None,
    record: ExportRecord | None,
    quantization: QuantizationConfig | None,
    threads: int | None,
) -> None:
    """Read every byte once: hashes, values, and the error against the source."""
    import torch

    from modelexport.inspection.verify.audit import run_audit

    threads = threads or len(os.sched_getaffinity(0))
    by_name = {module.name: module for module in modules}
    result.problems += _weight_shapes(checkpoint, modules, architecture)
    result.problems += (f"{name}: {text}" for name, text in odd_replicas(checkpoint))
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the modules are spread over threads; each need not be once more
    try:
        items = plan_items(modules, comparison, quantization, architecture.fused)
        checks = run_audit(items, checkpoint, source, {}, threads=threads, thorough=True)
    finally:
        torch.set_num_threads(before)
    recorded = {} if record is None else record.sqnr_db
    hashes = {} if record is None else record.sha256
    for check in checks:
        result.problems += check.faults
        for name, digest in check.sha256.items():
            if name in hashes:
                result.hashes += 1
                if digest != hashes[name]:
                    result.problems.append(
                        f"{name}: its bytes are not those that were exported "
                        f"(SHA-256 {digest[:12]}..., {RECORD} has {str(hashes[name])[:12]}...)"
                    )
        if check.identical is not None:
            result.identical += check.identical
            if not check.identical:
                result.problems.append(f"{check.name}: not equal to the source's, though it was passed through")
        if check.sqnr_db is not None:
            module = by_name[check.name]
            result.modules.append(
                ModuleError(
                    check.name,
                    module.path,
                    module.stored.number_format,
                    _finite(check.sqnr_db),
                    _finite(check.nearest_db),
                    recorded.get(check.name),
                )
            )
    if record is None:
        _judge_bytes(result, items, checks)
    result.modules.sort(key=lambda m: (math.inf if m.sqnr_db is None else m.sqnr_db, m.name))
    _judge_errors(result, compensated=_compensated(record))


def _judge_bytes(result: Verification, items: Sequence[AuditItem], checks: Sequence[ModuleCheck]) -> None:
    """Without a record: which bytes the source tells, and whether they are that."""
    from modelexport.inspection.verify import requantised

    if result.against is None:
        result.unchecked.append(
            f"the bytes of {result.tensors} tensors: there is no {RECORD} with their SHA-256, and no source to compare "
            "with (--against DIR)"
        )
        return
    problems, unchecked, right = requantised.judge(items, checks)
    result.problems += problems
    result.unchecked += unchecked + requantised.unchecked_tensors(checks, right, in_doubt=bool(unchecked))
    result.requantised = sum(not check.unlike for check in checks if check.unlike is not None)


def _compensated(record: ExportRecord | None) -> str:
    """Returns the algorithm that rounded weights for the least error of outputs rather than of their own, or ""."""
    used = [] if record is None else algorithms.used(record.recipe.get("algorithm"))
    return next((found.name for found in used if found.compensates), "")


def _judge_errors(result: Verification, *, compensated: str = "") -> None:
    """Turn the linears' errors into problems: far from the source, or not what was recorded.

    Args:
        compensated: the algorithm by which they may be further from the source than rounding to nearest, if the
            record says as far; "" for none.
    """
    if compensated:
        further = [m for m in result.modules if m.recorded_db is not None and _deficit(m) > NOTICEABLE_DB]
        if further:
            result.notes.append(
                f"{len(further)} linears are up to {max(map(_deficit, further)):.1f} dB further from {result.against} "
                f"than rounding to nearest: {compensated} makes their outputs' error small, not their own"
            )
    judged = [m for m in result.modules if not (compensated and m.recorded_db is not None)]
    far = [m for m in judged if m.sqnr_db is not None and _deficit(m) > FAR_DB]
    if len(far) > 1 and 2 * len(far) > len(result.modules):
        result.problems.append(
            f"{len(far)} of {len(result.modules)} linears are far from {result.against} (e.g. {far[0].name}: SQNR "
            f"{far[0].sqnr_db:.2f} dB, rounding to nearest gives {db_text(far[0].nearest_db)}): is it another model?"
        )
        return
    for module in result.modules:
        if module in far:
            result.problems.append(
                f"{module.name}: SQNR {db_text(module.sqnr_db)} against {result.against}, rounding to nearest gives "
                f"{db_text(module.nearest_db)}: its scales or values are not its own"
            )
        elif module in judged and _deficit(module) > NOTICEABLE_DB:
            result.notes.append(
                f"{module.name}: SQNR {db_text(module.sqnr_db)}, rounding to nearest gives {db_text(module.nearest_db)}"
            )
        recorded = module.recorded_db
        if recorded is not None and abs((module.sqnr_db or math.inf) - recorded) > RECORD_TOLERANCE_DB:
            result.problems.append(
                f"{module.name}: SQNR {db_text(module.sqnr_db)} against {result.against}, "
                f"{RECORD} has {db_text(recorded)}"
            )


def _deficit(module: ModuleError) -> float:
    """The SQNR below that of rounding to nearest, in dB."""
    if module.sqnr_db is None:
        return -math.inf
    return (math.inf if module.nearest_db is None else module.nearest_db) - module.sqnr_db


def _weight_shapes(
    checkpoint: Checkpoint, modules: Sequence[StoredModule], architecture: Architecture
) -> Iterator[str]:
    """``weight_shape`` of packed weights is data, not header: engines unpack by it."""
    from modelexport.checkpoints.safetensors.file import Reader

    known: dict[str, tuple[int, ...]] = {}
    family, dims = architecture.family, architecture.dimensions
    if family is not None and dims is not None and not too_many_blocks(dims, len(checkpoint.infos)):
        known = {place.name: dims.weight_shape(place.module) for place in places(family, dims)}
    with Reader(checkpoint) as reader:
        for module in modules:
            info, packed = module.tensors.get("weight_shape"), module.tensors.get("weight_packed")
            if info is None or packed is None or module.stored.shape is None or info.shape != (2,):
                continue
            rows, cols = (int(n) for n in reader.read(info))
            wanted = known.get(module.name)
            if wanted is not None and (rows, cols) != wanted:
                yield f"{info.name} says [{rows}, {cols}], config.json makes it {list(wanted)}: engines unpack by it"
                continue
            at_most = module.stored.shape[1]
            per_word = at_most // max(1, packed.shape[1])
            if rows != module.stored.shape[0] or not at_most - per_word < cols <= at_most:
                yield (
                    f"{info.name} says [{rows}, {cols}], {packed.name} holds {list(module.stored.shape)}: "
                    "engines cannot unpack it"
                )


def _finite(value: float | None) -> float | None:
    return None if value is None or (math.isinf(value) and value > 0) else max(-999.0, round(value, 4))


def db_text(value: float | None) -> str:
    """``"31.60 dB"``; ``"exact"`` for None."""
    return "exact" if value is None else f"{value:.2f} dB"
