"""The exchange algorithms, most of them made of collectives: every rank gets every shard, and keeps what it needs.

They count as sent what a rank hands out times the ranks that get it, however the back end routes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from modelexport.distributed.collectives import all_gather, broadcast
from modelexport.distributed.collectives.argument_check import exchange_texts
from modelexport.distributed.collectives.groups import AnyGroup, Group, Members
from modelexport.distributed.delivery.pairwise import Piece
from modelexport.distributed.transport import mailbox
from modelexport.distributed.transport.messages import Kind
from modelexport.errors import UsageError
from modelexport.sharding.agreement import ExchangeReport, exchange_records, team_of
from modelexport.sharding.distribution import canonical_order
from modelexport.sharding.exchange.shard_exchange import ShardExchange
from modelexport.sharding.tensor import ShardId, order_key

__all__ = ["by_broadcasts", "by_gather_object", "by_gather_rounds", "directly", "gather_objects"]


def directly(exchange: ShardExchange) -> None:
    """``p2p`` and ``shared_memory``: each shard to the ranks that need it and to no other."""
    exchange.route.carry(exchange.pieces, exchange, keep=True)


def by_broadcasts(exchange: ShardExchange) -> None:
    """A broadcast of each shard that any rank needs, source by source."""
    team = exchange.route.team
    group = team.process_group
    for piece in exchange.pieces:
        mine = piece.source == exchange.me
        data = exchange.bytes_of(piece.number) if mine else exchange.incoming(piece.number)
        broadcast(data, team.ranks[piece.source], group)
        if not mine and exchange.me in piece.targets:
            exchange.arrived(piece.number, data)
        amount = piece.nbytes * (team.size - 1) if mine else 0
        exchange.route.report.add(sent=amount, received=0 if mine else piece.nbytes, messages=1)


def by_gather_rounds(exchange: ShardExchange) -> None:
    """Dtype by dtype, in rounds: each rank's next shard, filled up to the largest of the round."""
    team = exchange.route.team
    for row in _rounds(exchange):
        size = max(piece.nbytes for piece in row if piece is not None)
        mine = row[exchange.me]
        block = torch.zeros(size, dtype=torch.uint8, device=exchange.route.device)
        if mine is not None:
            block[: mine.nbytes].copy_(exchange.bytes_of(mine.number))
        blocks = [torch.empty_like(block) for _ in range(team.size)]
        all_gather(blocks, block, _in_order(team))
        for piece, found in zip(row, blocks, strict=True):
            if piece is not None and exchange.me in piece.targets:
                place = exchange.incoming(piece.number)
                place.copy_(found[: piece.nbytes])
                exchange.arrived(piece.number, place)
        exchange.route.report.add(sent=size * (team.size - 1), received=size * (team.size - 1), messages=1)


def _rounds(exchange: ShardExchange) -> Iterator[tuple[Piece | None, ...]]:
    """For each round the shard that each rank gives, None where it has no more of the dtype.

    Large ones first, so that there is little to fill up.
    """

    def dtype(piece: Piece) -> str:
        return str(exchange.metadata[exchange.order[piece.number]].dtype)

    for _, group in itertools.groupby(sorted(exchange.pieces, key=lambda piece: (dtype(piece), -piece.nbytes)), dtype):
        queues: list[list[Piece]] = [[] for _ in range(exchange.route.team.size)]
        for piece in group:
            queues[piece.source].append(piece)
        yield from itertools.zip_longest(*queues)


def by_gather_object(exchange: ShardExchange) -> None:
    """All that a rank gives as one object, in one gather. Simple, and holds everything several times."""
    team = exchange.route.team
    mine = {
        str(piece.number): exchange.bytes_of(piece.number).cpu()
        for piece in exchange.pieces
        if piece.source == exchange.me
    }
    for place, (data, sent) in enumerate(_gather_values(mine, exchange.route.device, team, exchange.route.report)):
        if place == exchange.me:
            continue
        for name, found in data.items():
            if exchange.order[int(name)] in exchange.needed:
                target = exchange.incoming(int(name))
                target.copy_(found)
                exchange.arrived(int(name), target)
        exchange.route.report.add(received=sent)


def _gather_values(
    value: Any, device: torch.device, team: Members, report: ExchangeReport
) -> Iterator[tuple[Any, int]]:
    """Every rank's value, in the group's order, and the bytes it took; no pickle is involved."""
    data = torch.frombuffer(bytearray(mailbox.encode(value)), dtype=torch.uint8)
    sizes = [int(text) for text in exchange_texts(str(data.numel()), team)]
    block = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    block[: data.numel()].copy_(data)
    blocks = [torch.empty_like(block) for _ in sizes]
    all_gather(blocks, block, _in_order(team))
    report.add(sent=max(sizes) * (team.size - 1), messages=1)
    for found, size in zip(blocks, sizes, strict=True):
        yield mailbox.decode(found[:size].cpu().numpy().tobytes()), max(sizes)


def _is_named(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value)


_IDS = Kind("a list of pairs of texts", lambda value: isinstance(value, list) and all(map(_is_named, value)))


def gather_objects(call: str, objects: Mapping[Any, Any], group: AnyGroup) -> dict[Any, Any]:
    """See :func:`modelexport.sharding.exchange.exchange_loaded_objects_gather_object`."""
    team = team_of(call, group)
    failure: Exception | None = None
    value: list[Any] = []
    names: list[list[str]] = []
    try:
        ids = canonical_order(objects)
        value = [[isinstance(shard_id, ShardId), _plain_tuples(shard_id), objects[shard_id]] for shard_id in ids]
        mailbox.encode(value)  # whatever cannot travel fails here, before the others wait for it
        names = [[repr(order_key(shard_id)), str(shard_id)] for shard_id in ids]
    except Exception as error:
        failure = error
    records = exchange_records(call, team, {"ids": names}, failure, {"ids": _IDS})
    _check_names(call, [record["ids"] for record in records], team)
    if team.alone:
        return dict(objects)
    result: dict[Any, Any] = {}
    device = team.carrier(torch.device("cpu"))
    for place, (found, _) in enumerate(_gather_values(value, device, team, ExchangeReport())):
        if place == team.position:
            result |= objects
        else:
            result |= {ShardId(*plain) if is_id else plain: item for is_id, plain, item in found}
    return result


def _check_names(call: str, names: Sequence[Sequence[Sequence[str]]], team: Members) -> None:
    first: dict[str, int] = {}
    for rank, found in zip(team.ranks, names, strict=True):
        for name, shown in found:
            if name in first:
                raise UsageError(
                    f"{call}: ranks {first[name]} and {rank} have both loaded {shown}; load each object on one rank "
                    "(duplicate shard id)"
                )
            first[name] = rank


def _plain_tuples(shard_id: Any) -> Any:
    """An id without classes of ours, which would have to be known wherever it goes."""
    return tuple(map(_plain_tuples, shard_id)) if isinstance(shard_id, tuple) else shard_id


def _in_order(team: Members) -> Group:
    """The group as a handle that keeps the order of its ranks, which torch's own does not."""
    return Group(team.ranks, team.process_group)
