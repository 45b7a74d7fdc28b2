"""CWM: Llama's modules without biases, some layers with a sliding window."""

from modelexport.models.families._blocks import DENSE, embedding, head, llama_layer
from modelexport.models.families.base import Family

FAMILY = Family(
    name="cwm",
    architecture="CwmForCausalLM",
    before=embedding(),
    layer=llama_layer(bias=False, mlp_bias=False),
    after=head(),
    scalings=DENSE,
    defaults={"head_dim": 128},
)
