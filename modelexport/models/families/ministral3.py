"""Ministral 3's language model: Llama's modules without biases; queries are scaled by their position."""

from modelexport.models.families._blocks import DENSE, embedding, head, llama_layer
from modelexport.models.families.base import Family

FAMILY = Family(
    name="ministral3",
    architecture="Ministral3ForCausalLM",
    before=embedding(),
    layer=llama_layer(bias=False, mlp_bias=False),
    after=head(),
    scalings=DENSE,
    defaults={"head_dim": 128},
)
