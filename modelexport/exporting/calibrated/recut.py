"""A layer's tensors between the two ways in which ranks hold them: as its forward pass needs them, and as they leave.

The forward pass wants whole heads, and columns of what is row-parallel; weights are rounded in whole rows, so many that
groups and chunks are never cut. The shard exchange goes from one to the other and back. On one rank both are the same
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from modelexport.distributed import collectives
from modelexport.exporting.plan.steps import TensorTask
from modelexport.quantization.calibration.cut import ForwardShard
from modelexport.sharding.boxes import extent
from modelexport.sharding.reshard import reshard
from modelexport.sharding.tensor import ShardedTensor

Shares = Callable[[str], ForwardShard]


def to_rows(tasks: Mapping[str, TensorTask], tensors: Mapping[str, Tensor], shares: Shares) -> dict[str, Tensor]:
    """The part of each tensor that this rank emits, re-cut from the parts that the ranks' forward passes hold.
    Collective.

    Args:
        tasks: tensor's name -> its task. The same on all ranks.
        tensors: name -> this rank's forward shard.
        shares: name -> which part of the whole that is.

    Returns:
        Name -> the rank's rows; on one rank the given tensors themselves, on several new ones. A rank that owns
        nothing of a tensor gets no rows of it.
    """
    if collectives.get_world_size() == 1:
        return {name: tensors[name] for name in tasks}
    rank = collectives.get_rank()
    found: dict[str, Tensor] = {}
    held: list[ShardedTensor] = []
    wanted: list[ShardedTensor] = []
    for name, task in tasks.items():
        whole, data, share = task.info.shape, tensors[name], shares(name)
        box = task.owned_box(rank)
        if box is None:
            found[name] = data.new_empty((0, *whole[1:]))
        elif share.dim is None:
            found[name] = data[tuple(slice(*span) for span in box)]
        if share.dim is None:
            continue
        if share.tiles:  # else the rank has no part in it
            held += _parts(name, data, whole, share)
        if box is not None:
            offset = tuple(start for start, _ in box)
            wanted.append(ShardedTensor(name, data.dtype, extent(box), whole, offset))
    given = reshard(held, wanted)
    for shard in wanted:
        found[shard.key] = given[shard.id].to(tensors[shard.key].device)  # it may have travelled by the host's memory
    return {name: found[name] for name in tasks}


def from_rows(
    tasks: Mapping[str, TensorTask], rows: Mapping[str, Tensor], tensors: Mapping[str, Tensor], shares: Shares
) -> None:
    """The inverse of :func:`to_rows`: fills ``tensors``, this rank's forward shards, with what the ranks' rows are."""
    if collectives.get_world_size() == 1:
        for name in tasks:
            if rows[name].data_ptr() != tensors[name].data_ptr():
                tensors[name].copy_(rows[name])
        return
    rank = collectives.get_rank()
    held: list[ShardedTensor] = []
    wanted: list[ShardedTensor] = []
    for name, task in tasks.items():
        whole, data, share = task.info.shape, tensors[name], shares(name)
        box = task.owned_box(rank)
        if box is not None:
            held.append(ShardedTensor.part(name, rows[name].contiguous(), whole, tuple(start for start, _ in box)))
        if share.tiles or share.dim is None:
            wanted += _parts(name, data, whole, share)
    given = reshard(held, [part.without_data() for part in wanted])
    for part in wanted:
        assert part.data is not None
        part.data.copy_(given[part.id])


def _parts(name: str, data: Tensor, whole: tuple[int, ...], share: ForwardShard) -> Iterable[ShardedTensor]:
    """A rank's forward shard as rectangles of the whole tensor: views of ``data``."""
    if share.dim is None:
        return [ShardedTensor.whole(name, data)]
    found, at = [], 0
    for start, stop in share.spans:
        if stop == start:
            continue
        view = data.narrow(share.dim, at, stop - start)
        offset = [0] * len(whole)
        offset[share.dim] = start
        found.append(ShardedTensor.part(name, view, whole, offset))
        at += stop - start
    assert at == data.shape[share.dim], f"{name}: spans {share.spans} of {tuple(data.shape)}"
    return found
