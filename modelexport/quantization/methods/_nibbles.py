"""Between packed integers: compressed-tensors' int32 words along a row, modelopt's bytes of two rows, plain int8.

In compressed-tensors' words a value q of b bits stands as q + 2^(b-1), the first in the lowest bits; what fills the
last word of a row up is 0. modelopt has two's complement, the even row of two in the low four bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

_SIGNS = 0x8888 - 0x10000  # the top bit of four nibbles: from offset to two's complement and back
_AT_A_TIME = 1 << 15


def words_to_row_pairs(words: Tensor) -> Tensor:
    """int32 ``[rows, cols / 8]`` of 4-bit values to uint8 ``[rows / 2, cols]``."""
    octets = words.contiguous().view(torch.uint8)
    out = torch.empty(octets.shape[0] // 2, 2 * octets.shape[1], dtype=torch.uint8, device=words.device)
    pairs = out.view(torch.int16)
    for part in _in_cache(pairs):
        # Four nibbles at once: a byte of each row makes two bytes of the pair.
        even, odd = octets[0::2][part].to(torch.int16), octets[1::2][part].to(torch.int16)
        low, high = even & 0x0F, even.bitwise_and_(0xF0)
        low |= (odd & 0x0F).bitwise_left_shift_(4)
        high |= odd.bitwise_and_(0xF0).bitwise_left_shift_(4)
        low |= high.bitwise_left_shift_(4)
        torch.bitwise_xor(low, _SIGNS, out=pairs[part])
    return out


def row_pairs_to_words(packed: Tensor) -> Tensor:
    """uint8 ``[rows / 2, cols]`` to int32 ``[rows, cols / 8]``; ``cols`` is a multiple of 8."""
    pairs = packed.contiguous().view(torch.int16)
    octets = torch.empty(2 * packed.shape[0], packed.shape[1] // 2, dtype=torch.uint8, device=packed.device)
    for part in _in_cache(pairs):
        four = pairs[part] ^ _SIGNS
        upper = four >> 4
        octets[0::2][part] = (four & 0x0F).bitwise_or_(upper & 0xF0)
        octets[1::2][part] = upper.bitwise_and_(0x0F).bitwise_or_(four.bitwise_right_shift_(8).bitwise_and_(0xF0))
    return octets.view(torch.int32)


def _in_cache(pairs: Tensor) -> Iterator[slice]:
    """Rows of a matrix of int16, few enough that what is made of them stays in the cache (but all of it on a GPU)."""
    rows = max(1, _AT_A_TIME // max(1, pairs.shape[1])) if pairs.device.type == "cpu" else max(1, pairs.shape[0])
    for start in range(0, pairs.shape[0], rows):
        yield slice(start, start + rows)


def words_to_int8(words: Tensor, cols: int) -> Tensor:
    """int32 ``[rows, ceil(cols / 4)]`` of 8-bit values to int8 ``[rows, cols]``."""
    octets = words.contiguous().view(torch.uint8)[:, :cols] ^ 0x80
    return octets.contiguous().view(torch.int8)


def int8_to_words(weight: Tensor) -> Tensor:
    """int8 ``[rows, cols]`` to int32 ``[rows, ceil(cols / 4)]``."""
    octets = weight.contiguous().view(torch.uint8) ^ 0x80
    return functional.pad(octets, (0, -weight.shape[1] % 4)).contiguous().view(torch.int32)
