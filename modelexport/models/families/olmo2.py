"""OLMo 2: norms behind the attention and the MLP only, and over all queries, and all keys, of a token at once.

No norm stands before a linear: nothing is scaled out of norms, and the stream cannot be rotated. Who cuts the heads has
to gather queries and keys for their norms, or to add up squares, so the norms stay whole on every rank. OLMo 3's models
have the same modules and names, some layers with a sliding window.
"""

from modelexport.models.families._blocks import GATED, VALUES, attention, embedding, gated_mlp, head, norm
from modelexport.models.families.base import Family

FAMILY = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    variants={"olmo3": ("Olmo3ForCausalLM", ())},
    before=embedding(),
    layer=(
        *attention(bias="attention_bias"),
        norm("self_attn.q_norm", "attention.q_norm", axis="heads"),
        norm("self_attn.k_norm", "attention.k_norm", axis="kv_heads"),
        norm("post_attention_layernorm", "attention.post_norm"),
        *gated_mlp(),
        norm("post_feedforward_layernorm", "mlp.post_norm"),
    ),
    after=head(),
    scalings=(VALUES, GATED),
)
