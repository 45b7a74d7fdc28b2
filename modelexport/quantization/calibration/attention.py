"""A model's own attention function, where torch's fused one does not do all that it does: soft caps, sinks.

It runs head by head, so that every operation has the same shape however many heads a rank has, and its results are the
same bits. It is one function, which whoever watches torch's functions sees (see
:mod:`~modelexport.quantization.calibration.watch`).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

__all__ = ["attention_of_heads", "watched_attention"]

_NAME = "watched_eager"


def watched_attention() -> str:
    """The name by which transformers calls :func:`attention_of_heads`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionInterface.register(_NAME, attention_of_heads)
    AttentionMaskInterface.register(_NAME, eager_mask)
    return _NAME


def attention_of_heads(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Computes the model's own ``eager_attention_forward``, one head at a time.

    Args:
        query: ``[samples, heads, length, head_dim]``.
        key, value: ``[samples, key/value heads, length, head_dim]``.
        mask: what is added to the scores, ``[samples, 1, length, length]``.

    Returns:
        ``[samples, length, heads, head_dim]``, and no weights.
    """
    if has_torch_function((query, key, value)):
        found: tuple[Tensor, None] = handle_torch_function(
            attention_of_heads, (query, key, value), module, query, key, value, mask, **kwargs
        )
        return found
    own = sys.modules[type(module).__module__].eager_attention_forward
    group = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        parts = [x[:, n : n + 1].contiguous() for x, n in ((query, head), (key, head // group), (value, head // group))]
        heads.append(own(_OneHead(module, head), *parts, mask, **kwargs)[0])
    return torch.cat(heads, dim=2), None


class _OneHead:
    """An attention module as its function sees it, with one head."""

    num_key_value_groups = 1

    def __init__(self, module: nn.Module, head: int) -> None:
        self._module, self._head = module, head

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        has_sinks = name == "sinks" and value is not None  # of some models only layers with a sliding window have them
        return value[self._head : self._head + 1] if has_sinks else value
