"""Keys and values as they come out of an engine's cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from modelexport.quantization.kv_caches import CACHES, CacheRounding, of_scheme
from modelexport.quantization.methods import methods

HEADS = 4


def some(heads: int = HEADS, seed: int = 0, width: int = 32) -> Tensor:
    """Keys or values whose heads differ in size."""
    x = torch.randn(2, heads, 5, width, generator=torch.Generator().manual_seed(seed))
    return x * torch.arange(1, heads + 1).view(1, -1, 1, 1) ** 2


def by_head() -> CacheRounding:
    return CACHES["fp8-head"].rounding([3.0, 5.0, 7.0, 11.0], [2.0, 4.0, 6.0, 8.0])


def test_every_head_has_its_own_scale() -> None:
    """As compressed-tensors' own quantisation has it, which broadcasts scales of [heads, 1, 1]."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    scheme = dict(methods()["compressed-tensors"].KV_CACHES["fp8-head"])
    arguments = quantization.QuantizationArgs.model_validate(scheme)
    rounding, keys, values = by_head(), some(), some(seed=1)
    for got, x, scale in zip(rounding(keys, values), (keys, values), (rounding.keys, rounding.values), strict=True):
        theirs = fake_quantize(x, scale.view(HEADS, 1, 1), torch.zeros(HEADS, 1, 1), arguments)
        assert torch.equal(got, theirs)
        assert not torch.equal(got, x)


def test_ranks_round_their_heads_as_one_rank_does() -> None:
    rounding, keys, values = by_head(), some(), some(seed=1)
    whole = rounding(keys, values)
    for span in ((0, 2), (1, 4), (3, 4)):
        held = slice(*span)
        parts = rounding(keys[:, held], values[:, held], span)
        assert all(torch.equal(part, all_[:, held]) for part, all_ in zip(parts, whole, strict=True))
    repeated = rounding(*(x.repeat_interleave(2, dim=1) for x in (keys, values)))
    assert all(torch.equal(part[:, ::2], all_) for part, all_ in zip(repeated, whole, strict=True))
    assert rounding(keys[:, :1], values[:, :1], (0, 0))[0].shape == keys[:, :1].shape, "a rank without a part"


def test_int8_is_rounded_to_whole_steps_of_the_scale() -> None:
    """As compressed-tensors' own quantisation has it."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    arguments = quantization.QuantizationArgs(num_bits=8, type="int", strategy="tensor", symmetric=True)
    keys, values = some(), some(seed=1)
    rounding = CACHES["int8"].rounding([float(keys.abs().max())], [0.5 * float(values.abs().max())])
    assert float(rounding.keys) == pytest.approx(float(keys.abs().max()) / 127)
    for got, x, scale in zip(rounding(keys, values), (keys, values), (rounding.keys, rounding.values), strict=True):
        assert torch.equal(got, fake_quantize(x, scale, torch.zeros(1), arguments))
        assert not torch.equal(got, x)


def test_nvfp4_is_rounded_in_groups_below_the_stored_scale() -> None:
    """As compressed-tensors' own quantisation has it, whose global scale is the reciprocal."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    words = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    arguments = quantization.QuantizationArgs(**words, dynamic="local", scale_dtype=torch.float8_e4m3fn)
    keys, values = some(), some(seed=1)
    keys[0, 0, 0] = 0.0
    keys[0, 1, 1] *= 1e-6
    rounding = CACHES["nvfp4"].rounding([float(keys.abs().max())], [0.5 * float(values.abs().max())])
    for got, x, scale in zip(rounding(keys, values), (keys, values), (rounding.keys, rounding.values), strict=True):
        flat = x.flatten(0, 2)
        above = scale.reciprocal()
        own, zero = compute_dynamic_scales_and_zp(flat, arguments, torch.nn.Module(), global_scale=above)
        theirs = fake_quantize(flat, own, zero, arguments, global_scale=above)
        assert torch.allclose(got.flatten(0, 2), theirs, rtol=1e-5, atol=1e-7)
        assert len(got[0, 2, 3, :16].abs().unique()) <= 8


@pytest.mark.parametrize("method", ["compressed-tensors", "modelopt", "trtllm"])
def test_what_a_method_writes_is_read_as_the_same_cache(method: str) -> None:
    from modelexport.quantization.methods.base import ModelQuantization

    found = methods()[method]
    for name in found.KV_CACHES:
        read = found.read(found.quantization_files(ModelQuantization({}, (), name)).config)
        assert of_scheme(read.kv_cache_scheme) is CACHES[name]
