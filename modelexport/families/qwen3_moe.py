"""Qwen3's mixtures of experts: its attention, and in every layer many small gated MLPs that a router picks from.

On disk every expert has linears of its own. Layers without experts (``mlp_only_layers``, ``decoder_sparse_step`` above
1), which none of the published models have, are not in these data.
"""

from modelexport.families.base import Axis, Family, Module, Scaling

FAMILY = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    axes={
        "head": Axis(features=("head_dim",)),
        "expert_intermediate": Axis(features=("moe_intermediate_size",)),
    },
    before=(Module(path="model.embed_tokens", kind="embedding", role="embedding", partition="column", axis="vocab"),),
    layer=(
        Module(path="input_layernorm", kind="norm", role="attention.norm"),
        Module(
            path="self_attn.q_proj",
            kind="linear",
            role="attention.q",
            partition="column",
            axis="heads",
            fused_into="self_attn.qkv_proj",
            bias="attention_bias",
        ),
        Module(
            path="self_attn.k_proj",
            kind="linear",
            role="attention.k",
            partition="column",
            axis="kv_heads",
            fused_into="self_attn.qkv_proj",
            bias="attention_bias",
        ),
        Module(
            path="self_attn.v_proj",
            kind="linear",
            role="attention.v",
            partition="column",
            axis="kv_heads",
            fused_into="self_attn.qkv_proj",
            bias="attention_bias",
        ),
        Module(
            path="self_attn.o_proj",
            kind="linear",
            role="attention.o",
            partition="row",
            axis="heads",
            bias="attention_bias",
        ),
        Module(path="self_attn.q_norm", kind="norm", role="attention.q_norm", axis="head"),
        Module(path="self_attn.k_norm", kind="norm", role="attention.k_norm", axis="head"),
        Module(path="post_attention_layernorm", kind="norm", role="mlp.norm"),
        Module(path="mlp.gate", kind="router", role="router", axis="experts", bias=False),
        Module(
            path="mlp.experts.{e}.gate_proj",
            kind="linear",
            role="expert.gate",
            partition="column",
            axis="expert_intermediate",
            fused_into="mlp.experts.w13",
            bias=False,
        ),
        Module(
            path="mlp.experts.{e}.up_proj",
            kind="linear",
            role="expert.up",
            partition="column",
            axis="expert_intermediate",
            fused_into="mlp.experts.w13",
            bias=False,
        ),
        Module(
            path="mlp.experts.{e}.down_proj",
            kind="linear",
            role="expert.down",
            partition="row",
            axis="expert_intermediate",
            bias=False,
        ),
    ),
    after=(
        Module(path="model.norm", kind="norm", role="final_norm"),
        Module(path="lm_head", kind="head", role="head", partition="column", axis="vocab"),
    ),
    scalings=(
        Scaling(source="attention.v", into=("attention.o",)),
        Scaling(source="expert.up", into=("expert.down",)),
        Scaling(source="attention.norm", into=("attention.q", "attention.k", "attention.v")),
        Scaling(source="mlp.norm", into=("router", "expert.gate", "expert.up")),
    ),
)
