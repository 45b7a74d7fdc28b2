"""Agreement of the ranks, before they quantise, on the largest magnitudes that a scale depends on.

A maximum is exact in any order, and the squared errors of a search come whole rows at a time and are added in the order
of the rows, so that the scales are those of the whole weight, whatever the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from modelexport.distributed import collectives
from modelexport.distributed.launch import phase
from modelexport.exporting.plan.steps import ExportStep, TensorTask
from modelexport.quantization import kernels
from modelexport.quantization.formats.base import NumberFormat


class ScaleAgreement:
    """One rank's part in finding the magnitudes of a step.

    Args:
        read: reads this rank's part of a task's weight, of a step that is not at hand.
    """

    def __init__(self, rank: int, world: int, plain: NumberFormat, read: Callable[[TensorTask], Tensor]) -> None:
        self.rank, self.world, self.plain, self._read = rank, world, plain, read
        self._layer, self._known = "", dict[str, Tensor]()

    def agree(self, step: ExportStep, shards: Mapping[int, Tensor], *, search: bool = True) -> dict[int, Tensor]:
        """The ``amax`` to quantise each task with (task number -> float32), where its own shard does not tell.

        All ranks take part, also those that hold nothing of the step. One reduction over the ranks for the whole step.
        Of a layer that comes in parts the first part reads all weights of which several share a scale.

        Args:
            search: whether the formats' observers count; else it is the largest magnitude.
        """
        rows = [i for i, task in enumerate(step.tasks) if self.world > 1 and task.cut.dim == 1 and task.reach == "row"]
        groups: dict[str, list[int]] = {}
        for i, task in enumerate(step.tasks):
            if task.reach == "tensor":
                groups.setdefault(task.shared_scale, []).append(i)
        if step.layer != self._layer or not step.scaled_with:  # a whole layer may come again, with other weights
            self._layer, self._known = step.layer, {}
        unknown = self._unknown(step, [word for word in groups if word not in self._known])
        if not rows and not groups:
            return {}
        parts = [self._own(step.tasks[i], shards.get(i), step.tasks[i].info.shape[0]) for i in rows]
        at_hand = {id(step.tasks[i]): shard for i, shard in shards.items()}
        for tasks in unknown.values():
            own = [self._own(task, self._weight(task, at_hand), 1) for task in tasks]
            parts.append(torch.stack(own).amax(dim=0))
        split: Sequence[Tensor] = ()
        if parts:
            flat = torch.cat(parts)
            self._reduce(flat, collectives.reduce_op.MAX, f"reducing maxima of {step.id}", step)
            split = flat.split([part.numel() for part in parts])
        found = dict(zip(rows, split, strict=False))
        self._known.update(zip(unknown, split[len(rows) :], strict=True))
        for word, members in groups.items():
            amax = self._known[word]
            if search:
                amax = self._searched(step, members, shards, amax)
            found.update(dict.fromkeys(members, amax))
        return found

    @staticmethod
    def _unknown(step: ExportStep, words: Collection[str]) -> dict[str, list[TensorTask]]:
        """The weights that share the scales of these names; where one is shared beyond the step, all that share any."""
        beyond = any(task.shared_scale in words for task in step.scaled_with)
        tasks = step.read if beyond else step.tasks
        found: dict[str, list[TensorTask]] = {}
        for task in tasks:
            if task.reach == "tensor" and (task.shared_scale in words or beyond):
                found.setdefault(task.shared_scale, []).append(task)
        return found

    def _weight(self, task: TensorTask, at_hand: Mapping[int, Tensor]) -> Tensor | None:
        if id(task) in at_hand or not task.cut.owns(self.rank):
            return at_hand.get(id(task))
        return self._read(task)

    def _own(self, task: TensorTask, weight: Tensor | None, size: int) -> Tensor:
        if weight is None:
            return torch.zeros(size)
        assert task.number_format is not None
        part = task.number_format.amax(weight).cpu()
        if not bool(torch.isfinite(part).all()):  # before the reduction: the culprit is this rank
            check_finite(self.plain, weight, task.info.name)
        return part

    def _searched(self, step: ExportStep, members: Sequence[int], shards: Mapping[int, Tensor], amax: Tensor) -> Tensor:
        """The magnitude whose scale has the least squared error over all these weights, where that is searched."""
        number_format = step.tasks[members[0]].number_format
        assert number_format is not None
        if not number_format.searches_whole:
            return amax
        tables = []
        for i in members:
            task, weight = step.tasks[i], shards.get(i)
            own = None if weight is None else number_format.search_errors(weight, amax.to(weight.device))
            tables.append((task, own))
        tried = number_format.search_errors(torch.zeros(1, 1), amax).shape[1]
        whole = torch.zeros(sum(task.info.shape[0] for task, _ in tables), tried, dtype=torch.float64)
        at = 0
        for task, own in tables:
            if own is not None:
                start = at + task.cut.owned[self.rank][0]
                whole[start : start + own.shape[0]] = own
            at += task.info.shape[0]
        self._reduce(whole, collectives.reduce_op.SUM, f"adding the errors of {step.id}", step)
        return number_format.search(amax, whole)

    def _reduce(self, tensor: Tensor, op: collectives.reduce_op, what: str, step: ExportStep) -> None:
        if self.world > 1:
            phase(what, waiting=True)
            collectives.all_reduce(tensor, op=op)
            phase(f"quantising {step.id}")


def check_finite(plain: NumberFormat, tensor: Tensor, name: str) -> None:
    """Refuse NaN and Inf.

    Raises:
        CheckpointError: there are any; says how many and where the first is.
    """
    if tensor.dtype in (torch.bfloat16, torch.float16, torch.float32):
        matrix = tensor if tensor.dim() == 2 else tensor.reshape(1, -1)
        if not bool(torch.isfinite(kernels.row_amax(matrix)).all()):
            plain.quantise(matrix, name=name)  # counts them, says where the first is, and raises
