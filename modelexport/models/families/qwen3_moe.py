"""Qwen3's mixtures of experts: its attention, and in every layer many small gated MLPs that a router picks from.

On disk every expert has linears of its own. Layers without experts (``mlp_only_layers``, ``decoder_sparse_step`` above
1), which none of the published models have, are not in these data.
"""

from modelexport.models.families._blocks import SPARSE, attention, embedding, experts, head, head_norms, norm, router
from modelexport.models.families.base import Axis, Family

FAMILY = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    axes={"expert_intermediate": Axis(features=("moe_intermediate_size",))},
    before=embedding(),
    layer=(
        norm("input_layernorm", "attention.norm"),
        *attention(bias="attention_bias"),
        *head_norms(),
        norm("post_attention_layernorm", "mlp.norm"),
        router("mlp.gate"),
        *experts("mlp.experts", axis="expert_intermediate"),
    ),
    after=head(),
    scalings=SPARSE,
)
