"""mxfp4: the experts of gpt-oss, two numbers to a byte and an exponent for each 32.

https://huggingface.co/openai/gpt-oss-20b: all experts of a layer are in one tensor, ``gate_up_proj_blocks`` uint8
``[experts, rows, in / 32, 16]`` and ``gate_up_proj_scales`` uint8 ``[experts, rows, in / 32]`` (``down_proj`` alike).
Here are the rows of one expert's linear among them, ``blocks`` and ``scales``;
:mod:`modelexport.checkpoints.formats.mxfp4` puts them into their stacks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelexport.quantization.methods._arguments import MXFP4, with_modules_below
from modelexport.quantization.methods.base import (
    ModelQuantization,
    QuantizationConfig,
    QuantizationFiles,
    Scheme,
    StoredTensorSpec,
    WeightSlice,
    strings,
)

if TYPE_CHECKING:
    from torch import Tensor

    from modelexport.quantization.methods.base import NumberFormatProtocol

METHOD = "mxfp4"
FORMAT = None
SCALES = None
KV_SCALES: Mapping[str, str] = {}
KV_SHAPE: tuple[int, ...] = ()
SIDE_FILES: tuple[str, ...] = ()

BLOCK = 32
"""Weights that share an exponent."""
_EXPERTS = r"re:(?:.*\.)?experts(?:\.|$)"


def read(value: Mapping[str, Any]) -> QuantizationConfig:
    """Reads a ``quantization_config``: the experts are MXFP4, the rest as it is.

    Raises:
        CheckpointError: the list of kept modules has the wrong type.
    """
    kept = strings(value.get("modules_to_not_convert"), "modules_to_not_convert")
    scheme = Scheme("mxfp4", (_EXPERTS,), "mxfp4", MXFP4, None, None, METHOD)
    return QuantizationConfig(METHOD, "mxfp4", None, (scheme,), with_modules_below(kept), None)


def tensor_specs(scheme: Scheme, shape: tuple[int, int]) -> dict[str, StoredTensorSpec]:
    """The tensors of one expert's linear, by suffix."""
    blocks = -(-shape[1] // BLOCK)
    return {
        "blocks": StoredTensorSpec(("U8",), ((shape[0], blocks, BLOCK // 2),), ((0, 1), (1, BLOCK))),
        "scales": StoredTensorSpec(("U8",), ((shape[0], blocks),), ((0, 1), (1, BLOCK))),
    }


def stack_specs(experts: int, rows: int, columns: int) -> dict[str, StoredTensorSpec]:
    """The tensors that hold the weights of all experts of a layer, ``[experts, rows, columns]``: ending of the
    parameter's name -> what it is."""
    blocks = -(-columns // BLOCK)
    return {
        "_blocks": StoredTensorSpec(("U8",), ((experts, rows, blocks, BLOCK // 2),)),
        "_scales": StoredTensorSpec(("U8",), ((experts, rows, blocks),)),
    }


def refusal(number_format: NumberFormatProtocol, shape: tuple[int, int]) -> str | None:
    """Returns why it cannot encode a linear; None where it can."""
    if number_format.name == "mxfp4-wo":
        return None
    return f"--format mxfp4 holds experts in mxfp4-wo, not {number_format.name}: --quant '*experts*=mxfp4-wo,*=none'"


def quantization_files(announced: ModelQuantization) -> QuantizationFiles:
    """The quantization config: what is kept, with ``*`` for numbers."""
    kept = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in announced.unquantised)
    return QuantizationFiles({"modules_to_not_convert": list(kept), "quant_method": METHOD})


def encode(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """Native tensors in the method's form: the same bytes."""
    packed = tensors["weight_packed"]
    blocks = packed.reshape(packed.shape[0], -1, BLOCK // 2)
    return {"blocks": blocks, "scales": tensors["weight_scale"]}


def decode(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """The method's tensors in native form: the same bytes."""
    return {"weight_packed": tensors["blocks"].flatten(1), "weight_scale": tensors["scales"]}
