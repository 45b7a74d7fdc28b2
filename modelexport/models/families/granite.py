"""Granite: Llama's modules. The embedding, the attention, what layers add and the logits are multiplied by numbers.

These numbers (``embedding_multiplier`` and its like in config.json) are whole factors of what flows, so that scales and
rotations go past them.
"""

from modelexport.models.families._blocks import BUFFERS, DENSE, embedding, head, llama_layer
from modelexport.models.families.base import Family

FAMILY = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    before=embedding(),
    layer=llama_layer(bias="attention_bias", mlp_bias="mlp_bias"),
    after=head(),
    ignored_tensors=BUFFERS,
    scalings=DENSE,
)
