"""The dtypes of safetensors: their names, their sizes, and what torch calls them.

The one table of them; other vocabularies (of ggml, pickles, engines) are mapped to its names where they are spoken.
torch is imported by the functions that take or return what is torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from modelexport.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = [
    "FLOATS",
    "as_integers",
    "dtype_bits",
    "dtype_name",
    "dtype_names",
    "find_dtype",
    "tensor_nbytes",
    "torch_dtype",
    "torch_dtype_named",
    "torch_name",
]

FLOATS = ("BF16", "F16", "F32")
"""Dtypes of a model's weights that are not quantised, and of the scales of those that are."""
_MAX_INT = 2**63 - 1

# name in the file -> (bits per element, torch's name for it or None)
_DTYPES: dict[str, tuple[int, str | None]] = {
    "BOOL": (8, "bool"),
    "F4": (4, "float4_e2m1fn_x2"),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "I16": (16, "int16"),
    "U16": (16, "uint16"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "I32": (32, "int32"),
    "U32": (32, "uint32"),
    "F32": (32, "float32"),
    "C64": (64, "complex64"),
    "F64": (64, "float64"),
    "I64": (64, "int64"),
    "U64": (64, "uint64"),
}
_BY_TORCH_NAME = {in_torch: name for name, (_, in_torch) in _DTYPES.items() if in_torch}


def dtype_names() -> tuple[str, ...]:
    """Every dtype the format knows, as it spells them."""
    return tuple(_DTYPES)


def dtype_bits(dtype: str) -> int:
    """Bits per element of a format's dtype name.

    Raises:
        CheckpointError: no such dtype.
    """
    if dtype not in _DTYPES:
        raise CheckpointError(f"unknown dtype {dtype!r}; safetensors has {', '.join(_DTYPES)}")
    return _DTYPES[dtype][0]


def tensor_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of this dtype and shape (in elements).

    Raises:
        CheckpointError: unknown dtype, a negative or too large size, elements that fill no whole bytes.
    """
    bits = dtype_bits(dtype)
    if any(n == 0 for n in shape):
        return 0
    for n in shape:
        if n < 0:
            raise CheckpointError(f"negative size {n} in shape {list(shape)}")
        bits *= n
        if bits > 8 * _MAX_INT:
            raise CheckpointError("its size overflows 63 bits")
    if bits % 8:
        raise CheckpointError(f"{bits} bits of {dtype} do not fill whole bytes")
    return bits // 8


def torch_name(dtype: torch.dtype | str) -> str:
    """torch's name for a dtype, its own or safetensors': ``"bfloat16"``.

    Raises:
        CheckpointError: the name is unknown, or torch has no such dtype.
    """
    if not isinstance(dtype, str):
        return str(dtype).removeprefix("torch.")
    dtype_bits(dtype)
    found = _DTYPES[dtype][1]
    if found is None:
        raise CheckpointError(f"torch has no dtype for safetensors' {dtype}")
    return found


def is_dtype_name(name: object) -> bool:
    """Returns whether torch has a dtype of that name of its own."""
    import torch

    return isinstance(name, str) and isinstance(getattr(torch, name, None), torch.dtype)


def torch_dtype_named(name: str) -> torch.dtype:
    """torch's dtype of that name of its own.

    Raises:
        ValueError: it has none.
    """
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no torch dtype")
    return dtype


@cache
def torch_dtype(dtype: str) -> torch.dtype:
    """torch's dtype for a format's dtype name.

    Raises:
        CheckpointError: the name is unknown, or this torch has no such dtype.
    """
    import torch

    dtype_bits(dtype)
    found = getattr(torch, _DTYPES[dtype][1] or "", None)
    if found is None:
        raise CheckpointError(f"torch {torch.__version__} has no dtype for safetensors' {dtype}")
    return found


def find_dtype(name: str) -> str | None:
    """The format's name for what torch calls ``name`` (``"bfloat16"``); None where it has none."""
    return _BY_TORCH_NAME.get(name)


def dtype_name(dtype: torch.dtype) -> str:
    """The format's name for a torch dtype.

    Raises:
        CheckpointError: safetensors cannot hold it.
    """
    found = find_dtype(torch_name(dtype))
    if found is None:
        raise CheckpointError(f"safetensors has no dtype for {dtype}")
    return found


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor as integers of their width, which torch can copy, cut and compare whatever they mean.

    Same shape, strides and memory; 16-byte elements have one more last dim, of two halves.
    """
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype.itemsize == 16:
        return torch.view_as_real(plain).view(torch.int64)
    return plain.view((torch.uint8, torch.int16, torch.int32, torch.int64)[plain.dtype.itemsize.bit_length() - 1])
