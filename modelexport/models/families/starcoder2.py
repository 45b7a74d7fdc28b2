"""StarCoder2: Llama's attention, LayerNorms with biases, and an MLP of two linears; the embedding is the head.

The activation between the two linears of the MLP is no product: nothing is scaled from one into the other.
"""

from modelexport.models.families._blocks import (
    READS_ATTENTION_NORM,
    VALUES,
    attention,
    column,
    embedding,
    head,
    norm,
    row,
)
from modelexport.models.families.base import Family, Scaling

FAMILY = Family(
    name="starcoder2",
    architecture="Starcoder2ForCausalLM",
    before=embedding(),
    layer=(
        norm("input_layernorm", "attention.norm", bias=True),
        *attention(bias="use_bias"),
        norm("post_attention_layernorm", "mlp.norm", bias=True),
        column("mlp.c_fc", "mlp.in", "intermediate", bias="use_bias"),
        row("mlp.c_proj", "mlp.out", "intermediate", bias="use_bias"),
    ),
    after=head(norm_bias=True),
    scalings=(VALUES, READS_ATTENTION_NORM, Scaling(source="mlp.norm", into=("mlp.in",))),
    defaults={"tie_word_embeddings": True, "use_bias": True},
    norms_centre=True,
)
