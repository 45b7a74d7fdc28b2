"""What scales into what in derived families: what is proved on a small model holds for whole ones.

    MODELEXPORT_WRITE_DOCS=1 python -m pytest -m slow tests/models/families/test_derived_scalings.py

writes docs/scalings.md; otherwise each type must be found as its line there says.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from modelexport.errors import PlanError
from modelexport.models.architecture import Family, declared_family, family_of, language_config, read_dimensions
from modelexport.models.derived import derive
from modelexport.models.derived.scalings import prove, with_scalings
from modelexport.models.derived.small import small_configs
from modelexport.models.folds import folds_of_layer
from tests.helpers.folded_models import folded, in_float32, linears_of, logits, powers_of_two
from tests.helpers.marks import few
from tests.helpers.models import copy_checkpoint
from tests.helpers.tiny_models import NOT_MADE, causal_types, tiny_checkpoint
from tests.models.families._scalings_page import DOCUMENT, committed, document, proofs, row

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]  # transformers warns of many things

WRITE = os.environ.get("MODELEXPORT_WRITE_DOCS") == "1"
TYPES = sorted(set(causal_types()) - set(NOT_MADE))
DECLARED = [kind for kind in TYPES if declared_family(kind) is not None]
HYBRIDS = ["nemotron_h", "granitemoehybrid", "falcon_h1", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "jamba"]
OTHERS = ["gemma3", "cohere", "glm4_moe", "stablelm", "bamba", "lfm2", "exaone4", "opt", "phimoe", "recurrent_gemma"]
rows: dict[str, str] = {}


def config_of(model_type: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tiny_checkpoint(model_type) / "config.json").read_text())
    return found


def default_config(model_type: str, **changes: Any) -> dict[str, Any]:
    """As large as models of the type are."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**changes).to_dict()
    return {**json.loads(json.dumps(config, default=str)), "architectures": [causal_types()[model_type]]}


def found_in(family: Family, config: dict[str, Any], layer: int) -> set[tuple[Any, ...]]:
    """Every fold of a layer: source, rows, offset, readers, and what of the source these read."""
    dims = read_dimensions(config, family)
    shapes = tiny_tensors(config["model_type"])
    linears = linears_of(family, config, layer, shapes)
    folds = folds_of_layer(family, dims, layer, linears, shapes, lambda _: torch.float32)
    return {
        (
            fold.fold.source,
            fold.rows,
            fold.offset if fold.rows is None else 0.0,
            frozenset(linear.name for linear in fold.fold.linears),
            None if fold.fold.columns is None else tuple(fold.fold.columns.tolist()),
        )
        for fold in folds
    }


def tiny_tensors(model_type: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = tiny_checkpoint(model_type).glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("model_type", few(DECLARED, "llama", "gemma2", "phi3", "mixtral", "deepseek_v3", "cohere2"))
def test_what_is_proved_is_what_files_declare(model_type: str) -> None:
    config = config_of(model_type)
    family, derived = family_of(config), derive(config)
    derived = replace(derived, scalings=prove(derived, config).scalings)
    for layer in range(read_dimensions(config, family).layers):
        assert found_in(derived, config, layer) == found_in(family, config, layer)


def unlike(model_type: str, directory: Path) -> float:
    """The largest difference of logits that folding by random numbers makes, as a part of the largest one."""
    torch.manual_seed(3)
    source = in_float32(tiny_checkpoint(model_type), directory / "source")
    config = json.loads((source / "config.json").read_text())
    family = with_scalings(derive(config), language_config(config))
    copied = copy_checkpoint(source, directory / "folded", tensors=folded(family, config, powers_of_two))
    wanted, found = logits(source), logits(copied)
    assert bool((wanted != wanted[:, :1]).any())
    return float((found - wanted).abs().max()) / float(wanted.abs().max())


@pytest.mark.parametrize("model_type", few([*HYBRIDS, *OTHERS], "nemotron_h", "granitemoehybrid", "qwen3_next"))
def test_what_is_proved_leaves_the_function_of_the_whole_model(tmp_path: Path, model_type: str) -> None:
    assert unlike(model_type, tmp_path) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [kind for kind in TYPES if kind not in (*HYBRIDS, *OTHERS)])
def test_what_is_proved_leaves_the_function_of_every_type(tmp_path: Path, model_type: str) -> None:
    line = committed()[model_type]
    if line.split(" | ")[1] == "-":
        pytest.skip(line)
    assert unlike(model_type, tmp_path) <= 1e-4


def test_a_norm_that_more_than_linears_read_is_refused() -> None:
    """Granite-H's experts are one tensor, which the norm before them would have to be scaled into; and a BERT's norm
    goes into the residual stream."""
    found = proofs("granitemoehybrid")
    assert "block_sparse_moe.input_linear" in found.refused["post_attention_layernorm"]
    assert "post_attention_layernorm" not in {scaling.source for scaling in found.scalings}
    assert list(proofs("bert").refused) == ["attention.output.LayerNorm"]


def test_values_that_are_clipped_are_not_scaled() -> None:
    """Only large ones are: random weights alone would not show it."""
    sources = []
    for clip in (None, 8.0):
        config = default_config("olmo", clip_qkv=clip)
        sources.append({scaling.source for scaling in prove(derive(config), config).scalings})
    assert sources == [{"self_attn.v_proj", "mlp.up_proj"}, {"mlp.up_proj"}]


def test_experts_shared_experts_and_routers_share_a_norm() -> None:
    [into] = [each.into for each in proofs("qwen3_next").scalings if each.source == "post_attention_layernorm"]
    leaves = {path.removeprefix("mlp.") for path in into}
    experts = {"experts.*.gate_proj", "experts.*.up_proj"}
    assert leaves == {*experts, "gate", "shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert_gate"}


def test_layers_of_other_kinds_have_their_own() -> None:
    """Of Nemotron-H every layer has a norm of the same name, which other linears read."""
    kinds = ["mamba", "mlp", "mamba", "attention", "mlp", "mamba"] * 2
    config = default_config("nemotron_h", layers_block_type=kinds, num_hidden_layers=len(kinds))
    found = prove(derive(config), config).scalings
    of_norm = {scaling.into[0]: scaling.layers for scaling in found if scaling.source == "norm"}
    assert {"mixer.in_proj", "mixer.up_proj", "mixer.q_proj"} <= {into.replace("k_proj", "q_proj") for into in of_norm}
    numbers = [number for layers in of_norm.values() for number in layers or ()]
    assert sorted(numbers) == list(range(12)), "each layer once, of a model that is far too large to run here"


def test_the_same_structure_is_found_in_large_models() -> None:
    """A hundred times larger numbers, from which the small model is made; smaller ones come first."""
    config = default_config("llama", num_attention_heads=32, num_key_value_heads=8)
    assert [scaling.source for scaling in prove(derive(config), config).scalings] == [
        scaling.source for scaling in proofs("llama").scalings
    ]
    first = next(small_configs(config, 1))
    assert (first["num_hidden_layers"], first["num_attention_heads"], first["num_key_value_heads"]) == (1, 4, 2)
    assert first["hidden_size"] == config["hidden_size"] // 8


def test_why_nothing_can_be_scaled_is_said() -> None:
    with pytest.raises(PlanError, match="no norm is read by linears"):
        with_scalings(derive(config_of("falcon")), config_of("falcon"))


# ---------------------------------------------------------------- the page


def same_version() -> None:
    """Skip where another transformers is installed than the page was made with."""
    if f"transformers {version('transformers')};" not in DOCUMENT.read_text(encoding="utf-8"):
        pytest.skip(f"docs/scalings.md is not about transformers {version('transformers')}")


@pytest.mark.parametrize("model_type", ["bamba", "gpt_bigcode", "rwkv"])
def test_a_few_types(model_type: str) -> None:
    same_version()
    assert row(model_type) == committed()[model_type]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_every_type(model_type: str) -> None:
    rows[model_type] = row(model_type)
    if not WRITE:
        same_version()
        assert rows[model_type] == committed().get(model_type)


@pytest.mark.slow
def test_write_the_page() -> None:
    """After all others, where asked to."""
    if not WRITE:
        pytest.skip("writes docs/scalings.md with MODELEXPORT_WRITE_DOCS=1")
    DOCUMENT.write_text(document({**committed(), **rows}, version("transformers")), encoding="utf-8")
