"""Perplexity, KL and text against values known by hand, and against transformers itself."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from modelexport.assets import demo_documents, demo_model_path
from modelexport.checkpoints.formats import hf
from modelexport.errors import UsageError
from modelexport.inspection import evaluate as ev
from modelexport.inspection.evaluate.losses import PERCENTILES, comparison_of
from modelexport.quantization import formats
from modelexport.quantization.methods.base import ModelQuantization
from modelexport.quantization.methods.compressed_tensors import quantization_files
from tests.helpers.warm import run_warm


class Bigram(nn.Module):
    """Next-token logits that depend on the last token only: a row of a table."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table
        self.config = SimpleNamespace(vocab_size=table.shape[1])
        self.batches: list[int] = []

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        assert not use_cache
        self.batches.append(len(input_ids))
        return SimpleNamespace(logits=self.table[input_ids])


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model_path())


@pytest.fixture(scope="module")
def reference() -> Any:
    return ev.load_reference(demo_model_path())


def quantised_demo(name: str, directory: Path) -> Path:
    """The demo model in a number format, written with the safetensors package rather than our writer."""
    from safetensors.torch import load_file, save_file

    number_format = formats.get(name)
    tensors: dict[str, Tensor] = {}
    for full, weight in load_file(demo_model_path() / "model.safetensors").items():
        if full.endswith("_proj.weight"):
            parts = number_format.quantise(weight)
            tensors.update({full.removesuffix("weight") + suffix: part for suffix, part in parts.items()})
        else:
            tensors[full] = weight
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    quantization = quantization_files(
        ModelQuantization({"model.layers.0.mlp.up_proj": number_format}, ["lm_head"])
    ).config
    content = (demo_model_path() / "config.json").read_bytes()
    (directory / "config.json").write_bytes(hf.config_bytes(content, quantization))
    return directory


def test_uniform_model_has_the_vocabulary_as_perplexity() -> None:
    result = ev.perplexity(Bigram(torch.zeros(7, 7)), torch.arange(100) % 7, window=9)
    assert result.tokens == 99
    assert result.loss == pytest.approx(math.log(7))
    assert result.perplexity == pytest.approx(7.0)
    assert result.window_losses == pytest.approx([math.log(7)] * 11)


def test_losses_are_those_of_each_windows_next_tokens() -> None:
    torch.manual_seed(0)
    table, ids = torch.randn(5, 5), torch.randint(5, (24,))
    logs = torch.log_softmax(table, -1)
    expected = [-sum(logs[ids[i], ids[i + 1]].item() for i in range(s, s + 10)) / 10 for s in (0, 10)]
    model = Bigram(table)
    result = ev.perplexity(model, ids, window=10, batch=1)
    assert result.window_losses == pytest.approx(expected)
    assert result.tokens == 20
    assert model.batches == [1, 1]


def test_subset_of_windows_is_spread_evenly() -> None:
    table = torch.full((50, 50), -20.0)
    ids = torch.arange(50)  # window w holds tokens 5w .. 5w + 4
    table[:, 0] = torch.arange(50).float()  # so its losses tell which window it is
    everything = ev.perplexity(Bigram(table), ids, window=5).window_losses
    some = ev.perplexity(Bigram(table), ids, window=5, max_windows=3).window_losses
    assert len(everything) == 9
    assert some == (everything[0], everything[3], everything[6])
    assert ev.perplexity(Bigram(table), ids, window=5, max_windows=99).window_losses == everything


def test_text_shorter_than_a_window() -> None:
    result = ev.perplexity(Bigram(torch.zeros(3, 3)), torch.tensor([0, 1, 2, 0]), window=256)
    assert (result.tokens, len(result.window_losses)) == (3, 1)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([1], {}, "1 tokens; at least 2"),
        ([1, 2], {"window": 0}, "window is 0"),
        ([1, 2], {"max_windows": 0}, "max_windows is 0"),
        ([1, 2], {"batch": -1}, "batch is -1"),
    ],
)
def test_impossible_requests(ids: list[int], options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ev.perplexity(Bigram(torch.zeros(3, 3)), torch.tensor(ids), **options)


def test_a_broken_models_perplexity_is_infinite() -> None:
    table = torch.zeros(3, 3)
    table[:, 2] = 2000.0
    assert ev.perplexity(Bigram(table), torch.tensor([0, 1, 0, 1])).perplexity == math.inf


def test_mean_kl_against_torch_distributions() -> None:
    torch.manual_seed(1)
    p, q = torch.randn(2, 4, 11, 30)
    torch_says = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=p), torch.distributions.Categorical(logits=q)
    )
    got = ev.mean_kl(p, q)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, torch_says.double().mean(-1), rtol=1e-5, atol=1e-6)
    assert ev.mean_kl(p, p + 3.0).abs().max() < 1e-6


def test_paired_comparison() -> None:
    torch.manual_seed(2)
    table, other, ids = torch.randn(6, 6), torch.randn(6, 6), torch.randint(6, (41,))
    got = ev.compare(Bigram(table), Bigram(other), ids, window=8, batch=2)
    before, after = ev.perplexity(Bigram(table), ids, window=8), ev.perplexity(Bigram(other), ids, window=8)
    assert got.reference == before
    assert got.model == after
    differences = torch.tensor(after.window_losses) - torch.tensor(before.window_losses)
    assert got.loss_difference == pytest.approx(differences.mean().item(), abs=1e-6)
    assert got.loss_standard_error == pytest.approx((differences.std() / 5**0.5).item(), rel=1e-5)
    assert got.mean_kl == pytest.approx(ev.mean_kl(table[ids[:40]], other[ids[:40]]).item(), rel=1e-5)
    assert math.isnan(ev.compare(Bigram(table), Bigram(other), ids[:9], window=8).loss_standard_error)


def test_the_worst_tokens_against_numpy() -> None:
    torch.manual_seed(3)
    divergences, same_top = torch.rand(5, 61, dtype=torch.float64) ** 4, torch.rand(5, 61) < 0.9
    got = comparison_of([1.0] * 5, [1.0] * 5, divergences, same_top)
    values = np.sort(divergences.numpy().ravel())
    assert got.kl_percentiles == pytest.approx({name: np.percentile(values, float(name)) for name in PERCENTILES})
    assert got.worst_kl == pytest.approx(values[-4:].mean()), "1 % of 305 tokens, rounded up"
    assert got.max_kl == values[-1]
    parts = same_top.double().mean(-1)
    assert got.same_top == pytest.approx(float(same_top.double().mean()))
    assert got.same_top_standard_error == pytest.approx(float(parts.std() / 5**0.5))


def test_a_broken_model_agrees_with_nothing() -> None:
    got = comparison_of([1.0], [math.nan], torch.tensor([[0.5, math.nan]]).double(), torch.tensor([[True, False]]))
    assert math.isnan(got.worst_kl)
    assert got.same_top == 0.5


def test_perplexity_of_the_demo_model_against_transformers_own_loss(reference: Any, tokenizer: Any) -> None:
    ids = ev.tokenise(tokenizer, demo_documents("heldout"))[: 2 * 64 + 1]
    got = ev.perplexity(reference, ids, window=64)
    for start, loss in zip((0, 64), got.window_losses, strict=True):
        # transformers shifts the labels itself, so it needs the token after the window in its input.
        piece = ids[start : start + 65][None]
        assert loss == pytest.approx(reference(piece, labels=piece).loss.item(), rel=1e-4)


def test_tokenise_puts_the_start_token_before_each_document(tokenizer: Any) -> None:
    one, two = tokenizer.encode("One."), tokenizer.encode("Two.\n")
    assert ev.tokenise(tokenizer, ["One.", "Two.\n"]).tolist() == [0, *one, 0, *two]
    assert ev.tokenise(tokenizer, "One.").tolist() == [0, *one]
    bare = SimpleNamespace(bos_token_id=None, eos_token_id=None, encode=tokenizer.encode)
    assert ev.tokenise(bare, "One.").tolist() == one


def test_sentence_is_greedy_and_ends(reference: Any, tokenizer: Any) -> None:
    sentence = ev.generate_sentence(reference, tokenizer, ev.DEMO_PROMPT)
    assert sentence.startswith(ev.DEMO_PROMPT)
    assert sentence.endswith(".")
    assert sentence == ev.generate_sentence(reference, tokenizer, ev.DEMO_PROMPT)
    ids = ev.tokenise(tokenizer, ev.DEMO_PROMPT)
    with torch.inference_mode():
        for _ in range(12):  # without a cache
            ids = torch.cat([ids, reference(ids[None]).logits[0, -1].argmax()[None]])
    assert sentence.startswith(tokenizer.decode(ids[1:]))
    short = ev.generate_sentence(reference, tokenizer, ev.DEMO_PROMPT, max_new_tokens=3)
    assert short == tokenizer.decode(ids[1 : len(ids) - 9])


@pytest.mark.parametrize(
    ("name", "least_kl", "most_kl"), [("int8", 2e-4, 3e-3), ("fp8", 2e-3, 1.2e-2), ("int4", 2.5e-2, 9e-2)]
)
def test_evaluate_tells_the_formats_apart(name: str, least_kl: float, most_kl: float, tmp_path: Path) -> None:
    checkpoint = quantised_demo(name, tmp_path / "ckpt")
    result = ev.evaluate(checkpoint, demo_model_path(), demo_documents("heldout"), max_windows=8)
    assert (result.windows, result.window) == (8, 256)
    assert result.windows_in_text == 197
    assert result.comparison.model.tokens == 8 * 256
    assert 10 < result.comparison.reference.perplexity < 30
    assert least_kl < result.comparison.mean_kl < most_kl
    assert 0 < result.comparison.kl_standard_error < result.comparison.mean_kl
    assert result.sentence_before.startswith(result.prompt)
    assert result.sentence_after.startswith(result.prompt)
    value = json.loads(json.dumps(result.as_json()))
    assert value["comparison"]["mean_kl"] == result.comparison.mean_kl
    assert "window_losses" not in value["comparison"]["model"]
    assert "8 of 197 windows of 256 tokens" in "\n".join(result.lines())
    assert all("\n" not in line for line in result.lines())


def test_unquantised_export_is_the_source(tmp_path: Path) -> None:
    result = ev.evaluate(demo_model_path(), demo_model_path(), "A text of some length. " * 20, max_windows=2)
    assert result.comparison.mean_kl == 0
    assert result.comparison.loss_difference == 0
    assert result.sentence_before == result.sentence_after


@pytest.mark.extended
def test_neither_transformers_at_import_nor_compressed_tensors_ever(tmp_path: Path) -> None:
    checkpoint = quantised_demo("int4", tmp_path / "ckpt")
    code = (
        "import sys; sys.modules['compressed_tensors'] = None\n"
        "from modelexport.inspection import evaluate as ev\n"
        "assert 'transformers' not in sys.modules\n"
        f"model = ev.load_dequantised({str(checkpoint)!r})\n"
        "print(type(model).__name__, model.dtype)\n"
    )
    run = run_warm("-c", code)
    assert run.stdout.split() == ["LlamaForCausalLM", "torch.float32"], run.stderr
