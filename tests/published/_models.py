"""Layouts of checkpoints as their makers published them: config.json, and the names, dtypes and shapes of all tensors.

Sizes are tiny, keys and names are the publishers'. One entry a layout; models that share it are not listed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.published._parts import (
    DELTA_HEAD,
    DELTA_KEYS,
    DELTA_VALUES,
    EXPERTS,
    FOUR,
    HEAD,
    HEADS,
    IMAGE,
    INNER,
    KV,
    KV_HEADS,
    KV_LORA,
    LAYERS,
    MAMBA_GROUPS,
    MAMBA_HEAD,
    MAMBA_HEADS,
    MLP,
    NOPE,
    PATCH,
    PATCHES,
    PRE,
    Q_LORA,
    ROPE,
    SHARED_EXPERTS,
    STATE,
    VALUE,
    VH,
    VHEAD,
    VHEADS,
    VLAYERS,
    VMLP,
    W4,
    WIDE,
    H,
    M,
    Q,
    Tensors,
    V,
    attention,
    bare,
    compressed,
    decoder,
    encode,
    experts,
    fp8_blocks,
    gated,
    linear,
    norms,
    stacked,
    under,
)
from tests.published._sizes import size


@dataclass(frozen=True)
class Layout:
    """A published checkpoint, made tiny.

    Attributes:
        like: the repository on the Hugging Face Hub that has it.
        config: config.json.
        tensors: name -> dtype, shape.
        files: further files of JSON.
        weights: the file of the weights.
    """

    like: str
    config: Mapping[str, Any]
    tensors: Tensors
    files: Mapping[str, Any] = field(default_factory=dict)
    weights: str = "model.safetensors"


TEXT = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
TIED = {"tie_word_embeddings": True}


def text(kind: str, architecture: str = "", **keys: Any) -> dict[str, Any]:
    """The config.json of a language model; ``None`` takes one of the usual keys away, and is null of another."""
    named = {"architectures": [architecture]} if architecture else {}
    whole = {**named, "model_type": kind, **TEXT, **keys}
    return {key: value for key, value in whole.items() if value is not None or key not in TEXT}


def nested(kind: str, architecture: str, **parts: Any) -> dict[str, Any]:
    """The config.json of a model that has a language model as a part."""
    return {"architectures": [architecture], "model_type": kind, "torch_dtype": "bfloat16", **parts}


LLAMA = text("llama", "LlamaForCausalLM", rms_norm_eps=1e-5, attention_bias=False, mlp_bias=False)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DENSE = decoder(attention(), gated(), PRE)
DENSE_TIED = decoder(attention(), gated(), PRE, head="")
QWEN2 = decoder(attention(bias=True), gated(), PRE)
QWEN3 = decoder(attention(qk=WIDE, head=WIDE), gated(), PRE)
ROUTED = {**linear("mlp.gate", EXPERTS, H), **experts()}
QWEN3_MOE = decoder(attention(qk=WIDE, head=WIDE), ROUTED, PRE)
MOE = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": M,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
}
QWEN2_CONFIG = text("qwen2", "Qwen2ForCausalLM", use_sliding_window=False, sliding_window=512, max_window_layers=LAYERS)
QWEN3_CONFIG = text(
    "qwen3", "Qwen3ForCausalLM", head_dim=WIDE, attention_bias=False, use_sliding_window=False, max_window_layers=LAYERS
)
QWEN3_MOE_CONFIG = text(
    "qwen3_moe", "Qwen3MoeForCausalLM", head_dim=WIDE, attention_bias=False, max_window_layers=LAYERS, **MOE
)
LINEARS = r"layers\.\d+\.(self_attn|mlp)\..*proj$"

# ----------------------------------------------------------------- latent attention

LATENT = {
    "q_lora_rank": Q_LORA,
    "kv_lora_rank": KV_LORA,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "num_key_value_heads": HEADS,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "attention_bias": False,
    "attention_dropout": 0.0,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": M,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": SHARED_EXPERTS,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "ep_size": 1,
}
MLA = {
    **linear("self_attn.q_a_proj", Q_LORA, H),
    **norms("self_attn.q_a_layernorm", size=Q_LORA),
    **norms("self_attn.kv_a_layernorm", size=KV_LORA),
    **linear("self_attn.q_b_proj", HEADS * (NOPE + ROPE), Q_LORA),
    **linear("self_attn.kv_a_proj_with_mqa", KV_LORA + ROPE, H),
    **linear("self_attn.kv_b_proj", HEADS * (NOPE + VALUE), KV_LORA),
    **linear("self_attn.o_proj", H, HEADS * VALUE),
}
MLA_LITE = {
    **linear("self_attn.q_proj", HEADS * (NOPE + ROPE), H),
    **{name: tensor for name, tensor in MLA.items() if ".q_" not in name},
}
CORRECTION = bare("mlp.gate.e_score_correction_bias", EXPERTS, dtype="F32")
SHARED = gated("mlp.shared_experts", SHARED_EXPERTS * M)
INDEX_HEADS, INDEX_HEAD = size("index_heads", 4), size("index_head", 64)
INDEXER = {
    **linear("self_attn.indexer.wq_b", INDEX_HEADS * INDEX_HEAD, Q_LORA),
    **linear("self_attn.indexer.wk", INDEX_HEAD, H),
    **bare("self_attn.indexer.k_norm.weight", INDEX_HEAD, dtype="F32"),
    **bare("self_attn.indexer.k_norm.bias", INDEX_HEAD, dtype="F32"),
    **linear("self_attn.indexer.weights_proj", INDEX_HEADS, H),
}


def deepseek(*attend: Tensors, prefix: str = "model.", head: str = "lm_head", router: Tensors | None = None) -> Tensors:
    """A dense layer, and one of experts."""
    routed = {**ROUTED, **(CORRECTION if router is None else router), **SHARED}
    dense = stacked(f"{prefix}layers.", [0], *attend, gated(), PRE)
    return {**dense, **decoder(*attend, routed, PRE, prefix=prefix, head=head, layers=[1])}


def numbered_on(*layer: Tensors) -> Tensors:
    """A draft layer behind the two of the model, as DeepSeek-V3 and GLM-4.5 have it."""
    own = {**linear("eh_proj", H, 2 * H), **norms("enorm", "hnorm", "shared_head.norm")}
    shared = {**linear("embed_tokens", V, H), **linear("shared_head.head", V, H)}
    return stacked("model.layers.", [2], *layer, own, shared)


FP8_BLOCK = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
IN_BLOCKS = r"(self_attn|mlp|block_sparse_moe)\..*(proj(_with_mqa)?|wq_b|wk|w[123])$"
MLA_MOE = {**MLA, **ROUTED, **CORRECTION, **SHARED, **PRE}
DEEPSEEK_V3 = encode({**deepseek(MLA), **numbered_on(MLA_MOE)}, IN_BLOCKS, fp8_blocks)

# ----------------------------------------------------------------- vision towers

SIGLIP = under(
    "vision_model.",
    under("embeddings.", {**bare("patch_embedding.weight", VH, 3, PATCH, PATCH), **bare("patch_embedding.bias", VH)}),
    bare("embeddings.position_embedding.weight", PATCHES, VH),
    stacked(
        "encoder.layers.",
        1,
        *(linear(f"self_attn.{name}_proj", VH, VH, bias=True) for name in ("k", "v", "q", "out")),
        linear("mlp.fc1", VMLP, VH, bias=True),
        linear("mlp.fc2", VH, VMLP, bias=True),
        norms("layer_norm1", "layer_norm2", size=VH, bias=True),
    ),
    norms("post_layernorm", size=VH, bias=True),
)
SIGLIP_CONFIG = {
    "model_type": "siglip_vision_model",
    "hidden_size": VH,
    "intermediate_size": VMLP,
    "num_attention_heads": VHEADS,
    "num_hidden_layers": VLAYERS,
    "image_size": IMAGE,
    "patch_size": PATCH,
    "vision_use_head": False,
}
CLIP = {
    **{name: tensor for name, tensor in SIGLIP.items() if "patch_embedding.bias" not in name},
    **bare("vision_model.embeddings.class_embedding", VH),
    **bare("vision_model.embeddings.position_embedding.weight", PATCHES + 1, VH),
    **under("vision_model.", norms("pre_layrnorm", size=VH, bias=True)),
}
PIXTRAL = {
    **bare("patch_conv.weight", VH, 3, PATCH, PATCH),
    **norms("ln_pre", size=VH),
    **stacked(
        "transformer.layers.",
        1,
        *(linear(f"attention.{name}_proj", VH, VH) for name in "qkvo"),
        gated("feed_forward", VMLP, hidden=VH),
        norms("attention_norm", "ffn_norm", size=VH),
    ),
}
PIXTRAL_CONFIG = {
    "model_type": "pixtral",
    "hidden_size": VH,
    "head_dim": VHEAD,
    "intermediate_size": VMLP,
    "num_attention_heads": VHEADS,
    "num_hidden_layers": VLAYERS,
    "image_size": IMAGE,
    "patch_size": PATCH,
    "rope_theta": 10000.0,
}
QWEN_PATCH = bare("patch_embed.proj.weight", VH, 3, 2, PATCH, PATCH)
QWEN_ATTENTION = {**linear("attn.qkv", 3 * VH, VH, bias=True), **linear("attn.proj", VH, VH, bias=True)}
QWEN2_5_VISUAL = {
    **QWEN_PATCH,
    **stacked("blocks.", 1, norms("norm1", "norm2", size=VH), QWEN_ATTENTION, gated("mlp", VMLP, bias=True, hidden=VH)),
    **norms("merger.ln_q", size=VH),
    **linear("merger.mlp.0", 4 * VH, 4 * VH, bias=True),
    **linear("merger.mlp.2", H, 4 * VH, bias=True),
}
QWEN2_VISUAL = {
    **QWEN_PATCH,
    **stacked(
        "blocks.",
        1,
        norms("norm1", "norm2", size=VH, bias=True),
        QWEN_ATTENTION,
        linear("mlp.fc1", 4 * VH, VH, bias=True),
        linear("mlp.fc2", VH, 4 * VH, bias=True),
    ),
    **norms("merger.ln_q", size=VH, bias=True),
    **linear("merger.mlp.0", 4 * VH, 4 * VH, bias=True),
    **linear("merger.mlp.2", H, 4 * VH, bias=True),
}
QWEN2_5_VISION = {
    "model_type": "qwen2_5_vl",
    "depth": VLAYERS,
    "hidden_act": "silu",
    "hidden_size": VH,
    "intermediate_size": VMLP,
    "num_heads": VHEADS,
    "in_chans": 3,
    "out_hidden_size": H,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [0],
    "tokens_per_second": 2,
}
PATCH_16, POSITIONS = size("patch", 16), size("positions", 64)
QWEN3_VISUAL = {
    **bare("patch_embed.proj.weight", VH, 3, 2, PATCH_16, PATCH_16),
    **bare("patch_embed.proj.bias", VH),
    **bare("pos_embed.weight", POSITIONS, VH),
    **stacked(
        "blocks.",
        1,
        norms("norm1", "norm2", size=VH, bias=True),
        QWEN_ATTENTION,
        linear("mlp.linear_fc1", VMLP, VH, bias=True),
        linear("mlp.linear_fc2", VH, VMLP, bias=True),
    ),
    **norms("merger.norm", size=VH, bias=True),
    **linear("merger.linear_fc1", 4 * VH, 4 * VH, bias=True),
    **linear("merger.linear_fc2", H, 4 * VH, bias=True),
}
DEEPSTACK = stacked(
    "deepstack_merger_list.",
    1,
    norms("norm", size=4 * VH, bias=True),
    linear("linear_fc1", 4 * VH, 4 * VH, bias=True),
    linear("linear_fc2", H, 4 * VH, bias=True),
)
QWEN3_VISION = {
    "depth": VLAYERS,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": VH,
    "intermediate_size": VMLP,
    "num_heads": VHEADS,
    "in_channels": 3,
    "out_hidden_size": H,
    "patch_size": PATCH_16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": POSITIONS,
}
MROPE = {"type": "mrope", "mrope_section": [8, 12, 12]}
INTERLEAVED = {"mrope_interleaved": True, "mrope_section": [8, 12, 12], "rope_type": "default"}
VL_TOKENS = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}
QWEN2_5_VL_CONFIG = text(
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    vision_config=QWEN2_5_VISION,
    rope_scaling=MROPE,
    use_sliding_window=False,
    max_window_layers=LAYERS,
    sliding_window=512,
    **VL_TOKENS,
)

# ----------------------------------------------------------------- wrappers


def wrapped(prefix: str, *layer: Tensors, head: str = "language_model.lm_head", **others: Tensors) -> Tensors:
    """A language model under a prefix, with the parts beside it by their prefixes (``__`` for a dot)."""
    found = decoder(*layer, prefix=prefix, head=head)
    for name, part in others.items():
        found |= under(f"{name.replace('__', '.')}.", part)
    return found


LLAVA_PROJECTOR = {**linear("linear_1", H, VH, bias=True), **linear("linear_2", H, H, bias=True)}
MISTRAL3_PROJECTOR = {
    **norms("norm", size=VH),
    **linear("patch_merger.merging_layer", VH, 4 * VH),
    **linear("linear_1", H, VH),
    **linear("linear_2", H, H),
}
MISTRAL3_KEYS = {
    "image_token_index": 10,
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "vision_feature_layer": -1,
    "vision_config": PIXTRAL_CONFIG,
}
MISTRAL_TEXT = text("mistral", head_dim=HEAD, rms_norm_eps=1e-5, sliding_window=None, tie_word_embeddings=None)
MISTRAL3 = wrapped(
    "language_model.model.",
    attention(),
    gated(),
    PRE,
    vision_tower=PIXTRAL,
    multi_modal_projector=MISTRAL3_PROJECTOR,
)
GEMMA3_TEXT = text(
    "gemma3_text",
    hidden_act=None,
    hidden_activation="gelu_pytorch_tanh",
    head_dim=HEAD,
    query_pre_attn_scalar=HEAD,
    rope_local_base_freq=10000.0,
    sliding_window=512,
    sliding_window_pattern=2,
    final_logit_softcapping=None,
    attn_logit_softcapping=None,
    cache_implementation="hybrid",
    tie_word_embeddings=None,
)
GEMMA3_LAYER = ({**attention(qk=HEAD)}, gated(), FOUR)
GEMMA3_PROJECTOR = {**bare("mm_input_projection_weight", VH, H), **norms("mm_soft_emb_norm", size=VH)}
GEMMA3 = wrapped(
    "language_model.model.",
    *GEMMA3_LAYER,
    head="",
    vision_tower=SIGLIP,
    multi_modal_projector=GEMMA3_PROJECTOR,
)
GEMMA3_CONFIG = nested(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    text_config=GEMMA3_TEXT,
    vision_config=SIGLIP_CONFIG,
    mm_tokens_per_image=1,
    image_token_index=250,
    boi_token_index=251,
    eoi_token_index=252,
    eos_token_id=[1, 106],
    initializer_range=0.02,
)
MLLAMA_CROSS = {
    **attention("cross_attn", qk=HEAD),
    **bare("cross_attn_attn_gate", 1),
    **bare("cross_attn_mlp_gate", 1),
    **gated(),
    **PRE,
}
MLLAMA_OUT, MLLAMA_GLOBAL = size("vision_out", 512), size("vision_global_layers", 1)
MLLAMA_VISION_LAYER = (
    *(linear(f"self_attn.{name}_proj", VH, VH) for name in "qkvo"),
    linear("mlp.fc1", VMLP, VH, bias=True),
    linear("mlp.fc2", VH, VMLP, bias=True),
    norms("input_layernorm", "post_attention_layernorm", size=VH, bias=True),
)
MLLAMA_VISION = {
    **bare("class_embedding", VH),
    **bare("gated_positional_embedding.embedding", PATCHES + 1, VH),
    **bare("gated_positional_embedding.gate", 1),
    **bare("gated_positional_embedding.tile_embedding.weight", 9, 4 * (PATCHES + 1) * VH),
    **stacked("global_transformer.layers.", 1, *MLLAMA_VISION_LAYER, bare("gate_attn", 1), bare("gate_ffn", 1)),
    **norms("layernorm_post", "layernorm_pre", size=VH, bias=True),
    **bare("patch_embedding.weight", VH, 3, PATCH, PATCH),
    **bare("post_tile_positional_embedding.embedding.weight", 9, 4 * VH),
    **bare("post_tile_positional_embedding.gate", 1),
    **bare("pre_tile_positional_embedding.embedding.weight", 9, 4 * VH),
    **bare("pre_tile_positional_embedding.gate", 1),
    **stacked("transformer.layers.", 1, *MLLAMA_VISION_LAYER),
}
MLLAMA = {
    **wrapped(
        "language_model.model.",
        attention(),
        gated(),
        PRE,
        vision_model=MLLAMA_VISION,
        multi_modal_projector={"weight": ("BF16", (H, MLLAMA_OUT)), "bias": ("BF16", (H,))},
    ),
    **bare("language_model.model.embed_tokens.weight", V + 8, H),
}
MLLAMA = {name: tensor for name, tensor in MLLAMA.items() if ".model.layers.1." not in name or "vision" in name}
MLLAMA |= stacked("language_model.model.layers.", [1], MLLAMA_CROSS)
LLAMA4_EXPERTS = {
    **bare("feed_forward.experts.gate_up_proj", EXPERTS, H, 2 * MLP),
    **bare("feed_forward.experts.down_proj", EXPERTS, MLP, H),
    **linear("feed_forward.router", EXPERTS, H),
    **gated("feed_forward.shared_expert"),
}
LLAMA4_OUT = size("vision_out", 256)
LLAMA4_VISION = {
    **bare("class_embedding", VH),
    **bare("positional_embedding_vlm", PATCHES + 1, VH),
    **linear("patch_embedding.linear", VH, 3 * PATCH * PATCH),
    **norms("layernorm_pre", "layernorm_post", size=VH, bias=True),
    **stacked(
        "model.layers.",
        1,
        *(linear(f"self_attn.{name}_proj", VH, VH, bias=True) for name in "qkvo"),
        linear("mlp.fc1", VMLP, VH, bias=True),
        linear("mlp.fc2", VH, VMLP, bias=True),
        norms("input_layernorm", "post_attention_layernorm", size=VH, bias=True),
    ),
    **linear("vision_adapter.mlp.fc1", LLAMA4_OUT, VMLP),
    **linear("vision_adapter.mlp.fc2", LLAMA4_OUT, LLAMA4_OUT),
}
DELTA_K, DELTA_V = DELTA_KEYS * DELTA_HEAD, DELTA_VALUES * DELTA_HEAD
DELTA = {
    **bare("linear_attn.A_log", DELTA_VALUES),
    **bare("linear_attn.dt_bias", DELTA_VALUES),
    **bare("linear_attn.conv1d.weight", 2 * DELTA_K + DELTA_V, 1, 4),
    **bare("linear_attn.norm.weight", DELTA_HEAD, dtype="F32"),
    **linear("linear_attn.out_proj", H, DELTA_V),
}
DELTA_NEXT = {
    **DELTA,
    **linear("linear_attn.in_proj_qkvz", 2 * DELTA_K + 2 * DELTA_V, H),
    **linear("linear_attn.in_proj_ba", 2 * DELTA_VALUES, H),
}
DELTA_3_5 = {
    **DELTA,
    **linear("linear_attn.in_proj_qkv", 2 * DELTA_K + DELTA_V, H),
    **linear("linear_attn.in_proj_z", DELTA_V, H),
    **linear("linear_attn.in_proj_b", DELTA_VALUES, H),
    **linear("linear_attn.in_proj_a", DELTA_VALUES, H),
}
GATED_ATTENTION = {**attention(qk=HEAD), **linear("self_attn.q_proj", 2 * Q, H)}
SHARED_EXPERT = {**gated("mlp.shared_expert", M), **linear("mlp.shared_expert_gate", 1, H)}
STACKS_3_5 = {
    **linear("mlp.gate", EXPERTS, H),
    **bare("mlp.experts.gate_up_proj", EXPERTS, 2 * M, H),
    **bare("mlp.experts.down_proj", EXPERTS, H, M),
    **SHARED_EXPERT,
}
LINEAR_KEYS = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": DELTA_HEAD,
    "linear_num_key_heads": DELTA_KEYS,
    "linear_num_value_heads": DELTA_VALUES,
    "linear_value_head_dim": DELTA_HEAD,
    "head_dim": HEAD,
    "attention_bias": False,
    "attn_output_gate": True,
}


def mtp(*layer: Tensors) -> Tensors:
    """Qwen's draft layer."""
    own = {**linear("fc", H, 2 * H), **norms("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    return under("mtp.", own, stacked("layers.", 1, *layer))


def mixed(prefix: str, first: Tensors, second: Tensors, head: str = "lm_head") -> Tensors:
    """A model whose two layers differ."""
    return {
        **stacked(f"{prefix}layers.", [0], first),
        **decoder(second, prefix=prefix, head=head, layers=[1]),
    }


QWEN3_NEXT_MLP = {**ROUTED, **SHARED_EXPERT}
QWEN3_5_TEXT = text(
    "qwen3_5_text",
    layer_types=["linear_attention", "full_attention"],
    full_attention_interval=2,
    mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False,
    rope_theta=None,
    rope_parameters={**INTERLEAVED, "mrope_section": [3, 3, 2], "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    **LINEAR_KEYS,
)

GEMMA3N_LAYER = {
    **attention(qk=HEAD),
    **gated(),
    **FOUR,
    **bare("altup.correct_output_scale", H),
    **linear("altup.correction_coefs", 4, 4),
    **linear("altup.prediction_coefs", 16, 4),
    **linear("altup.modality_router", 4, H),
    **norms("altup.router_norm"),
    **linear("laurel.linear_left", 32, H),
    **linear("laurel.linear_right", H, 32),
    **norms("laurel.post_laurel_norm"),
    **linear("per_layer_input_gate", 32, H),
    **linear("per_layer_projection", H, 32),
    **norms("post_per_layer_input_norm"),
}
GEMMA3N = {
    **decoder(GEMMA3N_LAYER, prefix="model.language_model.", head=""),
    **under(
        "model.language_model.",
        linear("embed_tokens_per_layer", V, 64),
        linear("per_layer_model_projection", 64, H),
        norms("per_layer_projection_norm", size=32),
        stacked("altup_projections.", 3, {"weight": ("BF16", (H, H))}),
        stacked("altup_unembed_projections.", 3, {"weight": ("BF16", (H, H))}),
    ),
    **bare("model.vision_tower.timm_model.conv_stem.conv.weight", 64, 3, 3, 3),
    **bare("model.vision_tower.timm_model.conv_stem.bn.weight", 64),
    **linear("model.embed_vision.embedding_projection", H, H),
    **linear("model.embed_vision.embedding", 8, H),
    **norms("model.embed_vision.hard_embedding_norm", "model.embed_vision.soft_embedding_norm"),
    **linear("model.embed_audio.embedding_projection", H, H),
    **linear("model.embed_audio.embedding", 8, H),
    **norms("model.embed_audio.hard_embedding_norm", "model.embed_audio.soft_embedding_norm"),
    **linear("model.audio_tower.subsample_conv_projection.input_proj_linear", H, H),
}
GEMMA4_LAYER = {**attention(qk=HEAD), **gated(), **FOUR, **bare("layer_scalar", 1)}
GEMMA4_SMALL = {
    **decoder(
        {
            **GEMMA4_LAYER,
            **linear("per_layer_input_gate", 32, H),
            **linear("per_layer_projection", H, 32),
            **norms("post_per_layer_input_norm"),
        },
        prefix="model.language_model.",
        head="",
    ),
    **under(
        "model.language_model.",
        linear("embed_tokens_per_layer", V, 64),
        linear("per_layer_model_projection", 64, H),
        norms("per_layer_projection_norm", size=32),
    ),
}

# ----------------------------------------------------------------- state space

MAMBA2 = {
    **bare("A_log", MAMBA_HEADS),
    **bare("D", MAMBA_HEADS),
    **bare("conv1d.weight", INNER + 2 * MAMBA_GROUPS * STATE, 1, 4),
    **bare("conv1d.bias", INNER + 2 * MAMBA_GROUPS * STATE),
    **bare("dt_bias", MAMBA_HEADS),
    **linear("in_proj", 2 * INNER + 2 * MAMBA_GROUPS * STATE + MAMBA_HEADS, H),
    **linear("out_proj", H, INNER),
}
DT_RANK = size("dt_rank", 8)
JAMBA_MAMBA = under(
    "mamba.",
    bare("A_log", 2 * H, STATE),
    bare("D", 2 * H),
    bare("conv1d.weight", 2 * H, 1, 4),
    bare("conv1d.bias", 2 * H),
    linear("dt_proj", 2 * H, DT_RANK, bias=True),
    linear("in_proj", 4 * H, H),
    linear("out_proj", H, 2 * H),
    linear("x_proj", DT_RANK + 2 * STATE, 2 * H),
    norms("b_layernorm", "c_layernorm", size=STATE),
    norms("dt_layernorm", size=DT_RANK),
)
GRANITE_SHARED = {**linear("shared_mlp.input_linear", 2 * MLP, H), **linear("shared_mlp.output_linear", H, MLP)}
GRANITE_STACKS = {
    **bare("block_sparse_moe.input_linear.weight", EXPERTS, 2 * M, H),
    **bare("block_sparse_moe.output_linear.weight", EXPERTS, H, M),
    **linear("block_sparse_moe.router.layer", EXPERTS, H),
}
GRANITE_KEYS = {
    "attention_bias": False,
    "attention_multiplier": 0.0625,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
}
HYBRID_KEYS = {
    **GRANITE_KEYS,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": MAMBA_HEAD,
    "mamba_d_state": STATE,
    "mamba_expand": 2,
    "mamba_n_groups": MAMBA_GROUPS,
    "mamba_n_heads": MAMBA_HEADS,
    "mamba_proj_bias": False,
    "position_embedding_type": "nope",
    "shared_intermediate_size": MLP,
    **TIED,
}
GPT_OSS_LAYER = {
    **attention(bias=True, out_bias=True),
    **bare("self_attn.sinks", HEADS),
    **PRE,
    **linear("mlp.router", EXPERTS, H, bias=True),
    **bare("mlp.experts.gate_up_proj_blocks", EXPERTS, 2 * H, H // 32, 16, dtype="U8"),
    **bare("mlp.experts.gate_up_proj_scales", EXPERTS, 2 * H, H // 32, dtype="U8"),
    **bare("mlp.experts.gate_up_proj_bias", EXPERTS, 2 * H),
    **bare("mlp.experts.down_proj_blocks", EXPERTS, H, H // 32, 16, dtype="U8"),
    **bare("mlp.experts.down_proj_scales", EXPERTS, H, H // 32, dtype="U8"),
    **bare("mlp.experts.down_proj_bias", EXPERTS, H),
}
GLM_MOE_KEYS = {
    "head_dim": HEAD,
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": M,
    "n_group": 1,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": SHARED_EXPERTS,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "use_qk_norm": False,
}
GLM_MOE = {**ROUTED, **CORRECTION, **SHARED}
GLM_4_5 = {
    **stacked("model.layers.", [0], attention(bias=True), gated(), PRE),
    **decoder(attention(bias=True), GLM_MOE, PRE, layers=[1]),
    **numbered_on(attention(bias=True), GLM_MOE, PRE),
}
GLM4V_VISUAL = {
    **bare("embeddings.position_embedding.weight", PATCHES, VH),
    **bare("patch_embed.proj.weight", VH, 3, 2, PATCH, PATCH),
    **bare("patch_embed.proj.bias", VH),
    **stacked(
        "blocks.",
        1,
        norms("norm1", "norm2", size=VH),
        linear("attn.qkv", 3 * VH, VH),
        linear("attn.proj", VH, VH),
        gated("mlp", H, hidden=VH),
    ),
    **linear("merger.proj", H, H),
    **norms("merger.post_projection_norm", bias=True),
    **gated("merger", VMLP),
    **norms("post_conv_layernorm", "post_layernorm", size=VH),
    **bare("downsample.weight", H, VH, 2, 2),
    **bare("downsample.bias", H),
}
PHI4MM_LORA = {}
for _name, _rows, _cols in (
    ("self_attn.qkv_proj", Q + 2 * KV, H),
    ("self_attn.o_proj", H, Q),
    ("mlp.gate_up_proj", 2 * MLP, H),
    ("mlp.down_proj", H, MLP),
):
    PHI4MM_LORA |= linear(f"{_name}.base_layer", _rows, _cols)
    for _branch in ("vision", "speech"):
        PHI4MM_LORA |= {
            **linear(f"{_name}.lora_A.{_branch}", 32, _cols),
            **linear(f"{_name}.lora_B.{_branch}", _rows, 32),
        }
PHI3_LAYER = (
    linear("self_attn.qkv_proj", Q + 2 * KV, H),
    linear("self_attn.o_proj", H, Q),
    linear("mlp.gate_up_proj", 2 * MLP, H),
    linear("mlp.down_proj", H, MLP),
    PRE,
)
PHI3_KEYS = {
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "original_max_position_embeddings": 512,
    "pad_token_id": 0,
    "sliding_window": 512,
}
KIMI_VIT = {
    **linear("patch_embed.pos_emb", 64, VH),
    **bare("patch_embed.proj.weight", VH, 3, PATCH, PATCH),
    **bare("patch_embed.proj.bias", VH),
    **norms("encoder.final_layernorm", size=VH, bias=True),
    **stacked(
        "encoder.blocks.",
        1,
        norms("norm0", "norm1", size=VH, bias=True),
        linear("wqkv", 3 * VH, VH, bias=True),
        linear("wo", VH, VH, bias=True),
        linear("mlp.fc0", VMLP, VH, bias=True),
        linear("mlp.fc1", VH, VMLP, bias=True),
    ),
}
KIMI_K2 = text("kimi_k2", "DeepseekV3ForCausalLM", num_nextn_predict_layers=0, aux_loss_alpha=0.001, **LATENT)
KIMI_INT4 = compressed(
    "pack-quantized",
    {**W4, "group_size": 32},
    None,
    ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
)
INTERN_VIT = {
    **bare("embeddings.class_embedding", 1, 1, VH),
    **bare("embeddings.patch_embedding.weight", VH, 3, PATCH, PATCH),
    **bare("embeddings.patch_embedding.bias", VH),
    **bare("embeddings.position_embedding", 1, PATCHES + 1, VH),
    **stacked(
        "encoder.layers.",
        1,
        bare("ls1", VH),
        bare("ls2", VH),
        norms("norm1", "norm2", size=VH, bias=True),
        linear("attn.qkv", 3 * VH, VH, bias=True),
        linear("attn.proj", VH, VH, bias=True),
        linear("mlp.fc1", VMLP, VH, bias=True),
        linear("mlp.fc2", VH, VMLP, bias=True),
    ),
}
INTERNVL_TEXT = text("qwen2", "Qwen2ForCausalLM", use_sliding_window=False, max_window_layers=LAYERS)
INTERNVL_MLP = {
    **norms("0", size=4 * VH, bias=True),
    **linear("1", H, 4 * VH, bias=True),
    **linear("3", H, H, bias=True),
}
INTERNVL_HF_VISION = {
    **bare("embeddings.cls_token", 1, 1, VH),
    **bare("embeddings.patch_embeddings.projection.weight", VH, 3, PATCH, PATCH),
    **bare("embeddings.patch_embeddings.projection.bias", VH),
    **bare("embeddings.position_embeddings", 1, PATCHES + 1, VH),
    **stacked(
        "encoder.layer.",
        1,
        *(linear(f"attention.{name}_proj", VH, VH, bias=True) for name in "qkv"),
        linear("attention.projection_layer", VH, VH, bias=True),
        bare("lambda_1", VH),
        bare("lambda_2", VH),
        norms("layernorm_before", "layernorm_after", size=VH, bias=True),
        linear("mlp.fc1", VMLP, VH, bias=True),
        linear("mlp.fc2", VH, VMLP, bias=True),
    ),
}
KEPT_VISION = ["visual"]
AWQ_CONFIG = {
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}


def gptq_config(*, act_order: bool) -> dict[str, Any]:
    """AutoGPTQ's."""
    return {
        "bits": 4,
        "damp_percent": 0.01,
        "desc_act": act_order,
        "group_size": 128,
        "quant_method": "gptq",
        "static_groups": False,
        "sym": True,
        "true_sequential": True,
    }


def modelopt(algo: str, **keys: Any) -> dict[str, Any]:
    """hf_quant_config.json."""
    said = {"quant_algo": algo, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"], **keys}
    return {"hf_quant_config.json": {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": said}}


KV_SCALES = stacked(
    "model.layers.",
    2,
    bare("self_attn.k_proj.k_scale", dtype="F32"),
    bare("self_attn.v_proj.v_scale", dtype="F32"),
)
