"""The time that is left, as it is estimated from the steps that are done; the progress of a job in its log."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelexport.distributed.launch import MultiprocessConfig
from modelexport.exporting import export
from modelexport.jobs.progress import JobSteps, StepCost, TimeLeft
from modelexport.jobs.ranks import log_of
from tests.exporting.test_export import digests

GB = 10**9
Steps = dict[str, tuple[StepCost, float]]
"""Name -> cost, and the seconds that the step takes."""


def dense(*, calibrated: bool) -> Steps:
    """An embedding in four slabs, 32 equal layers, a head that is passed on."""
    slab = (StepCost(GB // 4, GB // 4), 2.0)
    layer = (StepCost(GB, GB // 2, calibrated), 60.0 if calibrated else 9.0)
    return {
        **{f"embedding ({n})": slab for n in range(4)},
        **{f"layer {n}": layer for n in range(32)},
        "norm": (StepCost(10_000, 10_000), 0.1),
        "head": (StepCost(GB, GB), 5.0),
    }


def mixture(*, calibrated: bool) -> Steps:
    """As DeepSeek-V3: three dense layers, then 58 with experts, fifteen times as large."""
    first = (StepCost(GB, GB // 2, calibrated), 4.0)
    layer = (StepCost(15 * GB, 15 * GB // 2, calibrated), 70.0)
    return {
        "embedding": (StepCost(2 * GB, 2 * GB), 8.0),
        **{f"layer {n}": first if n < 3 else layer for n in range(61)},
        "head": (StepCost(2 * GB, 2 * GB), 8.0),
    }


def alternating() -> Steps:
    """Every fourth layer is of another kind, and takes another time for its bytes."""
    kinds = [(StepCost(GB, GB // 2, True), 30.0), (StepCost(2 * GB, GB, True), 20.0)]
    return {"embedding": (StepCost(GB, GB), 3.0), **{f"layer {n}": kinds[n % 4 == 3] for n in range(48)}}


def estimates(steps: Steps, *, read_back: float, noise: float = 0.1) -> Iterator[tuple[float, float, float | None]]:
    """Yields, after every step of a run: seconds, the seconds that were left in truth, and the estimate."""
    draw = random.Random(0)
    took = {name: seconds * draw.uniform(1 - noise, 1 + noise) for name, (_, seconds) in steps.items()}
    first = next(iter(steps))
    took[first] += 5.0  # kernels are compiled
    nbytes = sum(cost.written for cost, _ in steps.values())
    left = TimeLeft({name: cost for name, (cost, _) in steps.items()}, nbytes)
    left.expect_read_back(nbytes / read_back)
    began, now = 20.0, 20.0  # imports, samples
    left.begin(began)
    end = began + sum(took.values()) + read_back
    for name, seconds in took.items():
        now += seconds
        left.step(now, name)
        yield now, end - now, left.left(now)


RECORDED = (
    17.210, 28.152, 39.599, 50.320, 64.115, 74.616, 86.650, 98.093, 110.560, 121.570, 131.055, 139.475, 148.075,
    159.114, 168.178, 180.036, 191.351, 203.095, 213.501, 225.747, 237.953, 246.768, 255.967, 266.860, 273.959, 273.973,
)  # fmt: skip
"""When the steps of a run ended, by its log: an embedding, 24 layers by gptq, a norm; on two cores, others at work."""
RECORDED_END = 275.465

RUNS = {
    "data-free": (dense(calibrated=False), 40.0),
    "calibrated": (dense(calibrated=True), 40.0),
    "data-free mixture": (mixture(calibrated=False), 300.0),
    "calibrated mixture": (mixture(calibrated=True), 300.0),
    "alternating": (alternating(), 10.0),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_time_left_is_right_within_a_fifth_after_a_tenth_of_the_run(name: str) -> None:
    steps, read_back = RUNS[name]
    checked = 0
    for now, truth, estimate in estimates(steps, read_back=read_back):
        total = now + truth
        if now > 0.1 * total:
            assert estimate == pytest.approx(truth, rel=0.2, abs=0.01 * total), f"after {now:.0f} of {total:.0f} s"
            checked += 1
    assert checked > len(steps) // 2


def test_of_a_recorded_run_the_time_left_was_right_within_a_fifth() -> None:
    layer = StepCost(6293504, 1624176, True)
    costs = [StepCost(2097152, 2097152), *[layer] * 24, StepCost(1024, 1024)]
    left = TimeLeft({str(n): cost for n, cost in enumerate(costs)}, sum(cost.written for cost in costs))
    left.expect_read_back(1e9)
    said = []
    for number, seconds in enumerate(RECORDED):
        left.step(seconds, str(number))
        said.append((seconds, left.left(seconds)))
    assert [estimate for _, estimate in said[:2]] == [None, None]  # the first layer has compiled its kernels
    for seconds, estimate in said[2:]:
        assert estimate == pytest.approx(RECORDED_END - seconds, rel=0.2, abs=0.01 * RECORDED_END), seconds


def test_nothing_is_said_before_anything_like_what_is_to_come_was_seen() -> None:
    """An embedding, read and written, tells nothing of layers that samples run through."""
    found = [estimate for _, _, estimate in estimates(dense(calibrated=True), read_back=1.0)]
    assert found[:5] == [None] * 5  # the first layer alone has compiled kernels: 31 others will not
    assert found[5] is not None


def test_the_time_left_runs_on_while_a_step_does() -> None:
    cost = StepCost(GB, GB)
    left = TimeLeft({f"layer {n}": cost for n in range(4)})
    left.begin(0.0)
    left.step(10.0, "layer 0")
    assert [left.left(seconds) for seconds in (10.0, 14.0, 45.0)] == [30.0, 26.0, 0.0]


def test_a_pass_over_the_model_before_the_first_step_counts() -> None:
    left = TimeLeft({"layer 0": StepCost(GB, 0)})
    left.begin(5.0)
    left.in_pass(15.0, 1, 10)
    assert left.left(15.0) == pytest.approx(90.0 + 1.0)  # the step: 1 GB/s is taken until one was seen


def test_reading_back_goes_by_its_own_rate_once_that_is_seen() -> None:
    left = TimeLeft({"layer 0": StepCost(GB, GB)}, 10 * GB)
    left.begin(0.0)
    left.expect_read_back(1e9)
    left.step(4.0, "layer 0")
    assert left.left(4.0) == pytest.approx(10.0)
    left.in_read_back(9.0, 0.25)
    assert left.left(9.0) == pytest.approx(15.0)


def test_a_log_has_progress_ranks_and_layers_and_changes_no_byte(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    export(out=str(tmp_path / "logged"), evaluate=False, quiet=True, log=str(log))
    export(out=str(tmp_path / "plain"), evaluate=False, quiet=True)
    assert digests(tmp_path / "logged") == digests(tmp_path / "plain")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    own = [line for line in lines if line["rank"] is None]
    assert [own[0]["phase"], own[-1]["phase"]] == ["begin", "done"]
    steps = [line for line in own if line["phase"] == "progress" and line["layer"] != "reading back"]
    assert steps[-1]["done"] == steps[-1]["steps"] == len(steps)
    assert (steps[-1]["read"], steps[-1]["written"]) == (own[0]["to_read"], own[0]["to_write"])
    ranks = [line for line in lines if line["rank"] == 0]
    assert {"phase": "quantising model.layers.2", "layer": "model.layers.2"}.items() <= next(
        line for line in ranks if line["phase"].startswith("quantising model.layers.2")
    ).items()
    assert ranks[-1]["written"] == own[0]["to_write"]
    assert ranks[-1]["read"] >= own[0]["to_read"] + own[0]["to_write"]  # read back, too


def test_each_machine_but_the_first_has_a_log_of_its_own_where_one_is_wanted() -> None:
    configs = [
        MultiprocessConfig(rank=rank, local_rank=rank % 2, world_size=4, local_world_size=2) for rank in range(4)
    ]
    assert [log_of(config, "run.jsonl") for config in configs] == ["run.jsonl"] * 2 + ["run.jsonl.2"] * 2
    assert {log_of(config, None) for config in configs} == {None}


def test_read_back_along_the_way_leaves_what_an_earlier_run_has_written() -> None:
    costs = {"layer 0": StepCost(10, 4), "layer 1": StepCost(10, 6)}
    assert JobSteps(costs, ["layer 0"]).read_back_bytes == 10
    assert JobSteps(costs, ["layer 0"], along=True).read_back_bytes == 4
