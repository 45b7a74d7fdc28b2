"""Samples that begin with images: what the whole model hands to its language model, and what that makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelexport.checkpoints.safetensors.file import Reader
from modelexport.errors import PlanError
from modelexport.exporting.calibrated.samples import forward_reader
from modelexport.models.architecture import language_config
from modelexport.models.opening import open_model
from modelexport.quantization.calibration.layers import LayerRunner
from modelexport.quantization.calibration.model import body
from modelexport.quantization.calibration.towers import embedded
from tests.helpers.marks import few
from tests.helpers.tiny_models import model_class
from tests.helpers.tiny_wrappers import WRAPPERS, image_inputs, save_wrapper

pytestmark = pytest.mark.filterwarnings("ignore")


def by_layers(directory: Path, samples: list[Mapping[str, Any]], windows: Tensor) -> list[Tensor]:
    checkpoint = open_model(directory)
    config, names = checkpoint.config or {}, checkpoint.infos
    with Reader(checkpoint) as reader:
        read = forward_reader(checkpoint, reader)
        begun = list(embedded(config, names.keys(), read, samples, torch.float32))
        with LayerRunner(language_config(config, names), names, read, windows, embedded=begun) as runner:
            for index in range(len(runner.layers)):
                with runner.filled(index) as layer:
                    runner.observe(layer, frozenset({"amax"}))
                    runner.advance(layer)
            return list(runner.outputs())


@pytest.mark.parametrize("model_type", few(WRAPPERS, "qwen2_5_vl", "qwen3_vl"))
def test_the_layers_give_what_the_whole_model_gives(tmp_path: Path, model_type: str) -> None:
    directory = save_wrapper(model_type, tmp_path / "model")
    model = model_class(model_type).from_pretrained(directory, dtype=torch.float32).eval()
    samples = [image_inputs(model_type, seed) for seed in (0, 1)]
    windows = torch.randint(5, 200, (3, 17), generator=torch.Generator().manual_seed(5))
    found = by_layers(directory, samples, windows)
    with torch.inference_mode():
        expected = [
            body(model)(**given, use_cache=False).last_hidden_state for given in ({"input_ids": windows}, *samples)
        ]
        without = body(model)(input_ids=samples[0]["input_ids"], use_cache=False).last_hidden_state
    assert len(found) == len(expected)
    for own, theirs in zip(found, expected, strict=True):
        # Where transformers loads a model, a factor of the embedding is rounded to bfloat16.
        assert (own - theirs).square().sum() < 1e-5 * theirs.square().sum()
    assert (found[1] - without).square().sum() > 1e-3 * without.square().sum(), "the image changes nothing"


def test_a_model_that_does_not_run_on_the_images_is_refused_in_a_sentence(tmp_path: Path) -> None:
    directory = save_wrapper("llava", tmp_path / "model")
    sample = image_inputs("llava")
    sample["input_ids"] = sample["input_ids"].clamp(max=200)  # no token stands for the image
    with pytest.raises(
        PlanError, match=r"'llava' model does not run on them .*: leave out the rows with images"
    ) as caught:
        by_layers(directory, [sample], torch.ones(1, 8, dtype=torch.int64))
    assert "\n" not in str(caught.value)


def test_a_model_that_sees_nothing_is_refused() -> None:
    config = {"model_type": "llama", "vocab_size": 250}
    with pytest.raises(PlanError, match="no model of the model_type 'llama' that takes any: leave out the rows"):
        next(embedded(config, (), lambda name, share: torch.ones(1), [image_inputs("llava")], torch.float32))


def test_a_run_with_images_is_taken_up(tmp_path: Path) -> None:
    checkpoint = open_model(save_wrapper("qwen3_vl", tmp_path / "model"))
    config, names = checkpoint.config or {}, checkpoint.infos
    windows = torch.randint(5, 200, (3, 17), generator=torch.Generator().manual_seed(5))
    with Reader(checkpoint) as reader:
        read = forward_reader(checkpoint, reader)
        begun = list(embedded(config, names.keys(), read, [image_inputs("qwen3_vl")], torch.bfloat16))
        ends = []
        for restored in (None, 1):
            runner = LayerRunner(language_config(config, names), names, read, windows, embedded=begun)
            assert runner.restore(tmp_path / "1.safetensors") == restored
            with runner:
                if restored is None:
                    with runner.filled(0) as layer:
                        runner.advance(layer)
                    runner.save(tmp_path / "1.safetensors", 1)
                with runner.filled(1) as layer:
                    runner.advance(layer)
                ends.append([x.clone() for x in runner.hidden])
    assert all(map(torch.equal, *ends))
