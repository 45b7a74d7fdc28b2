"""Qwen3: Llama's decoder with a norm over each head of the queries and of the keys; all heads share its weights.

Whoever cuts heads needs these norms whole, like every other.
"""

from modelexport.models.families._blocks import DENSE, attention, embedding, gated_mlp, head, head_norms, norm
from modelexport.models.families.base import Family

FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    before=embedding(),
    layer=(
        norm("input_layernorm", "attention.norm"),
        *attention(bias="attention_bias"),
        *head_norms(),
        norm("post_attention_layernorm", "mlp.norm"),
        *gated_mlp(),
    ),
    after=head(),
    scalings=DENSE,
)
