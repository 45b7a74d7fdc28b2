"""GGUF: blocks of weights, scales and codes side by side, as llama.cpp keeps and computes with them.

Follows ggml's block layouts (ggml-common.h, and the gguf package's dequantisation). A linear is one tensor of bytes,
``weight`` uint8 ``[out, in / block, bytes of a block]``. Each block type is a number format of its own, whose native
tensor that is: see :mod:`modelexport.quantization.ggml_layouts`. Four hold numbers that engines besides llama.cpp
have, too, and are made of these and read as these:

- ``Q8_0``, 34 bytes: d, float16, and 32 int8; value = q * d. int8-wo in groups of 32.
- ``Q4_0``, 18 bytes: d, 16 bytes: the low halves are the first 16 codes, the high ones the others; value =
  (code - 8) * d. int4 in groups of 32.
- ``MXFP4``, 17 bytes: an exponent (E8M0), codes as in Q4_0; value = e2m1(code) * 2^(e - 127). (ggml doubles the codes
  and halves the scale.) mxfp4-wo.
- ``NVFP4``, 36 bytes: 4 scales (e4m3, never negative), each of 16 weights; for each 16 weights 8 bytes of codes, the
  low halves the first 8, the high ones the others; value = e2m1(code) * scale * ``scale``, a tensor of one float32
  beside the blocks. nvfp4-wo, whose global scale divides: the reciprocal, by :mod:`._reciprocal`.

``IQ4_NL`` has as many bytes as Q4_0: its tensor has one dim more, of 1, by which a file's header is told from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelexport.errors import CheckpointError, shown
from modelexport.quantization.ggml_layouts import LAYOUTS
from modelexport.quantization.methods._arguments import NVFP4
from modelexport.quantization.methods._reciprocal import divisor_of, inverted_scale, multiplier_of
from modelexport.quantization.methods.base import (
    Axes,
    ModelQuantization,
    QuantizationConfig,
    QuantizationFiles,
    Scheme,
    StoredTensorSpec,
    WeightSlice,
    mapping,
    strings,
)

if TYPE_CHECKING:
    from torch import Tensor

    from modelexport.quantization.methods.base import NumberFormatProtocol

METHOD = "gguf"
FORMAT = "gguf"
SCALES = "F16"
KV_SCALES: Mapping[str, str] = {}
SIDE_FILES: tuple[str, ...] = ()
KV_SHAPE: tuple[int, ...] = ()
KEPT_LINEARS = {
    "kv_b_proj": "llama.cpp has the keys of latent attention transposed, head by head, and not in these rows"
}
HOLDS_HEADS = True
HOLDS_MIXTURES = True
READS_TIED = True  # llama.cpp looks rows up in the blocks that it multiplies by
FUSES_LINEARS = False

BLOCK = 32
"""Weights of a block of Q8_0, Q4_0 and MXFP4."""
SCALED_BLOCK = "NVFP4"
"""The block type whose weights are multiplied by one number more, that of all of them."""
SCALE = "scale"
"""The tensor of that number."""
UNSCALED = "NVFP4 (scale 1)"
"""The same without such a tensor, as others write it: read, and never written."""
BLOCK_BYTES = {**{layout.name: layout.nbytes for layout in LAYOUTS.values()}, "MXFP4": 17, SCALED_BLOCK: 36}
_CODES = {"Q8_0": 2, "Q4_0": 2, "MXFP4": 1, SCALED_BLOCK: 4}  # where in a block they begin
_WHAT_HOLDS = (
    "a block type of llama.cpp (--quant q4_k and its like), int4 --group-size 32, int8-wo --group-size 32, mxfp4-wo or "
    "nvfp4-wo"
)


def _weights(bits: int, kind: str = "int") -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": "group",
        "group_size": BLOCK,
        "dynamic": False,
        **({"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"} if kind == "float" else {}),
    }


_ARGUMENTS = {"Q8_0": _weights(8), "Q4_0": _weights(4), "MXFP4": _weights(4, "float"), SCALED_BLOCK: NVFP4}
_COMPRESSED = {"MXFP4": "mxfp4-pack-quantized", SCALED_BLOCK: "nvfp4-pack-quantized"}
_DECIDING = ("num_bits", "type", "symmetric", "strategy", "group_size")
_MARKED = "IQ4_NL"
_OWN = {layout.number_format: layout for layout in LAYOUTS.values()}


def _scheme(name: str, targets: tuple[str, ...]) -> Scheme | None:
    """The scheme of a type, as ``quantization_config`` or a file has it; None for others."""
    kind = SCALED_BLOCK if name == UNSCALED else name
    if kind in _ARGUMENTS:
        return Scheme(name, targets, _COMPRESSED.get(kind, "pack-quantized"), _ARGUMENTS[kind], None, None, METHOD)
    layout = _OWN.get(name) or LAYOUTS.get(name)
    return None if layout is None else Scheme(name, targets, layout.name, layout.arguments(), None, None, METHOD)


def read(value: Mapping[str, Any]) -> QuantizationConfig:
    """Reads a ``quantization_config``: ``types``, a number format or a block type -> the modules that it means (or
    ``"Linear"``). Q8_0, Q4_0, MXFP4 and NVFP4 are the numbers that other engines have, too; q8-0 and q4-0 the blocks.

    That is ours: llama.cpp itself looks at the tensors.

    Raises:
        CheckpointError: a part of it has the wrong type, or a block type is not known here.
    """
    schemes = []
    for name, targets in mapping(value.get("types") or {}, "quantization_config.types").items():
        scheme = _scheme(name, strings(targets, f"types.{shown(name)}"))
        if scheme is None:
            known = ", ".join(dict.fromkeys((*_ARGUMENTS, *LAYOUTS)))
            raise CheckpointError(f"quantization_config.types: no block type '{shown(name)}' here; {known} are")
        schemes.append(scheme)
    return QuantizationConfig(METHOD, None, None, tuple(schemes), strings(value.get("ignore"), "ignore"), None)


def tensor_specs(scheme: Scheme, shape: tuple[int, int]) -> dict[str, StoredTensorSpec]:
    """The tensor of blocks, and the one number beside NVFP4's.

    Raises:
        CheckpointError: no block type holds the scheme, or blocks do not divide the shape.
    """
    found = _block_type(scheme)
    if found is None:
        raise CheckpointError(f"{scheme.name}: no block type of GGUF holds {scheme.describe()}")
    block = _block(found)
    if shape[1] % block:
        raise CheckpointError(
            f"{scheme.name}: {shape[1]} input features are no multiple of {block}, a block of {found}"
        )
    more = (1,) if found == _MARKED else ()
    blocks = (shape[0], shape[1] // block, BLOCK_BYTES[found], *more)
    axes: Axes = ((0, 1), (1, block), None, *(None for _ in more))
    has_scale = found == SCALED_BLOCK and scheme.name != UNSCALED
    scale = {SCALE: StoredTensorSpec(("F32",), ((), (1,)))} if has_scale else {}
    return {"weight": StoredTensorSpec(("U8",), (blocks,), axes), **scale}


def _block(block_type: str) -> int:
    """Weights of a block."""
    if block_type == SCALED_BLOCK:
        return 2 * BLOCK
    return LAYOUTS[block_type].block if block_type in LAYOUTS else BLOCK


def stored_shape(blocks: tuple[int, ...]) -> tuple[int, int] | None:
    """The weight's shape by that of its blocks, ``[out, in / block, bytes of a block]``; None: no block has so many
    bytes."""
    block = {BLOCK_BYTES[kind]: _block(kind) for kind in BLOCK_BYTES}.get(blocks[2] if len(blocks) > 2 else 0)
    return None if block is None else (blocks[0], blocks[1] * block)


def _block_type(scheme: Scheme) -> str | None:
    """The block type whose numbers are a scheme's."""
    weights = scheme.weights
    if weights.get("type") in LAYOUTS:
        return str(weights["type"]) if scheme.inputs is None else None
    if scheme.inputs is not None or weights.get("actorder"):
        return None
    for name, own in _ARGUMENTS.items():
        if all(weights.get(key, True if key == "symmetric" else None) == own[key] for key in _DECIDING):
            return name
    return None


def refusal(number_format: NumberFormatProtocol, shape: tuple[int, int]) -> str | None:
    """Returns why no block type holds such a linear, and which number formats have one; None where one does."""
    scheme = number_format.scheme(METHOD)
    found = _block_type(scheme)
    if found is None:
        return f"GGUF has no blocks for {scheme.describe()}; choose {_WHAT_HOLDS}"
    packing = _COMPRESSED.get(found, "pack-quantized")
    if not _is_own(number_format) and number_format.checkpoint_format != packing:
        return (
            f"GGUF's {found} is made of the words of '{packing}', and number format {number_format.name} is laid out "
            f"as '{number_format.checkpoint_format}'; choose {_WHAT_HOLDS}"
        )
    if shape[1] % _block(found):
        return (
            f"{shape[1]} input features are no multiple of {_block(found)}, a block of GGUF's {found}; keep it "
            "unquantised"
        )
    return None


def embedding_refusal(number_format: NumberFormatProtocol) -> str | None:
    """llama.cpp looks rows up in blocks of any type, but does not multiply them by the number beside NVFP4's."""
    if _block_type(number_format.scheme(METHOD)) == SCALED_BLOCK:
        return (
            f"llama.cpp looks rows up in blocks of {SCALED_BLOCK} without their scale: choose mxfp4-wo or a block type "
            "(--quant q4_k and its like) for it"
        )
    return None


def _is_own(number_format: NumberFormatProtocol) -> bool:
    """True where the native tensor is the block."""
    return number_format.checkpoint_format in LAYOUTS


def _is_marked(number_format: NumberFormatProtocol) -> bool:
    """True for the blocks whose tensor has one dim more."""
    return number_format.checkpoint_format == _MARKED


def quantization_files(announced: ModelQuantization) -> QuantizationFiles:
    """The block types, each with its modules, but ``"Linear"`` for those of the type that most linears have; and, of a
    mixture, llama.cpp's number of it."""
    groups = announced.groups()
    types: dict[str, list[str]] = {}
    for number_format, modules in groups:
        found = _block_type(number_format.scheme(METHOD))
        assert found is not None, f"{number_format.name}: refusal() has let it pass"
        types.setdefault(number_format.name if _is_own(number_format) else found, []).extend(modules)
    if types:
        main = max(types, key=lambda name: len(types[name]))
        types[main] = ["Linear", *(module for module in types[main] if module in announced.embeddings)]
    mixture = {} if announced.file_type is None else {"file_type": announced.file_type}
    return QuantizationFiles({"quant_method": METHOD, "types": types, "ignore": announced.ignored(), **mixture})


def encode(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """Native tensors as ``weight`` uint8 ``[rows, cols / block, bytes of a block]``, NVFP4's with ``scale`` float32
    ``[]``.

    Raises:
        CheckpointError: a scale is no number of the block type's: the weight must be quantised anew.
    """
    if _is_own(number_format):
        return {"weight": tensors["weight"].unsqueeze(-1) if _is_marked(number_format) else tensors["weight"]}
    import torch

    found = _block_type(number_format.scheme(METHOD))
    assert found is not None, f"{number_format.name}: refusal() has let it pass"
    rows, cols = part.extent
    scales = tensors["weight_scale"]
    if found == SCALED_BLOCK:
        return _encode_scaled(tensors, rows, cols)
    packed = tensors["weight_packed"].contiguous().view(torch.uint8).view(rows, cols // BLOCK, -1)
    out = torch.empty((rows, cols // BLOCK, BLOCK_BYTES[found]), dtype=torch.uint8, device=packed.device)
    codes = out[..., _CODES[found] :]
    if found == "Q8_0":
        torch.bitwise_xor(packed, 0x80, out=codes)  # q + 128 -> int8
    else:
        _halves_of_pairs(packed, codes)
    if found == "MXFP4":
        exponents = scales.view(torch.uint8)
        if bool((exponents == 255).any()):
            raise CheckpointError("a block's exponent is 255, not a number in E8M0, which GGUF's MXFP4 reads as 2^128")
        out[..., 0] = exponents
    else:
        out[..., :2] = _float16_bytes(scales, "scale")
    return {"weight": out}


def decode(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """The blocks in native form, scales float16 (MXFP4: E8M0, NVFP4: e4m3 and one float32 for all).

    Raises:
        CheckpointError: an exponent of MXFP4's that E8M0 has no code for, or a scale of NVFP4's that e4m3 has none for;
            or the number beside NVFP4's has no reciprocal.
    """
    if _is_own(number_format):
        return {"weight": tensors["weight"].squeeze(-1) if _is_marked(number_format) else tensors["weight"]}
    import torch

    found = _block_type(number_format.scheme(METHOD))
    assert found is not None
    rows, cols = part.extent
    blocks = tensors["weight"]
    if found == SCALED_BLOCK:
        return _decode_scaled(tensors, rows, cols)
    codes = blocks[..., _CODES[found] :]
    packed = torch.empty((rows, cols // BLOCK, codes.shape[-1]), dtype=torch.uint8, device=blocks.device)
    if found == "Q8_0":
        torch.bitwise_xor(codes, 0x80, out=packed)
    else:
        _pairs_of_halves(codes, packed)
    if found == "MXFP4":
        exponents = blocks[..., 0].contiguous()
        if bool((exponents == 255).any()):
            raise CheckpointError("a block's exponent is 255: 2^128 to GGUF, which E8M0 has no code for")
        return {"weight_packed": packed.view(rows, cols // 2), "weight_scale": exponents}
    return {
        "weight_packed": packed.view(rows, -1).view(torch.int32),
        "weight_scale": blocks[..., :2].contiguous().view(torch.float16).view(rows, -1),
        "weight_shape": torch.tensor(part.shape, dtype=torch.int64, device=blocks.device),
    }


_SUB = 16  # weights of NVFP4 that share an e4m3
_NAN, _SIGN = 0x7F, 0x80  # of an e4m3; ggml reads the former as 0


def _encode_scaled(tensors: Mapping[str, Tensor], rows: int, cols: int) -> dict[str, Tensor]:
    import torch

    scales = tensors["weight_scale"].contiguous().view(torch.uint8)
    beyond = (scales >= _NAN) & (scales != _SIGN)  # a zero of either sign is one
    if bool(beyond.any()):
        raise CheckpointError(
            f"{int(beyond.sum()):,} of {scales.numel():,} scales of {_SUB} weights are negative or NaN, which GGUF's "
            f"{SCALED_BLOCK} has no code for: export the model that was quantised with --format gguf instead"
        )
    begin, per_block = _CODES[SCALED_BLOCK], 2 * BLOCK
    out = torch.empty((rows, cols // per_block, BLOCK_BYTES[SCALED_BLOCK]), dtype=torch.uint8, device=scales.device)
    out[..., :begin] = scales.view(rows, -1, begin) & _NAN
    halves = torch.empty((rows, cols // _SUB, _SUB // 2), dtype=torch.uint8, device=scales.device)
    _halves_of_pairs(tensors["weight_packed"].contiguous().view(torch.uint8).view(halves.shape), halves)
    out[..., begin:] = halves.view(rows, cols // per_block, -1)
    return {"weight": out, SCALE: inverted_scale(tensors, "weight_global_scale", multiplier_of, ())}


def _decode_scaled(tensors: Mapping[str, Tensor], rows: int, cols: int) -> dict[str, Tensor]:
    import torch

    begin = _CODES[SCALED_BLOCK]
    given = {SCALE: torch.ones((), device=tensors["weight"].device), **tensors}
    scales = tensors["weight"][..., :begin].contiguous().view(rows, -1)
    if bool((scales == _SIGN | _NAN).any()):
        raise CheckpointError("a scale of 16 weights is 255: 480 to GGUF, which e4m3 has no code for")
    scales = torch.where(scales == _NAN, 0, scales & _NAN)  # as ggml reads them
    halves = tensors["weight"][..., begin:].contiguous().view(rows, cols // _SUB, -1)
    pairs = torch.empty_like(halves)
    _pairs_of_halves(halves, pairs)
    return {
        "weight_packed": pairs.view(rows, cols // 2),
        "weight_scale": scales.view(torch.float8_e4m3fn),
        "weight_global_scale": inverted_scale(given, SCALE, divisor_of, (1,)),
    }


def _halves_of_pairs(pairs: Tensor, out: Tensor) -> None:
    """Codes 0 and 1 in the first of 2n bytes, low half first -> codes 0 and 2n there, as ggml has them."""
    middle = pairs.shape[-1] // 2
    first, second = pairs[..., :middle], pairs[..., middle:]
    out[..., 0::2] = (first & 15) | (second << 4)
    out[..., 1::2] = (first >> 4) | (second & 0xF0)


def _pairs_of_halves(halves: Tensor, out: Tensor) -> None:
    """The inverse of :func:`_halves_of_pairs`."""
    even, odd, middle = halves[..., 0::2], halves[..., 1::2], halves.shape[-1] // 2
    out[..., :middle] = (even & 15) | (odd << 4)
    out[..., middle:] = (even >> 4) | (odd & 0xF0)


def _float16_bytes(values: Tensor, what: str) -> Tensor:
    """uint8 ``[rows, blocks, 2]`` of numbers ``[rows, blocks]`` that float16 holds exactly."""
    import torch

    half = values.to(torch.float16)
    different = half.to(values.dtype) != values
    if bool(different.any()):
        first = float(values[different].flatten()[0])
        raise CheckpointError(
            f"{int(different.sum()):,} of {values.numel():,} blocks have a {what} that is no float16 number, as GGUF "
            f"wants it (the first is {first:.9g}): export the model that was quantised with --format gguf instead"
        )
    return half.contiguous().view(torch.uint8).view(*values.shape, 2)
