"""mxfp4: the experts of gpt-oss, two numbers to a byte and an exponent for each 32. Read only.

https://huggingface.co/openai/gpt-oss-20b: all experts of a layer are in one tensor, ``gate_up_proj_blocks`` uint8
``[experts, rows, in / 32, 16]`` and ``gate_up_proj_scales`` uint8 ``[experts, rows, in / 32]`` (``down_proj`` alike).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelexport.errors import CheckpointError, PlanError
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
_READ_ONLY = (
    "checkpoints of quant_method 'mxfp4' (gpt-oss) are only read: write mxfp4 with --format hf (--quant mxfp4-wo)"
)
_FUSED = (
    "quant_method 'mxfp4' (gpt-oss) stores all experts of a layer in one tensor, {what}_blocks and {what}_scales; "
    "a single linear has none: export such a model from its bfloat16 original"
)


def read(value: Mapping[str, Any]) -> QuantizationConfig:
    """Reads a ``quantization_config``: the experts are MXFP4, the rest as it is.

    Raises:
        CheckpointError: the list of kept modules has the wrong type.
    """
    kept = strings(value.get("modules_to_not_convert"), "modules_to_not_convert")
    scheme = Scheme("mxfp4", (_EXPERTS,), "mxfp4", MXFP4, None, None, METHOD)
    return QuantizationConfig(METHOD, "mxfp4", None, (scheme,), with_modules_below(kept), None)


def tensor_specs(scheme: Scheme, shape: tuple[int, int]) -> dict[str, StoredTensorSpec]:
    """Nothing: experts are fused.

    Raises:
        CheckpointError: always.
    """
    raise CheckpointError(_FUSED.format(what="gate_up_proj"))


def stack_specs(experts: int, rows: int, columns: int) -> dict[str, StoredTensorSpec]:
    """The tensors that hold the weights of all experts of a layer, ``[experts, rows, columns]``: ending of the
    parameter's name -> what it is."""
    blocks = -(-columns // BLOCK)
    return {
        "_blocks": StoredTensorSpec(("U8",), ((experts, rows, blocks, BLOCK // 2),)),
        "_scales": StoredTensorSpec(("U8",), ((experts, rows, blocks),)),
    }


def decode_blocks(blocks: Tensor, scales: Tensor) -> list[dict[str, Tensor]]:
    """Each expert's native tensors (number format mxfp4-wo), as views; exact.

    ``weight_packed`` is uint8 ``[rows, in / 2]``, ``weight_scale`` uint8 ``[rows, in / 32]``. The rows are in the
    stored order: of ``gate_up_proj`` the even ones are the gate's, the odd ones the up projection's.

    Args:
        blocks: uint8 ``[experts, rows, in / 32, 16]``: the low four bits hold the even column, sign then E2M1.
        scales: uint8 ``[experts, rows, in / 32]``: exponents, + 127.

    Raises:
        CheckpointError: the dtypes or shapes do not go together.
    """
    import torch

    shape = tuple(blocks.shape)
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise CheckpointError(f"MXFP4 experts of {blocks.dtype} and {scales.dtype}: both must be torch.uint8")
    if len(shape) != 4 or shape[3] != 16 or shape[:3] != tuple(scales.shape):
        raise CheckpointError(
            f"MXFP4 experts are blocks [experts, rows, in / 32, 16] with scales [experts, rows, in / 32], "
            f"not {list(shape)} with {list(scales.shape)}"
        )
    return [
        {"weight_packed": packed.flatten(1), "weight_scale": scale}
        for packed, scale in zip(blocks.unbind(), scales.unbind(), strict=True)
    ]


def refusal(number_format: NumberFormatProtocol, shape: tuple[int, int]) -> str | None:
    """Returns why it writes nothing: it is only read."""
    return _READ_ONLY


def quantization_files(announced: ModelQuantization) -> QuantizationFiles:
    """It is only read.

    Raises:
        PlanError: always.
    """
    raise PlanError(_READ_ONLY)


def encode(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """It is only read.

    Raises:
        PlanError: always.
    """
    raise PlanError(_READ_ONLY)


def decode(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """Not of single linears; see :func:`decode_blocks`.

    Raises:
        CheckpointError: always.
    """
    raise CheckpointError(_FUSED.format(what="gate_up_proj"))
