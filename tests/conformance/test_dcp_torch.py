"""Distributed checkpoints and torch itself: what its ranks save is read by us, what we write is loaded by its ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from modelexport.checkpoints.formats import dcp
from modelexport.distributed.launch import MultiprocessConfig, launch_subprocesses
from modelexport.models.rules import expected_rules
from tests.conformance import _dcp_ranks as ranks
from tests.helpers.dcp_models import assert_same, plan_of, read_all, rules_of, values_of, write
from tests.helpers.models import config_json

CONFIG = config_json(ranks.SHAPE)


def run(func: Callable[[str], None], world_size: int, directory: Path) -> None:
    launch_subprocesses(func, MultiprocessConfig(world_size=world_size), None, 0, str(directory))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    run(ranks.save_all, 4, directory)
    return directory


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ranks.SAVED)
def test_what_four_ranks_of_torch_save_is_the_model(saved: Path, name: str) -> None:
    assert dcp.recognises(saved / name)
    checkpoint = dcp.open(saved / name, CONFIG, expected_rules)
    assert len({place.path for places in checkpoint.placements.values() for place in places}) == 4
    assert_same(read_all(checkpoint), values_of(ranks.SHAPE))
    groups = {key.partition(".")[0] for key in checkpoint.left_out}
    assert groups == ({"optim", "step"} if name == "tensor parallel" else set())


@pytest.mark.timeout(120)
def test_ours_is_loaded_into_dtensors(tmp_path: Path) -> None:
    values = values_of(ranks.SHAPE)
    write(dcp, tmp_path, plan_of(rules_of(ranks.SHAPE, values), tp=4, pp=2), CONFIG, values)
    run(ranks.load_sharded, 2, tmp_path)
