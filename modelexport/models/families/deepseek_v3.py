"""DeepSeek-V3 and R1: multi-head latent attention, dense first layers, then many experts and some that all tokens use.

Attention (DeepSeek-AI, 2024, "DeepSeek-V2"): queries come out of a low-rank projection (``q_a``, a norm, ``q_b``; small
models have one ``q_proj`` instead), keys and values out of another that all heads share (``kv_a``, with the rotary part
of the keys at its end, a norm, ``kv_b``). What comes before the heads is whole on every tensor-parallel rank, norms
included; ``q_b``, ``kv_b`` and ``o_proj`` are cut by heads, whose sizes differ: a query's is nope + rope, that of
``kv_b`` nope + value, that of ``o_proj`` value.

DeepSeek-V2's models have the same modules and names, without the correction of the router's choice.
"""

from modelexport.models.families._blocks import BUFFERS, GATED, embedding, experts, gated_mlp, head, norm, router, row
from modelexport.models.families.base import Axis, Family, Module, Scaling

FAMILY = Family(
    name="deepseek_v3",
    aliases=("kimi_k2",),
    architecture="DeepseekV3ForCausalLM",
    variants={"deepseek_v2": ("DeepseekV2ForCausalLM", ("router.correction",))},
    axes={
        "query_heads": Axis(features=("qk_nope_head_dim", "qk_rope_head_dim"), times="num_attention_heads", heads=True),
        "key_value_heads": Axis(features=("qk_nope_head_dim", "v_head_dim"), times="num_attention_heads", heads=True),
        "value_heads": Axis(features=("v_head_dim",), times="num_attention_heads", heads=True),
        "query_rank": Axis(features=("q_lora_rank",), optional=True),
        "key_value_rank": Axis(features=("kv_lora_rank",)),
        "key_value_rank_and_rope": Axis(features=("kv_lora_rank", "qk_rope_head_dim")),
        "expert_intermediate": Axis(features=("moe_intermediate_size",)),
        "shared_intermediate": Axis(features=("moe_intermediate_size",), times="n_shared_experts", optional=True),
    },
    dense_layers="first_k_dense_replace",
    before=embedding(),
    layer=(
        norm("input_layernorm", "attention.norm"),
        Module(
            path="self_attn.q_proj",
            kind="linear",
            role="latent.q",
            partition="column",
            axis="query_heads",
            bias=False,
            unless="query_rank",
        ),
        Module(
            path="self_attn.q_a_proj",
            kind="linear",
            role="latent.q_a",
            axis="query_rank",
            fused_into="self_attn.fused_qkv_a_proj",
            bias="attention_bias",
        ),
        norm("self_attn.q_a_layernorm", "latent.q_norm", axis="query_rank"),
        Module(
            path="self_attn.q_b_proj",
            kind="linear",
            role="latent.q_b",
            partition="column",
            axis="query_heads",
            across="query_rank",
            bias=False,
        ),
        Module(
            path="self_attn.kv_a_proj_with_mqa",
            kind="linear",
            role="latent.kv_a",
            axis="key_value_rank_and_rope",
            fused_into="self_attn.fused_qkv_a_proj",
            bias="attention_bias",
        ),
        norm("self_attn.kv_a_layernorm", "latent.kv_norm", axis="key_value_rank"),
        Module(
            path="self_attn.kv_b_proj",
            kind="linear",
            role="latent.kv_b",
            partition="column",
            axis="key_value_heads",
            across="key_value_rank",
            bias=False,
        ),
        row("self_attn.o_proj", "attention.o", "value_heads", bias="attention_bias"),
        norm("post_attention_layernorm", "mlp.norm"),
        *gated_mlp(bias="mlp_bias", layers="dense"),
        router("mlp.gate", layers="sparse"),
        Module(
            path="mlp.gate",
            parameter="e_score_correction_bias",
            kind="vector",
            role="router.correction",
            axis="experts",
            bias=False,
            layers="sparse",
        ),
        *experts("mlp.experts", axis="expert_intermediate", layers="sparse"),
        *gated_mlp("mlp.shared_experts", "shared", axis="shared_intermediate", bias="mlp_bias", layers="sparse"),
    ),
    after=head(),
    ignored_tensors=BUFFERS,
    scalings=(
        GATED,
        Scaling(source="expert.up", into=("expert.down",)),
        Scaling(source="shared.up", into=("shared.down",)),
        Scaling(source="attention.norm", into=("latent.q", "latent.q_a", "latent.kv_a")),
        Scaling(source="latent.q_norm", into=("latent.q_b",)),
        Scaling(source="latent.kv_norm", into=("latent.kv_b",)),
        Scaling(
            source="mlp.norm",
            into=("mlp.gate", "mlp.up", "router", "expert.gate", "expert.up", "shared.gate", "shared.up"),
        ),
    ),
)
