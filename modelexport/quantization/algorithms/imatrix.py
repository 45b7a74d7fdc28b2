"""imatrix: round to nearest; of a grid of scales the one with which the outputs are nearest to what they were.

As "mse", but for the yardstick: a weight's error counts by what it is multiplied with. The error of a block of a row is
d G d^T, where d is what rounding did to it and G the products of its inputs, summed over the sample: the search for
ranges of "AWQ: Activation-aware Weight Quantization" (Lin et al., 2023), with G in full where llama.cpp's importance
matrix, which the name is from, and llm-compressor's observer of that name have its diagonal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from modelexport.quantization.algorithms.base import CalibratedLinear, Rounding, Want

if TYPE_CHECKING:
    from torch import Tensor


class ImportanceMatrix(Rounding):
    """See the file. Formats that have no choice of scales for parts of a row search theirs with observer "mse", and so
    do linears that no sample came to. The blocks of llama.cpp are not chosen among but fitted, by G of each sub-block.

    Mean KL to the demo model, 64 windows of 256 held-out tokens, after 64 samples of 256 tokens:

    ====================  =======  =======  =======
    number format         nearest  "mse"    imatrix
    ====================  =======  =======  =======
    int4, groups of 128   0.0530   0.0453   0.0363
    int4, groups of 32    0.0385   0.0326   0.0283
    int4, whole rows      0.0628   0.0511   0.0398
    int4-asym             0.0434   0.0389   0.0326
    nvfp4-wo              0.0393   0.0286   0.0252
    mxfp4-wo              0.0571   0.0572   0.0550
    fp8                   0.0061   0.0059   0.0055
    int8                  0.00100  0.00099  0.00096
    q4-k                  0.0249   0.0205   0.0177
    q6-k                  0.0014   0.0012   0.0010
    q2-k                  0.518    0.382    0.320
    ====================  =======  =======  =======

    (The blocks of llama.cpp on 32 windows.) By the diagonal of G alone it is 0.0432 for int4 in groups of 128.
    gptq and autoround gain nothing by these scales.
    """

    name: ClassVar[str] = "imatrix"
    description: ClassVar[str] = "round to nearest; of a grid of scales the one that serves the linear's outputs best"
    wants: ClassVar[frozenset[Want]] = frozenset({"sample"})
    observer: ClassVar[str] = "mse"

    @classmethod
    def device_bytes(cls, rows: int, columns: int, rows_at_once: int | None, settings: Any) -> int:
        """See the base: the sample twice, the products of its blocks, and tiles of the weight."""
        from modelexport.quantization.algorithms._tiles import TILE
        from modelexport.quantization.calibration.statistics import SAMPLE

        return 4 * columns * (3 * SAMPLE + 12 * TILE)

    def quantise(self, linears: Sequence[CalibratedLinear]) -> Mapping[str, dict[str, Tensor]]:
        """See the base."""
        from modelexport.quantization.algorithms._tiles import one_thread_an_operation

        metrics: dict[int, Tensor] = {}  # by the number of blocks: of the one input that all have
        with one_thread_an_operation():
            return {linear.name: _rounded(linear, metrics) for linear in linears}


def _rounded(linear: CalibratedLinear, metrics: dict[int, Tensor]) -> dict[str, Tensor]:
    """A linear's rows; formats that are fitted to the products of the inputs are given these, others a choice."""
    from modelexport.quantization.algorithms import _products

    number_format, inputs = linear.number_format, linear.inputs
    assert number_format is not None
    if not number_format.fits_products:
        return linear.rounded(choice=_choice(linear, metrics))
    if inputs is None or inputs.sample is None or not len(inputs.sample):
        return linear.rounded()
    blocks = number_format.blocks(linear.shape[1])
    if blocks not in metrics:
        metrics[blocks] = _products.of_sample(inputs.sample.to(linear.weight.device), blocks)
    return linear.rounded(products=metrics[blocks])


def _choice(linear: CalibratedLinear, metrics: dict[int, Tensor]) -> Tensor | None:
    """The number of each block's scale, uint8 ``[rows, blocks]``; None where there is no choice or no sample."""
    import torch

    from modelexport.quantization import kernels
    from modelexport.quantization.algorithms import _tiles

    number_format, inputs = linear.number_format, linear.inputs
    assert number_format is not None
    if not number_format.choices or inputs is None or inputs.sample is None or not len(inputs.sample):
        return None
    blocks = number_format.blocks(linear.shape[1])
    if blocks not in metrics:
        metrics[blocks] = _metric(inputs.sample.to(linear.weight.device), blocks)
    found = torch.zeros(len(linear.weight), blocks, dtype=torch.uint8, device=linear.weight.device)

    def work(part: slice) -> None:
        for tile in _tiles.tiles_of((linear.rows[0] + part.start, linear.rows[0] + part.stop)):
            found[part][tile.rows] = _best(tile.filled(linear.weight[part]), linear, metrics[blocks])[tile.within]

    kernels.split_rows(linear.weight, work, _tiles.TILE)
    return found


def _metric(sample: Tensor, blocks: int) -> Tensor:
    """The inputs of each block, ``[blocks, tokens, width]``, or their products ``[blocks, width, width]``."""
    parts = sample.unflatten(1, (blocks, -1)).transpose(0, 1).contiguous()
    return parts if parts.shape[2] > parts.shape[1] else parts.transpose(1, 2) @ parts


def _best(values: Tensor, linear: CalibratedLinear, metric: Tensor) -> Tensor:
    """Of each block of a tile the number of the scale with the least error; of equal ones the largest scale."""
    import torch

    number_format, blocks = linear.number_format, len(metric)
    assert number_format is not None
    found = number_format.choose(values, metric) if metric.shape[1] == metric.shape[2] else None
    if found is not None:
        return found
    amax = linear.amax if number_format.scale_granularity == "tensor" else None
    errors = []
    for number in range(number_format.choices):
        choice = torch.full((len(values), blocks), number, dtype=torch.uint8, device=values.device)
        stored = number_format.quantise(values, amax=amax, inputs=1.0, choice=choice, name=linear.name)
        errors.append(_error(number_format.dequantise(stored).sub_(values).unflatten(1, (blocks, -1)), metric))
    return torch.stack(errors).argmin(dim=0).to(torch.uint8)


def _error(difference: Tensor, metric: Tensor) -> Tensor:
    """float32 ``[TILE, blocks]``."""
    by_block = difference.transpose(0, 1)
    if metric.shape[1] == metric.shape[2]:
        return ((by_block @ metric) * by_block).sum(dim=2).t()
    return (by_block @ metric.transpose(1, 2)).square().sum(dim=2).t()


ALGORITHM = ImportanceMatrix
