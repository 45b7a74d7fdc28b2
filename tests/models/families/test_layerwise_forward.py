"""Models of every declared type, run layer by layer, whole and cut, against transformers running them at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from modelexport.exporting.calibrated.forward import forward_cut
from modelexport.inspection.evaluate.models import PlainTensors
from modelexport.inspection.evaluate.streaming import through_layers
from modelexport.models.architecture import family_of, read_dimensions
from modelexport.models.opening import open_model
from modelexport.quantization.calibration.attention import attention_of_heads
from modelexport.quantization.calibration.cut import WHOLE
from modelexport.quantization.calibration.model import build, decoder_layers, in_memory, narrow
from tests.helpers.tiny_models import tiny_checkpoint
from tests.models.families.test_declared_types import DECLARED, config_of

pytestmark = pytest.mark.timeout(120)

TOKENS = torch.randint(3, 240, (2, 21), generator=torch.Generator().manual_seed(1))
OWN_ATTENTION = ("gemma2", "gpt_oss")


def reference(directory: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS).logits
    return logits.flatten(0, 1)


@pytest.mark.parametrize("model_type", DECLARED)
def test_layer_by_layer_is_the_whole_model(model_type: str) -> None:
    directory = tiny_checkpoint(model_type)
    with PlainTensors(open_model(directory)) as tensors:
        outputs = through_layers(tensors, TOKENS)
        outputs.select(0, outputs.vocabulary)
        found = torch.cat([outputs.logits(number) for number in range(len(outputs.hidden))])
    wanted = reference(directory)
    # Gemma's embedding is scaled by a number that is rounded to the model's own dtype.
    most = 2e-3 if model_type.startswith("gemma") else 1e-5
    assert float((found - wanted).abs().max()) <= most * float(wanted.abs().max())


@pytest.mark.parametrize("model_type", DECLARED)
def test_which_attention_runs(model_type: str) -> None:
    config = config_of(tiny_checkpoint(model_type))
    model = build(config, {})
    assert (model.config._attn_implementation == "sdpa") == (model_type not in OWN_ATTENTION)
    if model_type == "gemma2":
        assert build({**config, "attn_logit_softcapping": None}, {}).config._attn_implementation != "eager"


@pytest.mark.parametrize("model_type", [*OWN_ATTENTION, "llama"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_head_by_head_is_the_models_own(model_type: str, kv_heads: int) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(model_type), dtype=torch.float32)
    module = model.model.layers[0].self_attn
    module.num_key_value_groups = 4 // kv_heads
    query, key, value = (torch.randn(2, heads, 9, 32) for heads in (4, kv_heads, kv_heads))
    mask = torch.full((9, 9), -1e9).triu(1)[None, None]
    own = __import__(type(module).__module__, fromlist=["_"]).eager_attention_forward
    settings = {"scaling": 0.3, **({"softcap": 5.0} if model_type == "gemma2" else {})}
    with torch.no_grad():
        wanted = own(module, query, key, value, mask, **settings)[0]
        found = attention_of_heads(module, query, key, value, mask, **settings)[0]
        plain = attention_of_heads(module, query, key, value, mask, scaling=0.3)[0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    assert (model_type == "gemma2") == bool((plain - found).abs().max() > 1e-3), "the cap does something"


@pytest.mark.parametrize(("layer", "sinks"), [(0, False), (1, True)])
def test_attention_with_sinks_in_some_layers_runs_head_by_head(layer: int, sinks: bool) -> None:
    model = build(config_of(tiny_checkpoint("mimo_v2_flash")), {}).to_empty(device="cpu")
    module = model.model.layers[layer].self_attn
    assert (module.sinks is not None) == sinks
    if sinks:
        torch.nn.init.normal_(module.sinks)
    query, key, value = (torch.randn(2, heads, 9, 32) for heads in (4, *2 * [4 // module.num_key_value_groups]))
    own = __import__(type(module).__module__, fromlist=["_"]).eager_attention_forward
    with torch.no_grad():
        wanted = own(module, query, key, value, None, scaling=0.3)[0]
        found = attention_of_heads(module, query, key, value, None, scaling=0.3)[0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_what_transformers_renames_is_found() -> None:
    directory = tiny_checkpoint("gpt_neox")
    model = build(config_of(directory), {})
    names = set(open_model(directory).infos)
    assert "embed_out.weight" in names
    assert in_memory(model, names) == {"lm_head.weight": "embed_out.weight"}
    assert in_memory(model, {"lm_head.weight", "stranger.weight"}) == {}


def test_layers_by_another_name() -> None:
    model = build(config_of(tiny_checkpoint("gpt2")), {})
    assert decoder_layers(model) is model.transformer.h


@pytest.mark.parametrize("model_type", sorted(set(DECLARED) - {"gpt2"}))
@pytest.mark.parametrize(("rank", "world"), [(0, 2), (1, 2), (2, 3), (5, 6)])
def test_a_ranks_part_is_as_narrow_as_what_it_holds(model_type: str, rank: int, world: int) -> None:
    """Whatever a config cannot say: the module's parameters are then made narrower."""
    config = config_of(tiny_checkpoint(model_type))
    family = family_of(config)
    dims = read_dimensions(config, family)
    cut = forward_cut(family, dims, rank, world)
    model = build(config, cut.config)
    layer = decoder_layers(model)[0]  # type: ignore[index]
    narrow(layer, cut)
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    checked = 0
    for path, _, module in family.modules_of_layer(dims, 0):
        share, name = cut.share(path), f"{path}.{module.parameter}"
        if share is WHOLE or name not in shapes:  # experts that transformers stacks
            continue
        held = sum(stop - start for start, stop in share.spans)
        whole = list(dims.weight_shape(module))
        whole[share.dim or 0] = held
        assert shapes[name] == tuple(whole), name
        checked += 1
    assert checked >= (3 if model_type in ("olmo2", "olmo3") else 2)
    attention = [path for path in cut.shares if path.startswith(("self_attn", "attention"))]
    assert bool(attention) == (model_type not in ("olmo2", "olmo3"))


def test_a_norm_over_all_heads_keeps_the_attention_whole() -> None:
    config = config_of(tiny_checkpoint("olmo2"))
    family = family_of(config)
    cut = forward_cut(family, read_dimensions(config, family), 1, 2)
    assert set(cut.shares) == {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    assert "num_attention_heads" not in cut.config
    assert cut.kv_heads is None
