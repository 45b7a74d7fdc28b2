"""What goes from layer to layer beside hidden states: inputs of each layer's own, and shared keys and values."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelexport.checkpoints.safetensors.file import Reader, open_checkpoint
from modelexport.errors import CheckpointError
from modelexport.exporting.calibrated.samples import forward_reader
from modelexport.quantization.calibration import around
from modelexport.quantization.calibration.arguments import Given, HandedOver, marked, replaced, values
from modelexport.quantization.calibration.cut import ForwardShard
from modelexport.quantization.calibration.hidden_states import CarriedTensors, HiddenStates
from modelexport.quantization.calibration.layers import LayerRunner
from modelexport.quantization.calibration.model import body
from tests.helpers.tiny_models import model_class, tiny_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = torch.randint(3, 200, (5, 120), generator=torch.Generator().manual_seed(3))  # two batches of unequal size


@contextmanager
def opened(model_type: str, reads: list[tuple[str, ForwardShard]] | None = None, **settings: Any) -> Iterator[Any]:
    checkpoint = open_checkpoint(tiny_checkpoint(model_type))
    with Reader(checkpoint) as reader:
        part = forward_reader(checkpoint, reader)

        def read(name: str, share: ForwardShard) -> Tensor:
            if reads is not None:
                reads.append((name, share))
            return part(name, share)

        yield LayerRunner(checkpoint.config or {}, checkpoint.infos, read, TOKENS, derived=True, **settings)


def walk(runner: LayerRunner, first: int = 0) -> list[Tensor]:
    for index in range(first, len(runner.layers)):
        with runner.filled(index) as layer:
            runner.advance(layer)
    return [x.clone() for x in runner.hidden]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_the_layers_give_what_the_model_gives(model_type: str) -> None:
    model = model_class(model_type).from_pretrained(tiny_checkpoint(model_type), dtype=torch.float32).eval()
    with opened(model_type) as runner, runner:
        walk(runner)
        found = torch.cat(list(runner.outputs()))
    with torch.inference_mode():
        expected = body(model)(input_ids=TOKENS, use_cache=False).last_hidden_state
    # Where transformers loads a model, a factor of the embedding is rounded to bfloat16.
    assert (found - expected).square().sum() < 1e-5 * expected.square().sum()


def test_they_are_the_same_above_a_budget(tmp_path: Path) -> None:
    found = []
    for memory in (None, 3_000_000, 0):  # all; the hidden states and some; none
        with opened("gemma3n_text", memory=memory, directory=tmp_path) as runner, runner:
            found.append(walk(runner))
    assert equal(found[0], found[1])
    assert equal(found[0], found[2])
    assert list(tmp_path.iterdir()) == []


def test_a_trial_leaves_what_is_shared() -> None:
    with opened("gemma3n_text") as runner, runner:
        expected = walk(runner)
    with opened("gemma3n_text") as runner, runner:
        for index in range(len(runner.layers)):
            with runner.filled(index) as layer:
                before = [x.clone() for x in runner.hidden]
                for number, x in enumerate(before):
                    runner.hidden[number] = x * 2
                runner.advance(layer, trial=True)
                for number, x in enumerate(before):
                    runner.hidden[number] = x
                runner.look(layer)
                runner.observe(layer, frozenset({"amax"}))
                runner.advance(layer)
        assert equal(list(runner.hidden), expected)


def test_a_run_that_is_taken_up_has_inputs_of_its_layers_again(tmp_path: Path) -> None:
    path = tmp_path / "1.safetensors"
    with opened("gemma4_text") as runner, runner:
        with runner.filled(0) as layer:
            runner.advance(layer)
        runner.save(path, 1)
        expected = walk(runner, 1)
    with opened("gemma4_text") as runner:
        assert runner.restore(path) == 1
        with runner:
            assert equal(walk(runner, 1), expected)


def test_nothing_is_kept_for_another_run_once_keys_are_shared(tmp_path: Path) -> None:
    with opened("gemma3n_text") as runner, runner:
        assert runner.hands_over
        runner.save(tmp_path / "0.safetensors", 0)
        with runner.filled(0) as layer:
            runner.advance(layer)
        runner.save(tmp_path / "1.safetensors", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["0.safetensors"]


def test_of_a_large_table_the_rows_of_the_tokens_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened("gemma3n_text") as runner, runner:
        expected = [x.clone() for x in runner.hidden], runner._carried[1, 0].clone()
    monkeypatch.setattr(around, "_LARGE_TABLE", 1)
    reads: list[tuple[str, ForwardShard]] = []
    with opened("gemma3n_text", reads) as runner, runner:
        assert equal(list(runner.hidden), expected[0])
        assert torch.equal(runner._carried[1, 0], expected[1])
    shares = [share for name, share in reads if name.endswith("embed_tokens_per_layer.weight")]
    assert shares
    tokens = set(TOKENS.flatten().tolist())
    assert {row for share in shares for span in share.spans for row in range(*span)} == tokens


def test_tensors_by_their_keys(tmp_path: Path) -> None:
    held = CarriedTensors(torch.device("cpu"), memory=64, directory=tmp_path)
    first, mask = torch.arange(16.0), torch.tensor([[True, False]])
    held["in memory"], held["a mask", 1] = first, mask
    held["in the file"] = torch.arange(5)
    held["in memory"] = first + 1  # replaced where it is
    held["in the file"] = torch.arange(9)  # of another size
    assert torch.equal(held["in memory"], first + 1)
    assert torch.equal(held["a mask", 1], mask)
    assert torch.equal(held["in the file"], torch.arange(9))
    held.close()


def test_arguments_that_batches_have_of_their_own() -> None:
    same, own, shared = torch.ones(2), torch.zeros(3), dict[str, Tensor]()
    calls = {0: ((same, own), {"kv": shared}), 1: ((same, None), {"kv": shared, "again": (own, 3), "empty": {}})}
    others = {0: ((same, own + 1), {"kv": {}}), 1: ((same, None), {"kv": {}, "again": (own + 1, 3), "empty": {}})}
    template, count = marked(calls, others)
    assert count == 1
    assert template[0] == ((same, Given(0)), {"kv": HandedOver(0, dict)})
    assert template[1][1]["again"] == (Given(0), 3)
    assert template[1][1]["empty"] == {}
    assert [(number, value is others[0][0][1]) for number, value in values(template[0], others[0])] == [(0, True)]
    assert replaced(template[1][1], (Given,), lambda place: place.number)["again"] == (0, 3)


def test_a_disk_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = HiddenStates([(2, 3)], torch.float32, torch.device("cpu"))
    states[0] = torch.ones(2, 3)

    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(CheckpointError, match=f"{tmp_path}: hidden states cannot be kept .*: Input/output error"):
            states.save(tmp_path / "1.safetensors", 1)
    assert list(tmp_path.iterdir()) == []


def test_calls_that_fall_short_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = HiddenStates([(2, 3)], torch.float32, torch.device("cpu"), memory=0, directory=tmp_path)
    pwrite, preadv, value = os.pwrite, os.preadv, torch.arange(6.0).view(2, 3)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:5], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:7]], at))
    states[0] = value
    assert torch.equal(states[0], value)
    states.close()
