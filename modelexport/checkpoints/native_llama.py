"""The names and the row order of the first Llama's own code, which torchtitan and Mistral have kept.

There neighbouring features of a head are rotated together, in Hugging Face's models the two halves: rows of query and
key weights are permuted accordingly (row ``2j + half`` of a head is row ``half * head_dim / 2 + j`` there).
"""

from __future__ import annotations

from modelexport.checkpoints.safetensors.arrays import Share
from modelexport.sharding.boxes import whole
from modelexport.sharding.rules import TensorRule

NAMES = {
    "embedding": ("tok_embeddings",),
    "attention.norm": ("attention_norm",),
    "attention.q": ("attention.wq", "attention.qkv_linear.wq"),
    "attention.k": ("attention.wk", "attention.qkv_linear.wk"),
    "attention.v": ("attention.wv", "attention.qkv_linear.wv"),
    "attention.o": ("attention.wo",),
    "mlp.norm": ("ffn_norm",),
    "mlp.gate": ("feed_forward.w1",),
    "mlp.up": ("feed_forward.w3",),
    "mlp.down": ("feed_forward.w2",),
    "router": ("feed_forward.gate", "block_sparse_moe.gate"),
    "expert.gate": ("feed_forward.experts.{e}.w1", "block_sparse_moe.experts.{e}.w1"),
    "expert.up": ("feed_forward.experts.{e}.w3", "block_sparse_moe.experts.{e}.w3"),
    "expert.down": ("feed_forward.experts.{e}.w2", "block_sparse_moe.experts.{e}.w2"),
    "final_norm": ("norm",),
    "head": ("output", "lm_head"),
}
"""Role -> the names that a module may have, within its layer where it is in one; ``{e}`` is an expert's number."""


def rotary_shares(rule: TensorRule, start: int, stop: int, row: int) -> list[Share]:
    """Rows ``[start, stop)``, whole heads, of a tensor that begin at ``row`` of a key's; rotary ones half by half."""
    rest = whole(rule.shape[1:])
    zeros = (0,) * len(rest)
    if rule.role not in ("attention.q", "attention.k"):
        return [Share(rule.name, ((start, stop), *rest), (row, *zeros))]
    (part,) = rule.parts
    size = part.size // part.heads
    half = size // 2
    steps = (2, *(1 for _ in rest))
    return [
        Share(
            rule.name, ((head + odd * half, head + (odd + 1) * half), *rest), (row + head - start + odd, *zeros), steps
        )
        for head in range(start, stop, size)
        for odd in (0, 1)
    ]
