"""Mixtral: Llama's attention, and of several gated MLPs the two that a router picks for each token.

On disk every expert has linears of its own: w1 is the gate, w3 the up and w2 the down projection. (transformers and
the engines stack them in memory.)
"""

from modelexport.families.base import Family, Module, Scaling

FAMILY = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
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
            bias=False,
        ),
        Module(
            path="self_attn.k_proj",
            kind="linear",
            role="attention.k",
            partition="column",
            axis="kv_heads",
            fused_into="self_attn.qkv_proj",
            bias=False,
        ),
        Module(
            path="self_attn.v_proj",
            kind="linear",
            role="attention.v",
            partition="column",
            axis="kv_heads",
            fused_into="self_attn.qkv_proj",
            bias=False,
        ),
        Module(path="self_attn.o_proj", kind="linear", role="attention.o", partition="row", axis="heads", bias=False),
        Module(path="post_attention_layernorm", kind="norm", role="mlp.norm"),
        Module(path="block_sparse_moe.gate", kind="router", role="router", axis="experts", bias=False),
        Module(
            path="block_sparse_moe.experts.{e}.w1",
            kind="linear",
            role="expert.gate",
            partition="column",
            axis="intermediate",
            fused_into="block_sparse_moe.experts.w13",
            bias=False,
        ),
        Module(
            path="block_sparse_moe.experts.{e}.w2",
            kind="linear",
            role="expert.down",
            partition="row",
            axis="intermediate",
            bias=False,
        ),
        Module(
            path="block_sparse_moe.experts.{e}.w3",
            kind="linear",
            role="expert.up",
            partition="column",
            axis="intermediate",
            fused_into="block_sparse_moe.experts.w13",
            bias=False,
        ),
    ),
    after=(
        Module(path="model.norm", kind="norm", role="final_norm"),
        Module(path="lm_head", kind="head", role="head", partition="column", axis="vocab"),
    ),
    ignored_tensors=("rotary_emb.inv_freq",),
    scalings=(
        Scaling(source="attention.v", into=("attention.o",)),
        Scaling(source="expert.up", into=("expert.down",)),
        Scaling(source="attention.norm", into=("attention.q", "attention.k", "attention.v")),
        Scaling(source="mlp.norm", into=("router", "expert.gate", "expert.up")),
    ),
)
