"""Linears as bitsandbytes and HQQ store them, and the weights that they stand for: number by number, in numpy.

Written from the formats' descriptions, and no faster than they read. Numbers, scales and code books are random: whoever
takes a code book from elsewhere than the file decodes something else.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Stored:
    """A layout of linears.

    Attributes:
        quantization: ``quantization_config``.
        encoded: makes the tensors of a linear, suffix -> array, and its weight, float32 ``[out, in]``.
    """

    quantization: dict[str, Any]
    encoded: Callable[[np.random.Generator, int, int], tuple[Arrays, np.ndarray]]


def four_bits(kind: str, block: int, nested: bool, storage: str = "u1") -> Stored:
    """bitsandbytes' NF4 or FP4."""

    def encoded(random: np.random.Generator, rows: int, cols: int) -> tuple[Arrays, np.ndarray]:
        size = rows * cols
        count = -(-size // block)
        book = random.uniform(-1, 1, 16).astype("f4")
        said: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [rows, cols]}
        tensors: Arrays = {"weight.quant_map": book}
        if nested:
            indices, inner = random.integers(0, 256, count, dtype="u1"), random.uniform(-1, 1, 256).astype("f4")
            outer = random.uniform(0.01, 0.02, -(-count // 256)).astype("f4")
            said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.03125}
            scales = [inner[index] * outer[i // 256] + np.float32(0.03125) for i, index in enumerate(indices)]
            own = {"absmax": indices, "nested_absmax": outer, "nested_quant_map": inner}
            tensors |= {f"weight.{name}": array for name, array in own.items()}
        else:
            scales = list(random.uniform(0.01, 0.05, count).astype("f4"))
            tensors["weight.absmax"] = np.array(scales)
        numbers = random.integers(0, 16, size + size % 2)
        tensors["weight"] = (numbers[::2] * 16 + numbers[1::2]).astype("u1").view(storage).reshape(-1, 1)
        state = np.frombuffer(json.dumps(said).encode(), "u1")
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = state
        weight = np.array([book[number] * scales[i // block] for i, number in enumerate(numbers[:size])], "f4")
        return tensors, weight.reshape(rows, cols)

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return Stored({**config, "bnb_4bit_use_double_quant": nested}, encoded)


def eight_bits() -> Stored:
    """bitsandbytes' LLM.int8()."""

    def encoded(random: np.random.Generator, rows: int, cols: int) -> tuple[Arrays, np.ndarray]:
        numbers = random.integers(-127, 128, (rows, cols), dtype="i1")
        largest = random.uniform(0.01, 0.1, rows).astype("f4")
        weight = numbers.astype("f4") * largest[:, None] * np.float32(1 / 127)
        return {"weight": numbers, "SCB": largest, "weight_format": np.zeros((), "u1")}, weight

    return Stored({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": None}, encoded)


def hqq(bits: int, axis: int, group: int | None) -> Stored:
    """HQQ's integers."""

    def encoded(random: np.random.Generator, rows: int, cols: int) -> tuple[Arrays, np.ndarray]:
        size = group or (rows, cols)[axis]
        count = rows * cols // size
        shape, along = ((count, size), (count, 1)) if axis == 1 else ((size, count), (1, count))
        numbers = random.integers(0, 2**bits, shape)
        scale, zero = (
            random.uniform(0.001, 0.01, along).astype("f2"),
            random.uniform(0, 2**bits - 1, along).astype("f2"),
        )
        weight = (numbers.astype("f4") - zero.astype("f4")) * scale.astype("f4")
        tensors = {"W_q": packed(numbers, bits), "scale": scale, "zero": zero, "shape": np.array([rows, cols])}
        word = {3: "3bit_32"}.get(bits, f"{bits}bit_u8")
        settings = {"nbits": np.array(bits, "i4"), "axis": np.array(axis, "i4"), "group_size": np.array(size, "i4")}
        return {**tensors, **settings, "packing": np.frombuffer(word.encode(), "u1")}, weight.reshape(rows, cols)

    own = {"nbits": bits, "group_size": group, "axis": axis, "channel_wise": True}
    config = {"weight_quant_params": own, "scale_quant_params": None, "zero_quant_params": None}
    return Stored({"quant_method": "hqq", "quant_config": config, "skip_modules": ["lm_head"]}, encoded)


def packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of equal parts of the rows in one byte (of ten parts in one int32 where there are 3 bits)."""
    parts = 10 if bits == 3 else 8 // bits
    rows = -(-len(numbers) // parts)
    filled = np.zeros((rows * parts, numbers.shape[1]), "i8")
    filled[: len(numbers)] = numbers
    found = np.zeros((rows, numbers.shape[1]), "i8")
    for part in filled.reshape(parts, rows, -1):
        found = found << bits | part
    return found.astype("i4" if bits == 3 else "u1")
