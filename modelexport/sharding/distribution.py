"""Distribution of a state dict's shards over the ranks that hold replicas of them, worked out alike on every rank.

A rank is named by its place in the group: for torch's own groups as torch numbers the members, for the handles of
``collectives.new_group`` in the order given there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from modelexport.distributed.collectives.groups import AnyGroup, Members
from modelexport.distributed.transport.messages import ANY, WHOLES, Kind
from modelexport.errors import UsageError
from modelexport.sharding.agreement import exchange_records, team_of
from modelexport.sharding.balance import distribute
from modelexport.sharding.tensor import ShardedTensor, ShardId, order_key
from modelexport.system.dtypes import is_dtype_name, torch_dtype_named, torch_name

__all__ = [
    "ShardDistribution",
    "T",
    "_shard_size",
    "determine_main_replica_uniform_distribution",
    "distribute_shards_to_ranks",
    "sharded_tensors",
]

T = TypeVar("T")


class ShardDistribution(NamedTuple):
    """An assignment of shards to the ranks of one group, which it does not name.

    Attributes:
        main_rank_for_shard: for each shard the rank that saves or loads it.
        shards_in_this_group: the shards whose main replica is on a rank of the group.
        shard_to_metadata: what each shard is, without data.
        all_ranks_for_shard: for each shard the ranks that need it.
    """

    main_rank_for_shard: dict[Any, int]
    shards_in_this_group: set[Any]
    shard_to_metadata: dict[Any, ShardedTensor]
    all_ranks_for_shard: dict[Any, list[int]]


def _shard_size(sh_ten: ShardedTensor) -> int:
    """Bytes of a shard."""
    return sh_ten.nbytes


def distribute_shards_to_ranks(
    shard_to_ranks: Mapping[T, Sequence[int]],
    shard_to_size: Mapping[T, int],
    num_ranks: int,
    cross_parallelization_group_loads: Collection[T],
    *,
    algorithm: str = "greedy",
) -> dict[T, int]:
    """Spreads shards over the ranks that hold them, so that each rank has about as many bytes to handle.

    A pure function: every rank that calls it with the same arguments, in whatever order its dicts are, gets the same.

    Args:
        shard_to_ranks: for each shard the ranks that hold it. Ids may be of any kind that
            :func:`modelexport.sharding.tensor.order_key` orders.
        shard_to_size: for each of these shards its size in bytes.
        num_ranks: in the group.
        cross_parallelization_group_loads: shards whose main replica is in another group; they are placed last, so
            that the others lie as they would without them.
        algorithm: ``greedy``: the most constrained shards first (on the fewest ranks), of these the largest, then by
            id, each to the rank with the least load. ``balanced``: improves on that until the fullest rank has little
            more than it must have (the mean, or the largest shard), where the shards allow it.

    Returns:
        The rank of each shard, in the order in which ``greedy`` assigns them.

    Raises:
        UsageError: a shard is on no rank, on a rank that does not exist, or has no size; an unknown algorithm.
    """
    return distribute(shard_to_ranks, shard_to_size, num_ranks, cross_parallelization_group_loads, algorithm)


def determine_main_replica_uniform_distribution(
    sharded_state_dict: Any,
    parallelization_group: AnyGroup = None,
    ignore_groups: bool = False,
    *,
    algorithm: str = "greedy",
) -> ShardDistribution | None:
    """Agrees on the rank that saves, or loads, each shard, by one exchange of metadata.

    Args:
        sharded_state_dict: nested dicts, lists and tuples with :class:`ShardedTensor` leaves; others are ignored.
        parallelization_group: the ranks that share the work; None for all.
        ignore_groups: False (to save): only shards whose main replica is in the group. True (to load): the others,
            too, which are placed last.
        algorithm: see :func:`distribute_shards_to_ranks`.

    Returns:
        The distribution; None for a group of one rank, which handles all it has.

    Raises:
        UsageError: on every rank, where a rank has two shards of one id, or ranks disagree about a tensor's dtype or
            shape or a shard's.
    """
    call = "determine_main_replica_uniform_distribution"
    team = team_of(call, parallelization_group)
    failure: UsageError | None = None
    mine: dict[str, Any] = {"how": [bool(ignore_groups), algorithm]}
    try:
        mine["shards"] = _described(sharded_state_dict)
    except UsageError as error:
        failure = error
    records = exchange_records(call, team, mine, failure, {"how": ANY, "shards": _SHARDS})
    if team.alone:
        return None
    for rank, record in zip(team.ranks, records, strict=True):
        if record["how"] != records[0]["how"]:
            raise UsageError(
                f"{call}: rank {rank} has [ignore_groups, algorithm] = {record['how']} and rank {team.ranks[0]} has "
                f"{records[0]['how']}; give the same on every rank"
            )
    return _distribution([record["shards"] for record in records], team, ignore_groups, algorithm)


def sharded_tensors(tree: Any) -> Iterator[ShardedTensor]:
    """The :class:`ShardedTensor` leaves of nested dicts, lists and tuples."""
    if isinstance(tree, ShardedTensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from sharded_tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from sharded_tensors(value)


def to_record(shard: ShardedTensor) -> list[Any]:
    """A shard's description as JSON; :func:`from_record` is the inverse."""
    return [
        shard.key,
        torch_name(shard.dtype),
        shard.local_shape,
        shard.global_shape,
        shard.global_offset,
        shard.replica_id,
    ]


def _is_record(value: Any) -> bool:
    """Returns whether a value from JSON is what :func:`to_record` makes."""
    if not isinstance(value, list) or len(value) != 6:
        return False
    key, dtype, local, whole, offset, replica = value
    return (
        isinstance(key, str)
        and is_dtype_name(dtype)
        and all(map(WHOLES.fits, (local, whole)))
        and (offset is None or WHOLES.fits(offset))
        and (type(replica) is int or (isinstance(replica, list) and all(type(each) is int for each in replica)))
    )


_SHARDS = Kind("a list of shards", lambda value: isinstance(value, list) and all(map(_is_record, value)))


def from_record(record: Sequence[Any]) -> ShardedTensor:
    """The shard that :func:`to_record` described, without data."""
    key, dtype, local, whole, offset, replica = record
    return ShardedTensor(key, torch_dtype_named(dtype), local, whole, offset, replica)


def _described(tree: Any) -> list[list[Any]]:
    seen: set[ShardId] = set()
    records = []
    for shard in sharded_tensors(tree):
        if shard.id in seen:
            raise UsageError(f"shard {shard.id} occurs twice in the state dict; give each shard once")
        seen.add(shard.id)
        records.append(to_record(shard))
    return records


def _distribution(
    shards: Sequence[Sequence[Sequence[Any]]], team: Members, ignore_groups: bool, algorithm: str
) -> ShardDistribution:
    found: dict[ShardId, ShardedTensor] = {}
    tensors: dict[str, tuple[int, ShardedTensor]] = {}  # key -> the rank and shard that was the first of it
    holders: dict[ShardId, list[int]] = {}
    own: set[ShardId] = set()
    for place, records in enumerate(shards):
        for record in records:
            shard = from_record(record)
            first, one = tensors.setdefault(shard.key, (place, shard))
            if (shard.dtype, shard.global_shape) != (one.dtype, one.global_shape):
                raise UsageError(
                    f"tensor {shard.key!r} is {one.dtype} of shape {list(one.global_shape)} on rank "
                    f"{team.ranks[first]}, and {shard.dtype} of shape {list(shard.global_shape)} on rank "
                    f"{team.ranks[place]}; all ranks must describe the same tensor"
                )
            found.setdefault(shard.id, shard)
            holders.setdefault(shard.id, []).append(place)
            if shard.is_main_replica:
                own.add(shard.id)
    handled = {shard: ranks for shard, ranks in holders.items() if ignore_groups or shard in own}
    sizes = {shard: _shard_size(found[shard]) for shard in handled}
    cross = handled.keys() - own
    main = distribute_shards_to_ranks(handled, sizes, team.size, cross, algorithm=algorithm)
    return ShardDistribution(main, own, found, handled)


def canonical_order(shards: Collection[Any]) -> list[Any]:
    """Shard ids in an order that is the same on every rank."""
    return sorted(shards, key=order_key)
