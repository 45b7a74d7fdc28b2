"""Small integers in int32 words: the packings of AWQ and GPTQ, and the steps between them and our native one.

Natively (compressed-tensors' "pack-quantized") element i of a row sits in bits i * b of its word, low bits first. A
word of GPTQ is the same word, only the matrix of words is transposed; a word of AWQ runs along the other dim of the
weight, and its eight nibbles are in an order of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NIBBLES = 8


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 ``[..., words]`` -> the first ``count`` unsigned numbers of each row, int32 ``[..., count]``."""
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    values = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return values.flatten(-2)[..., :count]


def pack(values: Tensor, bits: int) -> Tensor:
    """Unsigned numbers, int32 ``[..., count]`` -> int32 ``[..., count * bits / 32]``; a word must be full."""
    import torch

    per_word = 32 // bits
    assert values.shape[-1] % per_word == 0, "a word would be left open"
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=values.device)
    parts = values.unflatten(-1, (values.shape[-1] // per_word, per_word)) << shifts
    return parts.sum(dim=-1, dtype=torch.int32)


def add(words: Tensor, bits: int, what: int) -> Tensor:
    """Each number of each word plus ``what``, modulo ``2 ** bits``: no carry from one into the next."""
    per_word = 32 // bits
    values = unpack(words, bits, words.shape[-1] * per_word)
    return pack((values + what) & ((1 << bits) - 1), bits)


def reorder(words: Tensor, order: Sequence[int]) -> Tensor:
    """The same nibbles, ``order[i]`` of the old word as nibble i of the new one; int32 of any shape."""
    import torch

    out = torch.zeros_like(words)
    for to, source in enumerate(order):
        out |= ((words >> (4 * source)) & 15) << (4 * to)
    return out


def transpose(words: Tensor, columns: int) -> Tensor:
    """A matrix of nibbles ``[m, columns]``, packed along its columns, transposed and packed along the other dim.

    Eight words of a column are an 8 x 8 matrix of nibbles, whose halves, quarters and eighths change places (Warren,
    "Hacker's Delight", 7-3): nothing is ever widened.

    Args:
        words: int32 ``[m, ceil(columns / 8)]``.

    Returns:
        int32 ``[columns, ceil(m / 8)]``; what no number fills of a word is zero.
    """
    import torch

    rows, width = words.shape
    blocks = -(-rows // NIBBLES)
    padded = torch.nn.functional.pad(words, (0, 0, 0, blocks * NIBBLES - rows))
    planes = padded.view(blocks, NIBBLES, width).permute(1, 2, 0).contiguous()
    for distance, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
        pairs = planes.view(NIBBLES // (2 * distance), 2, distance, width, blocks)
        low, high = pairs[:, 0], pairs[:, 1]
        moved = ((low >> (4 * distance)) ^ high) & mask
        high ^= moved
        low ^= moved << (4 * distance)
    return planes.transpose(0, 1).reshape(width * NIBBLES, blocks)[:columns].contiguous()
