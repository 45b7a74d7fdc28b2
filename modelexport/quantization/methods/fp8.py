"""fp8: E4M3 weights in blocks of 128 x 128 as DeepSeek publishes them, read by vLLM, SGLang and transformers.

The checkpoints of https://huggingface.co/deepseek-ai/DeepSeek-V3; also the same ``quant_method`` with one scale for a
whole weight, of which there are two spellings: vLLM's (``weight_scale``, ``input_scale``) and transformers'
(``weight_scale_inv``, ``activation_scale``; config.json says ``weight_block_size: null``). The former is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelexport.errors import CheckpointError, PlanError, shown
from modelexport.quantization.methods._arguments import (
    FP8_TENSOR,
    FP8_TOKEN,
    MXFP8,
    fp8_block,
    fp8_groups,
    meaning,
    with_modules_below,
)
from modelexport.quantization.methods.base import (
    AS_WEIGHT,
    ModelQuantization,
    QuantizationConfig,
    QuantizationFiles,
    Scheme,
    StoredTensorSpec,
    WeightSlice,
    is_size,
    strings,
)

if TYPE_CHECKING:
    from torch import Tensor

    from modelexport.quantization.methods.base import NumberFormatProtocol

METHOD = "fp8"
FORMAT = "fp8-block"
DESCRIPTION = "DeepSeek's weight_scale_inv, in Hugging Face's files"
HUB_TAG = "fp8"
SCALES = "F32"
KV_SCALES: Mapping[str, str] = {}
KV_SHAPE: tuple[int, ...] = ()
SIDE_FILES: tuple[str, ...] = ()

BLOCK = (128, 128)
_SCALES = ("F32", "BF16", "F16", "F8_E8M0")  # DeepSeek's, Qwen's, and those of 2025's UE8M0 checkpoints
_BLOCKS, _EXPONENTS, _WHOLE, _WHOLE_INVERSE = "block", "mx", "tensor", "tensor-inverse"
_KEPT_ANYWAY = "lm_head"  # by every engine; DeepSeek's own config.json lists nothing at all
_SUFFIXES = {  # how a layout names what the native form calls weight_scale and input_scale
    _BLOCKS: ("weight_scale_inv", ""),
    _EXPONENTS: ("weight_scale_inv", ""),
    _WHOLE: ("weight_scale", "input_scale"),
    _WHOLE_INVERSE: ("weight_scale_inv", "activation_scale"),
}


def read(value: Mapping[str, Any]) -> QuantizationConfig:
    """Reads a ``quantization_config``.

    Raises:
        CheckpointError: a part of it has the wrong type or is not known.
    """
    listed = "ignored_layers" if value.get("ignored_layers") else "modules_to_not_convert"
    kept = strings(value.get(listed), listed)
    kept = kept if _KEPT_ANYWAY in kept else (*kept, _KEPT_ANYWAY)
    activations = str(value.get("activation_scheme", "dynamic")).lower()
    if activations not in ("dynamic", "static"):
        raise CheckpointError(f"quantization_config: activation_scheme '{shown(activations)}'; known: dynamic, static")
    block = value.get("weight_block_size")
    weights: dict[str, Any]
    inputs: dict[str, Any]
    if block is None:
        layout = _WHOLE_INVERSE if "weight_block_size" in value else _WHOLE
        weights, inputs = FP8_TENSOR, FP8_TENSOR if activations == "static" else FP8_TOKEN
    elif not isinstance(block, list) or len(block) != 2 or not all(map(is_size, block)):
        raise CheckpointError(
            f"quantization_config: weight_block_size {shown(block)}; two numbers, of rows and columns"
        )
    elif activations == "static":
        raise CheckpointError("quantization_config: activation_scheme 'static' with blocks; engines take 'dynamic'")
    elif block == [1, 32] and value.get("scale_fmt") == "ue8m0":
        layout, weights, inputs = _EXPONENTS, MXFP8, {**MXFP8, "dynamic": True}
    else:
        layout, weights, inputs = _BLOCKS, fp8_block(*block), fp8_groups(block[1])
    scheme = Scheme("fp8", ("Linear",), layout, weights, inputs, None, METHOD)
    return QuantizationConfig(METHOD, layout, None, (scheme,), with_modules_below(kept), None)


def tensor_specs(scheme: Scheme, shape: tuple[int, int]) -> dict[str, StoredTensorSpec]:
    """The tensors, by suffix, that a linear of that shape (``[out, in]``) has under a scheme."""
    rows, cols = shape
    scale, inputs = _SUFFIXES[scheme.format]
    tensors = {"weight": StoredTensorSpec(("F8_E4M3",), (shape,), AS_WEIGHT)}
    if scheme.format == _BLOCKS:
        height, width = scheme.weights["block_structure"]
        blocks = (-(-rows // height), -(-cols // width))
        tensors[scale] = StoredTensorSpec(_SCALES, (blocks,), ((0, height), (1, width)))
    elif scheme.format == _EXPONENTS:
        tensors[scale] = StoredTensorSpec(("U8", "F8_E8M0"), ((rows, -(-cols // 32)),), ((0, 1), (1, 32)))
    else:
        tensors[scale] = StoredTensorSpec(_SCALES[:3], ((), (1,)))
        if scheme.has_static_inputs:
            tensors[inputs] = StoredTensorSpec(_SCALES[:3], ((), (1,)))
    return tensors


def layout(number_format: NumberFormatProtocol) -> str | None:
    """The layout that a number format is written in."""
    means = meaning(number_format.weight_arguments()), meaning(number_format.input_arguments())
    if means == (meaning(fp8_block(*BLOCK)), meaning(fp8_groups(BLOCK[1]))):
        return _BLOCKS
    if means == (meaning(FP8_TENSOR), meaning(FP8_TENSOR)):
        return _WHOLE
    return None


def refusal(number_format: NumberFormatProtocol, shape: tuple[int, int]) -> str | None:
    """Returns why these checkpoints cannot hold such a linear, and what can; None where they can."""
    if layout(number_format) is None:
        return (
            f"a fp8 checkpoint holds fp8-block, or fp8-static of a whole model, not {number_format.name}; "
            "choose --quant fp8-block, or --format hf"
        )
    return None


def quantization_files(announced: ModelQuantization) -> QuantizationFiles:
    """``quantization_config`` as DeepSeek's, with the list of kept modules as transformers names it.

    Raises:
        PlanError: there are several number formats, or one without an encoding, or scales of a KV cache.
    """
    layouts = {}
    for number_format, _ in announced.groups():
        layouts[layout(number_format)] = number_format.name
        if None in layouts:
            raise PlanError(str(refusal(number_format, (0, 0))))
    if len(layouts) > 1:
        raise PlanError(
            f"a fp8 checkpoint has one number format, but {' and '.join(layouts.values())} were asked for: choose one "
            "of them, or --format hf"
        )
    if announced.kv_cache:
        raise PlanError("a fp8 checkpoint has no words for a KV cache's scales: leave --kv-cache out, or --format hf")
    static = _WHOLE in layouts
    config: dict[str, Any] = {"quant_method": METHOD, "activation_scheme": "static" if static else "dynamic"}
    if not static:
        config |= {"fmt": "e4m3", "weight_block_size": list(BLOCK)}
    roots = [name for subtree in announced.subtrees for name in subtree.names]  # no patterns are read here
    return QuantizationFiles(config | {"modules_to_not_convert": [*announced.unquantised, *roots]})


def encode(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """Native tensors as DeepSeek has them (blocks), or vLLM (whole weights); nothing is rounded, nor widened.

    Raises:
        PlanError: the number format has no encoding.
    """
    word = layout(number_format)
    if word is None:
        raise PlanError(str(refusal(number_format, part.extent)))
    scale, inputs = _SUFFIXES[word]
    encoded = {"weight": tensors["weight"], scale: tensors["weight_scale"]}
    if word == _WHOLE:
        encoded = {"weight": tensors["weight"], scale: tensors["weight_scale"].reshape(())}
        encoded[inputs] = tensors["input_scale"].reshape(())
    return encoded


def decode(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """Tensors of any encoding in native form; scales that are exponents (E8M0) become float32.

    Raises:
        CheckpointError: a scale is missing.
    """
    import torch

    scale = tensors["weight_scale_inv"] if "weight_scale_inv" in tensors else tensors.get("weight_scale")
    inputs = tensors["activation_scale"] if "activation_scale" in tensors else tensors.get("input_scale")
    strategy = number_format.weight_arguments()["strategy"]
    if scale is None or (inputs is None and number_format.has_static_inputs):
        raise CheckpointError(f"a scale is missing: {', '.join(sorted(tensors))} are there")
    if strategy == "group":  # MX: the native form has the exponents themselves
        scale = scale.view(torch.uint8)
    elif scale.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        scale = scale.float()
    if strategy == "tensor":
        scale = scale.reshape(1)
    native = {"weight": tensors["weight"], "weight_scale": scale}
    if inputs is not None and number_format.has_static_inputs:
        native["input_scale"] = inputs.reshape(1)
    return native


def dequantise(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> Tensor:
    """The weight, float32 ``[out, in]``, that tensors of any encoding stand for.

    Raises:
        CheckpointError: a scale is missing.
    """
    return number_format.dequantise(decode(number_format, tensors, part))
