"""SmolLM3: Llama's modules, some layers without rotary positions; the embedding serves as the head."""

from modelexport.models.families._blocks import BUFFERS, DENSE, embedding, head, llama_layer
from modelexport.models.families.base import Family

FAMILY = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    before=embedding(),
    layer=llama_layer(bias="attention_bias", mlp_bias="mlp_bias"),
    after=head(),
    ignored_tensors=BUFFERS,
    scalings=DENSE,
    defaults={"tie_word_embeddings": True},
)
