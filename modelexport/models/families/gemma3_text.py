"""Gemma 3's language model: Gemma 2's four norms a layer, and a norm over each head of the queries and of the keys.

Every norm multiplies by 1 + its weight. Checkpoints with a vision tower have another ``model_type`` (``gemma3``).
"""

from modelexport.models.families._blocks import DENSE, attention, embedding, gated_mlp, head, head_norms, norm
from modelexport.models.families.base import Family

FAMILY = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    before=embedding(),
    layer=(
        norm("input_layernorm", "attention.norm"),
        *attention(bias="attention_bias"),
        *head_norms(),
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
