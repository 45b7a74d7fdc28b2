"""ggml's blocks: fused kernels for CPU tensors where numba imports, else plain torch; the same bits.

Blocks are uint8 ``[rows, cols / block, bytes of a block]``; a layout says what stands where in them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from modelexport.quantization import kernels
from modelexport.quantization.kernels import ggml_reference as reference
from modelexport.quantization.kernels.ggml_reference import Search

if TYPE_CHECKING:
    from modelexport.quantization.ggml_layouts import BlockLayout

__all__ = ["Search", "dequantise", "quantise", "squared_error"]


def _module(tensor: Tensor, *, at_once: bool = False) -> Any:
    """The kernels that a tensor takes; Triton has none."""
    if tensor.device.type != "cpu" or kernels.backend().name == "triton":
        return reference
    return kernels.of(tensor, "ggml_", at_once=at_once)


def quantise(weight: Tensor, factor: Tensor | None, blocks: Tensor, layout: BlockLayout, search: Search) -> int:
    """Fills blocks; the first row of ``weight`` that holds NaN or Inf, or -1.

    Args:
        weight: ``[rows, cols]`` bf16, fp16 or float32, any strides; cols a multiple of the block.
        factor: float32 ``[cols / sub, sub, sub]``, upper triangles U: an error e of a sub-block counts the square of
            U e. None: of e itself.
    """
    metric = reference.Metric.of(factor, weight.shape[1], layout.sub, weight.device)
    module = _module(weight, at_once=search.rounds > 0)

    def work(part: slice) -> int:
        found: int = module.quantise(weight[part], metric, blocks[part], layout, search)
        return found

    return kernels.split_rows(weight, work)


def dequantise(blocks: Tensor, out: Tensor, layout: BlockLayout) -> None:
    """Fills ``out`` (``[rows, cols]``, bf16, fp16 or float32) with scale * level - minimum, computed in float32."""
    module = _module(out)
    kernels.split_rows(out, lambda part: module.dequantise(blocks[part], out[part], layout))


def squared_error(weight: Tensor, blocks: Tensor, out: Tensor, layout: BlockLayout) -> None:
    """Fills ``out`` (float64 ``[rows, 2]``) with sum((w - dequantised)^2) and sum(w^2) of each row.

    The order of the sums is that of :func:`.reference.squared_error`.
    """
    module, chunk = _module(weight), max(1, reference.AT_ONCE // max(1, weight.shape[1]))

    def work(part: slice) -> None:
        for start in range(part.start, part.stop, chunk):
            some = slice(start, min(part.stop, start + chunk))
            values = weight[some].float()
            decoded = values.new_empty(values.shape)
            module.dequantise(blocks[some], decoded, layout)
            kernels.squared_error(values, decoded, None, out[some])

    kernels.split_rows(weight, work)
