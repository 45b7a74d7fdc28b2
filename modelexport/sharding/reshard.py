"""Tensors in ranks, from any sharding to any other.

Each rank says which shards it holds and which it wants. The rectangles that exist are intersected with those that are
wanted; each element that a rank lacks is sent to it once, by one of those who hold it. It knows tensors and ranks, and
nothing of models: which shards a parallelism calls for is for a plan to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from modelexport.distributed.collectives.byte_transport import flat_bytes
from modelexport.distributed.collectives.groups import AnyGroup
from modelexport.distributed.delivery.pairwise import Piece
from modelexport.distributed.transport.messages import WHOLES, Kind
from modelexport.errors import UsageError
from modelexport.sharding.agreement import ExchangeReport, Route, agree, team_of
from modelexport.sharding.boxes import Box, extent, intersect, placed, relative, slices
from modelexport.sharding.moves import Holding, Move, plan_moves, shown
from modelexport.sharding.tensor import ShardedTensor, ShardId
from modelexport.system.dtypes import as_integers, is_dtype_name, torch_dtype_named, torch_name

__all__ = ["reshard"]

_ALGORITHMS = ("auto", "p2p", "shared_memory")
_BATCH_BYTES = 256 << 20  # of all ranks together, in shared memory at a time where results are copies

Held = Mapping[ShardId, torch.Tensor] | Sequence[ShardedTensor]


def reshard(
    held: Held,
    wanted: Sequence[ShardedTensor],
    group: AnyGroup = None,
    algorithm: str = "auto",
    *,
    share: bool = False,
    report: ExchangeReport | None = None,
) -> dict[ShardId, torch.Tensor]:
    """The shards that this rank wants, put together from those that the ranks hold. Called by all ranks of the group.

    Args:
        held: this rank's shards, with data, in any strides: as ShardedTensors, or as tensors by shard id (then the
            whole tensor's shape is not compared). Ranks may hold the same shard, or overlapping ones, if the values
            are the same; which of them is read is not said.
        wanted: what this rank wants, of these tensors: any rectangles, also some that overlap. Where one has ``data``,
            the result lies on their device (if not meta), else where the exchange runs (the CPU with gloo); they are
            not written to.
        group: None for all ranks.
        algorithm: ``p2p``, ``shared_memory`` or ``auto``, as in
            :func:`modelexport.sharding.exchange.exchange_by_distribution`.
        share: a result may be memory that is not its own: a view of a held tensor of which it is a part, or with
            ``shared_memory`` of another rank's, where it is one rectangle of that. Write to none of these.
        report: counters that the exchange adds to.

    Returns:
        By shard id one contiguous tensor for each of ``wanted`` (with ``share``, views may have strides).

    Raises:
        UsageError: the same on every rank: a shard without data or offset, or given twice; an unknown algorithm; ranks
            that disagree about a tensor's dtype or global shape; a part that is wanted and that nobody holds (it names
            tensor and rectangle).
        GatherError, RuntimeError: a rank was lost on the way; see
            :func:`modelexport.sharding.exchange.exchange_by_distribution`.
    """
    team = team_of("reshard", group)
    mine: dict[tuple[str, Box], torch.Tensor] = {}

    def describe() -> dict[str, Any]:
        holdings = []
        for shard, data in _given(held):
            if data.is_meta or data.layout != torch.strided:
                raise UsageError(f"held has shard {shard.id} without dense data ({data.layout} on {data.device})")
            mine[shard.key, shard.box] = data
            holdings.append(_record(shard, known=isinstance(held, Sequence)))
        return {"held": _unique(holdings, "held"), "wanted": _unique(map(_record, wanted), "wanted")}

    route = agree("reshard", team, algorithm, _ALGORITHMS, describe, lambda: list(mine.values()), report, _FIELDS)
    moves = plan_moves(
        [_holdings(record["held"]) for record in route.records],
        [_holdings(record["wanted"]) for record in route.records],
        team.ranks,
    )
    return _Assembly(mine, wanted, moves, route, share).run()


class _Assembly:
    """This rank's part of the moves: the buffers of its pieces (see ``PieceBuffers``)."""

    def __init__(
        self,
        mine: Mapping[tuple[str, Box], torch.Tensor],
        wanted: Sequence[ShardedTensor],
        moves: Sequence[Move],
        route: Route,
        share: bool,
    ) -> None:
        self._mine, self._moves, self._route = mine, moves, route
        self._share = share
        self._all = list(wanted)
        self._wanted: dict[str, list[ShardedTensor]] = {}
        for shard in wanted:
            self._wanted.setdefault(shard.key, []).append(shard)
        self._held: dict[str, list[Box]] = {}
        for key, box in mine:
            self._held.setdefault(key, []).append(box)
        self._results: dict[ShardId, torch.Tensor] = {}
        self._views: set[ShardId] = set()  # results that are complete, and not this rank's to write to

    def run(self) -> dict[ShardId, torch.Tensor]:
        """Exchanges the pieces; returns the shards that this rank wants."""
        me = self._route.team.position
        self._route.report.add(needed=sum(move.nbytes for move in self._moves if me in move.targets))
        for shard in self._all:
            self._take_own(shard)
        pieces = [Piece(number, move.nbytes, move.source, move.targets) for number, move in enumerate(self._moves)]
        for batch in self._batches(pieces):
            self._route.carry(batch, self, keep=self._share)
        return {shard.id: self._finished(shard) for shard in self._all}

    def outgoing(self, number: int) -> torch.Tensor:
        """The rectangle, cut out of the shard that has it."""
        move = self._moves[number]
        return as_integers(_cut(self._mine[move.key, move.held], move.box, move.held))

    def incoming(self, number: int) -> torch.Tensor:
        """The place in the result, if the rectangle goes to one place and lies there in one piece; else a buffer."""
        move = self._moves[number]
        places = list(self._places(move))
        if len(places) == 1:
            part = _cut(self._result(places[0]), move.box, places[0].box)
            if part.is_contiguous() and part.device == self._route.device:
                return flat_bytes(part)
        return torch.empty(move.nbytes, dtype=torch.uint8, device=self._route.device)

    def arrived(self, number: int, data: torch.Tensor) -> None:
        """The rectangle's bytes are here."""
        move = self._moves[number]
        places = list(self._places(move))
        whole = data.view(places[0].dtype).view(extent(move.box))
        for shard in places:
            if self._share and shard.box == move.box and shard.id not in self._results:
                self._results[shard.id] = whole
                self._views.add(shard.id)
                continue
            shared = intersect(move.box, shard.box)
            assert shared is not None
            target = _cut(self._result(shard), shared, shard.box)
            if target.data_ptr() != data.data_ptr():  # else it was received in its place
                as_integers(target).copy_(as_integers(_cut(whole, shared, move.box)))

    def _batches(self, pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
        if self._route.algorithm != "shared_memory" or self._share:
            if pieces:
                yield pieces
            return
        batch: list[Piece] = []
        total = 0
        for piece in pieces:
            if batch and total + piece.nbytes > _BATCH_BYTES:
                yield batch
                batch, total = [], 0
            batch.append(piece)
            total += piece.nbytes
        if batch:
            yield batch

    def _places(self, move: Move) -> Iterator[ShardedTensor]:
        """The wanted shards that share elements with the rectangle, and have not all of theirs yet."""
        for shard in self._wanted[move.key]:
            if shard.id not in self._views and intersect(move.box, shard.box) is not None:
                yield shard

    def _take_own(self, shard: ShardedTensor) -> None:
        """Takes from this rank's own tensors what they hold of a shard."""
        for box in self._held.get(shard.key, ()):
            shared = intersect(box, shard.box)
            if shared is None:
                continue
            part = _cut(self._mine[shard.key, box], shared, box)
            if self._share and shared == shard.box:
                self._results[shard.id] = part
                self._views.add(shard.id)
                return
            as_integers(_cut(self._result(shard), shared, shard.box)).copy_(as_integers(part))
            if shared == shard.box:
                return

    def _result(self, shard: ShardedTensor) -> torch.Tensor:
        if shard.id not in self._results:
            self._results[shard.id] = torch.empty(shard.local_shape, dtype=shard.dtype, device=self._route.device)
        return self._results[shard.id]

    def _finished(self, shard: ShardedTensor) -> torch.Tensor:
        result = self._result(shard).detach()
        return result if shard.data is None or shard.data.is_meta else result.to(shard.data.device)


def _cut(tensor: torch.Tensor, box: Box, outer: Box) -> torch.Tensor:
    """The part ``box`` of a tensor that is the part ``outer`` of a global one."""
    return tensor.detach()[slices(relative(box, outer))]


def _given(held: Held) -> Iterator[tuple[ShardedTensor, torch.Tensor]]:
    if isinstance(held, Mapping):
        for shard_id, tensor in held.items():
            yield _of_id(shard_id, tensor), tensor
        return
    for shard in held:
        if not isinstance(shard, ShardedTensor) or shard.data is None:
            raise UsageError(f"held has {shard!r}; what a rank holds must be ShardedTensors with data")
        yield shard, shard.data


def _of_id(shard_id: ShardId, tensor: torch.Tensor) -> ShardedTensor:
    """A held tensor as a shard; the tensor's whole shape is unknown, and reaches as far as the shard does."""
    if not isinstance(shard_id, tuple) or len(shard_id) != 3 or shard_id[1] is None:
        raise UsageError(f"held has the id {shard_id!r}; it must be (key, global_offset, local_shape), a ShardId")
    key, offset, shape = shard_id
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != tuple(shape):
        found = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise UsageError(f"held has a tensor of shape {found} for shard {ShardId(*shard_id)}")
    assert offset is not None
    whole = tuple(stop for _, stop in placed(offset, shape))
    return ShardedTensor(key, tensor.dtype, shape, whole, offset, 0, tensor)


def _record(shard: ShardedTensor, known: bool = True) -> list[Any]:
    if not isinstance(shard, ShardedTensor):
        raise UsageError(f"wanted has {shard!r}; it must be a ShardedTensor")
    box = shard.box  # raises where its place is not known
    return [shard.key, box, torch_name(shard.dtype), shard.global_shape if known else None]


def _is_record(value: Any) -> bool:
    """Returns whether a value from JSON is what :func:`_record` makes."""
    if not isinstance(value, list) or len(value) != 4:
        return False
    key, box, dtype, whole = value
    return (
        isinstance(key, str)
        and isinstance(box, list)
        and all(WHOLES.fits(span) and len(span) == 2 and span[0] <= span[1] for span in box)
        and is_dtype_name(dtype)
        and (whole is None or (WHOLES.fits(whole) and len(whole) == len(box)))
    )


_RECORDS = Kind("a list of shards", lambda value: isinstance(value, list) and all(map(_is_record, value)))
_FIELDS = {"held": _RECORDS, "wanted": _RECORDS}


def _unique(records: Iterable[list[Any]], what: str) -> list[list[Any]]:
    seen: dict[tuple[str, Box], list[Any]] = {}
    for record in records:
        key, box = record[0], record[1]
        if (key, box) in seen:
            raise UsageError(f"{what} has {shown(box)} of tensor {key!r} twice; give each shard once")
        seen[key, box] = record
    return list(seen.values())


def _holdings(records: Iterable[Sequence[Any]]) -> list[Holding]:
    return [
        Holding(
            key,
            tuple((start, stop) for start, stop in box),
            torch_dtype_named(dtype),
            None if whole is None else tuple(whole),
        )
        for key, box, dtype, whole in records
    ]
