"""One exchange of loaded shards: the ranks' holdings and needs, checked on all ranks before any shard is sent."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from modelexport.distributed.collectives.byte_transport import flat_bytes
from modelexport.distributed.collectives.groups import AnyGroup, Members
from modelexport.distributed.delivery.pairwise import Piece, as_flat_bytes
from modelexport.distributed.transport.messages import TEXT, Kind
from modelexport.errors import UsageError
from modelexport.sharding.agreement import ExchangeReport, Route, agree, is_float8tensor, team_of
from modelexport.sharding.distribution import ShardDistribution, canonical_order
from modelexport.sharding.tensor import ShardedTensor, order_key
from modelexport.system.dtypes import as_integers

__all__ = ["ShardExchange", "_get_empty_tensor_for_exchange", "prepare"]

Loaded = Mapping[Any, torch.Tensor]
Unloaded = Mapping[Any, ShardedTensor]


def _get_empty_tensor_for_exchange(
    shard_id: Any,
    needed_shards: Unloaded,
    unneeded_shards: Unloaded,
    loaded_tensors: dict[Any, torch.Tensor],
    device: torch.device | None = None,
) -> tuple[torch.Tensor, torch.device | None]:
    """A tensor to receive a shard in.

    Args:
        shard_id: the shard.
        needed_shards: what this rank needs, described.
        unneeded_shards: descriptions of the others, whose tensor is thrown away after the exchange.
        loaded_tensors: the new tensor is put in here if the shard is needed.
        device: where it is to be; None for the current CUDA device, or the CPU where there is none.

    Returns:
        The tensor, its contents undefined, and the device of the state dict's own tensor of a needed shard that has
        one (the caller moves the result there), else None.

    Raises:
        UsageError: nothing describes the shard.
    """
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    needed = needed_shards.get(shard_id)
    shard = needed if needed is not None else unneeded_shards.get(shard_id)
    if shard is None:
        raise UsageError(f"nothing describes shard {shard_id!s}: it is neither needed nor in the distribution")
    tensor = torch.empty(shard.local_shape, dtype=shard.dtype, device=device)
    if needed is None:
        return tensor, None
    loaded_tensors[shard_id] = tensor
    return tensor, None if needed.data is None else needed.data.device


@dataclass(eq=False)
class ShardExchange:
    """This rank's part of an exchange, for an algorithm to carry out; the ``PieceBuffers`` of its pieces.

    Attributes:
        route: the group, the device, the counters.
        order: the ids of all shards of the distribution, in an order that all ranks share.
        pieces: the shards that travel, numbered by ``order``; those without bytes are not among them. By source.
        metadata: describes each shard.
        needed: what this rank has to get.
        loaded: the tensors that this rank has.
        result: what this rank will have; filled by the algorithm.
    """

    route: Route
    order: list[Any]
    pieces: list[Piece]
    metadata: Unloaded
    needed: dict[Any, ShardedTensor]
    loaded: Loaded
    result: dict[Any, torch.Tensor]

    @property
    def me(self) -> int:
        """This rank's place in the group."""
        return self.route.team.position

    def outgoing(self, number: int) -> torch.Tensor:
        """A shard of this rank's, as integers of its width."""
        return as_integers(_plain(self.loaded[self.order[number]]))

    def bytes_of(self, number: int) -> torch.Tensor:
        """A shard of this rank's as contiguous ``uint8`` on the device of the exchange."""
        return as_flat_bytes(self.outgoing(number), self.route.device)

    def incoming(self, number: int) -> torch.Tensor:
        """The bytes of the tensor for a shard; made when first asked for."""
        shard_id = self.order[number]
        tensor = self.result.get(shard_id)
        if tensor is None or shard_id not in self.needed:
            tensor, _ = _get_empty_tensor_for_exchange(
                shard_id, self.needed, self.metadata, self.result, self.route.device
            )
        return flat_bytes(tensor)

    def arrived(self, number: int, data: torch.Tensor) -> None:
        """``data`` holds the shard's bytes: the tensor's own, or memory that is mapped here."""
        shard_id = self.order[number]
        if shard_id not in self.result:
            shard = self.metadata[shard_id]
            self.result[shard_id] = data.view(shard.dtype).view(shard.local_shape)

    def finish(self) -> dict[Any, torch.Tensor]:
        """The result, with shards of no bytes, each on the device that its description's data are on."""
        for shard_id, shard in self.needed.items():
            if shard_id not in self.result:
                assert not shard.nbytes
                _get_empty_tensor_for_exchange(shard_id, self.needed, {}, self.result, self.route.device)
            if shard.data is not None and not shard.data.is_meta:
                self.result[shard_id] = self.result[shard_id].to(shard.data.device)
        return self.result


def prepare(
    call: str,
    loaded: Loaded,
    unloaded: Unloaded,
    distribution: ShardDistribution | None,
    group: AnyGroup,
    report: ExchangeReport | None,
    algorithm: str,
    known: Sequence[str],
) -> ShardExchange:
    """Checks this rank's arguments and compares them with the others'.

    Raises:
        UsageError: on every rank, with the rank that is to blame.
    """
    team = team_of(call, group)
    order: list[Any] = []

    def describe() -> dict[str, Any]:
        if distribution is None and not team.alone:
            raise UsageError(
                "there is no shard distribution; pass what determine_main_replica_uniform_distribution returned"
            )
        if distribution is not None:
            order.extend(canonical_order(distribution.main_rank_for_shard))
            _check(order, loaded, unloaded, distribution, team)
        elif unloaded.keys() - loaded.keys():
            missing = canonical_order(unloaded.keys() - loaded.keys())
            raise UsageError(f"shard {missing[0]!s} is not loaded, and this rank is alone: nobody can send it")
        return {
            "digest": _digest(order, distribution),
            "has": _bits(order, loaded.keys()),
            "needs": _bits(order, unloaded.keys() - loaded.keys()),
        }

    def given() -> list[torch.Tensor]:
        return [loaded[shard_id] for shard_id in order if shard_id in loaded]

    route = agree(call, team, algorithm, known, describe, given, report, _FIELDS)
    pieces = [] if distribution is None else _pieces(call, order, distribution, route)
    needed = {shard_id: unloaded[shard_id] for shard_id in order if shard_id in unloaded and shard_id not in loaded}
    route.report.add(needed=sum(shard.nbytes for shard in needed.values()))
    metadata = {} if distribution is None else distribution.shard_to_metadata
    return ShardExchange(route, order, pieces, metadata, needed, loaded, dict(loaded))


def _is_hexadecimal(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]+", value) is not None


_BITS = Kind("a hexadecimal number", _is_hexadecimal)
_FIELDS = {"digest": TEXT, "has": _BITS, "needs": _BITS}


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    dequantise: Any = getattr(tensor, "dequantize", None)
    return dequantise() if is_float8tensor(tensor) else tensor


def _check(
    order: Sequence[Any], loaded: Loaded, unloaded: Unloaded, distribution: ShardDistribution, team: Members
) -> None:
    for shard_id in order:
        if shard_id not in distribution.shard_to_metadata:
            raise UsageError(f"the distribution does not describe shard {shard_id!s} (shard_to_metadata)")
        main = distribution.main_rank_for_shard[shard_id]
        if not 0 <= main < team.size:
            raise UsageError(
                f"the distribution gives shard {shard_id!s} to rank {main}, but the group has {team.size} ranks; "
                "was it made for another group?"
            )
    for shard_id, shard in distribution.shard_to_metadata.items():
        if shard_id in loaded:
            _check_loaded(shard_id, loaded[shard_id], shard)
        wanted = unloaded.get(shard_id)
        if wanted is not None and (wanted.dtype, wanted.local_shape) != (shard.dtype, shard.local_shape):
            raise UsageError(
                f"shard {shard_id!s} is needed as {wanted.dtype} of shape {list(wanted.local_shape)}, but the "
                f"distribution has it as {shard.dtype} of shape {list(shard.local_shape)}"
            )
    strange = unloaded.keys() - loaded.keys() - distribution.main_rank_for_shard.keys()
    if strange:
        first = canonical_order(strange)[0]
        raise UsageError(
            f"shard {first!s} is needed, but no rank of this group loads it: it is not in the distribution "
            "(ignore_groups=True takes in shards whose main replica is in another group)"
        )


def _check_loaded(shard_id: Any, tensor: torch.Tensor, shard: ShardedTensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"shard {shard_id!s} is loaded as {type(tensor).__name__}; it must be a tensor")
    if hasattr(tensor, "to_local"):
        raise UsageError(f"shard {shard_id!s} is a {type(tensor).__name__}; give the local part: tensor.to_local()")
    if tensor.layout != torch.strided or tensor.is_meta:
        kind = f"sparse ({tensor.layout}); give it .to_dense()" if not tensor.is_meta else "on the meta device: no data"
        raise UsageError(f"shard {shard_id!s} is {kind}")
    dtype = _plain(tensor).dtype if is_float8tensor(tensor) else tensor.dtype
    if tuple(tensor.shape) != shard.local_shape or dtype != shard.dtype:
        raise UsageError(
            f"shard {shard_id!s} was loaded as {dtype} of shape {list(tensor.shape)}, but is described as "
            f"{shard.dtype} of shape {list(shard.local_shape)}"
        )


def _digest(order: Sequence[Any], distribution: ShardDistribution | None) -> str:
    """A digest that is equal on ranks that have the same distribution."""
    digest = hashlib.sha256()
    for shard_id in order:
        assert distribution is not None
        shard = distribution.shard_to_metadata[shard_id]
        facts = (order_key(shard_id), distribution.main_rank_for_shard[shard_id], str(shard.dtype), shard.local_shape)
        digest.update(repr(facts).encode())
    return digest.hexdigest()


def _bits(order: Sequence[Any], chosen: Any) -> str:
    """The members of ``order`` that are chosen, as a hexadecimal number whose lowest bit is the first of them."""
    return f"{int(''.join('1' if shard_id in chosen else '0' for shard_id in reversed(order)) or '0', 2):x}"


def _pieces(call: str, order: Sequence[Any], distribution: ShardDistribution, route: Route) -> list[Piece]:
    """The pieces that travel; the same on every rank, and so are the errors."""
    team, records = route.team, route.records
    for rank, record in zip(team.ranks, records, strict=True):
        if record["digest"] != records[0]["digest"]:
            raise UsageError(
                f"{call}: ranks {team.ranks[0]} and {rank} have different distributions; make it on all ranks of "
                "this group together"
            )
    width = len(order)
    has = [f"{int(record['has'], 16):0{width}b}"[::-1] for record in records]
    needs = [f"{int(record['needs'], 16):0{width}b}"[::-1] for record in records]
    pieces = []
    for number, shard_id in enumerate(order):
        main = distribution.main_rank_for_shard[shard_id]
        owners = [place for place in range(team.size) if has[place][number] == "1"]
        if len(owners) > 1:
            raise UsageError(
                f"{call}: shard {shard_id!s} was loaded by ranks {[team.ranks[place] for place in owners]}; only "
                f"rank {team.ranks[main]} has it to load (duplicate shard id)"
            )
        targets = tuple(place for place in range(team.size) if needs[place][number] == "1")
        if targets and owners != [main]:
            loaded = f"rank {team.ranks[owners[0]]} has" if owners else "nobody has"
            raise UsageError(
                f"{call}: rank {team.ranks[targets[0]]} needs shard {shard_id!s}, which rank {team.ranks[main]} was "
                f"to load; {loaded} loaded it"
            )
        shard = distribution.shard_to_metadata[shard_id]
        nbytes = math.prod(shard.local_shape) * shard.dtype.itemsize
        if targets and nbytes:
            pieces.append(Piece(number, nbytes, main, targets))
    pieces.sort(key=lambda piece: (piece.source, piece.number))
    return pieces
