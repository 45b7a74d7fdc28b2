"""TensorRT-LLM's own checkpoints: how the files of ``trtllm-build --checkpoint_dir`` encode quantised linears.

What is said here of names, dtypes and shapes is what TensorRT-LLM's loader takes
(https://github.com/NVIDIA/TensorRT-LLM: ``preprocess_perlayer_weights`` in ``models/modeling_utils.py``, the parameters
of the classes in ``quantization/layers.py`` and ``layers/moe.py``, ``value.setter`` in ``parameter.py``) and what
nvidia-modelopt 0.47 writes for it (``torch/export/quant_utils.py``, ``model_config_utils.py``). A linear's weight is
``[out, in]`` in each; the engine's own layout (transposed, interleaved) is made when it is built.

====================================== ========================== ==================================================
quant_algo                             weight                     beside it
====================================== ========================== ==================================================
FP8                                    e4m3 [out, in]             weights_scaling_factor, activation_scaling_factor [1]
FP8_PER_CHANNEL_PER_TOKEN              e4m3 [out, in]             per_channel_scale [out]
W8A8_SQ_PER_CHANNEL                    int8 [out, in]             weights_scaling_factor [out],
                                                                  activation_scaling_factor [1]
W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN   int8 [out, in]             per_channel_scale [1, out]
W4A16_AWQ                              int8 [out / 2, in]         weights_scaling_factor [out, in / group]
NVFP4                                  uint8 [out, in / 2]        weights_scaling_factor e4m3 [out, in / 16],
                                                                  weights_scaling_factor_2, activation_scaling_factor []
====================================== ========================== ==================================================

Scales are float32 where nothing is said, and multiply. A byte of W4A16_AWQ holds two *rows*, the even one in its low
half. What the engine wants besides and says nothing of the model (smoothing by 1) is the container's business.

W8A16 and W4A16 are not stored: TensorRT-LLM rounds an unquantised checkpoint when it builds, or stores what its kernels
have made of it. W4A16_GPTQ, W4A8_AWQ and W4A8_QSERVE have zero points or static activations that no format of ours has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modelexport.errors import CheckpointError, PlanError, nearest, quoted, shown
from modelexport.quantization.methods._arguments import FP8_ROW, FP8_TENSOR, FP8_TOKEN, NVFP4, meaning, numbers
from modelexport.quantization.methods.base import (
    AS_WEIGHT,
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

METHOD = "trtllm"
FORMAT = "trtllm"
SCALES = "F32"
SIDE_FILES: tuple[str, ...] = ()
KV_SCALES = {"k": "k_scale", "v": "v_scale"}
KV_SHAPE: tuple[int, ...] = (1,)
KV_CACHES: Mapping[str, str] = {"fp8": "FP8", "int8": "INT8"}
GROUP_SIZES = (64, 128)

_PLACES = {  # modelopt's suffixes -> ours, where they are not the same word
    "weight": "weight",
    "weight_scale": "weights_scaling_factor",
    "weight_scale_2": "weights_scaling_factor_2",
    "input_scale": "activation_scaling_factor",
}
_PER_TOKEN = ("FP8_PER_CHANNEL_PER_TOKEN", "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN")


@dataclass(frozen=True)
class _TrtllmAlgorithm:
    """compressed-tensors' arguments of a ``quant_algo``; integer groups have the size that config.json gives."""

    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None = None


_INT8_ROW = numbers("int", 8, "channel")
_ALGOS = {
    "FP8": _TrtllmAlgorithm(FP8_TENSOR, FP8_TENSOR),
    "FP8_PER_CHANNEL_PER_TOKEN": _TrtllmAlgorithm(FP8_ROW, FP8_TOKEN),
    "W8A8_SQ_PER_CHANNEL": _TrtllmAlgorithm(_INT8_ROW, numbers("int", 8, "tensor")),
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": _TrtllmAlgorithm(_INT8_ROW, numbers("int", 8, "token", dynamic=True)),
    "W4A16_AWQ": _TrtllmAlgorithm(numbers("int", 4, "group", group_size=128)),
    "NVFP4": _TrtllmAlgorithm(NVFP4, {**NVFP4, "dynamic": "local"}),
}
_KNOWN = "fp8, fp8-static, int8, int8-static, int4 (groups of 64 or 128), nvfp4"
_WHY_NOT = {
    "int8-wo": "TensorRT-LLM rounds to W8A16 itself, when it builds from a checkpoint of --quant none; choose ",
    "w4a8": "its W4A8_AWQ has static activations; choose ",
    "nvfp4-wo": "its NVFP4 rounds the activations, too: choose --quant nvfp4, ",
    "fp8-block": "its engines have FP8 blocks in their other checkpoints: choose --format fp8-block or ",
}


def read(value: Mapping[str, Any]) -> QuantizationConfig:
    """Reads the config that :func:`quantization_files` makes, or TensorRT-LLM's ``quantization`` with ``ignore`` added.

    Raises:
        CheckpointError: a part of it has the wrong type, the algorithm is not known, or inputs are smoothed.
    """
    algo = value.get("quant_algo")
    schemes = []
    if algo is not None:
        if not isinstance(algo, str) or algo not in _ALGOS:
            raise CheckpointError(
                f"quantization: quant_algo '{shown(algo)}' is not read{nearest(shown(algo), _ALGOS)}; give the "
                "checkpoint that this one was made from"
            )
        for key, what in (("has_zero_point", "zero points"), ("pre_quant_scale", "inputs that are multiplied first")):
            if value.get(key):
                raise CheckpointError(
                    f"quantization: {algo} with {key} ({what}) is not read; give the checkpoint that this one was made "
                    "from, e.g. modelopt's"
                )
        schemes = [_scheme(algo, value.get("group_size"))]
    cache = value.get("kv_cache_quant_algo")
    numbers_of = {None: None, "FP8": "float", "INT8": "int"}
    if cache is not None and (not isinstance(cache, str) or cache not in numbers_of):
        raise CheckpointError(f"quantization: kv_cache_quant_algo '{shown(cache)}' is not read; FP8 and INT8 are")
    kv = None if cache is None else {"dynamic": False, "num_bits": 8, "type": numbers_of[cache]}
    ignore = strings(value.get("ignore"), "ignore")
    return QuantizationConfig(METHOD, None if algo is None else str(algo), None, tuple(schemes), ignore, kv)


def _scheme(algo: str, size: Any) -> Scheme:
    own = _ALGOS[algo]
    weights = dict(own.weights)
    if weights["type"] == "int" and weights["strategy"] == "group":
        if size is not None and (not isinstance(size, int) or size < 1):
            raise CheckpointError(f"quantization: {algo} with group_size {quoted(size)}; a number of columns is needed")
        weights["group_size"] = size or 128
    return Scheme(algo, ("Linear",), algo, weights, own.inputs, None, METHOD)


def tensor_specs(scheme: Scheme, shape: tuple[int, int]) -> dict[str, StoredTensorSpec]:
    """The tensors, by suffix, that a linear of that shape (``[out, in]``) has under a scheme.

    Raises:
        CheckpointError: the scheme is not known, or the shape does not go with it.
    """
    algo = _algorithm_of(scheme.weights, scheme.inputs)
    if algo is None:
        raise CheckpointError(f"{scheme.name}: TensorRT-LLM has no word for {scheme.describe()}")
    rows, cols = shape
    scalar, single = StoredTensorSpec(("F32",), ((1,),)), StoredTensorSpec(("F32",), ((),))
    e4m3 = StoredTensorSpec(
        ("F8_E4M3", "I8"), (shape,), AS_WEIGHT
    )  # I8: the bytes as modelopt's before safetensors had FP8
    int8 = StoredTensorSpec(("I8",), (shape,), AS_WEIGHT)
    if algo == "FP8":
        return {"weight": e4m3, "weights_scaling_factor": scalar, "activation_scaling_factor": scalar}
    if algo == "FP8_PER_CHANNEL_PER_TOKEN":
        return {"weight": e4m3, "per_channel_scale": StoredTensorSpec(("F32",), ((rows,),), ((0, 1),))}
    if algo == "W8A8_SQ_PER_CHANNEL":
        scales = StoredTensorSpec(("F32",), ((rows,),), ((0, 1),))
        return {"weight": int8, "weights_scaling_factor": scales, "activation_scaling_factor": scalar}
    if algo == "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN":
        return {"weight": int8, "per_channel_scale": StoredTensorSpec(("F32",), ((1, rows),), (None, (0, 1)))}
    if algo == "W4A16_AWQ":
        size = int(scheme.weights["group_size"])
        if rows % 2 or cols % size:
            raise CheckpointError(
                f"{scheme.name}: a weight of {rows} rows of {cols} is not in pairs of rows and groups of {size}"
            )
        scales = StoredTensorSpec(("F32",), ((rows, cols // size),), ((0, 1), (1, size)))
        return {
            "weight": StoredTensorSpec(("I8",), ((rows // 2, cols),), ((0, 2), (1, 1))),
            "weights_scaling_factor": scales,
        }
    return {
        "weight": StoredTensorSpec(("U8",), ((rows, cols // 2),), ((0, 1), (1, 2))),
        "weights_scaling_factor": StoredTensorSpec(("F8_E4M3",), ((rows, -(-cols // 16)),), ((0, 1), (1, 16))),
        "weights_scaling_factor_2": single,
        "activation_scaling_factor": single,
    }


def _algorithm_of(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> str | None:
    """The algorithm that says the same as compressed-tensors' arguments, whatever its group size."""
    size = weights.get("group_size")
    for name, algo in _ALGOS.items():
        own = algo.weights
        if own["type"] == "int" and own["strategy"] == "group":
            own = {**own, "group_size": size}
        if (meaning(own), meaning(algo.inputs)) == (meaning(weights), meaning(inputs)):
            return name
    return None


def refusal(number_format: NumberFormatProtocol, shape: tuple[int, int]) -> str | None:
    """Returns why TensorRT-LLM's checkpoints cannot hold such a linear, and what can; None where they can."""
    algo = _algorithm_of(number_format.weight_arguments(), number_format.input_arguments())
    group, (rows, cols) = number_format.group_size, shape
    if algo is None or (algo == "W4A16_AWQ" and group not in GROUP_SIZES):
        why = _WHY_NOT.get(number_format.name, "choose ")
        size = "" if group is None else " of whole rows" if group == -1 else f" in groups of {group}"
        return (
            f"a TensorRT-LLM checkpoint has no word for {number_format.name}{size}; {why}--format hf, or "
            f"one of: {_KNOWN}"
        )
    if algo == "W4A16_AWQ" and (rows % 2 or cols % (group or 1)):
        return (
            f"TensorRT-LLM's {algo} packs two rows into a byte and has whole groups, but {rows} rows of {cols} are not "
            f"in pairs and in groups of {group}; choose --format hf"
        )
    return None


def _known_spelling(number_format: NumberFormatProtocol) -> str:
    algo = _algorithm_of(number_format.weight_arguments(), number_format.input_arguments())
    if algo is None:
        raise PlanError(str(refusal(number_format, (0, 0))))
    return algo


def quantization_files(announced: ModelQuantization) -> QuantizationFiles:
    """TensorRT-LLM's ``quantization``, and in ``ignore`` what is kept, by Hugging Face's names.

    The container puts the former into TensorRT-LLM's config.json, and the whole into the model's own.

    Raises:
        PlanError: a number format has no encoding, or there are several.
    """
    groups = announced.groups()
    algos = [(_known_spelling(number_format), number_format.group_size) for number_format, _ in groups]
    if len(set(algos)) > 1:
        spelled = "; ".join(f"{number_format.name}: {modules[0]}, ..." for number_format, modules in groups)
        raise PlanError(
            f"--format {FORMAT}: several number formats ({spelled}); TensorRT-LLM's own loader stumbles over its "
            "MIXED_PRECISION checkpoints: choose one of them for all, or --format modelopt or hf"
        )
    config: dict[str, Any] = {"quant_method": METHOD, "quant_algo": algos[0][0] if algos else None}
    config["kv_cache_quant_algo"] = None if announced.kv_cache is None else KV_CACHES[announced.kv_cache]
    if algos and algos[0][0] == "W4A16_AWQ":
        config |= {"group_size": algos[0][1], "has_zero_point": False, "pre_quant_scale": False}
    elif algos and algos[0][0] == "NVFP4":
        config["group_size"] = 16
    return QuantizationFiles({**config, "ignore": announced.ignored()})


def encode(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """Native tensors as TensorRT-LLM has them; scales become float32, NVFP4's global ones multipliers.

    Raises:
        PlanError: TensorRT-LLM has no encoding of the number format.
        CheckpointError: a global scale is negative or NaN.
    """
    import torch

    from modelexport.quantization.methods import _modelopt_tensors

    algo = _known_spelling(number_format)
    found = _modelopt_tensors.encode(number_format, tensors, part)  # the same numbers, in other words
    encoded = {_PLACES[suffix]: tensor for suffix, tensor in found.items()}
    if algo == "W4A16_AWQ":
        encoded["weight"] = encoded["weight"].view(torch.int8)
    elif algo == "FP8":
        encoded["weights_scaling_factor"] = encoded["weights_scaling_factor"].reshape(1)
    elif algo in _PER_TOKEN:
        scale = encoded.pop("weights_scaling_factor")
        encoded["per_channel_scale"] = scale if algo.startswith("FP8") else scale.reshape(1, -1)
    if algo in ("FP8", "W8A8_SQ_PER_CHANNEL"):
        encoded["activation_scaling_factor"] = encoded["activation_scaling_factor"].reshape(1)
    return encoded


def decode(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """TensorRT-LLM's tensors in native form.

    Raises:
        PlanError: TensorRT-LLM has no encoding of the number format.
        CheckpointError: a global scale cannot be inverted.
    """
    import torch

    from modelexport.quantization.methods import _modelopt_tensors

    algo = _known_spelling(number_format)
    own = {suffix: tensors[place] for suffix, place in _PLACES.items() if place in tensors}
    if algo == "W4A16_AWQ":
        own["weight"] = own["weight"].view(torch.uint8)
    elif algo.startswith("FP8"):
        own["weight"] = own["weight"].view(torch.float8_e4m3fn)
    if algo in _PER_TOKEN:
        own["weight_scale"] = tensors["per_channel_scale"]
    return _modelopt_tensors.decode(number_format, own, part)
