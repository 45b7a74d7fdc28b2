"""The demo model made hard, on which what algorithms are for can be seen: here, one layer's attention and its MLP."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from modelexport.assets import demo_documents, demo_model_path
from modelexport.inspection.evaluate import tokenise
from modelexport.models.architecture import family_of, read_dimensions
from modelexport.models.folds import apply_fold, folds_of_layer
from modelexport.quantization import formats
from modelexport.quantization.algorithms import get
from modelexport.quantization.algorithms.base import CalibratedLinear, Folding
from modelexport.quantization.calibration.statistics import InputStatistics
from tests.helpers.hard_model import make_hard

LAYER = "model.layers.1"
TOKENS = 512


@dataclass
class Hard:
    """Both checkpoints, and what the hard one's linears of a layer are given."""

    plain: Path
    hard: Path
    tokens: Tensor
    given: dict[str, Tensor]


def model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.fixture(scope="module")
def hard(tmp_path_factory: pytest.TempPathFactory) -> Hard:
    from transformers import AutoTokenizer

    plain = demo_model_path()
    target = make_hard(plain, tmp_path_factory.mktemp("hard") / "model")
    tokenizer = AutoTokenizer.from_pretrained(plain)
    tokens = tokenise(tokenizer, demo_documents("calibration")[:20])[: 2 * TOKENS].view(2, 2, -1)
    given: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda module, args: given.__setitem__(name, args[0].flatten(0, 1))

    loaded = model(target)
    for name, module in loaded.named_modules():
        if name.startswith(f"{LAYER}.") and isinstance(module, nn.Linear):
            module.register_forward_pre_hook(keep(name))
    with torch.no_grad():
        loaded(tokens[0])
    return Hard(plain, target, tokens[1], given)


def test_it_computes_the_same(hard: Hard) -> None:
    """And nothing was rounded on the way."""
    with torch.no_grad():
        wanted, found = (model(directory)(hard.tokens).logits for directory in (hard.plain, hard.hard))
    assert float((found - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())
    before, after = (load_file(directory / "model.safetensors") for directory in (hard.plain, hard.hard))
    for name, tensor in before.items():
        ratio = (after[name].double() / tensor.double())[tensor != 0].log2()
        assert torch.equal(ratio, ratio.round()), name


def test_it_has_outliers(hard: Hard) -> None:
    for x in hard.given.values():
        amax = x.abs().amax(0)
        assert float(amax.max() / amax.median()) > 10


def error_of(hard: Hard, quant: str, algorithm: str | None) -> float:
    """The squared error of the layer's outputs as a part of their square, the mean over its linears."""
    config = json.loads((hard.hard / "config.json").read_text())
    family = family_of(config)
    dims = read_dimensions(config, family)
    tensors = {k: v.float() for k, v in load_file(hard.hard / "model.safetensors").items() if k.startswith(LAYER)}
    seen = {
        id(x): InputStatistics(x.shape[1], len(x), x.abs().amax(0), x.abs().mean(0), x) for x in hard.given.values()
    }
    linears = {}
    for path, _, module in family.modules_of_layer(dims, 1):
        if module.kind == "linear":
            name, weight = f"{LAYER}.{path}", tensors[f"{LAYER}.{path}.weight"]
            shape, inputs = (weight.shape[0], weight.shape[1]), seen[id(hard.given[f"{LAYER}.{path}"])]
            linears[name] = CalibratedLinear(
                name, module.role, formats.get(quant), weight, (0, shape[0]), shape, inputs
            )
    wanted = {name: hard.given[name] @ linear.weight.t() for name, linear in linears.items()}
    factors = {f"{LAYER}.{path}": torch.ones(1) for path, _, _ in family.modules_of_layer(dims, 1)}
    if algorithm is not None:
        kind = get(algorithm)
        folding = kind(kind.Settings(**({"grid": 10} if algorithm == "awq" else {})))
        assert isinstance(folding, Folding)
        for fold in folds_of_layer(family, dims, 1, linears, tensors, lambda name: torch.bfloat16):
            scale = folding.scales(fold.fold)
            if scale is not None:
                scale = apply_fold(tensors, {}, fold, scale)
                if fold.source is not None:  # whose own outputs are divided now
                    factors[fold.fold.source] = scale
    errors = []
    for name, linear in linears.items():
        assert linear.inputs is not None
        assert linear.inputs.sample is not None
        x, number_format = linear.inputs.sample, formats.get(quant)
        stored = number_format.quantise(linear.weight, inputs=float(x.abs().max()))
        out = number_format.fake_quantise_activations(x, stored) @ number_format.dequantise(stored).t()
        difference = (out * factors[name] - wanted[name]).square().sum()
        errors.append(float(difference / wanted[name].square().sum()))
    return sum(errors) / len(errors)


@pytest.mark.parametrize(
    ("quant", "algorithm", "part"),
    [
        ("int8-static", "smoothquant", 0.05),
        ("int8-static", "awq", 0.05),
        ("int4", "awq", 0.6),
        ("nvfp4", "awq", 0.6),
        ("nvfp4", "smoothquant", 0.8),
    ],
)
def test_most_of_what_rounding_to_nearest_loses_is_recovered(
    hard: Hard, quant: str, algorithm: str, part: float
) -> None:
    assert error_of(hard, quant, algorithm) < part * error_of(hard, quant, None)
