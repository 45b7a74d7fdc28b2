"""Mixtral: Llama's attention, and of several gated MLPs the two that a router picks for each token.

On disk every expert has linears of its own: w1 is the gate, w3 the up and w2 the down projection. (transformers and
the engines stack them in memory.)
"""

from modelexport.models.families._blocks import BUFFERS, SPARSE, attention, embedding, experts, head, norm, router
from modelexport.models.families.base import Family

FAMILY = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    before=embedding(),
    layer=(
        norm("input_layernorm", "attention.norm"),
        *attention(),
        norm("post_attention_layernorm", "mlp.norm"),
        router("block_sparse_moe.gate"),
        *experts("block_sparse_moe.experts", axis="intermediate", names={"gate": "w1", "down": "w2", "up": "w3"}),
    ),
    after=head(),
    ignored_tensors=BUFFERS,
    scalings=SPARSE,
)
