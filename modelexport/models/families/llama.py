"""Llama: pre-norm decoder, grouped-query attention, gated MLP.

Cuts follow Megatron-LM (Shoeybi et al., 2019): q/k/v and gate/up by output features, o and down by input
features, the vocabulary by rows. Checkpoints converted from the first Llama carry ``rotary_emb.inv_freq``
buffers, which every reader recomputes. The models of Mistral, Ministral and
TeleChat3 have the same modules and names.
"""

from modelexport.models.families._blocks import BUFFERS, DENSE, embedding, head, llama_layer
from modelexport.models.families.base import Family

FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    aliases=("ministral", "mistral", "telechat3"),
    before=embedding(),
    layer=llama_layer(bias="attention_bias", mlp_bias="mlp_bias"),
    after=head(),
    ignored_tensors=BUFFERS,
    scalings=DENSE,
)
