"""GGUF: blocks of 32 weights, a scale and its codes side by side, as llama.cpp keeps and computes with them.

Follows ggml's block layouts (ggml-common.h, and the gguf package's dequantisation). A linear is one tensor of bytes,
``weight`` uint8 ``[out, in / 32, bytes of a block]``; an element's code is 4 or 8 bits, a scale ``d`` float16:

- ``Q8_0``, 34 bytes: d, 32 int8; value = q * d. From int8-wo in groups of 32.
- ``Q4_0``, 18 bytes: d, 16 bytes: the low halves are the first 16 codes, the high ones the others; value =
  (code - 8) * d. From int4 in groups of 32.
- ``Q4_1``, 20 bytes: d, m, codes as in Q4_0; value = code * d + m, m float16. It holds what int4-asym does wherever
  zero point * scale is a float16 number, 11 bits: of 4 and 11 bits it rarely is. So it is read, where the division
  comes out even, and never planned.
- ``MXFP4``, 17 bytes: an exponent (E8M0), codes as in Q4_0; value = e2m1(code) * 2^(e - 127). (ggml doubles the codes
  and halves the scale.) From mxfp4-wo.

Of the K-quants (Q4_K and its like) the gguf package only unpacks: how their scales are searched and packed is
llama.cpp's own, and none of them is a number format of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelexport.errors import CheckpointError, shown
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
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "MXFP4": 17}
_CODES = {"Q8_0": 2, "Q4_0": 2, "Q4_1": 4, "MXFP4": 1}  # where in a block they begin
_WHAT_HOLDS = "--quant int4 --group-size 32, --quant int8-wo --group-size 32 or --quant mxfp4-wo"


def _weights(bits: int, kind: str = "int", symmetric: bool = True) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": BLOCK,
        "dynamic": False,
        **({"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"} if kind == "float" else {}),
    }


_ARGUMENTS = {
    "Q8_0": _weights(8),
    "Q4_0": _weights(4),
    "Q4_1": _weights(4, symmetric=False),
    "MXFP4": _weights(4, "float"),
}
_COMPRESSED = {"MXFP4": "mxfp4-pack-quantized"}


def read(value: Mapping[str, Any]) -> QuantizationConfig:
    """Reads a ``quantization_config``: ``types``, a block type -> the modules that it means (or ``"Linear"``).

    That is ours: llama.cpp itself looks at the tensors.

    Raises:
        CheckpointError: a part of it has the wrong type, or a block type is not known here.
    """
    schemes = []
    for name, targets in mapping(value.get("types") or {}, "quantization_config.types").items():
        if name not in _ARGUMENTS:
            raise CheckpointError(
                f"quantization_config.types: no block type '{shown(name)}' here; {', '.join(_ARGUMENTS)} are"
            )
        packing = _COMPRESSED.get(name, "pack-quantized")
        schemes.append(Scheme(name, strings(targets, f"types.{name}"), packing, _ARGUMENTS[name], None, None, METHOD))
    return QuantizationConfig(METHOD, None, None, tuple(schemes), strings(value.get("ignore"), "ignore"), None)


def tensor_specs(scheme: Scheme, shape: tuple[int, int]) -> dict[str, StoredTensorSpec]:
    """The tensor of blocks.

    Raises:
        CheckpointError: no block type holds the scheme, or blocks do not divide the shape.
    """
    found = _block_type(scheme)
    if found is None:
        raise CheckpointError(f"{scheme.name}: no block type of GGUF holds {scheme.describe()}")
    if shape[1] % BLOCK:
        raise CheckpointError(
            f"{scheme.name}: {shape[1]} input features are no multiple of {BLOCK}, a block of {found}"
        )
    blocks = (shape[0], shape[1] // BLOCK, BLOCK_BYTES[found])
    return {"weight": StoredTensorSpec(("U8",), (blocks,), ((0, 1), (1, BLOCK), None))}


def _block_type(scheme: Scheme) -> str | None:
    """The block type whose numbers are a scheme's."""
    weights = scheme.weights
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
    if found == "Q4_1":
        return (
            f"number format {number_format.name}: GGUF's Q4_1 keeps -zero point * scale as a float16 number, and that "
            f"product is one only now and then; choose {_WHAT_HOLDS}"
        )
    if found is None:
        return f"GGUF has no blocks for {scheme.describe()}; choose {_WHAT_HOLDS}"
    packing = _COMPRESSED.get(found, "pack-quantized")
    if number_format.checkpoint_format != packing:
        return (
            f"GGUF's {found} is made of the words of '{packing}', and number format {number_format.name} is laid out "
            f"as '{number_format.checkpoint_format}'; choose {_WHAT_HOLDS}"
        )
    if shape[1] % BLOCK:
        return f"{shape[1]} input features are no multiple of {BLOCK}, a block of GGUF's {found}; keep it unquantised"
    return None


def embedding_refusal(number_format: NumberFormatProtocol) -> str | None:
    """None: llama.cpp looks rows up in blocks of any type, and :func:`refusal` says which there are."""
    return None


def quantization_files(announced: ModelQuantization) -> QuantizationFiles:
    """The block types, each with its modules, but ``"Linear"`` for those of the type that most linears have; and, of a
    mixture, llama.cpp's number of it."""
    groups = announced.groups()
    types: dict[str, list[str]] = {}
    for number_format, modules in groups:
        found = _block_type(number_format.scheme(METHOD))
        assert found is not None, f"{number_format.name}: refusal() has let it pass"
        types.setdefault(found, []).extend(modules)
    if types:
        main = max(types, key=lambda name: len(types[name]))
        types[main] = ["Linear", *(module for module in types[main] if module in announced.embeddings)]
    mixture = {} if announced.file_type is None else {"file_type": announced.file_type}
    return QuantizationFiles({"quant_method": METHOD, "types": types, "ignore": announced.ignored(), **mixture})


def encode(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """Native tensors as ``weight`` uint8 ``[rows, cols / 32, bytes of a block]``.

    Raises:
        CheckpointError: a scale (or Q4_1's minimum) is no float16 number: the weight must be quantised anew.
    """
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
    if found == "Q4_1":
        zeros = _unpack_rows(tensors["weight_zero_point"], rows)
        minima = -(zeros.to(torch.float64) * scales.to(torch.float64))
        out[..., 2:4] = _float16_bytes(minima, "minimum (- zero point * scale)")
    return {"weight": out}


def decode(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """The blocks in native form, scales float16 (MXFP4: E8M0).

    Raises:
        CheckpointError: a block of Q4_1 whose minimum is no whole number of its steps, 0 to 15 of them, below zero.
    """
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
    native = {
        "weight_packed": packed.view(rows, -1).view(torch.int32),
        "weight_scale": blocks[..., :2].contiguous().view(torch.float16).view(rows, -1),
        "weight_shape": torch.tensor(part.shape, dtype=torch.int64, device=blocks.device),
    }
    if found == "Q4_1":
        minima = blocks[..., 2:4].contiguous().view(torch.float16).view(rows, -1).to(torch.float64)
        steps = native["weight_scale"].to(torch.float64)
        zeros = torch.where(steps == 0, 0.0, -minima / torch.where(steps == 0, 1.0, steps)).round()
        bad = (zeros * steps != -minima) | (zeros < 0) | (zeros > 15)
        if bool(bad.any()):
            raise CheckpointError(
                f"{int(bad.sum()):,} of {bad.numel():,} blocks of Q4_1 begin at no whole number of their steps: no "
                "zero point says that. Take the checkpoint that the file was made from"
            )
        native["weight_zero_point"] = _pack_rows(zeros.to(torch.int32))
    return native


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


def _unpack_rows(words: Tensor, rows: int) -> Tensor:
    """4-bit numbers 0..15 packed along dim 0, the first in the lowest bits: int32 ``[rows, blocks]``."""
    import torch

    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words[:, None, :] >> shifts[None, :, None]) & 15).reshape(-1, words.shape[1])[:rows]


def _pack_rows(numbers: Tensor) -> Tensor:
    """The inverse: int32 ``[ceil(rows / 8), blocks]``, zeros behind the last."""
    import torch

    rows, blocks = numbers.shape
    filled = numbers.new_zeros((-(-rows // 8) * 8, blocks))
    filled[:rows] = numbers
    words = torch.zeros((filled.shape[0] // 8, blocks), dtype=torch.int64, device=numbers.device)
    for at in range(8):
        words |= filled[at::8].to(torch.int64) << (4 * at)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
