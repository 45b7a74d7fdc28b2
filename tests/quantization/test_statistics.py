"""Statistics of linears' inputs: what they are, by plain formulas; and that the number of ranks leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from _statistics_targets import WANTS, batches, digest, gather
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modelexport.distributed.launch import MultiprocessConfig, launch_subprocesses
from modelexport.quantization.calibration.statistics import (
    BINS,
    SAMPLE,
    Collector,
    Cross,
    Hessian,
    InputStatistics,
    owners,
    panel_edges,
)

WIDTHS = (64, 100, 256, 1040, 1360)  # of one panel, of an odd one, of several, of one left over


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def collected(given_batches: list[Tensor], *, world: int = 1, pool: object = None) -> list[InputStatistics]:
    """What each rank has."""
    found = []
    for rank in range(world):
        collector = Collector(given_batches[0].shape[1], WANTS, rank, world, pool)
        for batch in given_batches:
            collector.add(batch)
        assert collector.finite
        found.append(collector.finish())
    return found


def joined(ranks: list[InputStatistics]) -> Tensor:
    """The Hessian of ranks that are simulated."""
    panels = [dict(found.hessian.panels) for found in ranks]
    together = {start: panel for part in panels for start, panel in part.items()}
    assert len(together) == sum(map(len, panels)), "two ranks have computed the same"
    return Hessian(ranks[0].features, together).whole(0)


@pytest.mark.parametrize("features", WIDTHS)
def test_plain_formulas(features: int) -> None:
    given_batches = batches(features)
    (found,) = collected(given_batches)
    x = torch.cat(given_batches).double().numpy()
    assert found.features == features
    assert found.tokens == len(x) == 1324
    assert found.amax.dtype == found.mean.dtype == found.sample.dtype == torch.float32
    np.testing.assert_array_equal(found.amax.double().numpy(), np.abs(x).max(0))
    np.testing.assert_allclose(found.mean.double().numpy(), np.abs(x).mean(0), rtol=2e-7)
    bits = np.abs(x).astype(np.float32).view(np.uint32) >> 16
    assert found.histogram.dtype == torch.int64
    np.testing.assert_array_equal(found.histogram.numpy(), np.bincount(bits.ravel(), minlength=BINS))
    hessian = joined([found])
    wanted = x.T @ x
    scale = np.sqrt(np.outer(wanted.diagonal(), wanted.diagonal()))
    assert np.abs(hessian.double().numpy() - wanted).max() <= (scale * 2e-6).max()
    assert np.all(np.abs(hessian.double().numpy() - wanted) <= scale * 2e-6)
    assert torch.equal(hessian, hessian.T)


@pytest.mark.parametrize("features", WIDTHS)
def test_any_number_of_ranks(features: int) -> None:
    given_batches = batches(features)
    (alone,) = collected(given_batches)
    for world in (2, 3, 4):
        ranks = collected(given_batches, world=world)
        assert torch.equal(joined(ranks), joined([alone]))
        for found in ranks:
            for name in ("amax", "mean", "sample", "histogram"):
                assert torch.equal(getattr(found, name), getattr(alone, name)), name


def test_what_the_unrounded_model_gives_is_compared() -> None:
    given_batches = batches(200)
    references = [batch.flip(0) for batch in given_batches]
    panels: dict[int, torch.Tensor] = {}
    for rank in range(3):
        collector = Collector(200, {"cross"}, rank, 3)
        for batch, reference in zip(given_batches, references, strict=True):
            collector.add(batch, reference)
        collector.add(given_batches[0])  # of which nothing is known
        panels |= collector.finish().cross.panels
    x, r = (torch.cat(each).double() for each in (given_batches, references))
    found, wanted = Cross(200, panels).whole(0), (r - x).T @ x
    assert torch.allclose(found.double(), wanted, atol=2e-5 * float(wanted.abs().max()))


def test_rank_processes() -> None:
    widths = (100, 1040, 256)
    alone = {}
    for features in widths:
        (found,) = collected(batches(features))
        small = digest(found.amax, found.mean, found.sample, found.histogram)
        alone[features] = (small, digest(found.hessian.whole(0)))
    events: list[tuple[int, dict]] = []

    def keep(rank: int, event: dict) -> None:
        events.append((rank, event))

    cfg = MultiprocessConfig(world_size=3, on_event=keep, timeout=120)
    launch_subprocesses(gather, cfg, None, 0, widths)
    for number, features in enumerate(widths):
        of_width = {rank: event for rank, event in events if event["features"] == features}
        assert sorted(of_width) == [0, 1, 2]
        held = [start for event in of_width.values() for start in event["panels"]]
        assert sorted(held) == panel_edges(features)[:-1]
        assert {event["small"] for event in of_width.values()} == {alone[features][0]}
        assert {rank: event["whole"] for rank, event in of_width.items() if event["whole"]} == {
            number: alone[features][1]
        }


def test_threads_and_layout_leave_no_trace() -> None:
    given_batches = batches(1040)
    wide = [torch.nn.functional.pad(batch, (3, 5))[:, 3:-5] for batch in given_batches]  # off every cache line
    turned = [batch.T.contiguous().T for batch in given_batches]
    (alone,) = collected(given_batches)
    with ThreadPoolExecutor(2) as pool:
        for other in (given_batches, wide, turned):
            (found,) = collected(other, pool=pool)
            assert digest(found.mean, found.sample, joined([found])) == digest(
                alone.mean, alone.sample, joined([alone])
            )


@given(st.integers(1, 20000), st.integers(1, 9))
def test_panels(features: int, world: int) -> None:
    edges, dealt = panel_edges(features), owners(features, world)
    widths = [stop - start for start, stop in pairwise(edges)]
    assert edges[0] == 0
    assert edges[-1] == features
    assert min(widths) > 0
    assert all(start % 16 == 0 for start in edges[:-1])
    assert len(widths) <= 16
    assert all(width >= 64 for width in widths[:-1])
    assert len(dealt) == len(widths)
    assert set(dealt) <= set(range(world))


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_ranks_get_about_the_same_work(world: int) -> None:
    edges = panel_edges(8192)
    assert len(edges) == 17
    load = [0] * world
    for (start, stop), rank in zip(pairwise(edges), owners(8192, world), strict=True):
        load[rank] += stop * (stop - start)
    assert max(load) <= 1.1 * sum(load) / world


@given(st.lists(st.integers(0, 700), min_size=1, max_size=8))
def test_the_sample_is_spread_evenly(counts: list[int]) -> None:
    collector = Collector(2, ["sample"])
    total = 0
    for count in counts:
        places = torch.arange(total, total + count, dtype=torch.float32)
        collector.add(torch.stack([places, places], dim=1))
        total += count
    sample = collector.finish().sample
    kept = sample.shape[0]
    assert kept == total if total <= SAMPLE else SAMPLE // 2 < kept <= SAMPLE
    step = 1
    while -(-total // step) > SAMPLE:
        step *= 2
    assert sample[:, 0].tolist() == list(range(0, total, step))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("wants", [(), ("hessian",), ("histogram", "mean")])
def test_what_is_not_finite_is_noticed(bad: float, wants: tuple[str, ...]) -> None:
    collector = Collector(64, wants)
    assert collector.finite
    collector.add(torch.ones(3, 64))
    assert collector.finite
    collector.add(torch.ones(2, 64).index_fill(1, torch.tensor([5]), bad))
    assert not collector.finite
    collector.add(torch.ones(3, 64))
    assert not collector.finish().finite


def test_only_what_was_asked_for() -> None:
    for want in WANTS:
        collector = Collector(64, [want])
        collector.add(torch.ones(2, 64))
        found = collector.finish()
        assert [name for name in WANTS if getattr(found, name) is not None] == [want]


def test_nothing_came() -> None:
    found = Collector(80, WANTS).finish()
    assert found.tokens == 0
    assert found.sample.shape == (0, 80)
    assert not found.amax.any()
    assert not found.mean.any()
    assert not found.histogram.any()
    assert torch.equal(found.hessian.whole(0), torch.zeros(80, 80))


def test_inference_mode() -> None:
    """As batches come from a layer's forward pass; what is kept can be used outside of it."""
    given_batches = batches(128)
    collector = Collector(128, WANTS)
    with torch.inference_mode():
        for batch in given_batches[:2]:
            collector.add(batch * 1)
    for batch in given_batches[2:]:
        collector.add(batch)
    found = collector.finish()
    (alone,) = collected(given_batches)
    assert digest(found.amax, found.mean, joined([found])) == digest(alone.amax, alone.mean, joined([alone]))
    found.mean.add_(1)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no statistic 'max'"):
        Collector(8, ["max"])
    with pytest.raises(ValueError, match="rank 2 of 2"):
        Collector(8, [], 2, 2)
    collector = Collector(8, ["amax"])
    with pytest.raises(ValueError, match=r"float64 \[3, 8\] came, where torch.float32 \[tokens, 8\]"):
        collector.add(torch.ones(3, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"\[3, 9\]"):
        collector.add(torch.ones(3, 9))
