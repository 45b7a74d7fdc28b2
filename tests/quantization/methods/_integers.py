"""Integer weights for the tests of AWQ and GPTQ, packed natively by arithmetic of its own (no shifts of tensors)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from modelexport.quantization import formats
from modelexport.quantization.formats.base import NumberFormat

NAMES = {
    (4, True): "int4",
    (4, False): "int4-asym",
    (8, True): "int8-wo",
    (8, False): "int8-wo-asym",
}


def number_format(bits: int, symmetric: bool, group: int) -> NumberFormat:
    return formats.get(NAMES[bits, symmetric], group_size=group)


@dataclass
class Integers:
    """Unsigned codes ``[out, in]``, unsigned zero points and scales ``[out, groups]``, and the group of each column."""

    bits: int
    symmetric: bool
    group: int
    codes: np.ndarray
    zeros: np.ndarray
    scales: Tensor
    g_idx: np.ndarray

    @classmethod
    def random(
        cls, rows: int, cols: int, *, bits: int = 4, symmetric: bool = False, group: int = 32, seed: int = 0
    ) -> Integers:
        """Every code and every zero point there is, float16 scales."""
        rng = np.random.default_rng(seed)
        size = cols if group == -1 else group
        groups = cols // size
        zeros = rng.integers(0, 2**bits, (rows, groups))
        if symmetric:
            zeros[:] = 2 ** (bits - 1)
        scales = torch.from_numpy(rng.uniform(0.001, 0.01, (rows, groups))).to(torch.float16)
        return cls(
            bits, symmetric, group, rng.integers(0, 2**bits, (rows, cols)), zeros, scales, np.arange(cols) // size
        )

    @property
    def format(self) -> NumberFormat:
        return number_format(self.bits, self.symmetric, self.group)

    def native(self) -> dict[str, Tensor]:
        rows, cols = self.codes.shape
        found = {
            "weight_packed": words(self.codes, self.bits),
            "weight_scale": self.scales.clone(),
            "weight_shape": torch.tensor([rows, cols]),
        }
        if not self.symmetric:
            found["weight_zero_point"] = words(self.zeros.T, self.bits).T.contiguous()
        return found

    def values(self) -> Tensor:
        """float32 ``[out, in]``, one product at a time in float64: exact, a code times a float16."""
        scales = self.scales.double().numpy()
        exact = (self.codes - self.zeros[:, self.g_idx]) * scales[:, self.g_idx]
        return torch.from_numpy(exact).float()


def words(values: np.ndarray, bits: int) -> Tensor:
    """int32, ``32 / bits`` unsigned numbers of a row to each, the first one worth least."""
    per_word = 32 // bits
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % per_word))).astype(np.int64)
    parts = padded.reshape(values.shape[0], -1, per_word)
    totals = sum(parts[:, :, i] * 2 ** (bits * i) for i in range(per_word))
    return torch.from_numpy(np.where(totals >= 2**31, totals - 2**32, totals).astype(np.int32))


def number(word: int, place: int, bits: int) -> int:
    """The ``place``-th number of an int32 word, as Python's integers have it."""
    return int(word) % 2**32 // 2 ** (bits * place) % 2**bits


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Equal names, dtypes, shapes and bytes."""
    return set(left) == set(right) and all(
        left[k].dtype == right[k].dtype and torch.equal(left[k], right[k]) for k in left
    )
