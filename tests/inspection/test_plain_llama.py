"""A small Llama in plain torch, against transformers'."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from modelexport.assets import demo_documents, demo_model_path
from modelexport.inspection import evaluate as ev
from modelexport.inspection.evaluate.models import PlainTensors
from modelexport.inspection.evaluate.plain_llama import PlainLlama, fast_tokenizer, plain_llama
from modelexport.models.opening import open_model
from tests.inspection._quantised import with_cache_scales
from tests.inspection.test_evaluate import quantised_demo


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantised_demo("int8", tmp_path_factory.mktemp("plain") / "int8")


def plain(directory: Path) -> PlainLlama | None:
    with PlainTensors(open_model(directory)) as tensors:
        return plain_llama(tensors)


def demo_with(directory: Path, **settings: Any) -> Path:
    shutil.copytree(demo_model_path(), directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **settings}))
    return directory


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    ids = torch.arange(64).view(2, 32) * 31 % 2048
    for directory in (demo_model_path(), quantised_demo("int8-wo", tmp_path / "int8-wo")):
        model = plain(directory)
        assert model is not None
        with torch.inference_mode():
            expected = ev.load_dequantised(directory)(input_ids=ids, use_cache=False).logits
            first = model(ids[:, :-1])
            last = model(ids[:, -1:], past_key_values=first.past_key_values)
        torch.testing.assert_close(first.logits, expected[:, :-1], atol=1e-4, rtol=0)
        torch.testing.assert_close(last.logits, expected[:, -1:], atol=1e-4, rtol=0)


def test_an_evaluation_is_that_of_the_layers(quantised: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = demo_documents("heldout")
    whole = ev.evaluate(quantised, demo_model_path(), text, max_windows=2)
    monkeypatch.setattr(ev, "_small", lambda *_: None)
    layers = ev.evaluate(quantised, demo_model_path(), text, max_windows=2)
    assert (whole.sentence_before, whole.sentence_after) == (layers.sentence_before, layers.sentence_after)
    assert whole.comparison.model.loss == pytest.approx(layers.comparison.model.loss, rel=1e-5)
    assert whole.comparison.mean_kl == pytest.approx(layers.comparison.mean_kl, rel=1e-2)
    assert whole.windows_in_text == layers.windows_in_text


@pytest.mark.parametrize(("key", "value"), [(0.05, 0.003), ([0.05, 0.9, 0.01, 0.5], [0.003, 0.1, 0.002, 0.004])])
def test_keys_and_values_go_through_the_cache(key: Any, value: Any, quantised: Path, tmp_path: Path) -> None:
    scales = {f"layers.{n}.self_attn.{part}_scale": s for n in range(4) for part, s in (("k", key), ("v", value))}
    checkpoint = with_cache_scales(quantised, tmp_path / "kv", scales)
    ids, whole = torch.arange(129) * 31 % 2048, plain(checkpoint)
    assert whole is not None
    got = ev.perplexity(whole, ids, window=64)  # type: ignore[arg-type]
    layers = ev.perplexity_of_checkpoint(open_model(checkpoint), ev.cut_windows(ids, 64))
    unrounded = ev.perplexity_of_checkpoint(open_model(quantised), ev.cut_windows(ids, 64))
    assert got.window_losses == pytest.approx(layers.window_losses, abs=5e-3)
    assert got.window_losses != pytest.approx(unrounded.window_losses, abs=2e-2)


def test_tokens_are_those_of_transformers() -> None:
    theirs, ours = ev.load_tokenizer(demo_model_path()), fast_tokenizer(demo_model_path())
    assert ours is not None
    text = "\n\n".join(demo_documents("heldout")[:20]) + "<|endoftext|> caf\u00e9 \u2018x\u2019"
    ids = ev.tokenise(theirs, text)
    assert torch.equal(ev.tokenise(ours, text), ids)
    assert ours.decode(ids.tolist()) == theirs.decode(ids.tolist())
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "mistral"},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 10**12},
        {"head_dim": None},
        {"tie_word_embeddings": False},
    ],
    ids=lambda settings: str(next(iter(settings))),
)
def test_what_is_not_plain_is_left_to_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    assert plain(demo_with(tmp_path / "model", **settings)) is None


def test_a_tokenizer_of_more_than_one_file_is_left_to_transformers(tmp_path: Path) -> None:
    directory = demo_with(tmp_path / "model")
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    assert fast_tokenizer(directory) is None
