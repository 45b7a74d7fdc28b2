"""The check that ends an export: what the plan promised, against what lies in the files."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from modelexport.checkpoints.safetensors.file import Checkpoint, Layout, Reader, TensorInfo
from modelexport.distributed.launch import phase
from modelexport.errors import CheckpointError
from modelexport.exporting.plan import ExportPlan, ExportStep, full_name
from modelexport.inspection.verify.audit import check_written, run_audit
from modelexport.inspection.verify.items import AuditItem, ModuleCheck, WrittenPiece, decibels
from modelexport.jobs.progress import ReadBack
from modelexport.models.opening import open_model
from modelexport.models.stacked import as_written, held


class Audit:
    """Reads back what an export has written, this rank's share of it.

    Args:
        payload: the directory of the files, which :meth:`Layout.create` has made.
        along: whether a module is read back as soon as its steps are written, by a thread beside the next steps; what
            is left is read in the end. For one rank alone, and tensors that lie in one place each.
    """

    def __init__(
        self, plan: ExportPlan, layout: Layout, payload: Path, rank: int, world: int, *, along: bool = False
    ) -> None:
        assert not along or (world == 1 and not layout.placements)
        self._plan, self._layout, self._payload = plan, layout, payload
        self._rank, self._world = rank, world
        self._checks: dict[str, ModuleCheck] = {}
        self._ahead: deque[Future[list[ModuleCheck]]] = deque()
        self._items: dict[str, AuditItem] = {}  # of those that are read back along the way
        self._steps: dict[str, list[str]] = {}  # module -> its steps
        self._missing: dict[str, int] = {}  # module -> how many of them are not written
        self._stack = ExitStack()
        if along:
            self._begin()

    def _begin(self) -> None:
        infos = {name: replace(info, path=self._payload / info.path) for name, info in self._layout.infos.items()}
        planned = Checkpoint(self._payload, infos, None, {})
        self._items = {item.name: item for item in plan_items(self._plan, planned)}
        for step in self._plan.steps:
            for name in _modules(step):
                self._steps.setdefault(name, []).append(step.id)
        self._missing = {name: len(steps) for name, steps in self._steps.items()}
        self._reader = self._stack.enter_context(Reader(planned))
        self._thread = ThreadPoolExecutor(1, "modelexport-reading-back")
        self._stack.callback(self._thread.shutdown, cancel_futures=True)

    def __enter__(self) -> Audit:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def written(self, step: ExportStep, records: Mapping[str, Any]) -> None:
        """Has the modules read back of which this was the last step to be written.

        Args:
            records: step id -> the journal's record, of all steps that are written.

        Raises:
            CheckpointError: bytes of an earlier step are not those written, or a file cannot be read.
        """
        while self._ahead and self._ahead[0].done():
            self._take(self._ahead.popleft().result())
        if not self._items:
            return
        whole = []
        for name in _modules(step):
            self._missing[name] -= 1
            if not self._missing[name]:
                whole.append(self._items[name])
        pieces = _pieces(records[each] for each in dict.fromkeys(chain(*(self._steps[item.name] for item in whole))))
        self._ahead.append(self._thread.submit(self._check, whole, pieces))

    def _check(self, items: Iterable[AuditItem], pieces: Mapping[str, Sequence[WrittenPiece]]) -> list[ModuleCheck]:
        return [check_written(item, self._reader, pieces) for item in items]

    def _take(self, checks: Iterable[ModuleCheck]) -> None:
        """Notes what was read back.

        Raises:
            CheckpointError: some of it is not what was written.
        """
        found = {check.name: check for check in checks}
        damaged = [text for check in found.values() for text in check.damaged]
        if damaged:
            raise CheckpointError(
                f"{len(damaged)} piece(s) read back differ from what was written: {'; '.join(damaged[:3])}; the "
                f"storage or the memory is at fault: remove {self._payload.parent} and run the same command again"
            )
        self._checks |= found

    def finish(
        self, source: Checkpoint, records: Mapping[str, Any], changed: Collection[str] = ()
    ) -> list[dict[str, Any]]:
        """Reads back what is left; returns a JSON-able entry for each module of this rank's share.

        Of linears that are quantised in the source, it has ``exact``: whether their values are the same.

        Args:
            records: step id -> the journal's record, with the pieces that were written and the errors that were made.
            changed: modules whose weights are not compared with the source's.

        Raises:
            CheckpointError: the files do not hold the planned tensors, or their bytes are not those written.
        """
        for ahead in self._ahead:
            if not ahead.cancel():  # those not begun are left to all threads
                self._take(ahead.result())
        written = as_written(open_model(self._payload), self._layout.infos)
        _same_structure(self._layout.infos, written)
        self._same_places(written)
        own = share(plan_items(self._plan, written), self._rank, self._world)
        left = [item for item in own if item.name not in self._checks]
        found = run_audit(
            left,
            written,
            None,
            _pieces(records.values()),
            threads=torch.get_num_threads(),
            progress=lambda name: phase(f"reading back {name}"),
            advance=ReadBack(sum(item.nbytes for item in left)).add,
        )
        self._take(found)
        errors, twice = _errors(records, changed), _held_before(self._plan, source)
        return [
            {
                "name": check.name,
                "sha256": check.sha256,
                "sqnr_db": _finite(decibels(*errors[check.name])) if check.name in errors else None,
                **({"exact": errors[check.name][0] == 0} if check.name in twice & errors.keys() else {}),
            }
            for check in (self._checks[item.name] for item in own)
        ]

    def _same_places(self, written: Checkpoint) -> None:
        """Checks that what was read back along the way lies where the files' headers say now.

        Raises:
            CheckpointError: a header says otherwise.
        """
        for name in self._checks:
            for info in self._items[name].tensors.values():
                found = written.infos[info.name]
                if (found.path, found.offset) != (info.path, info.offset):
                    raise CheckpointError(
                        f"read back: {info.name} begins at byte {found.offset:,} of {found.path}; it was written at "
                        f"{info.offset:,} of {info.path}"
                    )


def _modules(step: ExportStep) -> dict[str, None]:
    """Names of the modules that a step writes something of."""
    return dict.fromkeys(full_name(step.layer, task.path) for task in step.tasks)


def _pieces(records: Iterable[Mapping[str, Any]]) -> dict[str, list[WrittenPiece]]:
    """The pieces that were written of each tensor, by the journal's records."""
    found: dict[str, list[WrittenPiece]] = {}
    for record in records:
        for value in record["pieces"]:
            piece = WrittenPiece.from_json(value)
            found.setdefault(piece.name, []).append(piece)
    return found


def _held_before(plan: ExportPlan, source: Checkpoint) -> set[str]:
    """The linears that are quantised anew though the source has them quantised."""
    before = {name for name, tensor in source.computed.items() if held(tensor) is not None}
    return {
        full_name(step.layer, task.path)
        for step in plan.steps
        for task in step.tasks
        if task.quantised and task.info.name in before
    }


def _errors(records: Mapping[str, Any], changed: Collection[str]) -> dict[str, tuple[float, float]]:
    """Module -> squared error and squared weights, over all steps that it is written in."""
    parts: dict[str, list[Sequence[float]]] = {}
    for record in records.values():
        for name, sums in record["errors"].items():
            if name not in changed:
                parts.setdefault(name, []).append(sums)
    return {
        name: (math.fsum(noise for noise, _ in sums), math.fsum(signal for _, signal in sums))
        for name, sums in parts.items()
    }


def plan_items(plan: ExportPlan, written: Checkpoint) -> Iterator[AuditItem]:
    """One item per module, in the plan's order; the slabs of a module are one item."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for step in plan.steps:
        for task in step.tasks:
            name = full_name(step.layer, task.path)
            found = {out.name: written.infos[full_name(name, out.name)] for out in task.outputs}
            modules.setdefault(name, {}).update(found)
    for name, tensors in modules.items():
        yield AuditItem(name, tensors, None, None)


def share(items: Iterable[AuditItem], rank: int, world: int) -> list[AuditItem]:
    """This rank's items: the largest first, each to the rank with the least to do so far."""

    loads = [0] * world
    mine = []
    for item in sorted(items, key=lambda item: (-item.nbytes, item.name)):
        chosen = loads.index(min(loads))
        loads[chosen] += item.nbytes
        if chosen == rank:
            mine.append(item)
    return mine


def _finite(value: float | None) -> float | None:
    """None for "exact" and "not compared": JSON has no infinity. Two decimals are all that is meaningful."""
    return None if value is None or math.isinf(value) else round(value, 2)


def _same_structure(expected: Mapping[str, TensorInfo], written: Checkpoint) -> None:
    for name, info in expected.items():
        found = written.infos.get(name)
        if found is None or (found.dtype, found.shape) != (info.dtype, info.shape):
            state = "is missing" if found is None else f"is {found.dtype} {list(found.shape)}"
            raise CheckpointError(f"read back: {name} {state}; {info.dtype} {list(info.shape)} was to be written")
    extra = sorted(set(written.infos) - set(expected))
    if extra:
        raise CheckpointError(f"read back: {len(extra)} tensor(s) nobody planned, e.g. {extra[0]}")
