"""Between packed integers: compressed-tensors' int32 words along a row, modelopt's bytes of two rows, plain int8.

In compressed-tensors' words a value q of b bits stands as q + 2^(b-1), the first in the lowest bits; what fills the
last word of a row up is 0. modelopt has two's complement, the even row of two in the low four bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_SIGNS = 0x8888 - 0x10000  # the top bit of four nibbles: from offset to two's complement and back


def words_to_row_pairs(words: Tensor) -> Tensor:
    """int32 ``[rows, cols / 8]`` of 4-bit values to uint8 ``[rows / 2, cols]``."""
    octets = words.contiguous().view(torch.uint8)
    even, odd = octets[0::2].to(torch.int16), octets[1::2].to(torch.int16)
    # Four nibbles at once: a byte of each row makes two bytes of the pair.
    pairs = (even & 0x0F) | ((odd & 0x0F) << 4) | ((even & 0xF0) << 4) | ((odd & 0xF0) << 8)
    return (pairs ^ _SIGNS).view(torch.uint8)


def row_pairs_to_words(packed: Tensor) -> Tensor:
    """uint8 ``[rows / 2, cols]`` to int32 ``[rows, cols / 8]``; ``cols`` is a multiple of 8."""
    pairs = packed.contiguous().view(torch.int16) ^ _SIGNS
    octets = torch.empty(2 * packed.shape[0], packed.shape[1] // 2, dtype=torch.uint8, device=packed.device)
    octets[0::2] = (pairs & 0x0F) | ((pairs >> 4) & 0xF0)
    octets[1::2] = ((pairs >> 4) & 0x0F) | ((pairs >> 8) & 0xF0)
    return octets.view(torch.int32)


def words_to_int8(words: Tensor, cols: int) -> Tensor:
    """int32 ``[rows, ceil(cols / 4)]`` of 8-bit values to int8 ``[rows, cols]``."""
    octets = words.contiguous().view(torch.uint8)[:, :cols] ^ 0x80
    return octets.contiguous().view(torch.int8)


def int8_to_words(weight: Tensor) -> Tensor:
    """int8 ``[rows, cols]`` to int32 ``[rows, ceil(cols / 4)]``."""
    octets = weight.contiguous().view(torch.uint8) ^ 0x80
    return functional.pad(octets, (0, -weight.shape[1] % 4)).contiguous().view(torch.int32)
