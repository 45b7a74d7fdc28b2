"""The optional check that all ranks mean the same collective, made before it starts.

A collective to which one rank brings another shape leaves gloo's group unusable, and where ranks call different
collectives all of them hang. With ``check=True`` or ``MODELEXPORT_DEBUG`` set (non-empty, not ``"0"``; on every rank
of the group) the ranks first tell each other what they are about to do; where they disagree, or one of them cannot
take part, all raise the same error and the group remains usable.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from modelexport.distributed.collectives.groups import Members
from modelexport.distributed.transport.messages import (
    OBJECT,
    TEXT,
    TEXT_OR_NONE,
    TEXTS,
    LostPeerError,
    read_message,
)
from modelexport.errors import UsageError
from modelexport.system.dtypes import torch_name

_MOST_BYTES = 64 << 20  # a hundred thousand tensors take a quarter of it
_FIELDS = {"collective": TEXT, "facts": OBJECT, "problem": TEXT_OR_NONE, "sent": TEXTS, "expected": TEXTS}
_FIRST_BYTES = 512  # most headers fit into the first exchange


class CollectiveMismatchError(UsageError, RuntimeError):
    """The ranks of a group brought arguments to a collective that do not go together; raised on all of them."""


def checking(check: bool | None) -> bool:
    """Returns whether to check: ``check``, or where that is None the setting ``MODELEXPORT_DEBUG``."""
    return os.environ.get("MODELEXPORT_DEBUG", "") not in ("", "0") if check is None else check


class Agreement:
    """Compares the ranks' arguments at the end of ``with Agreement("broadcast", team, check) as call:``.

    The block validates this rank's arguments and declares them (:meth:`declare`). An error that it raises is raised on
    every rank where the check is on.
    """

    def __init__(self, name: str, team: Members, check: bool | None) -> None:
        self._name = name
        self._team = team
        self._on = team.size > 1 and checking(check)
        self._facts: dict[str, str] = {}
        self._sent: list[str] = []
        self._expected: list[str] = []

    def __enter__(self) -> Agreement:
        return self

    def declare(self, tensor: torch.Tensor | None = None, **facts: Any) -> None:
        """Declares facts that must be the same on every rank."""
        if not self._on:
            return
        if tensor is not None:
            facts.update(shape=tuple(tensor.shape), dtype=torch_name(tensor.dtype), device=tensor.device.type)
        self._facts.update({name: str(value) for name, value in facts.items()})

    def exchanges(self, sent: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
        """Declares the tensors sent to each member, and those expected from each (in the group's order)."""
        if self._on:
            self._sent, self._expected = [str(tuple(t.shape)) for t in sent], [str(tuple(t.shape)) for t in expected]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._on or (error is not None and not isinstance(error, Exception)):
            return
        mine = {
            "collective": self._name,
            "facts": self._facts,
            "problem": None if error is None else str(error),
            "sent": self._sent,
            "expected": self._expected,
        }
        texts = exchange_texts(json.dumps(mine), self._team)
        records = [_record(text, rank, self._team.size) for text, rank in zip(texts, self._team.ranks, strict=True)]
        message = _disagreement(records, self._team.ranks)
        if message:
            raise CollectiveMismatchError(message) from error


def exchange_texts(text: str, team: Members) -> list[str]:
    """Every member's text, in the group's order.

    Raises:
        LostPeerError: a rank's is longer than any, or is no text.
    """
    data = text.encode()
    first = len(data).to_bytes(8, "little") + data[: _FIRST_BYTES - 8]
    blocks = _exchange_blocks(first, _FIRST_BYTES, team)
    lengths = [int.from_bytes(block[:8], "little") for block in blocks]
    for rank, length in zip(team.ranks, lengths, strict=True):
        if length > _MOST_BYTES:
            what = f"describes its arguments in {length:,} bytes, and {_MOST_BYTES:,} at most are taken"
            raise LostPeerError(f"rank {rank} {what}: is it in the same call?", [rank])
    if max(lengths) > _FIRST_BYTES - 8:
        blocks = [bytes(8) + block for block in _exchange_blocks(data, max(lengths), team)]
    try:
        return [block[8 : 8 + length].decode() for block, length in zip(blocks, lengths, strict=True)]
    except UnicodeDecodeError as error:
        raise LostPeerError(f"what ranks {list(team.ranks)} say of their arguments is no text: {error}") from error


def _record(text: str, rank: int, size: int) -> dict[str, Any]:
    """A rank's record.

    Raises:
        LostPeerError: it is none.
    """
    sender = f"what rank {rank} says of its arguments"
    record = read_message(text, sender, _FIELDS, blamed=[rank])
    for name in ("sent", "expected"):
        if len(record[name]) not in (0, size):
            what = f"{len(record[name])} shapes as '{name}', and the group has {size} ranks"
            raise LostPeerError(f"{sender} has {what}", [rank])
    return record


def _exchange_blocks(data: bytes, size: int, team: Members) -> list[bytes]:
    device = team.carrier(torch.device("cpu"))
    mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(device)
    blocks = [torch.empty_like(mine) for _ in range(team.size)]
    dist.all_gather(team.torch_order(blocks), mine, group=team.process_group)
    return [block.cpu().numpy().tobytes() for block in blocks]


def _disagreement(records: list[dict[str, Any]], ranks: tuple[int, ...]) -> str | None:
    """Returns the first disagreement between the ranks' records, worded alike on every rank; None where they agree."""
    odd = _odd_one([record["collective"] for record in records])
    if odd is not None:
        culprit, other = odd
        return (
            f"rank {ranks[culprit]} calls {records[culprit]['collective']} where rank {ranks[other]} calls "
            f"{records[other]['collective']}; every rank of a group must make the same calls in the same order"
        )
    name = records[0]["collective"]
    for rank, record in zip(ranks, records, strict=True):
        if record["problem"] is not None:
            return f"{name}: rank {rank}: {record['problem']}"
    for fact in records[0]["facts"]:
        odd = _odd_one([record["facts"].get(fact) for record in records])
        if odd is not None:
            (one, value), (other, right) = ((ranks[index], records[index]["facts"].get(fact)) for index in odd)
            return (
                f"{name}: rank {one} brings {fact} {value} and rank {other} brings {right}; "
                f"every rank of the group must bring the same"
            )
    return _unpaired(name, records, ranks)


def _odd_one(values: list[Any]) -> tuple[int, int] | None:
    """The index of a value that differs from the most frequent one, and an index of that; None where all are equal.

    Of two equally frequent values the one that comes first counts as right.
    """
    texts = [json.dumps(value) for value in values]
    if len(set(texts)) == 1:
        return None
    right = Counter(texts).most_common(1)[0][0]
    culprit = next(index for index, text in enumerate(texts) if text != right)
    return culprit, texts.index(right)


def _unpaired(name: str, records: list[dict[str, Any]], ranks: tuple[int, ...]) -> str | None:
    for source, record in enumerate(records):
        for target, sent in enumerate(record["sent"]):
            expected = (records[target]["expected"] or [None] * len(records))[source]
            if sent != expected:
                giver, taker = ranks[source], ranks[target]
                return (
                    f"{name}: rank {giver} sends shape {sent} to rank {taker}, which expects {expected}; "
                    f"input {target} of rank {giver} and output {source} of rank {taker} must agree"
                )
    return None
