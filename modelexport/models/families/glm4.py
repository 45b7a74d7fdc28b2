"""GLM-4 (0414): biases on q, k and v; gate and up in one linear on disk; norms behind the attention and the MLP, too.

Gate and up are cut each by itself. What the norms behind a block give is added to the residual stream, which therefore
cannot be rotated.
"""

from modelexport.models.families._blocks import (
    GATED,
    READS_ATTENTION_NORM,
    VALUES,
    attention,
    embedding,
    fused,
    head,
    norm,
    row,
)
from modelexport.models.families.base import Family, Scaling

FAMILY = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    before=embedding(),
    layer=(
        norm("input_layernorm", "attention.norm"),
        *attention(bias="attention_bias", output_bias=False),
        norm("post_self_attn_layernorm", "attention.post_norm"),
        norm("post_attention_layernorm", "mlp.norm"),
        fused("mlp.gate_up_proj", "mlp.gate_up", (("mlp.gate", "intermediate"), ("mlp.up", "intermediate"))),
        row("mlp.down_proj", "mlp.down", "intermediate"),
        norm("post_mlp_layernorm", "mlp.post_norm"),
    ),
    after=head(),
    scalings=(VALUES, GATED, READS_ATTENTION_NORM, Scaling(source="mlp.norm", into=("mlp.gate_up",))),
    defaults={"attention_bias": True, "head_dim": 128},
)
