"""GPTQ checkpoints that are not as we write them: they can be read, and are not written.

Either their zero points are stored the other way round than ours of the same kind ("gptq", minus one, and asymmetric:
AutoGPTQ's with ``sym: false``; "gptq_v2", as they are, and symmetric), or their columns are grouped by activation order
(``desc_act``). A scheme that :mod:`gptq` reads from such a checkpoint names one of these methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from modelexport.errors import CheckpointError
from modelexport.quantization.methods import _gptq
from modelexport.quantization.methods.base import (
    ModelQuantization,
    QuantizationConfig,
    QuantizationFiles,
    Scheme,
    StoredTensorSpec,
    WeightSlice,
)

if TYPE_CHECKING:
    from torch import Tensor

    from modelexport.quantization.methods.base import NumberFormatProtocol


@dataclass(frozen=True)
class ReadOnly:
    """A method that is only read; see :class:`~modelexport.quantization.methods.base.Method`.

    Attributes:
        METHOD: the name that schemes have; no config.json has it.
        minus_one: whether zero points are stored minus one.
    """

    METHOD: str
    minus_one: bool
    FORMAT: str | None = None
    SCALES: str | None = "F16"
    KV_SHAPE: tuple[int, ...] = ()
    SIDE_FILES: tuple[str, ...] = ()

    @property
    def KV_SCALES(self) -> Mapping[str, str]:
        """Nowhere."""
        return {}

    def read(self, value: Mapping[str, Any]) -> QuantizationConfig:
        """Refuses: no tool names this method, they say "gptq".

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(f"config.json: quantization_config: quant_method '{self.METHOD}' is written 'gptq'")

    def tensor_specs(self, scheme: Scheme, shape: tuple[int, int]) -> dict[str, StoredTensorSpec]:
        """As for "gptq"."""
        return _gptq.tensor_specs(scheme, shape)

    def refusal(self, number_format: NumberFormatProtocol, shape: tuple[int, int]) -> str | None:
        """It is not written."""
        return "this encoding of gptq is read, not written: --format gptq"

    def quantization_files(self, announced: ModelQuantization) -> QuantizationFiles:
        """It is not written."""
        self._not_written()

    def encode(
        self, number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice
    ) -> dict[str, Tensor]:
        """It is not written."""
        self._not_written()

    def decode(
        self, number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice
    ) -> dict[str, Tensor]:
        """GPTQ's tensors in native form.

        Raises:
            CheckpointError: the columns were grouped by activation order, or the format is symmetric and its zero
                points are not in the middle.
        """
        return _gptq.decode(number_format, tensors, part, minus_one=self.minus_one)

    def dequantise(
        self, number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice
    ) -> Tensor:
        """The weight, float32 ``[out, in]``, also of columns that were grouped by activation order."""
        return _gptq.dequantise(number_format, tensors, part, minus_one=self.minus_one)

    def _not_written(self) -> NoReturn:
        raise AssertionError("gptq is written by the method 'gptq'")


METHODS = (ReadOnly("gptq_v1", minus_one=True), ReadOnly("gptq_v2", minus_one=False))
