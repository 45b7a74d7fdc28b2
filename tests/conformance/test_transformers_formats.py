"""transformers with compressed-tensors loads every number format that we write, and computes what we say it stands for.

Weights first: what compressed-tensors decodes is what we decode, to the bit where it decodes into float32. Then, on the
same weights, the logits: they differ only where inputs are rounded differently, and by how much is bounded and printed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from modelexport.exporting import export
from modelexport.inspection.evaluate.models import PlainTensors, load_dequantised
from modelexport.inspection.evaluate.streaming import through_layers
from modelexport.models.opening import open_model
from modelexport.quantization import formats
from modelexport.quantization.ggml_layouts import LAYOUTS
from tests.conformance._kv_cache import round_kv_cache
from tests.helpers.marks import few
from tests.helpers.models import make_llama
from tests.helpers.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and compressed-tensors' own, many and changing

IDS = torch.randint(1003, (1, 96), generator=torch.Generator().manual_seed(1))
BLOCKS = {layout.number_format for layout in LAYOUTS.values()}  # llama.cpp's alone
ALL = [
    *(name for name in formats.names() if name not in BLOCKS),
    "int8-wo:32",
    "int8-wo:-1",
    "int4:32",
    "int4:-1",
    "int4-asym:32",
]

# compressed-tensors decodes these into bfloat16, whatever dtype is asked for.
IN_BFLOAT16 = ("nvfp4", "mxfp4", "mxfp8")
# It makes room for zero points as they are before packing, and then refuses the packed ones. They load where all
# weights are decoded on the way in (CompressedTensorsConfig(dequantize=True)), again into bfloat16.
ON_LOADING = ("int4-asym", "int8-wo-asym")


def source() -> str:
    return str(make_llama(kv_heads=2, vocab=1003, hidden=256, attention_bias=True, mlp_bias=True))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What calibrates a model that has no tokenizer."""
    path = tmp_path_factory.mktemp("tokens") / "tokens.jsonl"
    path.write_text(json.dumps({"input_ids": IDS[0].tolist()}), encoding="utf-8")
    return {"calib": str(path), "calib_samples": 2, "calib_length": 48}


def exported(out: Path, quant: str, tokens: dict[str, Any], **settings: Any) -> Path:
    export(model=source(), out=str(out), quant=quant, quiet=True, evaluate=False, **tokens, **settings)
    return out


def loaded(directory: Path, dtype: torch.dtype, **settings: Any) -> Any:
    """transformers' model; every tensor of the checkpoint has found its place, and every place its tensor."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True, **settings)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    return model.eval()


def logits_of(model: nn.Module) -> Tensor:
    with torch.no_grad():  # inference_mode would freeze the weights that compressed-tensors decodes in the first run
        return model(input_ids=IDS).logits.float()


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def described(difference: Tensor, of: Tensor) -> str:
    return f"{difference.mean():.6f} on average, {difference.max():.6f} at most, of logits that vary by {of.std():.2f}"


@pytest.mark.parametrize("quant", few(ALL, *ALL[::4]))
def test_it_decodes_and_computes_what_we_do(tmp_path: Path, tokens: dict[str, Any], quant: str) -> None:
    from transformers import CompressedTensorsConfig

    name = quant.partition(":")[0]
    directory = exported(tmp_path / "out", quant, tokens)
    exactly = not name.startswith((*IN_BFLOAT16, *ON_LOADING))
    settings = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if name in ON_LOADING else {}
    theirs = loaded(directory, torch.float32 if exactly else torch.bfloat16, **settings)
    assert torch.isfinite(logits_of(theirs)).all()  # the first run decodes the weights
    ours = load_dequantised(directory)

    for path, module in linears(theirs).items():
        weight = linears(ours)[path].weight.data
        close = 0.0 if exactly else 2.0**-7  # a scale, rounded to eight bits, times a value, rounded again
        torch.testing.assert_close(module.weight.data.float(), weight, rtol=close, atol=0.0)
        module.weight.data = weight

    seen = seen_by_linears(ours)
    nn.Module.float(theirs)
    most = 0.0
    for path, (given, expected) in seen.items():  # one by one: through layers, one tipped rounding makes many
        with torch.no_grad():
            difference = (linears(theirs)[path](given) - expected).abs().mean()
        most = max(most, float(difference / expected.std()))
    print(f"{quant}: outputs of linears differ by {most:.2e} of their spread on average, at most")
    # compressed-tensors lays the largest input of a token in int8 on 127.5, vLLM and we on 127
    assert most <= (0.02 if name == "int8" else 1e-5)
    if not formats.get(name).input_arguments():
        torch.testing.assert_close(logits_of(theirs), logits_of(ours), rtol=0.0, atol=1e-4)


def seen_by_linears(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """The inputs of each linear, before they are rounded, and its outputs."""
    inputs: dict[str, Tensor] = {}
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for path, module in linears(model).items():

        def before(_: nn.Module, args: tuple[Tensor, ...], path: str = path) -> None:
            inputs[path] = args[0]

        def after(_: nn.Module, args: tuple[Tensor, ...], output: Tensor, path: str = path) -> None:
            seen[path] = inputs.pop(path), output

        module.register_forward_pre_hook(before, prepend=True)
        module.register_forward_hook(after)
    logits_of(model)
    return seen


def test_mixed_formats_in_one_checkpoint(tmp_path: Path, tokens: dict[str, Any]) -> None:
    quant = "*.0.*down_proj=none,*.down_proj=fp8-static,*self_attn*=int8,*gate_proj=int4:32,*up_proj=int4:32"
    directory = exported(tmp_path / "out", quant, tokens)
    theirs, ours = loaded(directory, torch.float32), load_dequantised(directory)
    expected, got = logits_of(ours), logits_of(theirs)
    for path, module in linears(theirs).items():
        assert torch.equal(module.weight.data, linears(ours)[path].weight.data), path
    print(f"mixed: logits differ by {described((got - expected).abs(), expected)}")
    assert (got - expected).abs().mean() <= 0.05 * expected.std()  # for the sake of int8, see above


@pytest.mark.parametrize(
    ("kind", "experts", "linears"),
    [("mixtral", "block_sparse_moe", ("w1", "w3", "w2")), ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj"))],
)
def test_experts_that_were_calibrated(
    tmp_path: Path, tokens: dict[str, Any], kind: str, experts: str, linears: tuple[str, str, str]
) -> None:
    """transformers stacks them; compressed-tensors decodes these into bfloat16, whatever dtype is asked for."""
    model = str(make_llama(model_type=kind, kv_heads=2, vocab=1003, hidden=256))
    settings = {"quiet": True, "evaluate": False, **tokens}
    export(model=model, out=str(tmp_path / "out"), quant="int4:32", algorithm="gptq", **settings)
    theirs = loaded(tmp_path / "out", torch.float32)
    logits_of(theirs)  # the first run decodes the weights
    with PlainTensors(open_model(tmp_path / "out")) as tensors:
        for index, layer in enumerate(theirs.model.layers):
            path = f"model.layers.{index}.{experts}.experts"
            own = [
                [tensors.read(f"{path}.{expert}.{linear}.weight") for linear in linears]
                for expert in range(len(layer.mlp.experts.down_proj))
            ]
            stacked = {
                "gate_up_proj": torch.stack([torch.cat(each[:2]) for each in own]),
                "down_proj": torch.stack([each[2] for each in own]),
            }
            for name, weight in stacked.items():
                parameter = getattr(layer.mlp.experts, name)
                assert torch.equal(parameter.data, weight.bfloat16())
                parameter.data = weight
        ours = through_layers(tensors, IDS)
        ours.select(0, ours.vocabulary)
        expected, got = ours.logits(0), logits_of(theirs)[0]
    print(f"{kind}: logits differ by {described((got - expected).abs(), expected)}")
    assert (got - expected).abs().max() <= 1e-4


def test_gpt_oss_as_it_was_published(tmp_path: Path) -> None:
    """Without a GPU transformers decodes the blocks as it loads them."""
    source, quant = str(tiny_checkpoint("gpt_oss")), "*experts*=mxfp4-wo,*=none"
    export(model=source, quant=quant, format="mxfp4", out=str(tmp_path / "out"), quiet=True, evaluate=False)
    export(model=str(tmp_path / "out"), quant="none", out=str(tmp_path / "plain"), quiet=True, evaluate=False)
    theirs, plain = loaded(tmp_path / "out", torch.bfloat16), load_file(tmp_path / "plain" / "model.safetensors")
    held = theirs.state_dict()
    assert {*plain} == {*held}
    assert all(torch.equal(held[name], tensor) for name, tensor in plain.items())


@pytest.mark.parametrize(("quant", "cache"), [("none", "fp8"), ("int4", "fp8"), ("none", "fp8-head")])
def test_kv_cache_scales(
    tmp_path: Path, tokens: dict[str, Any], monkeypatch: pytest.MonkeyPatch, quant: str, cache: str
) -> None:
    """Keys after the rotary embedding, and values, rounded to FP8 by the scales that we have written."""
    directory = exported(tmp_path / "out", quant, tokens, kv_cache=cache)
    theirs, ours = loaded(directory, torch.float32), load_dequantised(directory)
    without = logits_of(ours)
    round_kv_cache(monkeypatch, directory)  # ours: theirs calls sdpa
    expected, got = logits_of(ours), logits_of(theirs)
    print(f"{quant}, KV cache in {cache}: logits differ by {described((got - expected).abs(), expected)}")
    assert (expected - without).abs().mean() >= 1e-3, "rounding changes nothing: is it done at all?"
    assert (got - expected).abs().mean() <= 1e-4
