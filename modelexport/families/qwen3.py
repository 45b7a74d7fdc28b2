"""Qwen3: Llama's decoder with a norm over each head of the queries and of the keys; all heads share its weights.

Whoever cuts heads needs these norms whole, like every other.
"""

from modelexport.families.base import Axis, Family, Module, Scaling

FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    axes={"head": Axis(features=("head_dim",))},
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
        Module(
            path="mlp.gate_proj",
            kind="linear",
            role="mlp.gate",
            partition="column",
            axis="intermediate",
            fused_into="mlp.gate_up_proj",
            bias=False,
        ),
        Module(
            path="mlp.up_proj",
            kind="linear",
            role="mlp.up",
            partition="column",
            axis="intermediate",
            fused_into="mlp.gate_up_proj",
            bias=False,
        ),
        Module(
            path="mlp.down_proj",
            kind="linear",
            role="mlp.down",
            partition="row",
            axis="intermediate",
            bias=False,
        ),
    ),
    after=(
        Module(path="model.norm", kind="norm", role="final_norm"),
        Module(path="lm_head", kind="head", role="head", partition="column", axis="vocab"),
    ),
    scalings=(
        Scaling(source="attention.v", into=("attention.o",)),
        Scaling(source="mlp.up", into=("mlp.down",)),
        Scaling(source="attention.norm", into=("attention.q", "attention.k", "attention.v")),
        Scaling(source="mlp.norm", into=("mlp.gate", "mlp.up")),
    ),
)
