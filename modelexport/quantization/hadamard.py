"""A random orthogonal matrix that spreads every feature evenly over all others, and a fast product with it.

The matrix is R = D T of order n = 2^k m, m odd: D has random signs on its diagonal, T is symmetric and orthogonal, the
Kronecker product of a Hartley matrix of order m, cos(2 pi i j / m) + sin(2 pi i j / m), and Sylvester's Hadamard matrix
of order 2^k, normalised. (QuaRot, Ashkboos et al., 2024, takes Hadamard matrices only, which not every order has; the
entries of a Hartley matrix are at most sqrt(2) times as large.)

Nothing is multiplied as a matrix: additions and multiplications of single numbers in one order, so that the product
with a vector is the same to the bit whatever stands beside it, however it is stored and whoever computes it.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_CHUNK = 1 << 17  # numbers at a time: two such buffers stay in a core's own cache


class Hadamard:
    """The matrix R of one order.

    Args:
        order: positive.
        seed: of the signs, together with ``purpose``: matrices of one order need not be equal.
    """

    def __init__(self, order: int, seed: int = 0, purpose: str = "") -> None:
        self.order = order
        self.odd = order // (order & -order)
        self.power = order // self.odd
        # Digest bits are the same in every release of torch, which its generators do not promise.
        digest = hashlib.shake_256(f"{purpose} {seed} {order}".encode()).digest(-(-order // 8))
        bits = torch.tensor(list(digest), dtype=torch.uint8).unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1
        self.signs = 1.0 - 2.0 * bits.flatten()[:order].float()
        angles = [[2 * math.pi * (i * j % self.odd) / self.odd for j in range(self.odd)] for i in range(self.odd)]
        self._mixing = torch.tensor([[math.cos(x) + math.sin(x) for x in row] for row in angles])

    def rotate(self, values: Tensor, dim: int) -> Tensor:
        """R^T times each vector along ``dim``, in new memory; equally, vectors as rows times R.

        Args:
            values: floating-point ``[rows, cols]``; of a size along ``dim`` that is a multiple of the order, each
                block of which is a vector of its own.
            dim: 0 or 1.

        Returns:
            float32, contiguous, on the device of ``values``.
        """
        assert values.dim() == 2
        assert values.shape[dim] % self.order == 0
        out = torch.empty(values.shape, dtype=torch.float32, device=values.device)
        vectors, rotated = (values, out) if dim == 0 else (values.t(), out.t())
        length, count = vectors.shape
        if not out.numel():
            return out
        factor = (self.signs * (1 / math.sqrt(self.order))).repeat(length // self.order).unsqueeze(1).to(out.device)
        step = max(16, _CHUNK // length)
        for start in range(0, count, step):
            part = slice(start, min(start + step, count))
            chunk = torch.empty(length, part.stop - part.start, device=out.device).copy_(vectors[:, part])
            rotated[:, part] = self._mixed(self._butterflies(chunk.mul_(factor)))
        return out

    def _butterflies(self, now: Tensor) -> Tensor:
        """Sylvester's matrix, not normalised, times the columns of ``[n, count]``, which is written to."""
        then, width, stride = torch.empty_like(now), now.shape[1], 1
        while stride < self.power:
            left, right = now.view(-1, 2, stride * width), then.view(-1, 2, stride * width)
            torch.add(left[:, 0], left[:, 1], out=right[:, 0])
            torch.sub(left[:, 0], left[:, 1], out=right[:, 1])
            now, then, stride = then, now, 2 * stride
        return now

    def _mixed(self, values: Tensor) -> Tensor:
        """The Hartley matrix, not normalised, times the ``odd`` parts of ``[n, count]``."""
        if self.odd == 1:
            return values
        parts = values.view(-1, self.odd, self.power * values.shape[1])
        mixing = self._mixing.to(values.device)
        total = parts[:, :1] * mixing[:, :1]
        for j in range(1, self.odd):
            total += parts[:, j : j + 1] * mixing[:, j : j + 1]
        return total.view(values.shape)
