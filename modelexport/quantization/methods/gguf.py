"""GGUF: blocks of weights, scales and codes side by side, as llama.cpp keeps and computes with them.

Follows ggml's block layouts (ggml-common.h, and the gguf package's dequantisation). A linear is one tensor of bytes,
``weight`` uint8 ``[out, in / block, bytes of a block]``. Each block type is a number format of its own, whose native
tensor that is: see :mod:`modelexport.quantization.ggml_layouts`. Three hold numbers that engines besides llama.cpp
have, too, and are made of these and read as these:

- ``Q8_0``, 34 bytes: d, float16, and 32 int8; value = q * d. int8-wo in groups of 32.
- ``Q4_0``, 18 bytes: d, 16 bytes: the low halves are the first 16 codes, the high ones the others; value =
  (code - 8) * d. int4 in groups of 32.
- ``MXFP4``, 17 bytes: an exponent (E8M0), codes as in Q4_0; value = e2m1(code) * 2^(e - 127). (ggml doubles the codes
  and halves the scale.) mxfp4-wo.

``IQ4_NL`` has as many bytes as Q4_0: its tensor has one dim more, of 1, by which a file's header is told from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelexport.errors import CheckpointError, shown
from modelexport.quantization.ggml_layouts import LAYOUTS
from modelexport.quantization.methods.base import (
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
"""Weights of a block of the types that other number formats are held in."""
BLOCK_BYTES = {**{layout.name: layout.nbytes for layout in LAYOUTS.values()}, "MXFP4": 17}
_CODES = {"Q8_0": 2, "Q4_0": 2, "MXFP4": 1}  # where in a block they begin
_WHAT_HOLDS = (
    "a block type of llama.cpp (--quant q4_k and its like), int4 --group-size 32, int8-wo --group-size 32 or mxfp4-wo"
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


_ARGUMENTS = {"Q8_0": _weights(8), "Q4_0": _weights(4), "MXFP4": _weights(4, "float")}
_COMPRESSED = {"MXFP4": "mxfp4-pack-quantized"}
_MARKED = "IQ4_NL"
_OWN = {layout.number_format: layout for layout in LAYOUTS.values()}


def _scheme(name: str, targets: tuple[str, ...]) -> Scheme | None:
    """The scheme of a type, as ``quantization_config`` or a file has it; None for others."""
    if name in _ARGUMENTS:
        return Scheme(name, targets, _COMPRESSED.get(name, "pack-quantized"), _ARGUMENTS[name], None, None, METHOD)
    layout = _OWN.get(name) or LAYOUTS.get(name)
    return None if layout is None else Scheme(name, targets, layout.name, layout.arguments(), None, None, METHOD)


def read(value: Mapping[str, Any]) -> QuantizationConfig:
    """Reads a ``quantization_config``: ``types``, a number format or a block type -> the modules that it means (or
    ``"Linear"``). Q8_0, Q4_0 and MXFP4 are the numbers that other engines have, too; q8-0 and q4-0 the blocks.

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
    """The tensor of blocks.

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
    return {"weight": StoredTensorSpec(("U8",), (blocks,), ((0, 1), (1, block), None, *(None for _ in more)))}


def _block(block_type: str) -> int:
    """Weights of a block."""
    return LAYOUTS[block_type].block if block_type in LAYOUTS else BLOCK


def _block_type(scheme: Scheme) -> str | None:
    """The block type whose numbers are a scheme's."""
    weights = scheme.weights
    if weights.get("type") in LAYOUTS:
        return str(weights["type"]) if scheme.inputs is None else None
    if scheme.inputs is not None or weights.get("strategy") != "group" or weights.get("group_size") != BLOCK:
        return None
    if weights.get("actorder"):
        return None
    wanted = (weights.get("num_bits"), weights.get("type"), bool(weights.get("symmetric", True)))
    for name, own in _ARGUMENTS.items():
        if wanted == (own["num_bits"], own["type"], own["symmetric"]):
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
    """None: llama.cpp looks rows up in blocks of any type, and :func:`refusal` says which there are."""
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
    """Native tensors as ``weight`` uint8 ``[rows, cols / block, bytes of a block]``.

    Raises:
        CheckpointError: a scale is no float16 number: the weight must be quantised anew.
    """
    if _is_own(number_format):
        return {"weight": tensors["weight"].unsqueeze(-1) if _is_marked(number_format) else tensors["weight"]}
    import torch

    found = _block_type(number_format.scheme(METHOD))
    assert found is not None, f"{number_format.name}: refusal() has let it pass"
    rows, cols = part.extent
    scales = tensors["weight_scale"]
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
    """The blocks in native form, scales float16 (MXFP4: E8M0).

    Raises:
        CheckpointError: an exponent of MXFP4's that E8M0 has no code for.
    """
    if _is_own(number_format):
        return {"weight": tensors["weight"].squeeze(-1) if _is_marked(number_format) else tensors["weight"]}
    import torch

    found = _block_type(number_format.scheme(METHOD))
    assert found is not None
    rows, cols = part.extent
    blocks = tensors["weight"]
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


def _halves_of_pairs(pairs: Tensor, out: Tensor) -> None:
    """Codes 0 and 1 in the first of 16 bytes, low half first -> codes 0 and 16 there, as ggml has them."""
    first, second = pairs[..., :8], pairs[..., 8:]
    out[..., 0::2] = (first & 15) | (second << 4)
    out[..., 1::2] = (first >> 4) | (second & 0xF0)


def _pairs_of_halves(halves: Tensor, out: Tensor) -> None:
    """The inverse of :func:`_halves_of_pairs`."""
    even, odd = halves[..., 0::2], halves[..., 1::2]
    out[..., :8] = (even & 15) | (odd << 4)
    out[..., 8:] = (even >> 4) | (odd & 0xF0)


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
