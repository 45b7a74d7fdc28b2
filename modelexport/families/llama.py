"""Llama: pre-norm decoder, grouped-query attention, gated MLP.

Cuts follow Megatron-LM (Shoeybi et al., 2019): q/k/v and gate/up by output features, o and down by input
features, the vocabulary by rows. Checkpoints converted from the first Llama carry ``rotary_emb.inv_freq``
buffers, which every reader recomputes. Mistral's models have the same modules and names.
"""

from modelexport.families.base import Family, Module, Scaling

FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    aliases=("mistral",),
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
        Module(path="post_attention_layernorm", kind="norm", role="mlp.norm"),
        Module(
            path="mlp.gate_proj",
            kind="linear",
            role="mlp.gate",
            partition="column",
            axis="intermediate",
            fused_into="mlp.gate_up_proj",
            bias="mlp_bias",
        ),
        Module(
            path="mlp.up_proj",
            kind="linear",
            role="mlp.up",
            partition="column",
            axis="intermediate",
            fused_into="mlp.gate_up_proj",
            bias="mlp_bias",
        ),
        Module(
            path="mlp.down_proj",
            kind="linear",
            role="mlp.down",
            partition="row",
            axis="intermediate",
            bias="mlp_bias",
        ),
    ),
    after=(
        Module(path="model.norm", kind="norm", role="final_norm"),
        Module(path="lm_head", kind="head", role="head", partition="column", axis="vocab"),
    ),
    ignored_tensors=("rotary_emb.inv_freq",),
    scalings=(
        Scaling(source="attention.v", into=("attention.o",)),
        Scaling(source="mlp.up", into=("mlp.down",)),
        Scaling(source="attention.norm", into=("attention.q", "attention.k", "attention.v")),
        Scaling(source="mlp.norm", into=("mlp.gate", "mlp.up")),
    ),
)
