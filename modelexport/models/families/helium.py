"""Helium: Llama's decoder whose output projection never has a bias."""

from modelexport.models.families._blocks import DENSE, embedding, head, llama_layer
from modelexport.models.families.base import Family

FAMILY = Family(
    name="helium",
    architecture="HeliumForCausalLM",
    before=embedding(),
    layer=llama_layer(bias="attention_bias", output_bias=False, mlp_bias="mlp_bias"),
    after=head(),
    scalings=DENSE,
    defaults={"head_dim": 128},
)
