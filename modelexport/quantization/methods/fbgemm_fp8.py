"""fbgemm_fp8: E4M3 weights with a scale for each row, as Meta published Llama 3.1 405B (FP8). Read only.

``weight`` F8_E4M3 ``[out, in]`` and ``weight_scale`` ``[out, 1]``; activations are rounded per token at run time, below
a bound that config.json has (``activation_scale_ub``) and that is not a part of the weights. The numbers are those of
the number format fp8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelexport.quantization.methods._arguments import FP8_ROW, FP8_TOKEN, with_modules_below
from modelexport.quantization.methods._read_only import writes_nothing
from modelexport.quantization.methods.base import (
    AS_WEIGHT,
    QuantizationConfig,
    Scheme,
    StoredTensorSpec,
    WeightSlice,
    strings,
)
from modelexport.system.dtypes import FLOATS

if TYPE_CHECKING:
    from torch import Tensor

    from modelexport.quantization.methods.base import NumberFormatProtocol

METHOD = "fbgemm_fp8"
FORMAT = None
SCALES = None
KV_SCALES: Mapping[str, str] = {}
KV_SHAPE: tuple[int, ...] = ()
SIDE_FILES: tuple[str, ...] = ()

refusal, quantization_files, encode = writes_nothing(METHOD, "write the same numbers with --format hf")


def read(value: Mapping[str, Any]) -> QuantizationConfig:
    """Reads a ``quantization_config``.

    Raises:
        CheckpointError: the list of kept modules has the wrong type.
    """
    kept = strings(value.get("modules_to_not_convert"), "modules_to_not_convert")
    kept = kept if "lm_head" in kept else (*kept, "lm_head")
    scheme = Scheme(METHOD, ("Linear",), "row", FP8_ROW, FP8_TOKEN, None, METHOD)
    return QuantizationConfig(METHOD, "row", None, (scheme,), with_modules_below(kept), None)


def tensor_specs(scheme: Scheme, shape: tuple[int, int]) -> dict[str, StoredTensorSpec]:
    """The tensors, by suffix, that a linear of that shape (``[out, in]``) has."""
    return {
        "weight": StoredTensorSpec(("F8_E4M3",), (shape,), AS_WEIGHT),
        "weight_scale": StoredTensorSpec(FLOATS, ((shape[0], 1),), ((0, 1),)),
    }


def decode(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """The tensors in native form, which is their own."""
    return dict(tensors)
