"""Gemma: Llama's modules; a norm multiplies by 1 + its weight, and the embedding, which is the head too, is scaled."""

from modelexport.models.families._blocks import BUFFERS, DENSE, embedding, head, llama_layer
from modelexport.models.families.base import Family

FAMILY = Family(
    name="gemma",
    architecture="GemmaForCausalLM",
    before=embedding(),
    layer=llama_layer(bias="attention_bias", mlp_bias=False),
    after=head(),
    ignored_tensors=BUFFERS,
    scalings=DENSE,
    defaults={"tie_word_embeddings": True, "head_dim": 256},
    norm_offset=1.0,
)
