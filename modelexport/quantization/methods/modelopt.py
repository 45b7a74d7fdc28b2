"""modelopt's unified checkpoints: what TensorRT-LLM reads, and of the FP8, NVFP4 and MXFP8 kinds vLLM and SGLang.

As nvidia-modelopt 0.47 writes them (https://github.com/NVIDIA/Model-Optimizer, ``modelopt.torch.export``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modelexport.errors import CheckpointError, PlanError, nearest, shown
from modelexport.quantization.methods._arguments import (
    FP8_ROW,
    FP8_TENSOR,
    FP8_TOKEN,
    MXFP4,
    MXFP8,
    NVFP4,
    fp8_block,
    fp8_groups,
    meaning,
    numbers,
    with_modules_below,
)
from modelexport.quantization.methods.base import (
    AS_WEIGHT,
    Axes,
    ModelQuantization,
    QuantizationConfig,
    QuantizationFiles,
    Scheme,
    StoredTensorSpec,
    WeightSlice,
    is_size,
    mapping,
    strings,
)
from modelexport.system.dtypes import FLOATS

if TYPE_CHECKING:
    from torch import Tensor

    from modelexport.quantization.methods.base import NumberFormatProtocol

METHOD = "modelopt"
HOLDS_HEADS = True
ALIASES = ("modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8")
FORMAT = "modelopt"
DESCRIPTION = "NVIDIA ModelOpt's names and hf_quant_config.json"
SCALES = "F32"
SIDE_FILES: tuple[str, ...] = ("hf_quant_config.json",)
KV_SHAPE: tuple[int, ...] = ()
KV_SCALES = {"k": "k_proj.k_scale", "v": "v_proj.v_scale"}
KV_CACHES: Mapping[str, str] = {"fp8": "FP8", "nvfp4": "NVFP4"}
MIXED = "MIXED_PRECISION"

_INT4_GROUPS = (32, 64, 128)
_KV_NUMBERS = {"FP8": ("float", 8), "INT8": ("int", 8), "NVFP4": ("float", 4)}


@dataclass(frozen=True)
class _ModelOptAlgorithm:
    """A ``quant_algo``.

    Attributes:
        weights, inputs: compressed-tensors' arguments.
        group_size: as config.json has it; 0: it has none, -1: any, and without it the weights' own.
        awq: whether linears may have a ``pre_quant_scale`` and config.json says so.
        second: whether there is a ``weight_scale_2``.
    """

    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None = None
    group_size: int = 0
    awq: bool = False
    second: bool = False


_INT8_ROW = numbers("int", 8, "channel")
_INT4 = numbers("int", 4, "group", group_size=128)
_NVFP4_INPUTS = {**NVFP4, "dynamic": "local"}  # the tensor's scale is stored, the groups' are not
_ALGOS = {
    "FP8": _ModelOptAlgorithm(FP8_TENSOR, FP8_TENSOR),
    "FP8_PER_CHANNEL_PER_TOKEN": _ModelOptAlgorithm(FP8_ROW, FP8_TOKEN),
    "fp8_pb_wo": _ModelOptAlgorithm(fp8_block(128, 128), fp8_groups(128)),
    "W8A8_SQ_PER_CHANNEL": _ModelOptAlgorithm(_INT8_ROW, numbers("int", 8, "tensor")),
    "W8A16": _ModelOptAlgorithm(_INT8_ROW),
    "W4A16_AWQ": _ModelOptAlgorithm(_INT4, None, -1, awq=True),
    "W4A8_AWQ": _ModelOptAlgorithm(_INT4, FP8_TENSOR, -1, awq=True, second=True),
    "NVFP4": _ModelOptAlgorithm(NVFP4, _NVFP4_INPUTS, 16, second=True),
    "NVFP4_AWQ": _ModelOptAlgorithm(NVFP4, _NVFP4_INPUTS, 16, awq=True, second=True),
    "W4A16_NVFP4": _ModelOptAlgorithm(NVFP4, None, 16, second=True),
    "W4A8_NVFP4_FP8": _ModelOptAlgorithm({**NVFP4, "group_size": 32}, FP8_TENSOR, -1, second=True),
    "MXFP8": _ModelOptAlgorithm(MXFP8, {**MXFP8, "dynamic": True}, 32),
    "mxfp4": _ModelOptAlgorithm(MXFP4, {**MXFP4, "dynamic": True}),
    "W4A8_MXFP4_FP8": _ModelOptAlgorithm(MXFP4, {**FP8_TENSOR, "dynamic": True}, 32),
    "W4A16_MXFP4": _ModelOptAlgorithm(MXFP4, None, 32),  # TensorRT-LLM's word; modelopt itself says mxfp4 of these, too
}
_SAME = {"FP8_BLOCK_SCALES": "fp8_pb_wo", "FP8_PB_REAL": "fp8_pb_wo", "NVFP4_STATIC": "NVFP4"}
_BY_UPPER = {name.upper(): name for name in _ALGOS} | _SAME
_WITHOUT_DETAILS = ("fp8_pb_wo", "mxfp4", "W4A16_MXFP4")  # modelopt's config groups say no more than their names
_KNOWN = "fp8, fp8-static, fp8-block, int8-static, int8-wo (a whole row: -1), int4, nvfp4, nvfp4-wo, mxfp8, mxfp4"


def read(value: Mapping[str, Any]) -> QuantizationConfig:
    """Reads config.json's ``quantization_config``, or hf_quant_config.json, whose content is ``quantization``.

    Raises:
        CheckpointError: a part of it has the wrong type, or the algorithm is not known.
    """
    nested = value.get("quantization") is not None
    inner = mapping(value["quantization"], "quantization") if nested else value
    kept = strings(inner.get("exclude_modules" if nested else "ignore"), "ignore")
    name = inner.get("quant_algo")
    schemes: list[Scheme] = []
    if str(name).upper() == MIXED:
        schemes = _mixed_schemes(mapping(inner.get("quantized_layers") or {}, "quantized_layers"))
    elif name is not None:
        algo = _algo_name(name)
        groups = mapping(inner.get("config_groups") or {}, "config_groups")
        details = [mapping(group, "config_groups") for group in groups.values()]
        if algo == "NVFP4" and details and all(group.get("input_activations") is None for group in details):
            algo = "W4A16_NVFP4"  # so engines take it: there are no inputs' scales
        stated = [mapping(group.get("weights") or {}, "weights").get("group_size") for group in details]
        size = inner.get("group_size") or next(iter(stated), None)
        schemes = [_scheme(algo, _size(algo, size), ("Linear",))]
    kv = inner.get("kv_cache_quant_algo") if nested else inner.get("kv_cache_scheme")
    return QuantizationConfig(
        METHOD, None if name is None else shown(name), None, tuple(schemes), with_modules_below(kept), _kv_scheme(kv)
    )


def _mixed_schemes(layers: Mapping[str, Any]) -> list[Scheme]:
    found: dict[tuple[str, int | None], list[str]] = {}
    for module, entry in layers.items():
        entry = mapping(entry, f"quantized_layers.{module}")
        algo = _algo_name(entry.get("quant_algo"))
        found.setdefault((algo, _size(algo, entry.get("group_size"))), []).append(module)
    schemes = []
    for (algo, size), modules in found.items():
        fused = [module for module in modules if module.endswith(".experts")]  # stands for all below
        schemes.append(_scheme(algo, size, tuple(modules) + with_modules_below(fused)[len(fused) :]))
    return schemes


def _algo_name(name: object) -> str:
    known = _BY_UPPER.get(str(name).upper())
    if known is None:
        raise CheckpointError(
            f"quantization_config: quant_algo '{shown(name)}' is not known{nearest(shown(name), _ALGOS)}"
        )
    return known


def _size(algo: str, value: Any) -> int | None:
    """``group_size`` as config.json has it; None where it says none, or the algorithm has no groups.

    Raises:
        CheckpointError: it is none that the algorithm has.
    """
    own = _ALGOS[algo]
    usual = own.weights.get("group_size")
    if value is None or usual is None or (value == 0 and own.group_size != -1):
        return None
    if not is_size(value):
        raise CheckpointError(
            f"quantization_config: {algo} with group_size '{shown(value)}'; a number of columns is needed"
        )
    if own.group_size != -1 and value != usual:
        raise CheckpointError(f"quantization_config: {algo} with group_size {shown(value)}; it has {usual}")
    return int(value)


def _scheme(algo: str, size: int | None, targets: tuple[str, ...]) -> Scheme:
    own = _ALGOS[algo]
    weights = dict(own.weights) if size is None else {**own.weights, "group_size": size}
    return Scheme(algo, targets, algo, weights, own.inputs, None, METHOD)


def _kv_scheme(value: Any) -> Mapping[str, Any] | None:
    if value is None or isinstance(value, dict):
        return value
    kind = _KV_NUMBERS.get(str(value).upper())
    if kind is None:
        raise CheckpointError(
            f"quantization_config: KV cache '{shown(value)}' is not known{nearest(shown(value), _KV_NUMBERS)}"
        )
    return {"dynamic": False, "num_bits": kind[1], "type": kind[0]}


def tensor_specs(scheme: Scheme, shape: tuple[int, int]) -> dict[str, StoredTensorSpec]:
    """The tensors, by suffix, that a linear of that shape (``[out, in]``) has under a scheme; see :func:`extras`.

    Raises:
        CheckpointError: the scheme is not known, or int4 has an odd number of rows or a part of a group.
    """
    algo = _ALGOS[_algo_name(scheme.format)]
    rows, cols = shape
    kind, bits = scheme.weights["type"], scheme.bits
    if kind == "int" and bits == 4:
        size = int(scheme.weights["group_size"])
        if rows % 2 or cols % size:
            raise CheckpointError(
                f"{scheme.name}: a weight of {rows} rows of {cols} is not in pairs of rows and groups of {size}"
            )
        weight = StoredTensorSpec(("U8",), ((rows // 2, cols),), ((0, 2), (1, 1)))
    elif bits == 4:
        weight = StoredTensorSpec(("U8",), ((rows, cols // 2),), ((0, 1), (1, 2)))
    else:
        weight = StoredTensorSpec(("I8" if kind == "int" else "F8_E4M3",), (shape,), AS_WEIGHT)
    tensors = {"weight": weight, "weight_scale": _scale_promise(scheme.weights, shape)}
    if algo.second:
        tensors["weight_scale_2"] = StoredTensorSpec(("F32",), ((), (1,)))
    if scheme.has_static_inputs:
        tensors["input_scale"] = StoredTensorSpec(("F32",), ((), (1,)))
    return tensors


def scaled_stack_specs(scheme: Scheme, shape: tuple[int, ...]) -> dict[str, StoredTensorSpec] | None:
    """The tensors that hold the weights of all experts of a layer, ``[experts, in, out]``, with one scale for them all:
    ending of the parameter's name -> what it is. None where modelopt has no such stacks.

    So are the experts of Llama 4, by whose names vLLM's loader asks for them (``mllama4.py``).
    """
    if scheme.format != "FP8":
        return None
    one = StoredTensorSpec(("F32",), ((), (1,)))
    return {"": StoredTensorSpec(("F8_E4M3",), (shape,)), "_weight_scale": one, "_input_scale": one}


def _scale_promise(weights: Mapping[str, Any], shape: tuple[int, int]) -> StoredTensorSpec:
    rows, cols = shape
    strategy, size = weights["strategy"], weights.get("group_size") or 1
    along: Axes = ((0, 1), (1, size))
    if strategy == "tensor":
        return StoredTensorSpec(("F32",), ((), (1,)))
    if strategy == "channel":
        return StoredTensorSpec(("F32",), ((rows,),), ((0, 1),))
    if strategy == "block":
        height, width = weights["block_structure"]
        blocks = (-(-rows // height), 1, -(-cols // width), 1)
        return StoredTensorSpec(("F32",), (blocks,), ((0, height), None, (1, width), None))
    dtype = "F8_E4M3" if strategy == "tensor_group" else "U8" if weights["type"] == "float" else "F32"
    return StoredTensorSpec((dtype,), ((rows, -(-cols // size)),), along)


def extras(scheme: Scheme, shape: tuple[int, int]) -> dict[str, StoredTensorSpec]:
    """Tensors that a linear may have besides: inputs are multiplied by ``pre_quant_scale`` ``[in]`` first (AWQ)."""
    algo = _algo_name(scheme.format)
    if _ALGOS[algo].awq or algo == "W8A8_SQ_PER_CHANNEL":
        return {"pre_quant_scale": StoredTensorSpec(FLOATS, ((shape[1],),), ((1, 1),))}
    return {}


def layout(number_format: NumberFormatProtocol) -> str | None:
    """The algorithm that says the same as a number format."""
    weights, inputs = number_format.weight_arguments(), number_format.input_arguments()
    size = weights.get("group_size")
    for name, algo in _ALGOS.items():
        own = algo.weights
        if algo.group_size == -1 and weights.get("strategy") == "group" and size in _INT4_GROUPS:
            own = {**own, "group_size": size}
        if (meaning(own), meaning(algo.inputs)) == (meaning(weights), meaning(inputs)):
            return name
    return None


def refusal(number_format: NumberFormatProtocol, shape: tuple[int, int]) -> str | None:
    """Returns why modelopt's checkpoints cannot hold such a linear, and what can; None where they can."""
    algo = layout(number_format)
    if algo is None:
        why = {
            "int8": "modelopt's W8A8_SQ_PER_CHANNEL has static activations: choose --quant int8-static, ",
            "w4a8": "modelopt's W4A8_AWQ has static activations: choose ",
        }.get(number_format.name, "choose ")
        group = "" if number_format.group_size is None else f" in groups of {number_format.group_size}"
        return (
            f"a modelopt checkpoint has no word for {number_format.name}{group}; {why}--format hf, or one of: {_KNOWN}"
        )
    if _ALGOS[algo].group_size == -1 and (shape[0] % 2 or shape[1] % (number_format.group_size or 1)):
        return (
            f"modelopt's {algo} packs two rows into a byte and has whole groups, but {shape[0]} rows of {shape[1]} are "
            f"not in pairs and in groups of {number_format.group_size}; choose --format hf"
        )
    return None


def _known_layout(number_format: NumberFormatProtocol) -> str:
    algo = layout(number_format)
    if algo is None:
        raise PlanError(str(refusal(number_format, (0, 0))))
    return algo


def quantization_files(announced: ModelQuantization) -> QuantizationFiles:
    """``quantization_config`` as modelopt's, with the group size that its readers take; and hf_quant_config.json.

    Raises:
        PlanError: a number format has no encoding.
    """
    layers: dict[str, dict[str, Any]] = {}
    for number_format, modules in announced.groups():
        entry = _entry(_known_layout(number_format), number_format.group_size)
        layers.update(dict.fromkeys(modules, entry))
    distinct = list({json.dumps(entry): entry for entry in layers.values()}.values())
    cache = None if announced.kv_cache is None else KV_CACHES[announced.kv_cache]
    inner: dict[str, Any] = {"quant_algo": None, "kv_cache_quant_algo": cache}
    config: dict[str, Any] = {}
    if len(distinct) > 1:
        inner |= {"quant_algo": MIXED, "quantized_layers": {name: layers[name] for name in announced.formats}}
        groups = [(entry, sorted(name for name in layers if layers[name] == entry)) for entry in distinct]
        config["config_groups"] = {f"group_{n}": _group(entry, names) for n, (entry, names) in enumerate(groups)}
        config["quantized_layers"] = inner["quantized_layers"]
    elif distinct:
        inner |= distinct[0]
        if distinct[0]["quant_algo"] in ("FP8", "NVFP4", "W4A16_NVFP4"):
            config["config_groups"] = {"group_0": _group(distinct[0], ["Linear"])}
        if "group_size" in distinct[0]:  # not modelopt's own habit, but without it groups of 64 read as 128
            config["group_size"] = distinct[0]["group_size"]
    wildcards = [f"*{subtree.path}{below}" for subtree in announced.subtrees for below in ("", ".*")]
    inner["exclude_modules"] = [*announced.unquantised, *wildcards]
    config |= {"ignore": inner["exclude_modules"], "quant_algo": inner["quant_algo"]}
    if cache is not None:
        config["kv_cache_scheme"] = _kv_scheme(cache) if cache == "FP8" else cache  # as modelopt itself has it
    producer = {"name": "modelexport", "version": announced.version}
    config |= {"producer": producer, "quant_method": METHOD}
    side = {"producer": producer, "quantization": inner}
    return QuantizationFiles(config, {SIDE_FILES[0]: (json.dumps(side, indent=4) + "\n").encode()})


def _entry(algo: str, group_size: int | None) -> dict[str, Any]:
    """One of ``quantized_layers``."""
    own = _ALGOS[algo]
    entry: dict[str, Any] = {"quant_algo": algo}
    if own.group_size:
        entry["group_size"] = group_size if own.group_size == -1 else own.group_size
    if own.awq:
        entry |= {"has_zero_point": False, "pre_quant_scale": True}
    return entry


def _group(entry: Mapping[str, Any], targets: list[str]) -> dict[str, Any]:
    """One of ``config_groups``, in modelopt's few words."""
    name = entry["quant_algo"]
    if name in _WITHOUT_DETAILS:
        return {"quant_algo": name, "targets": targets}
    algo, group = _ALGOS[name], {}
    size = {"group_size": entry["group_size"]} if "group_size" in entry else {}
    if algo.inputs is not None:
        group["input_activations"] = _words(algo.inputs) | size
    group["weights"] = _words(algo.weights) | size
    if algo.weights["strategy"] == "channel" and algo.inputs is not None:
        group["weights"]["strategy"] = "channel"
    return {**group, "targets": targets}


def _words(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"dynamic": False, "num_bits": arguments["num_bits"], "type": arguments["type"]}


def encode(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """Native tensors as modelopt has them; scales become float32, NVFP4's global ones multipliers.

    Raises:
        PlanError: modelopt has no encoding of the number format.
        CheckpointError: a global scale is negative or NaN.
    """
    from modelexport.quantization.methods import _modelopt_tensors

    _known_layout(number_format)
    return _modelopt_tensors.encode(number_format, tensors, part)


def decode(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """modelopt's tensors in native form.

    A number format that rounds weights alone (int4, nvfp4-wo) may be asked of linears whose inputs are rounded, too
    (W4A8_AWQ, W4A8_NVFP4_FP8): what it has no place for is left out.

    Raises:
        PlanError: modelopt has no encoding of the number format.
        CheckpointError: there is a ``pre_quant_scale`` (see :func:`weight_multiplier`) or a low-rank part, which the
            native form cannot say; or a global scale that cannot be inverted.
    """
    from modelexport.quantization.methods import _modelopt_tensors

    _known_layout(number_format)
    return _modelopt_tensors.decode(number_format, tensors, part)


def weight_multiplier(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Returns the factors of the dequantised weight's columns, ``[in]`` (or a part's), in any float dtype.

    Engines multiply a linear's inputs by ``pre_quant_scale`` before the product: W x (s * x) is (W * s) x. To
    dequantise such a linear, take ``pre_quant_scale`` out of the tensors before :func:`decode`. None where there is
    none.
    """
    return tensors.get("pre_quant_scale")
