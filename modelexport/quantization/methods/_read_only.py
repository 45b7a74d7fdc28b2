"""The parts of a method whose checkpoints are read, and never written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from modelexport.errors import CheckpointError, PlanError, quoted
from modelexport.quantization.methods.base import ModelQuantization, QuantizationFiles, WeightSlice

if TYPE_CHECKING:
    from torch import Tensor

    from modelexport.quantization.methods.base import NumberFormatProtocol

Refusal = Callable[["NumberFormatProtocol", tuple[int, int]], "str | None"]
Announce = Callable[[ModelQuantization], QuantizationFiles]
Encode = Callable[["NumberFormatProtocol", Mapping[str, "Tensor"], WeightSlice], "dict[str, Tensor]"]


def writes_nothing(method: str, instead: str) -> tuple[Refusal, Announce, Encode]:
    """Returns ``refusal``, ``quantization_files`` and ``encode`` of a method that is only read.

    Args:
        method: the ``quant_method``.
        instead: what to do.
    """
    words = f"checkpoints of quant_method '{method}' are only read: {instead}"

    def refusal(number_format: NumberFormatProtocol, shape: tuple[int, int]) -> str | None:
        """Returns why it writes nothing: it is only read."""
        return words

    def quantization_files(announced: ModelQuantization) -> QuantizationFiles:
        """It is only read.

        Raises:
            PlanError: always.
        """
        raise PlanError(words)

    def encode(
        number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice
    ) -> dict[str, Tensor]:
        """It is only read.

        Raises:
            PlanError: always.
        """
        raise PlanError(words)

    return refusal, quantization_files, encode


def has_no_native_form(
    number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice
) -> dict[str, Tensor]:
    """Stands for ``decode`` of a method whose numbers have no native form.

    Raises:
        CheckpointError: always.
    """
    raise CheckpointError(f"{quoted(number_format.name)} is only decoded: --quant none writes the weights")
