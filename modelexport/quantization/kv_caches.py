"""Number formats of KV caches: the scales that a checkpoint has for one, and how engines round keys and values by them.

Importing this does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from modelexport.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CACHES", "NOT_ROUNDED", "CacheFormat", "CacheRounding", "of_scheme"]

NOT_ROUNDED = "not rounded"
"""In place of a name: engines round such a cache, and it is not done here."""
_LARGEST = {"float": 448.0, "int": 127.0}
"""Of what scales are made for: e4m3 and int8."""


@dataclass(frozen=True)
class CacheFormat:
    """A number format of a KV cache.

    A scale is what a stored number is multiplied by: the largest magnitude that it is to cover, over 448, or over 127
    where numbers are integers. In NVFP4 that
    is the scale above those of the groups, which an engine finds as tokens come: a group's is the e4m3 nearest to its
    largest magnitude over 6 times the scale (vLLM's ``nvfp4_kv_cache_kernels.cu``). It is 448 there, too, and not
    6 * 448 as for weights, since kernels turn what they read into FP8 before they multiply (ModelOpt's
    ``unified_export_hf.py`` has one bound for both). That last rounding is the kernel's, and not done here.

    Attributes:
        name: as ``--kv-cache`` spells it.
        in_words: its numbers, for a sentence.
        num_bits: of a number.
        numbers: what it is.
        by_head: whether each key/value head has scales of its own; else a layer has one for keys and one for values.
        group: numbers of a head, next to each other, that share a scale of the engine's; 0: there are none.
    """

    name: str
    in_words: str
    num_bits: int
    numbers: Literal["float", "int"] = "float"
    by_head: bool = False
    group: int = 0

    def scales(self, reached: Sequence[float]) -> Tensor:
        """The scales, float32 ``[n]``, that cover these magnitudes; 1 where there is nothing but zeros."""
        import torch

        return torch.tensor([reach / self._largest if reach > 0 else 1.0 for reach in reached], dtype=torch.float32)

    @property
    def _largest(self) -> float:
        return _LARGEST[self.numbers]

    def rounding(self, keys: Sequence[float], values: Sequence[float]) -> CacheRounding:
        """Returns what rounds by the scales that cover these magnitudes of keys and of values."""
        return CacheRounding(self, self.scales(keys), self.scales(values))

    def round(self, x: Tensor, scale: Tensor) -> Tensor:
        """``x`` as it comes out of the cache, in its dtype.

        Args:
            x: ``[..., head_dim]``.
            scale: float32, broadcast with ``x``; in NVFP4 one number.
        """
        import torch

        if self.group:
            from modelexport.quantization.kernels import microscaling_reference

            return microscaling_reference.fake_quantise(x, self.group, scale.reshape(1).reciprocal(), torch.uint8)
        scaled = x.float() / scale
        if self.numbers == "int":
            return (scaled.round_().clamp_(-self._largest - 1, self._largest) * scale).to(x.dtype)
        code = scaled.clamp_(-self._largest, self._largest).to(torch.float8_e4m3fn)
        return (code.float() * scale).to(x.dtype)


@dataclass(frozen=True)
class CacheRounding:
    """Keys and values of one layer on their way through an engine's cache.

    Attributes:
        cache: its number format.
        keys, values: the scales, float32 ``[1]``, or of all key/value heads of the model ``[kv_heads]``.
    """

    cache: CacheFormat
    keys: Tensor
    values: Tensor

    def __call__(self, key: Tensor, value: Tensor, heads: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values as they come out of the cache, of the same shapes and dtype.

        Args:
            key, value: ``[samples, heads, length, head_dim]``; heads that share keys may be there several times, next
                to each other.
            heads: which of the key/value heads these are; None: all. An empty range: none of them, and any will do.

        Raises:
            PlanError: there are other heads than scales.
        """
        return self._round(key, self.keys, heads), self._round(value, self.values, heads)

    def _round(self, x: Tensor, scales: Tensor, heads: tuple[int, int] | None) -> Tensor:
        if scales.numel() > 1:
            if heads is not None:
                scales = scales[heads[0] : max(heads[1], heads[0] + 1)]
            if x.shape[1] % len(scales):
                raise PlanError(f"a layer has {x.shape[1]} key/value heads where its KV cache has {len(scales)} scales")
            scales = scales.repeat_interleave(x.shape[1] // len(scales)).reshape(1, -1, 1, 1)
        return self.cache.round(x, scales.to(x.device))


CACHES: Mapping[str, CacheFormat] = {
    cache.name: cache
    for cache in (
        CacheFormat("fp8", "FP8", 8),
        CacheFormat("fp8-head", "FP8, a scale for each head", 8, by_head=True),
        CacheFormat("int8", "int8", 8, "int"),
        CacheFormat("nvfp4", "NVFP4", 4, group=16),
    )
}
"""The formats that can be written, by their names; docs/number-formats.md has the engines that read each."""


def of_scheme(scheme: Mapping[str, Any] | None) -> CacheFormat | None:
    """The format that a ``kv_cache_scheme`` means; None where there is none, or it is none of :data:`CACHES`."""
    if scheme is None:
        return None
    said = (scheme.get("type"), scheme.get("num_bits"), scheme.get("strategy") or "tensor")
    return next((cache for cache in CACHES.values() if said == _meaning(cache)), None)


def _meaning(cache: CacheFormat) -> tuple[str, int, str]:
    return cache.numbers, cache.num_bits, "attn_head" if cache.by_head else "tensor"
