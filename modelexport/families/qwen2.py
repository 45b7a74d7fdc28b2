"""Qwen2 and Qwen2.5: Llama's decoder with biases on q, k and v, always, and on nothing else."""

from modelexport.families.base import Family, Module, Scaling

FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
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
            bias=True,
        ),
        Module(
            path="self_attn.k_proj",
            kind="linear",
            role="attention.k",
            partition="column",
            axis="kv_heads",
            fused_into="self_attn.qkv_proj",
            bias=True,
        ),
        Module(
            path="self_attn.v_proj",
            kind="linear",
            role="attention.v",
            partition="column",
            axis="kv_heads",
            fused_into="self_attn.qkv_proj",
            bias=True,
        ),
        Module(path="self_attn.o_proj", kind="linear", role="attention.o", partition="row", axis="heads", bias=False),
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
        Module(path="mlp.down_proj", kind="linear", role="mlp.down", partition="row", axis="intermediate", bias=False),
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
