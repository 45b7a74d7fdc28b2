"""Calibration against a plain run of transformers' whole model, its memory, its determinism, and its text."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelexport.assets import demo_documents, demo_model_path
from modelexport.checkpoints.safetensors.file import Reader, open_checkpoint
from modelexport.errors import CheckpointError, PlanError, UsageError
from modelexport.inspection.evaluate import tokenise
from modelexport.models.architecture import language_config
from modelexport.quantization.calibration import text as calibration_text
from modelexport.quantization.calibration.layers import LayerRunner
from modelexport.quantization.calibration.ranges import observe, token_batches_from
from modelexport.quantization.calibration.static_ranges import Ranges
from tests.helpers.models import copy_checkpoint, make_llama
from tests.helpers.tiny_models import tiny_checkpoint, tiny_model
from tests.quantization._forward_ranks import forward_reader

VOCABULARY = 211


def some_tokens(samples: int = 5, length: int = 120) -> Tensor:
    """Five samples are two batches, the last of them smaller."""
    return torch.randint(VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(3))


def observed(directory: Path, tokens: Tensor, **settings: Any) -> Ranges:
    checkpoint = open_checkpoint(directory)
    assert checkpoint.config is not None
    with Reader(checkpoint) as reader:
        read = forward_reader(lambda name: reader.read(checkpoint.infos[name]))
        return observe(checkpoint.config, checkpoint.infos, read, tokens, **settings)


def largest(x: Tensor) -> float:
    return x.abs().max().item()


class PlainRun:
    """The whole model in memory, hooks on its linears, and what it leaves in its KV cache."""

    def __init__(self, directory: Path, tokens: Tensor) -> None:
        from transformers import AutoModelForCausalLM

        self.inputs: dict[str, float] = {}
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(self.linear(name))
            elif name.endswith(".experts"):
                module.register_forward_pre_hook(self.experts(name))
        with torch.inference_mode():
            self.cache = model.eval()(input_ids=tokens, use_cache=True).past_key_values

    def linear(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            self.inputs[name] = largest(args[0])

        return hook

    def experts(self, name: str) -> Callable[..., None]:
        """The gated MLP of every token's experts, computed here."""

        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            hidden, chosen, _ = args
            down = []
            for expert, weight in enumerate(module.gate_up_proj):
                gate, up = (hidden[(chosen == expert).any(-1)] @ weight.T).chunk(2, dim=-1)
                down += [largest(nn.functional.silu(gate) * up)] if len(gate) else []
            self.inputs[f"{name}.in"], self.inputs[f"{name}.down"] = largest(hidden), max(down)

        return hook


def expected_name(name: str) -> str:
    """Where a plain run keeps what is known of a linear on disk."""
    name = name.replace("block_sparse_moe", "mlp")
    path, experts, own = name.partition(".experts.")
    if not experts:
        return name
    return f"{path}.experts.{'down' if own.endswith(('.w2', '.down_proj')) else 'in'}"


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"model_type": "qwen2", "tied": True},
        {"model_type": "phi3", "dtype": "float16"},
        {"model_type": "mixtral"},
        {"model_type": "deepseek_v3"},
        {"model_type": "deepseek_v2", "query_rank": None, "dtype": "float32"},
    ],
    ids=lambda model: model.get("model_type", "llama"),
)
def test_it_sees_what_a_plain_run_of_the_whole_model_sees(model: dict[str, Any]) -> None:
    directory = make_llama(**model)
    tokens = some_tokens()
    ranges, plain = observed(directory, tokens), PlainRun(directory, tokens)
    assert {expected_name(name) for name in ranges.inputs} == set(plain.inputs)
    for name, value in ranges.inputs.items():
        assert value == pytest.approx(plain.inputs[expected_name(name)], rel=1e-5), name
    names = set(open_checkpoint(directory).infos)
    heads = {"lm_head"} if model.get("tied") else set()  # a tied head is not on disk
    assert {name for name in ranges.inputs if f"{name}.weight" not in names} == heads
    assert ranges.unseen == ()
    assert (ranges.samples, ranges.length) == (5, 120)
    assert list(ranges.keys) == list(ranges.values) == list(range(2))
    for layer, cached in enumerate(plain.cache.layers):
        keys, values = largest(cached.keys), largest(cached.values)
        if "deepseek" in model.get("model_type", ""):  # one cache: the latent, and the keys' rotary part
            keys = values = max(keys, values)
        assert (*ranges.keys[layer], *ranges.values[layer]) == pytest.approx((keys, values), rel=1e-5)


def test_one_layer_is_in_memory_at_a_time() -> None:
    checkpoint = open_checkpoint(make_llama(model_type="mixtral", layers=3))
    assert checkpoint.config is not None
    reads: list[str] = []

    def in_memory() -> set[str]:
        tensors = [*runner.model.named_parameters(), *runner.model.named_buffers()]
        return {".".join(name.split(".")[:3]) for name, tensor in tensors if not tensor.is_meta}

    with Reader(checkpoint) as reader:

        def read(name: str) -> Tensor:
            reads.append(name)
            return reader.read(checkpoint.infos[name])

        with LayerRunner(checkpoint.config, checkpoint.infos, forward_reader(read), some_tokens()) as runner:
            constants = in_memory()
            assert not {name for name in constants if "layers" in name or "embed" in name or "head" in name}
            for index in range(3):
                assert len(runner.layers) == 3
                with runner.filled(index) as layer:
                    assert in_memory() - constants == {f"model.layers.{index}"}
                    runner.advance(layer)
                assert in_memory() == constants
            runner.head_input()
            assert in_memory() == constants
    layers = {name for name in checkpoint.infos if ".layers." in name}
    assert sorted(reads) == sorted([*layers, "model.embed_tokens.weight", "model.norm.weight", "model.norm.weight"])


def test_in_bfloat16_it_sees_nearly_the_same() -> None:
    directory, tokens = make_llama(model_type="mixtral"), some_tokens()
    exactly, roughly = observed(directory, tokens), observed(directory, tokens, dtype=torch.bfloat16)
    assert roughly != exactly
    assert roughly.inputs == pytest.approx(exactly.inputs, rel=0.05)
    for found, expected in ((roughly.keys, exactly.keys), (roughly.values, exactly.values)):
        assert {n: x for n, (x,) in found.items()} == pytest.approx({n: x for n, (x,) in expected.items()}, rel=0.05)


def test_threads_change_nothing() -> None:
    directory, tokens = make_llama(model_type="mixtral"), some_tokens(11, 100)
    before = torch.get_num_threads()
    found = []
    try:
        for threads, of_torch in ((1, 1), (3, 2), (None, 4)):
            torch.set_num_threads(of_torch)
            found.append(observed(directory, tokens, threads=threads))
            assert torch.get_num_threads() == of_torch
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_experts_without_tokens_take_their_siblings() -> None:
    directory = make_llama(model_type="mixtral", experts=8, layers=1)
    ranges = observed(directory, some_tokens(1, 2))  # two tokens, two experts each: four at most
    assert 4 <= len(ranges.unseen) / 3 <= 6
    assert all(name in ranges.inputs for name in ranges.unseen)
    for linear in ("w1", "w2", "w3"):
        of_all = [v for name, v in ranges.inputs.items() if ".experts." in name and name.endswith(linear)]
        assert len(of_all) == 8
        assert len(set(of_all)) == 1


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    observed(make_llama(), some_tokens(1, 4), progress=lambda done, layers: told.append((done, layers)))
    assert told == [(1, 2), (2, 2)]


# ----------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("tensor", "value", "said"),
    [
        ("model.layers.0.mlp.up_proj.weight", 3e38, "the inputs of model.layers.0.mlp.down_proj are not finite"),
        ("model.layers.1.self_attn.k_proj.weight", float("nan"), "the keys of layer 1 are not finite"),
        ("model.layers.1.self_attn.v_proj.weight", float("inf"), "the values of layer 1 are not finite"),
        ("model.norm.weight", float("nan"), "the inputs of lm_head are not finite"),
    ],
)
def test_what_is_not_finite_is_named(tmp_path: Path, tensor: str, value: float, said: str) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[tensor].fill_(value)

    copy = copy_checkpoint(make_llama(), tmp_path / "copy", tensors=spoil)
    before = torch.get_num_threads()
    with pytest.raises(CheckpointError, match=said):
        observed(copy, some_tokens(1, 8))
    assert torch.get_num_threads() == before


def test_models_that_cannot_be_run(tmp_path: Path) -> None:
    source = make_llama()

    def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
        return lambda tensors: {key: value for key, value in tensors.items() if key != name}

    unknown = copy_checkpoint(source, tmp_path / "unknown", config={"model_type": "mamba-nobody-knows"})
    with pytest.raises(PlanError, match=r"no model_type 'mamba-nobody-knows'.*--quant fp8"):
        observed(unknown, some_tokens(1, 8))
    encoder = copy_checkpoint(source, tmp_path / "encoder", config={"model_type": "t5"})
    with pytest.raises(PlanError, match=r"has model\.shared\.weight, which the checkpoint has not"):
        observed(encoder, some_tokens(1, 8))
    lacks = copy_checkpoint(source, tmp_path / "lacks", tensors=without("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(PlanError, match=r"has model\.layers\.1\.mlp\.up_proj\.weight, which the checkpoint has not"):
        observed(lacks, some_tokens(1, 8))
    bare = copy_checkpoint(source, tmp_path / "bare", tensors=without("model.norm.weight"))
    with pytest.raises(PlanError, match=r"has model\.norm\.weight, which the checkpoint has not"):
        observed(bare, some_tokens(1, 8))
    wide = copy_checkpoint(source, tmp_path / "wide", config={"intermediate_size": 512})
    with pytest.raises(CheckpointError, match=r"is \[384, 128\], but config.json's model has \[512, 128\]"):
        observed(wide, some_tokens(1, 8))
    experts = make_llama(model_type="mixtral")
    gap = copy_checkpoint(
        experts, tmp_path / "gap", tensors=without("model.layers.1.block_sparse_moe.experts.2.w3.weight")
    )
    with pytest.raises(PlanError, match=r"has model\.layers\.1\.mlp\.experts\.gate_up_proj, which the checkpoint"):
        observed(gap, some_tokens(1, 8))
    narrow = copy_checkpoint(experts, tmp_path / "narrow", config={"intermediate_size": 128})
    with pytest.raises(CheckpointError, match=r"w1\.weight is \[384, 128\], but config.json's model has \[128, 128\]"):
        observed(narrow, some_tokens(1, 8))


# ------------------------------------------------------------------------- text


def test_the_default_text_is_windows_of_the_packages_own() -> None:
    from transformers import AutoTokenizer

    demo = demo_model_path()
    tokens = token_batches_from(None, demo, vocabulary=2048)
    assert (tokens.shape, tokens.dtype) == ((64, 256), torch.int64)
    whole = tokenise(AutoTokenizer.from_pretrained(demo), demo_documents("calibration"))
    windows = [tuple(row) for row in whole[: len(whole) // 256 * 256].view(-1, 256).tolist()]
    chosen = [windows.index(tuple(row)) for row in tokens.tolist()]
    assert chosen == sorted(set(chosen))
    assert torch.equal(tokens, token_batches_from(None, demo, vocabulary=2048))
    assert not torch.equal(tokens, token_batches_from(None, demo, vocabulary=2048, seed=1))
    assert token_batches_from(None, demo, vocabulary=100, samples=2, length=7).max() < 100


def test_text_files_and_lines(tmp_path: Path) -> None:
    demo = demo_model_path()
    words = [f"Number {number} of the lines that are written here.\n" for number in range(400)]
    text, lines, ids = (tmp_path / name for name in ("a.txt", "a.jsonl", "ids.jsonl"))
    text.write_text("".join(words), encoding="utf-8")
    lines.write_text(json.dumps({"text": "".join(words)}) + "\n\n", encoding="utf-8")
    from_text, from_lines = (token_batches_from(p, demo, vocabulary=2048, samples=9, length=31) for p in (text, lines))
    assert torch.equal(from_text, from_lines)
    ids.write_text('{"input_ids": [0, 1, 2, 3, 4]}\n{"input_ids": [5, 6, 7]}\n', encoding="utf-8")
    got = token_batches_from(ids, tmp_path / "no-tokenizer-needed", vocabulary=8, samples=4, length=2)
    assert got.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("content", "name", "said"),
    [
        (None, "a.txt", "no such file"),
        ("", "a.txt", "a.txt: is empty; give a text"),
        ("A", "a.txt", "tokens, but a single sample of 4 needs as many"),
        ("\n", "a.jsonl", "has 0 tokens"),
        ("A few words.", "a.txt", r"tokens, but 64 samples of 4 are 256: .*--calib-samples 1\)"),
        ("{", "a.jsonl", "line 1 is not JSON"),
        ('{"text": "\\ud800"}', "a.jsonl", "line 1: its text has half a surrogate pair"),
        ('{"text": 3}', "a.jsonl", 'line 1 has neither "text"'),
        ("[3]", "a.jsonl", 'line 1 has neither "text"'),
        ('{"input_ids": [true]}', "a.jsonl", 'line 1 has neither "text"'),
        ('\n{"input_ids": [1, 2048]}', "a.jsonl", "line 2: token 2048 is not in the model's vocabulary of 2048"),
    ],
)
def test_text_that_cannot_be_used(tmp_path: Path, content: str | None, name: str, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=said):
        token_batches_from(tmp_path / name, demo_model_path(), vocabulary=2048, length=4)


def test_samples_are_divided_among_texts_by_their_weights(tmp_path: Path) -> None:
    def counts(samples: int, *texts: str) -> list[int]:
        return [share.samples for share in calibration_text.shares(texts, samples)]

    assert counts(64) == [64]
    assert counts(64, "a.txt=0.1") == [64]
    assert counts(8, "a.txt=3", "b.txt") == [6, 2]
    assert counts(4, "a.txt", "b.txt", "c.txt") == [2, 1, 1], "what is left over is the first one's"
    assert counts(5, "a.txt=2", "hf:name:train=3") == [2, 3]
    odd = tmp_path / "a=2"
    odd.write_text("x")
    assert [(share.name, share.weight) for share in calibration_text.shares([str(odd)], 1)] == [("a=2", 1.0)]
    for texts, said in (
        (("a.txt=0",), "--calib a.txt=0: 0 is no weight"),
        (("a.txt=x",), "--calib a.txt=x: x is no weight"),
        (("a.txt=-1", "b.txt=2"), "--calib a.txt=-1: a weight above 0 is needed"),
        (("a.txt", "a.txt=2"), "--calib a.txt is given twice"),
        (("a.txt=9", "b.txt"), r"b.txt: with a weight of 1 among 10 it has none of 4 samples: .*--calib-samples 10 or"),
    ):
        with pytest.raises(UsageError, match=said):
            calibration_text.shares(texts, 4)


def test_a_line_without_end_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_text, "_LONGEST_LINE", 4)
    monkeypatch.setattr(calibration_text, "_BLOCK", 8)
    (tmp_path / "text.txt").write_text("a" * 30 + "\nb\n")
    documents = calibration_text.TokenDocuments(tmp_path / "text.txt", tmp_path, 9)
    blocks: list[str] = []
    monkeypatch.setattr(documents, "_tokenise", lambda text, begins: blocks.append(text) or [])
    assert list(documents) == [[]] * len(blocks)
    assert "".join(blocks) == "a" * 30 + "\nb\n"
    assert max(map(len, blocks)) <= 8 + 4
    monkeypatch.setattr(calibration_text, "_LONGEST_OBJECT", 20)
    (tmp_path / "text.jsonl").write_text('{"input_ids": [1]}\n{"input_ids": [1, 2]}\n')
    with pytest.raises(UsageError, match=r"line 2 has 20 characters or more"):
        list(calibration_text.TokenDocuments(tmp_path / "text.jsonl", tmp_path, 9))


def test_a_data_set_is_read_as_far_as_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    served: list[int] = []

    def rows(name: str) -> Iterator[dict[str, Any]]:
        for number in range(1000):
            served.append(number)
            if name == "broken":
                raise ConnectionError("reset")
            yield {"input_ids": [number] * 10} if name == "ids" else {"content": "x"}

    def load_dataset(name: str, configuration: str | None, *, split: str, streaming: bool) -> Any:
        asked.append((name, configuration, split, streaming, stand_in.config.HF_DATASETS_TRUST_REMOTE_CODE))
        return rows(name)

    stand_in = SimpleNamespace(load_dataset=load_dataset, config=SimpleNamespace(HF_DATASETS_TRUST_REMOTE_CODE=True))

    def batches(text: str) -> Tensor:
        return token_batches_from(text, "no-tokenizer-needed", vocabulary=1000, samples=2, length=10)

    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    assert batches("hf:ids:one:validation").shape == batches("hf:ids:validation").shape == batches("hf:ids").shape
    splits = [("one", "validation"), (None, "validation"), (None, "train")]
    assert asked == [("ids", *each, True, False) for each in splits]
    assert len(served) == 3 * 16, "eight times what is needed to draw from, of a thousand rows"
    with pytest.raises(UsageError, match=r'hf:other, row 1 has neither "text"'):
        batches("hf:other")
    with pytest.raises(UsageError, match="hf:broken: cannot be read: ConnectionError: reset"):
        batches("hf:broken")
    with pytest.raises(UsageError, match="hf:a:b:c:d: a data set is hf:NAME"):
        batches("hf:a:b:c:d")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "datasets")
    with pytest.raises(UsageError, match="pip install datasets"):
        batches("hf:ids")


def test_more_errors_of_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no tokenizer.*--calib FILE\.jsonl"):
        token_batches_from(None, tmp_path, vocabulary=2048)
    with pytest.raises(UsageError, match="--calib-samples 0: at least 1"):
        token_batches_from(None, tmp_path, vocabulary=2048, samples=0)
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"bytes\.txt is not UTF-8"):
        token_batches_from(tmp_path / "bytes.txt", demo_model_path(), vocabulary=2048)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    with pytest.raises(CheckpointError, match="its tokenizer cannot be loaded"):
        token_batches_from(None, tmp_path, vocabulary=2048)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_max_length": {}}, "its tokenizer cannot be loaded"),
        ({"tokenizer_class": "LlamaForCausalLM"}, "tokenizer_class 'LlamaForCausalLM' is no tokenizer's"),
        ({"tokenizer_class": 7}, "tokenizer_class is 7; a text is needed"),
    ],
    ids=str,
)
def test_a_tokenizer_that_is_of_no_use(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    """transformers would load the model, where its class is named as the tokenizer's."""
    for path in (*demo_model_path().glob("tokenizer*.json"), demo_model_path() / "config.json"):
        shutil.copy(path, tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=words):
        token_batches_from(None, tmp_path, vocabulary=2048)


def in_the_language_model(directory: Path, tokens: Tensor) -> LayerRunner:
    """A runner of the language model that is a part of a checkpoint's."""
    checkpoint = open_checkpoint(directory)
    assert checkpoint.config is not None
    reader = Reader(checkpoint)
    read = forward_reader(lambda name: reader.read(checkpoint.infos[name]))
    return LayerRunner(language_config(checkpoint.config, checkpoint.infos), checkpoint.infos, read, tokens)


def test_layers_that_attend_to_images_are_passed_by() -> None:
    """Llama 3.2 Vision's second layer is run on none of the samples, as in transformers' whole model."""
    model, tokens = tiny_model("mllama").float(), some_tokens(2, 24)
    with in_the_language_model(tiny_checkpoint("mllama"), tokens) as runner:
        assert [runner.skips(index) for index in range(len(runner.layers))] == [False, True]
        for index in range(len(runner.layers)):
            with runner.filled(index) as layer:
                seen = runner.observe(layer, {"amax"}, advance=True)
                assert bool(seen.inputs) is not runner.skips(index)
        (found,) = runner.outputs()
    with torch.inference_mode():
        expected = model.model.language_model(input_ids=tokens, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, expected)


def test_no_range_is_made_up_for_a_layer_that_attends_to_images() -> None:
    with in_the_language_model(tiny_checkpoint("mllama"), some_tokens(1, 24)) as runner:
        runner.check_ranges(0)
        with pytest.raises(PlanError, match=r"text does not pass through language_model\.model\.layers\.1 .* --quant"):
            runner.check_ranges(1)
