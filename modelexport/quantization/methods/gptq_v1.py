"""GPTQ checkpoints of format "gptq" that are not as we write them: they can be read, and are not written.

Their zero points are stored minus one and not all the same (AutoGPTQ's with ``sym: false``), or their columns are
grouped by activation order (``desc_act``).
A scheme that :mod:`gptq` reads from such a checkpoint names this method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from modelexport.errors import CheckpointError
from modelexport.quantization.methods import _gptq
from modelexport.quantization.methods.base import Announced, Announcement, Part, Promise, QuantizationConfig, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from modelexport.quantization.formats.base import NumberFormat

METHOD = "gptq_v1"
FORMAT = None
SCALES = "F16"
KV_SCALES: Mapping[str, str] = {}
SIDE_FILES: tuple[str, ...] = ()
KV_SHAPE: tuple[int, ...] = ()


def read(value: Mapping[str, Any]) -> QuantizationConfig:
    """Refuses: no tool names this method, they say "gptq".

    Raises:
        CheckpointError: always.
    """
    raise CheckpointError("config.json: quantization_config: quant_method 'gptq_v1' is written 'gptq'")


def promised(scheme: Scheme, shape: tuple[int, int]) -> dict[str, Promise]:
    """As for "gptq"."""
    return _gptq.promised(scheme, shape)


def refusal(number_format: NumberFormat, shape: tuple[int, int]) -> str | None:
    """It is not written."""
    return "this spelling of gptq is read, not written: --format gptq"


def announce(announced: Announced) -> Announcement:
    """It is not written."""
    _not_written()


def encode(number_format: NumberFormat, tensors: Mapping[str, Tensor], part: Part) -> dict[str, Tensor]:
    """It is not written."""
    _not_written()


def decode(number_format: NumberFormat, tensors: Mapping[str, Tensor], part: Part) -> dict[str, Tensor]:
    """GPTQ's tensors in native form.

    Raises:
        CheckpointError: the columns were grouped by activation order, or the format is symmetric and its zero points
            are not in the middle.
    """
    return _gptq.decode(number_format, tensors, part, minus_one=True)


def dequantise(number_format: NumberFormat, tensors: Mapping[str, Tensor], part: Part) -> Tensor:
    """The weight, float32 ``[out, in]``, also of columns that were grouped by activation order."""
    return _gptq.dequantise(number_format, tensors, part, minus_one=True)


def _not_written() -> NoReturn:
    raise AssertionError("gptq is written by the method 'gptq'")
