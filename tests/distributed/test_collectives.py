"""Collectives: every dtype, shape and layout over worlds of 1 to 4 ranks."""

from __future__ import annotations

import pytest

from tests.distributed import _collectives_targets as targets
from tests.distributed._launch_helpers import launch
from tests.helpers.marks import few

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize("world_size", few([1, 2, 3, 4], 1, 3))
def test_data_arrive_bit_for_bit(world_size: int) -> None:
    events = launch(targets.move, world_size, world_size, 40)
    assert sorted(event["rank"] for _, event in events) == list(range(world_size))


@pytest.mark.parametrize("world_size", few([1, 2, 3, 4], 1, 3))
def test_reductions(world_size: int) -> None:
    events = launch(targets.reductions, world_size, world_size, 250, 0)
    assert sorted(event["rank"] for _, event in events) == list(range(world_size))


@pytest.mark.parametrize("world_size", [1, 3])
def test_several_tensors_per_rank(world_size: int) -> None:
    launch(targets.many_devices, world_size)
    launch(targets.reductions, world_size, world_size, 150, 3)


@pytest.mark.parametrize("world_size", few([2, 4], 4))
def test_every_rank_gets_the_same_bits(world_size: int) -> None:
    launch(targets.identical_bits, world_size, 1000)
