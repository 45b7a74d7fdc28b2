"""Seed-OSS: Llama's decoder with biases on q, k and v; whether o has one is said by a key of its own."""

from modelexport.models.families._blocks import DENSE, embedding, head, llama_layer
from modelexport.models.families.base import Family

FAMILY = Family(
    name="seed_oss",
    architecture="SeedOssForCausalLM",
    before=embedding(),
    layer=llama_layer(bias="attention_bias", output_bias="attention_out_bias", mlp_bias="mlp_bias"),
    after=head(),
    scalings=DENSE,
    defaults={"attention_bias": True, "head_dim": 128},
)
