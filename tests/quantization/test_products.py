"""Products of calibration are those of float32, whichever library computes them; strides change no bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from modelexport.quantization.calibration import products
from modelexport.quantization.calibration.products import add_product, linear, product, transposed

_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@pytest.fixture(params=["mkl", pytest.param("onednn", marks=pytest.mark.skipif(not _HAS_ONEDNN, reason="no oneDNN"))])
def _library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_is_faster", lambda: request.param == "onednn")
    monkeypatch.setattr(products, "_LEAST", 0)


def _matrices() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(48, 200, generator=generator), torch.randn(72, 200, generator=generator)


@pytest.mark.usefixtures("_library")
def test_a_product_is_that_of_float32() -> None:
    x, weight = _matrices()
    exact = (x.double() @ weight.double().t()).float()
    near = {"rtol": 1e-6, "atol": 1e-4}  # sums of 200 products of numbers of 1
    torch.testing.assert_close(product(x, weight), exact, **near)
    bias = torch.arange(72.0)
    torch.testing.assert_close(linear(x.view(6, 8, 200), weight, bias), (exact + bias).view(6, 8, 72), **near)
    sums = torch.ones(48, 72)
    add_product(sums, x, weight)
    torch.testing.assert_close(sums, exact + 1, **near)
    torch.testing.assert_close(product(transposed(x)[:, :40], transposed(x)[:64, :40]), x[:40].T @ x[:40, :64], **near)


@pytest.mark.usefixtures("_library")
def test_strides_and_the_place_of_a_result_change_no_bit() -> None:
    x, weight = _matrices()
    wide = torch.zeros(72, 512)
    wide[:, 100:300] = weight
    out = torch.zeros(48, 100)
    product(x, wide[:, 100:300], out=out[:, 20:92])
    assert torch.equal(out[:, 20:92], product(x, weight))


@pytest.mark.usefixtures("_library")
def test_gradients_are_followed() -> None:
    x, weight = _matrices()
    weight.requires_grad_()
    product(x, weight).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, x.sum(0).expand(72, -1))


def test_where_float32_may_be_less_mkl_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = _matrices()
    monkeypatch.setattr(products, "_is_faster", lambda: True)
    monkeypatch.setattr(products, "_LEAST", 0)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    monkeypatch.setattr(products, "_by_onednn", lambda *args: pytest.fail("rounds to bfloat16"))
    torch.testing.assert_close(product(x, weight), x @ weight.t())
