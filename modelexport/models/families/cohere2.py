"""Command R7B and its like (Cohere2): attention and MLP side by side, both of what one norm gives.

The norm is a LayerNorm without a bias; it takes the mean away, so the stream cannot be rotated. The logits are scaled,
and the embedding is the head.
"""

from modelexport.models.families._blocks import GATED, QKV, VALUES, attention, embedding, gated_mlp, head, norm
from modelexport.models.families.base import Family, Scaling

FAMILY = Family(
    name="cohere2",
    architecture="Cohere2ForCausalLM",
    before=embedding(),
    layer=(
        norm("input_layernorm", "norm", bias=False),
        *attention(bias="attention_bias"),
        *gated_mlp(),
    ),
    after=head(norm_bias=False),
    scalings=(VALUES, GATED, Scaling(source="norm", into=(*QKV, "mlp.gate", "mlp.up"))),
    defaults={"tie_word_embeddings": True},
    norms_centre=True,
)
