"""Folds of a layer, and scales put into the parts of it that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from modelexport.models.architecture import family_of, read_dimensions
from modelexport.models.folds import LayerFold, apply_fold, folds_of_layer
from modelexport.quantization import formats
from modelexport.quantization.algorithms.base import CalibratedLinear
from modelexport.quantization.calibration.cut import ForwardShard
from modelexport.quantization.calibration.statistics import InputStatistics
from tests.helpers.models import LlamaShape, config_json, tensor_shapes

PREFIX = "model.layers.0"
ATTENTION = f"{PREFIX}.self_attn"


@dataclass
class Layer:
    """One layer's tensors, float32 as stored in bfloat16, and its linears; nothing of it is shared with another."""

    tensors: dict[str, Tensor]
    linears: dict[str, CalibratedLinear]
    folds: dict[str, LayerFold]


def layer(
    *, quant: str | None = "int4", copies: bool = True, dtype: torch.dtype = torch.bfloat16, **shape: Any
) -> Layer:
    torch.manual_seed(0)
    config = config_json(LlamaShape(**shape))
    family = family_of(config)
    dims = read_dimensions(config, family)
    shapes = {k: v for k, v in tensor_shapes(LlamaShape(**shape)).items() if k.startswith(f"{PREFIX}.")}
    tensors = {name: torch.randn(size).to(dtype).float() for name, size in shapes.items()}
    linears: dict[str, CalibratedLinear] = {}
    given: dict[int, InputStatistics] = {}
    for path, _, module in family.modules_of_layer(dims, 0):
        name = f"{PREFIX}.{path}"
        if module.kind not in ("linear", "router"):
            continue
        weight = tensors[f"{name}.weight"]
        number_format = None if quant is None or module.kind == "router" else formats.get(quant)
        inputs = given.setdefault(
            weight.shape[1], InputStatistics(weight.shape[1], 3, amax=torch.ones(weight.shape[1]))
        )
        own = weight.clone() if copies else weight
        linears[name] = CalibratedLinear(
            name, module.role, number_format, own, (0, len(weight)), (len(weight), weight.shape[1]), inputs
        )
    found = folds_of_layer(family, dims, 0, linears, tensors, lambda name: dtype)
    return Layer(tensors, linears, {fold.fold.source.removeprefix(f"{PREFIX}."): fold for fold in found})


def test_a_layers_folds() -> None:
    found = layer(kv_heads=2, heads=4).folds
    assert list(found) == ["self_attn.v_proj", "mlp.up_proj", "input_layernorm", "post_attention_layernorm"]
    norm, value = found["input_layernorm"].fold, found["self_attn.v_proj"].fold
    assert [linear.role for linear in norm.linears] == ["attention.q", "attention.k", "attention.v"]
    assert norm.weight is not None
    assert (norm.columns, norm.exact, norm.features) == (None, False, 128)
    assert (value.weight, value.exact, value.features) == (None, False, 64)
    assert value.columns is not None
    heads = value.columns.view(4, 32)
    assert [int(head[0]) for head in heads] == [0, 0, 32, 32]
    assert torch.equal(heads - heads[:, :1], torch.arange(32).expand(4, 32))
    assert layer(kv_heads=4).folds["self_attn.v_proj"].fold.columns is None


def test_experts_and_their_router() -> None:
    found = layer(model_type="mixtral", experts=3).folds
    norm = found["post_attention_layernorm"].fold
    assert norm.exact, "the router stays as it is"
    assert [linear.role for linear in norm.linears] == ["router", *["expert.gate"] * 3, *["expert.up"] * 3]
    for e in range(3):
        prefix = f"block_sparse_moe.experts.{e}"
        assert [linear.name for linear in found[f"{prefix}.w3"].fold.linears] == [f"{PREFIX}.{prefix}.w2"]


def test_what_is_not_quantised() -> None:
    assert layer(quant=None).folds == {}
    assert layer(quant="none").folds == {}
    assert layer(model_type="qwen2").folds["self_attn.v_proj"].fold.exact, "its bias stays as it is"
    assert not layer(model_type="qwen2").folds["mlp.up_proj"].fold.exact


def scale_of(fold: LayerFold) -> Tensor:
    found = torch.rand(fold.fold.features) * 3 + 0.2
    return found.log2().round().exp2() if fold.fold.exact else found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_norm_is_what_can_be_stored(dtype: torch.dtype) -> None:
    """Its weight after the fold is one of the dtype, and its readers make up for just that."""
    found = layer(dtype=dtype)
    fold = found.folds["input_layernorm"]
    name = f"{PREFIX}.input_layernorm.weight"
    found.tensors[name][5] = 0.0
    found.tensors[name][6] = torch.finfo(dtype).max
    before, query = found.tensors[name].clone(), found.tensors[f"{ATTENTION}.q_proj.weight"].clone()
    asked = scale_of(fold)
    asked[6] = 0.25
    scale = apply_fold(found.tensors, {}, fold, asked)
    after = found.tensors[name]
    assert torch.equal(after.to(dtype).float(), after)
    assert scale[5] == scale[6] == 1
    assert torch.equal(after[5:7], before[5:7])
    others = torch.arange(128).sub(5.5).abs() > 1
    assert torch.equal((before / after)[others], scale[others])
    assert float((scale / asked - 1)[others].abs().max()) <= 2 * torch.finfo(dtype).eps
    assert torch.equal(found.tensors[f"{ATTENTION}.q_proj.weight"], query * scale)


def test_powers_of_two_change_no_number() -> None:
    found = layer(model_type="mixtral", experts=2)
    router = f"{PREFIX}.block_sparse_moe.gate.weight"
    fold, before = found.folds["post_attention_layernorm"], found.tensors[router].clone()
    asked = scale_of(fold)
    scale = apply_fold(found.tensors, {}, fold, asked)
    assert torch.equal(scale, asked)
    after = found.tensors[router]
    assert torch.equal(after.bfloat16().float(), after)
    assert torch.equal(after / scale, before)


def test_linears_and_what_is_known_of_their_inputs() -> None:
    found = layer()
    inputs = found.linears[f"{ATTENTION}.q_proj"].inputs
    assert inputs is not None
    inputs.mean, inputs.sample = torch.full((128,), 2.0), torch.ones(3, 128)
    inputs.histogram = torch.ones(4, dtype=torch.int64)
    scale = apply_fold(found.tensors, {}, found.folds["input_layernorm"], torch.full((128,), 4.0))
    assert torch.equal(scale, torch.full((128,), 4.0))
    assert inputs.amax is not None
    assert (float(inputs.amax[0]), float(inputs.mean[0]), float(inputs.sample[2, 0])) == (0.25, 0.5, 0.25)
    assert inputs.histogram is None, "of all features together"
    for name, linear in found.linears.items():
        assert torch.equal(linear.weight, found.tensors[f"{name}.weight"]), name
    shared = layer(copies=False)
    apply_fold(shared.tensors, {}, shared.folds["input_layernorm"], torch.full((128,), 4.0))
    for name in found.linears:
        assert torch.equal(shared.tensors[f"{name}.weight"], found.tensors[f"{name}.weight"]), "once, not twice"


def cut(tensors: dict[str, Tensor], shares: dict[str, ForwardShard]) -> dict[str, Tensor]:
    """What a rank holds."""
    found = {}
    for name, tensor in tensors.items():
        share = shares.get(name.rpartition(".")[0], ForwardShard())
        is_cut = share.dim is not None and (share.dim == 0 or tensor.dim() == 2)
        parts = [tensor.narrow(share.dim, a, b - a) for a, b in share.spans] if is_cut and share.dim is not None else []
        found[name] = torch.cat(parts, dim=share.dim or 0) if parts else tensor.clone()
    return found


def column(*spans: tuple[int, int]) -> ForwardShard:
    return ForwardShard(0, spans, ((0, sum(b - a for a, b in spans)),))


def row(*spans: tuple[int, int]) -> ForwardShard:
    return ForwardShard(1, spans, ((0, sum(b - a for a, b in spans)),), (0,), 2)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("model_type", ["qwen2", "phi3"])
def test_a_rank_s_part(model_type: str, rank: int) -> None:
    """Cut after the fold, or folded after the cut: the same. Fused modules are several ranges of rows."""
    whole = layer(model_type=model_type, kv_heads=2)
    half, wide = (rank * 64, rank * 64 + 64), (rank * 192, rank * 192 + 192)
    one = (rank * 32, rank * 32 + 32)
    shares = {f"{ATTENTION}.o_proj": row(half), f"{PREFIX}.mlp.down_proj": row(wide)}
    if model_type == "phi3":
        key, value = (128 + one[0], 128 + one[1]), (192 + one[0], 192 + one[1])
        shares[f"{ATTENTION}.qkv_proj"] = column(half, key, value)
        shares[f"{PREFIX}.mlp.gate_up_proj"] = column(wide, (384 + wide[0], 384 + wide[1]))
    else:
        shares |= {f"{ATTENTION}.q_proj": column(half)}
        shares |= {f"{ATTENTION}.{name}_proj": column(one) for name in "kv"}
        shares |= {f"{PREFIX}.mlp.{name}_proj": column(wide) for name in ("gate", "up")}
    part = cut(whole.tensors, shares)
    for fold in whole.folds.values():
        scale = scale_of(fold)
        # Folded twice on purpose: into the rank's part, with linears of its own that nobody looks at, and the whole.
        own = replace(
            fold, fold=replace(fold.fold, linears=[_apart(linear) for linear in fold.fold.linears]), source=None
        )
        found, wanted = apply_fold(part, shares, own, scale), apply_fold(whole.tensors, {}, fold, scale)
        assert torch.equal(found, wanted)
    expected = cut(whole.tensors, shares)
    assert all(torch.equal(part[name], expected[name]) for name in expected)


def _apart(linear: CalibratedLinear) -> CalibratedLinear:
    return replace(linear, weight=linear.weight.clone(), inputs=None)


def test_a_rank_without_a_part() -> None:
    """What it holds in its place may be anything."""
    found = layer()
    name = f"{PREFIX}.mlp.down_proj.weight"
    found.tensors[name] = found.tensors[name][:, :7].clone()
    apply_fold(
        found.tensors, {f"{PREFIX}.mlp.down_proj": ForwardShard(1)}, found.folds["mlp.up_proj"], torch.full((384,), 2.0)
    )
    whole = found.linears[f"{PREFIX}.mlp.down_proj"].weight
    assert torch.equal(whole, layer().tensors[name] * 2)


def test_scales_that_are_none() -> None:
    found = layer()
    fold = found.folds["mlp.up_proj"]
    for wrong in (torch.ones(3), torch.zeros(384), torch.full((384,), torch.nan)):
        with pytest.raises(ValueError, match="384 positive numbers"):
            apply_fold(found.tensors, {}, fold, wrong)
