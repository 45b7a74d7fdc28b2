"""Layer by layer is the whole model: the same losses and divergences, with memory for a layer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from modelexport.assets import demo_documents, demo_model_path
from modelexport.errors import CheckpointError, PlanError
from modelexport.inspection import evaluate as ev
from modelexport.inspection.evaluate.losses import Windows, cut_windows
from modelexport.inspection.evaluate.models import load_dequantised, load_reference
from modelexport.inspection.evaluate.streaming import measure
from modelexport.models.opening import open_model
from modelexport.quantization import formats
from tests.helpers.marks import few
from tests.helpers.models import LlamaShape, config_json, copy_checkpoint, make_llama, tensor_shapes
from tests.inspection._quantised import REACH, save_decoded, save_quantised, with_cache_scales

pytestmark = pytest.mark.timeout(180)

SHAPE = {"hidden": 128, "layers": 2, "vocab": 211}


@pytest.fixture(scope="module")
def text() -> Tensor:
    from transformers import AutoTokenizer

    return ev.tokenise(AutoTokenizer.from_pretrained(demo_model_path()), demo_documents("heldout"))


def tokens(vocabulary: int, count: int) -> Tensor:
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(0))


# ------------------------------------------------------------------------------------- against whole models


def smooth(_: Any, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """In the stead of rounding, which makes a difference in the last bit a visible one, and so on."""
    scale = sum(float(each) for each in tensors.values())
    return torch.tanh(x * (1.0 + scale / (1.0 + scale)))


@pytest.mark.parametrize("quant", few(["int4", "int8-static", "nvfp4"], "int8-static"))
def test_equal_to_the_whole_model(quant: str, text: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save_quantised(demo_model_path(), tmp_path / "ckpt", quant)
    if quant != "int4":
        monkeypatch.setattr(type(formats.get(quant)), "fake_quantise_activations", smooth)
    models = load_reference(demo_model_path()), load_dequantised(checkpoint)
    expected = ev.compare(*models, text, window=128, max_windows=5)
    windows = cut_windows(text, 128, 5)
    got = ev.compare_checkpoints(open_model(demo_model_path()), open_model(checkpoint), windows)
    assert got.model.window_losses == pytest.approx(expected.model.window_losses, abs=1e-5)
    assert got.reference.window_losses == pytest.approx(expected.reference.window_losses, abs=1e-5)
    assert got.mean_kl == pytest.approx(expected.mean_kl, abs=1e-5)
    assert got.kl_standard_error == pytest.approx(expected.kl_standard_error, abs=1e-5)
    assert got.loss_standard_error == pytest.approx(expected.loss_standard_error, abs=1e-5)
    assert got.mean_kl > 0.01
    alone = ev.perplexity_of_checkpoint(open_model(checkpoint), windows, threads=1)
    assert alone == got.model


def test_activations_are_rounded(text: Tensor, tmp_path: Path) -> None:
    """Which of two neighbours a number goes to may differ from the whole model's; how much is lost does not."""
    checkpoint = save_quantised(demo_model_path(), tmp_path / "ckpt", "nvfp4")
    models = load_reference(demo_model_path()), load_dequantised(checkpoint)
    expected = ev.compare(*models, text, window=128, max_windows=8)
    got = ev.compare_checkpoints(open_model(demo_model_path()), open_model(checkpoint), cut_windows(text, 128, 8))
    assert got.mean_kl == pytest.approx(expected.mean_kl, rel=0.1)
    for module in models[1].modules():
        module._forward_pre_hooks.clear()
    kept = ev.compare(*models, text, window=128, max_windows=8)
    assert kept.mean_kl < 0.7 * got.mean_kl


SCALES = {"layers.0.self_attn.k_scale": 0.9, "layers.0.self_attn.v_scale": 0.01, "layers.1.self_attn.k_scale": 0.2}


def test_keys_and_values_are_rounded_as_a_cache_of_fp8_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against transformers' attention with its arguments rounded by hand; a scale that is not there is 1."""
    from transformers.models.llama import modeling_llama

    plain = save_quantised(make_llama(**SHAPE), tmp_path / "plain", "int8-wo")
    checkpoint = with_cache_scales(plain, tmp_path / "kv", SCALES)
    windows = cut_windows(tokens(211, 200), 60)
    own = modeling_llama.eager_attention_forward

    def rounded(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        parts = []
        for x, part in ((key, "k"), (value, "v")):
            scale = SCALES.get(f"layers.{module.layer_idx}.self_attn.{part}_scale", 1.0)
            parts.append((x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)
        return own(module, query, *parts, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "eager_attention_forward", rounded)
        model = load_dequantised(checkpoint)
        expected = ev.perplexity(model, tokens(211, 200), window=60)
    got = ev.perplexity_of_checkpoint(open_model(checkpoint), windows)
    assert got.window_losses == pytest.approx(expected.window_losses, abs=2e-4)
    unrounded = ev.perplexity_of_checkpoint(open_model(plain), windows)
    assert unrounded.window_losses != pytest.approx(expected.window_losses, abs=1e-3), "the test cannot tell"


def test_a_scale_of_a_cache_that_is_none(tmp_path: Path) -> None:
    plain = save_quantised(make_llama(**SHAPE), tmp_path / "plain", "int8-wo")
    checkpoint = with_cache_scales(plain, tmp_path / "kv", {"layers.1.self_attn.v_scale": -1.0})
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.v_scale is no scale of a KV cache: -1"):
        ev.perplexity_of_checkpoint(open_model(checkpoint), windows_of(211))


class RoundedInputs(TorchFunctionMode):
    """Every product with a decoder layer's linear, routers aside, has its inputs rounded."""

    def __init__(self, model: Any, rounded: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.rounded = rounded
        self.kept = {model.lm_head.weight.data_ptr()}
        self.kept |= {p.data_ptr() for name, p in model.named_parameters() if name.endswith("gate.weight")}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and args[1].data_ptr() not in self.kept:
            args = (self.rounded(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("model_type", "quant"), [("mixtral", "fp8"), ("mixtral", "nvfp4"), ("deepseek_v3", "int8-static")]
)
def test_experts_that_transformers_stacks(
    model_type: str, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against transformers' whole model of the decoded weights, its inputs changed by hand."""
    from transformers import AutoModelForCausalLM

    number_format = formats.get(quant)
    source = make_llama(model_type=model_type, **SHAPE)
    checkpoint = save_quantised(source, tmp_path / "ckpt", quant)
    decoded = save_decoded(source, checkpoint, tmp_path / "decoded", quant)
    monkeypatch.setattr(type(number_format), "fake_quantise_activations", smooth)
    ones = torch.ones(128, 128, dtype=torch.bfloat16)
    example = number_format.quantise(ones, inputs=REACH if number_format.has_static_inputs else None)
    inputs = {suffix: part for suffix, part in example.items() if suffix.startswith("input_")}
    assert len(inputs) == number_format.has_static_inputs
    windows = cut_windows(tokens(211, 200), 60)
    logits = []
    for directory in (source, decoded):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager")
        rounded = (
            partial(number_format.fake_quantise_activations, tensors=inputs) if directory is decoded else torch.clone
        )
        with torch.inference_mode(), RoundedInputs(model, rounded):
            logits.append(model(windows.inputs).logits)
    one, other = (torch.distributions.Categorical(logits=x.double()) for x in logits)
    losses = -other.log_prob(windows.targets).mean(-1)
    kl = torch.distributions.kl_divergence(one, other).mean()
    got = ev.compare_checkpoints(open_model(source), open_model(checkpoint), windows)
    assert got.model.window_losses == pytest.approx(losses.tolist(), abs=1e-5)
    assert got.mean_kl == pytest.approx(kl.item(), rel=1e-3)
    assert got.mean_kl > 1e-5


def test_a_checkpoint_beside_itself(text: Tensor) -> None:
    demo = open_model(demo_model_path())
    got = ev.compare_checkpoints(demo, demo, cut_windows(text, 32, 3))
    assert (got.mean_kl, got.kl_standard_error, got.loss_difference) == (0, 0, 0)
    narrow = ev.perplexity_of_checkpoint(demo, cut_windows(text, 32, 3), dtype=torch.bfloat16)
    assert narrow.loss == pytest.approx(got.model.loss, abs=0.05)
    assert narrow.loss != got.model.loss


def test_heads_that_change_their_logits(tmp_path: Path) -> None:
    """Granite, of no family of ours, scales embeddings and logits: that is left to transformers' model."""
    from transformers import GraniteConfig, GraniteForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    others = {"vocab_size": 211, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(5)
    model = GraniteForCausalLM(GraniteConfig(**sizes, **others, logits_scaling=0.1, embedding_multiplier=3.0)).eval()
    model.save_pretrained(tmp_path / "granite")
    source = tmp_path / "granite"
    windows = cut_windows(tokens(211, 41), 20)
    with torch.inference_mode():
        logits = model(windows.inputs).logits
    expected = functional.cross_entropy(logits.flatten(0, 1), windows.targets.flatten())
    got = ev.perplexity_of_checkpoint(open_model(source), windows)
    assert got.loss == pytest.approx(expected.item(), abs=1e-5)


# -------------------------------------------------------------------------------------- chunks of the vocabulary


class Given:
    """Outputs whose logits are a table's."""

    def __init__(self, logits: Tensor, batch: int) -> None:
        self.parts = logits.split(batch)
        self.hidden = [torch.zeros(*part.shape[:2], 7) for part in self.parts]
        self.vocabulary, self.device = logits.shape[-1], torch.device("cpu")

    def select(self, start: int, stop: int) -> None:
        self.rows = slice(start, stop)

    def logits(self, batch: int) -> Tensor:
        return self.parts[batch].flatten(0, 1)[:, self.rows]


@pytest.mark.parametrize("step", [1, 7, 50, 1000])
def test_any_chunks_give_the_same(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    one, other = torch.randn(2, 5, 6, 50) * torch.tensor([3.0, 20.0])[:, None, None, None]
    one[0, 0] += 300  # exponentials overflow float32 unless they are taken relative to the largest
    one[0, 1, :40] -= 300
    one[1], other[1] = one[1].round(), other[1] / 30  # of equal logits the first is the top one
    one[2:4] = other[2:4] = 2.0
    targets = torch.randint(50, (5, 6))
    monkeypatch.setattr("modelexport.inspection.evaluate.streaming._CHUNK_LOGITS", step * 12)
    found = measure([Given(one, 2), Given(other, 2)], targets)  # type: ignore[list-item]
    first, second = (torch.distributions.Categorical(logits=x.double()) for x in (one, other))
    assert found.divergences is not None
    torch.testing.assert_close(
        found.divergences, torch.distributions.kl_divergence(first, second), rtol=1e-5, atol=1e-5
    )
    assert found.same_top is not None
    assert found.same_top.tolist() == (one.argmax(-1) == other.argmax(-1)).tolist()
    assert 0 < found.same_top.sum() < 30
    for got, expected in zip(found.losses, (first, second), strict=True):
        torch.testing.assert_close(got, -expected.log_prob(targets).mean(-1), rtol=1e-5, atol=1e-5)
    [alone], nothing = (lambda m: (m.losses, m.divergences))(measure([Given(one, 5)], targets))  # type: ignore[list-item]
    torch.testing.assert_close(alone, found.losses[0])
    assert nothing is None


# ------------------------------------------------------------------------------------------------- what is refused


def windows_of(vocabulary: int) -> Windows:
    return cut_windows(tokens(vocabulary, 17), 8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), PlanError, r"model\.layers\.1\.mlp\.up_proj\.weight"),
        (lambda t: t.pop("model.norm.weight"), PlanError, r"cannot be evaluated: .*model\.norm\.weight"),
        (lambda t: t.pop("lm_head.weight"), CheckpointError, r"lm_head\.weight is missing"),
        (lambda t: t.update({"lm_head.weight": torch.ones(210, 128)}), CheckpointError, r"\[210, 128\].*211"),
        (lambda t: t.update({"model.layers.0.mlp.extra": torch.ones(2)}), CheckpointError, "belongs to no part"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), CheckpointError, r"\[3\]"),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.ones(384, 128, dtype=torch.int8)}),
            CheckpointError,
            "up_proj is stored as int8, but config.json does not say how",
        ),
    ],
)
def test_damage_is_named(
    change: Callable[[dict[str, Tensor]], object], error: type[Exception], message: str, tmp_path: Path
) -> None:
    def damage(found: dict[str, Tensor]) -> None:
        change(found)

    bad = copy_checkpoint(make_llama(**SHAPE), tmp_path / "bad", tensors=damage)
    with pytest.raises(error, match=message) as caught:
        ev.perplexity_of_checkpoint(open_model(bad), windows_of(211))
    assert "--quant" not in str(caught.value), "advice for calibration"


def test_unknown_models_and_other_vocabularies(tmp_path: Path) -> None:
    source = make_llama(**SHAPE)
    strange = copy_checkpoint(source, tmp_path / "strange", config={"model_type": "nobodys"})
    with pytest.raises(PlanError, match=r"strange cannot be evaluated.*'nobodys'$"):
        ev.perplexity_of_checkpoint(open_model(strange), windows_of(211))
    with pytest.raises(CheckpointError, match=r"vocabulary of 2,048, .* one of 211"):
        ev.compare_checkpoints(open_model(source), open_model(demo_model_path()), windows_of(211))


# ------------------------------------------------------------------------------------------------------- memory

PEAK = """
import json, re, sys
from pathlib import Path
import torch
from modelexport.models.opening import open_model
from modelexport.inspection import evaluate as ev
from modelexport.inspection.evaluate.losses import cut_windows

def resident(key):
    return 1024 * int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def peak(directory):
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the largest so far begins anew
    checkpoint = open_model(directory)
    ev.compare_checkpoints(checkpoint, checkpoint, cut_windows(torch.arange(4 * 128 + 1) * 7 % 20000, 128))
    return resident("VmHWM") - before

peak(sys.argv[1])  # what is imported and made once
print(json.dumps([peak(directory) for directory in sys.argv[1:]]))
"""


def save_deep(directory: Path, layers: int) -> Path:
    from safetensors.torch import save_file

    directory.mkdir()
    shape = LlamaShape(layers=layers, hidden=512, heads=4, kv_heads=4, intermediate=1536, vocab=20000)
    tensors = {name: torch.full(size, 0.01, dtype=torch.bfloat16) for name, size in tensor_shapes(shape).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({**config_json(shape), "max_position_embeddings": 128}))
    return directory


@pytest.mark.extended
def test_memory_is_that_of_a_layer(tmp_path: Path) -> None:
    directories = [save_deep(tmp_path / str(layers), layers) for layers in (2, 10)]
    layer = 4 * (4 * 512 * 512 + 3 * 512 * 1536)  # in float32
    command = [sys.executable, "-c", PEAK, *map(str, directories)]
    # What is freed goes back to the system at once, rather than into the allocator's pools, which keep some.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    shallow, deep = json.loads(run.stdout)
    assert deep - shallow < layer, f"8 more layers of {layer:,} bytes took {deep - shallow:,} bytes more"
    # All logits would be 41 MB for each model, and so would be the head in float32.
    assert deep < 3 * layer + 30e6
