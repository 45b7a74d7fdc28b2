"""The block types of ggml as data: where in a block's bytes the codes of its weights and its scales stand.

Follows ggml-common.h and the dequantisation of the ``gguf`` package. A weight is
``d * scale * level - dmin * minimum``:

- ``d`` and ``dmin`` are float16 numbers of the block;
- ``scale`` and ``minimum`` are whole numbers of a sub-block of 16 or 32 weights, of the types whose names end in K or
  XS; of the others, whose blocks are of 32 weights, they are 1;
- ``level`` is the weight's code plus the least level, or an entry of a table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

__all__ = ["LAYOUTS", "BitField", "BlockLayout"]


@dataclass(frozen=True)
class BitField:
    """Whole numbers within a block, each in one or several pieces, the lowest bits first.

    Attributes:
        bits: of each piece.
        places: of each piece, for each number: (its byte, by how many bits it is shifted there).
        flipped: bits that are stored the other way round: the sign's of a two's complement, which then counts from
            the least number up.
    """

    bits: tuple[int, ...]
    places: tuple[tuple[tuple[int, int], ...], ...]
    flipped: int = 0

    @property
    def highest(self) -> int:
        """The greatest number."""
        return int(2 ** sum(self.bits) - 1)


def _planes(at: int, count: int, width: int, bits: int) -> tuple[tuple[int, int], ...]:
    """The places of ``count`` numbers from byte ``at`` on: ``width`` of them stand in the lowest bits of as many bytes,
    the next ``width`` above these, and so on until the bytes are full."""
    full = width * (8 // bits)
    return tuple((at + n // full * width + n % width, n % full // width * bits) for n in range(count))


@dataclass(frozen=True)
class BlockLayout:
    """A block type.

    Attributes:
        name: ggml's.
        block: weights of a block.
        nbytes: bytes of a block.
        sub: weights that share a scale.
        codes: of the weights.
        lowest: the level of code 0.
        levels: the levels of all codes, where they are no whole numbers in a row.
        scales: of the sub-blocks; None where there is ``d`` alone.
        lowest_scale: the scale whose code is 0.
        minima: of the sub-blocks, where they have them.
        d: the byte at which ``d`` begins.
        dmin: the same of ``dmin``; None where there is none.
        adds_minimum: whether ``dmin`` is stored with the other sign, as what is added.
    """

    name: str
    block: int
    nbytes: int
    sub: int
    codes: BitField
    lowest: int = 0
    levels: tuple[int, ...] = ()
    scales: BitField | None = None
    lowest_scale: int = 0
    minima: BitField | None = None
    d: int = 0
    dmin: int | None = None
    adds_minimum: bool = False

    @property
    def number_format(self) -> str:
        """The name of the number format whose weights these are."""
        return self.name.lower().replace("_", "-")

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return sum(self.codes.bits)

    def arguments(self) -> dict[str, Any]:
        """Returns compressed-tensors' arguments for such weights; their ``type`` is ggml's name."""
        return {
            "num_bits": self.bits,
            "type": self.name,
            "symmetric": not self.affine,
            "strategy": "group",
            "group_size": self.block,
            "dynamic": False,
        }

    @property
    def affine(self) -> bool:
        """True where weights have a minimum."""
        return self.dmin is not None

    @property
    def level_range(self) -> tuple[int, int]:
        """The least and the greatest level."""
        if self.levels:
            return self.levels[0], self.levels[-1]
        return self.lowest, self.lowest + self.codes.highest


_K = 256
_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_NIBBLES = BitField((4,), (_planes(2, 32, 16, 4),))


def _six_bits(own: Iterable[int], shift: int) -> BitField:
    """Eight numbers: the first four in the low bits of four bytes; the others' lower halves in bytes that scales and
    minima share, by the half at ``shift``, and their upper bits above the first four."""
    low = chain(((byte, 0) for byte in own), ((byte, shift) for byte in range(12, 16)))
    high = chain(((byte, 4) for byte in own), ((byte, 6) for byte in own))
    return BitField((4, 2), (tuple(low), tuple(high)))


_SCALES, _MINIMA = _six_bits(range(4, 8), 0), _six_bits(range(8, 12), 4)

_ALL = (
    BlockLayout("Q4_0", 32, 18, 32, _NIBBLES, -8),
    BlockLayout("Q4_1", 32, 20, 32, BitField((4,), (_planes(4, 32, 16, 4),)), dmin=2, adds_minimum=True),
    BlockLayout("Q5_0", 32, 22, 32, BitField((4, 1), (_planes(6, 32, 16, 4), _planes(2, 32, 1, 1))), -16),
    BlockLayout(
        "Q5_1",
        32,
        24,
        32,
        BitField((4, 1), (_planes(8, 32, 16, 4), _planes(4, 32, 1, 1))),
        dmin=2,
        adds_minimum=True,
    ),
    BlockLayout("Q8_0", 32, 34, 32, BitField((8,), (_planes(2, 32, 32, 8),), flipped=0x80), -128),
    BlockLayout("IQ4_NL", 32, 18, 32, _NIBBLES, levels=_NONLINEAR),
    BlockLayout(
        "Q2_K",
        _K,
        84,
        16,
        BitField((2,), (_planes(16, _K, 32, 2),)),
        scales=BitField((4,), (tuple((byte, 0) for byte in range(16)),)),
        minima=BitField((4,), (tuple((byte, 4) for byte in range(16)),)),
        d=80,
        dmin=82,
    ),
    BlockLayout(
        "Q3_K",
        _K,
        110,
        16,
        BitField((2, 1), (_planes(32, _K, 32, 2), _planes(0, _K, 32, 1))),
        -4,
        scales=BitField((4, 2), (_planes(96, 16, 8, 4), _planes(104, 16, 4, 2))),
        lowest_scale=-32,
        d=108,
    ),
    BlockLayout("Q4_K", _K, 144, 32, BitField((4,), (_planes(16, _K, 32, 4),)), scales=_SCALES, minima=_MINIMA, dmin=2),
    BlockLayout(
        "Q5_K",
        _K,
        176,
        32,
        BitField((4, 1), (_planes(48, _K, 32, 4), _planes(16, _K, 32, 1))),
        scales=_SCALES,
        minima=_MINIMA,
        dmin=2,
    ),
    BlockLayout(
        "Q6_K",
        _K,
        210,
        16,
        BitField((4, 2), (_planes(0, _K, 64, 4), _planes(128, _K, 32, 2))),
        -32,
        scales=BitField((8,), (_planes(192, 16, 16, 8),), flipped=0x80),
        lowest_scale=-128,
        d=208,
    ),
    BlockLayout(
        "IQ4_XS",
        _K,
        136,
        32,
        BitField((4,), (_planes(8, _K, 16, 4),)),
        levels=_NONLINEAR,
        scales=BitField((4, 2), (_planes(4, 8, 1, 4), _planes(2, 8, 1, 2))),
        lowest_scale=-32,
    ),
)

LAYOUTS = {layout.name: layout for layout in _ALL}
"""Every block type that has a number format of its own, by ggml's name."""
