"""Shared loading of shards that several ranks need: the rank that loads each, and its exchange with the others.

Several ranks hold replicas of the same shards. One loads each (:func:`determine_main_replica_uniform_distribution`
says which), and the others get it from there::

    distribution = determine_main_replica_uniform_distribution(state_dict, group, True)
    mine = {key: read(key) for key, rank in distribution.main_rank_for_shard.items() if rank == my_place_in_group}
    rest = {shard.id: shard for shard in sharded_tensors(state_dict) if shard.id not in mine}
    tensors = exchange_by_distribution(mine, rest, distribution, group, "auto")

What holds for every exchange of tensors: all ranks of the group call it together, with the same distribution. A rank
gets what ``unloaded_shards`` names, bit for bit, and what it had loaded. Every dtype travels. With gloo (host memory)
results are on the CPU, with NCCL, or where any rank's loaded tensors are on CUDA and the group serves that, on this
rank's CUDA device (with ``shared_memory`` always on the CPU); where the description of an unloaded shard has ``data``
on another device than meta, the result goes there (they are not written to). Arguments are compared before anything
travels, so that these errors are the same on every rank:

    UsageError: there is no distribution (in a group of more than one rank), or the ranks have different ones; an
        unknown algorithm, or different ones; a shard that two ranks have loaded, or none has; a shard that is needed
        and not in the distribution; a tensor that is not what the distribution or ``unloaded_shards`` describes.

Where a rank fails while data travel (its process ends, memory does not suffice), the others fail as the transport
finds out: at once where the connection ends, else after the process group's time-out.

``shared_memory`` does not copy: its results are views of one memory, which all ranks that need a shard, and often the
one that loaded it, have in common. Write to none of them. That memory is not used for anything else before every
receiver has let go of its tensor. A tensor that was loaded into ``memory.shared_empty`` is not copied at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from modelexport.distributed.collectives.groups import AnyGroup
from modelexport.sharding.agreement import ExchangeReport, is_float8tensor
from modelexport.sharding.distribution import (
    ShardDistribution,
    T,
    _shard_size,
    determine_main_replica_uniform_distribution,
    distribute_shards_to_ranks,
    sharded_tensors,
)
from modelexport.sharding.exchange import algorithms as _algorithms
from modelexport.sharding.exchange.shard_exchange import ShardExchange, _get_empty_tensor_for_exchange, prepare
from modelexport.sharding.tensor import ShardedTensor

__all__ = [
    "ExchangeReport",
    "ShardDistribution",
    "T",
    "_get_empty_tensor_for_exchange",
    "_shard_size",
    "determine_main_replica_uniform_distribution",
    "distribute_shards_to_ranks",
    "exchange_by_distribution",
    "exchange_loaded_objects_gather_object",
    "exchange_loaded_tensors_broadcast",
    "exchange_loaded_tensors_gather_object",
    "exchange_loaded_tensors_gather_rounds",
    "is_float8tensor",
    "logger",
    "sharded_tensors",
]

logger = logging.getLogger(__name__)

_ALGORITHMS: dict[str, Callable[[ShardExchange], None]] = {
    "auto": _algorithms.directly,
    "broadcast": _algorithms.by_broadcasts,
    "gather_object": _algorithms.by_gather_object,
    "gather_rounds": _algorithms.by_gather_rounds,
    "p2p": _algorithms.directly,
    "shared_memory": _algorithms.directly,
}


def exchange_loaded_tensors_gather_rounds(
    loaded_tensors: Mapping[Any, torch.Tensor],
    unloaded_shards: Mapping[Any, ShardedTensor],
    shard_distribution: ShardDistribution | None = None,
    parallelization_group: AnyGroup = None,
    *,
    report: ExchangeReport | None = None,
) -> dict[Any, torch.Tensor]:
    """Exchanges in rounds: dtype by dtype, in each round one shard of every rank goes to all.

    Shapes may differ within a round: the smaller ones are filled up. Ranks that have fewer shards than others send
    filling to the end. Arguments, result and errors: :func:`exchange_by_distribution`.
    """
    call = "exchange_loaded_tensors_gather_rounds"
    return _exchange(
        call, "gather_rounds", loaded_tensors, unloaded_shards, shard_distribution, parallelization_group, report
    )


def exchange_loaded_tensors_gather_object(
    loaded_tensors: Mapping[Any, torch.Tensor],
    unloaded_shards: Mapping[Any, ShardedTensor],
    shard_distribution: ShardDistribution | None,
    parallelization_group: AnyGroup = None,
    *,
    report: ExchangeReport | None = None,
) -> dict[Any, torch.Tensor]:
    """Exchanges all that ranks have for each other in one gather. For debugging: simple, and heavy on memory.

    No pickle: what travels are the bytes of a safetensors file. Arguments, result and errors:
    :func:`exchange_by_distribution`.
    """
    call = "exchange_loaded_tensors_gather_object"
    return _exchange(
        call, "gather_object", loaded_tensors, unloaded_shards, shard_distribution, parallelization_group, report
    )


def exchange_loaded_objects_gather_object(
    loaded_objects: Mapping[Any, Any], *, group: AnyGroup = None
) -> dict[Any, Any]:
    """Gives every rank the objects that all ranks have loaded.

    Args:
        loaded_objects: by id. Objects are trees of what travels without pickle: None, bool, int, float, str, bytes,
            dtypes, tensors, lists, tuples, dicts and registered dataclasses
            (:func:`modelexport.distributed.transport.tree.register_config`).
        group: who takes part; None for all ranks.

    Returns:
        All objects by id; this rank's own are the very ones it gave, tensors of others are on the CPU.

    Raises:
        UsageError: on every rank, where an id was loaded by two ranks, or an object cannot travel.
    """
    return _algorithms.gather_objects("exchange_loaded_objects_gather_object", loaded_objects, group)


def exchange_loaded_tensors_broadcast(
    loaded_tensors: Mapping[Any, torch.Tensor],
    unloaded_shards: Mapping[Any, ShardedTensor],
    shard_distribution: ShardDistribution | None,
    parallelization_group: AnyGroup = None,
    *,
    report: ExchangeReport | None = None,
) -> dict[Any, torch.Tensor]:
    """Exchanges by broadcasting each shard that any rank needs to all of them, loading rank by loading rank.

    Ranks that do not need a shard receive it and throw it away. Arguments, result and errors:
    :func:`exchange_by_distribution`.
    """
    call = "exchange_loaded_tensors_broadcast"
    return _exchange(
        call, "broadcast", loaded_tensors, unloaded_shards, shard_distribution, parallelization_group, report
    )


def exchange_by_distribution(
    loaded_tensors: Mapping[Any, torch.Tensor],
    unloaded_shards: Mapping[Any, ShardedTensor],
    shard_distribution: ShardDistribution | None,
    parallelization_group: AnyGroup = None,
    exchange_algo: str = "broadcast",
    *,
    report: ExchangeReport | None = None,
) -> dict[Any, torch.Tensor]:
    """Gives each rank of a group the shards that it needs and others have loaded.

    Args:
        loaded_tensors: by shard id, of any strides, on any device; those that are not in the distribution (whose main
            replica is in another group, say) are this rank's own affair.
        unloaded_shards: by shard id, what this rank needs besides. Ids that are in ``loaded_tensors`` too count as
            loaded.
        shard_distribution: the same on every rank; None only in a group of one rank.
        parallelization_group: None for all ranks.
        exchange_algo: ``broadcast``, ``gather_rounds``, ``gather_object``: as the functions of that name;
            ``p2p``: each shard goes once to each rank that needs it and to no other;
            ``shared_memory``: on one host, it is mapped by the ranks that need it (see the module);
            ``auto``: the latter where all ranks are on one host and exchange host memory, else ``p2p``.
        report: counters that the exchange adds to.

    Returns:
        By shard id ``loaded_tensors`` (the very tensors) and what ``unloaded_shards`` names.

    Raises:
        UsageError: as the module says.
        GatherError: with ``shared_memory``, a rank ended or failed, or memory does not suffice.
        RuntimeError: otherwise, a peer is gone, or the group's time-out has passed.
    """
    return _exchange(
        "exchange_by_distribution",
        exchange_algo,
        loaded_tensors,
        unloaded_shards,
        shard_distribution,
        parallelization_group,
        report,
    )


def _exchange(
    call: str,
    algorithm: str,
    loaded: Mapping[Any, torch.Tensor],
    unloaded: Mapping[Any, ShardedTensor],
    distribution: ShardDistribution | None,
    group: AnyGroup,
    report: ExchangeReport | None,
) -> dict[Any, torch.Tensor]:
    exchange = prepare(call, loaded, unloaded, distribution, group, report, algorithm, tuple(_ALGORITHMS))
    if exchange.pieces:
        _ALGORITHMS[algorithm](exchange)
    logger.debug("%s: %s", call, exchange.route.report)
    return exchange.finish()
