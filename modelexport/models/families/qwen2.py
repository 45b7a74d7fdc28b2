"""Qwen2 and Qwen2.5: Llama's decoder with biases on q, k and v, always, and on nothing else."""

from modelexport.models.families._blocks import BUFFERS, DENSE, embedding, head, llama_layer
from modelexport.models.families.base import Family

FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    before=embedding(),
    layer=llama_layer(bias=True, output_bias=False, mlp_bias=False),
    after=head(),
    ignored_tensors=BUFFERS,
    scalings=DENSE,
)
