"""Gemma 2: Gemma with norms behind the attention and behind the MLP, too, and soft caps on scores and logits.

What these norms give is added to the residual stream: no linear reads it, so nothing is scaled into them, and the
stream cannot be rotated. A norm multiplies by 1 + its weight.
"""

from modelexport.models.families._blocks import DENSE, attention, embedding, gated_mlp, head, norm
from modelexport.models.families.base import Family

FAMILY = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    before=embedding(),
    layer=(
        norm("input_layernorm", "attention.norm"),
        *attention(bias="attention_bias"),
        norm("post_attention_layernorm", "attention.post_norm"),
        norm("pre_feedforward_layernorm", "mlp.norm"),
        *gated_mlp(),
        norm("post_feedforward_layernorm", "mlp.post_norm"),
    ),
    after=head(),
    scalings=DENSE,
    defaults={"tie_word_embeddings": True, "head_dim": 256},
    norm_offset=1.0,
)
