"""Products of float32 matrices, by the faster of the two libraries that torch has for them.

torch multiplies by MKL, which takes AVX2 on processors of AMD even where they have AVX-512. oneDNN, which torch brings
as well, takes AVX-512 there, and is twice as fast. The choice depends on the processor and on shapes alone, so that a
run is the same to the bit whatever number of ranks shares it.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["add_product", "linear", "product", "transposed"]

_LEAST = 1 << 22
"""Multiplications from which on a call of oneDNN's costs little beside them."""


def product(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """``x @ weight.T``. ``[rows, in_features]``, ``[out_features, in_features]`` -> ``[rows, out_features]``.

    Args:
        out: filled and returned, if given.
    """
    if not _is_for_onednn(x, weight):
        return torch.mm(x, weight.t(), out=out)
    found = _by_onednn(x, weight)
    return found if out is None else out.copy_(found)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``. ``[..., in_features]`` -> ``[..., out_features]``."""
    rows = x.reshape(-1, x.shape[-1])
    if not _is_for_onednn(rows, weight):
        return functional.linear(x, weight, bias)
    return _by_onednn(rows, weight, bias).view(*x.shape[:-1], weight.shape[0])


def add_product(sums: Tensor, x: Tensor, weight: Tensor) -> None:
    """Adds :func:`product` to ``sums``."""
    if _is_for_onednn(x, weight):
        sums += _by_onednn(x, weight)
    else:
        sums.addmm_(x, weight.t())


def transposed(x: Tensor) -> Tensor:
    """``x.T``, some rows of which are multiplied after others."""
    return x.t().contiguous() if _is_for_onednn(x, x) else x.t()


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # Of strided matrices it computes many times more slowly.
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight.contiguous(), bias, "none", [], "")
    return found


def _is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    is_plain = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
    followed = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return is_plain and not followed and x.shape[0] * weight.numel() >= _LEAST and _has_faster()


def _has_faster() -> bool:
    """Returns whether oneDNN is there and faster than MKL; not where others have set it to less than float32."""
    return torch.get_float32_matmul_precision() == "highest" and _is_faster()


@cache
def _is_faster() -> bool:
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and _vendor() == "AuthenticAMD"


def _vendor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            found = (line.partition(":")[2].strip() for line in file if line.startswith("vendor_id"))
            return next(found, "")
    except OSError:
        return ""
