"""How the tiny models of GGUF's tests differ from their types' defaults, since llama.cpp computes no others."""

from __future__ import annotations

import functools
import json
from typing import Any

from tests.helpers.tiny_overrides import ROPE

_TURNED = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
_PARTLY_TURNED = {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}
_TURNED_BY_ALPHA = {**_TURNED, "rope_type": "dynamic", "alpha": 100.0, "factor": 1.0}
_YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 32}
_GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "per_layer_config": {"1": {"head_dim": 64}, "3": {"head_dim": 64}},
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
_GRANITE_MULTIPLIERS = {
    "attention_multiplier": 0.25,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
}
_MUSE = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "layer_rope_theta": [1e4, 1e4, 0],
    "sliding_window": 8,
    "output_multiplier": 0.25,
}
_STEP = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "num_sliding_attention_heads": 6,
    "per_layer_config": {"1": {"num_attention_heads": 6}, "2": {"num_attention_heads": 6}},
    "sliding_window": 8,
    "share_expert_dim": 64,
    "moe_router_scaling_factor": 3.0,
    "swiglu_limits": [None, 0.05, None, None],
    "swiglu_limits_shared": [0.0625, None, 0.125, None],
    "rope_parameters": {
        "full_attention": {
            "rope_type": "llama3",
            "rope_theta": 5e6,
            "partial_rotary_factor": 0.5,
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 32.0,
            "original_max_position_embeddings": 64,
        },
        "sliding_attention": ROPE,
    },
}
_SWA = {
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", *["sliding_attention"] * 2],
    "layer_rope_theta": [1e4, 1e4, 0],
    **_GRANITE_MULTIPLIERS,
}

CHANGES: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": {"rope_parameters": _TURNED},
    "qwen2_5_vl_text": {"rope_parameters": _TURNED},
    "qwen2_5_omni_text": {"rope_parameters": _TURNED},
    "paddleocr_vl_text": {"rope_parameters": _TURNED},
    "qwen3_vl_text": {"rope_parameters": _TURNED},
    "qwen3_omni_moe_text": {"rope_parameters": _TURNED},
    "granite4_vision_text": _GRANITE_MULTIPLIERS,
    "muse_glimmer_text": _MUSE,
    "step3p5": _STEP,
    "qwen3_vl_moe_text": {"rope_parameters": _TURNED, "tie_word_embeddings": False},
    **{
        kind: {"rope_parameters": {**_TURNED, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}}
        for kind in ("qwen3_5_text", "qwen3_5_moe_text")
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "qwen3_moe": {"norm_topk_prob": True},
    "exaone4": {
        "sliding_window": None,
        "sliding_window_pattern": None,
        "layer_types": ["full_attention", "full_attention"],
        "num_hidden_layers": 2,
    },
    "olmoe": {"num_key_value_heads": 4},
    "dots1": {"num_key_value_heads": 4},
    "llama4_text": {
        "num_hidden_layers": 4,
        "layer_types": [*["chunked_attention"] * 3, "full_attention"],
        "no_rope_layers": [1, 1, 1, 0],
        "interleave_moe_layer_step": 2,
        "moe_layers": [1, 3],
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "afmoe": {
        "num_hidden_layers": 4,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "mup_enabled": True,
    },
    "hunyuan_vl_text": {"rope_parameters": _TURNED_BY_ALPHA, "head_dim": 32},
    **{kind: {"rope_parameters": _PARTLY_TURNED} for kind in ("glm4v_text", "glm_ocr_text", "glm4v_moe_text")},
    "granite_swa": _SWA,
    "granitemoe_swa": {**_SWA, "shared_intermediate_size": 64},
    "mistral4": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
            "partial_rotary_factor": 0.5,
        }
    },
    "mellum": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": {**_YARN, "rope_theta": 1e4}, "sliding_attention": ROPE},
    },
    "laguna": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_attention_heads_per_layer": [4, 6, 6],
        "moe_routed_scaling_factor": 2.5,
        "rope_parameters": {
            "full_attention": {**_YARN, "partial_rotary_factor": 0.5},
            "sliding_attention": ROPE,
        },
    },
    "deepseek_v32": {"index_head_dim": 64},
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "index_head_dim": 64,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "qk_rope_head_dim": 8,
        "swiglu_limit": 0.5,
    },
    "glm_moe_dsa": {
        "index_head_dim": 64,
        "num_hidden_layers": 3,
        "indexer_types": ["full", "full", "shared"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["indexed_attention"] * 3,
    },
    "glm5_next_text": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
        "indexer_types": ["full", "full", "shared", "full"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "swiglu_limit": 0.5,
    },
    "mimo_v2_flash": {
        "rope_parameters": {
            "full_attention": {**ROPE, "rope_theta": 5e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {**ROPE, "partial_rotary_factor": 0.5},
        },
        "v_head_dim": 16,
    },
    "minimax_m3_vl_text": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        "shared_intermediate_size": 256,
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention"]},
}
"""Model type -> settings of config.json beside those of :mod:`tests.helpers.tiny_overrides`."""

NOT_IN_TRANSFORMERS = ("kimi_k2",)
"""Types of the table whose models have code of their own."""

WRAPPED: dict[str, dict[str, Any]] = {
    "gemma3": {},
    "gemma4": {
        "text_config": {
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "per_layer_config": {"1": {"head_dim": 64, "num_key_value_heads": 1}},
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 128,
        }
    },
    "mistral3": {"text_config": {"sliding_window": None}},
    "qwen2_vl": {"text_config": {"rope_parameters": _TURNED}},
    "qwen2_5_vl": {"text_config": {"rope_parameters": _TURNED}},
    "qwen3_vl": {"text_config": {"rope_parameters": {**_TURNED, "mrope_interleaved": True}}},
    "qwen3_vl_moe": {"text_config": {"rope_parameters": {**_TURNED, "mrope_interleaved": True}}},
    "voxtral": {},
    **{kind: {"text_config": {"rope_parameters": _PARTLY_TURNED}} for kind in ("glm4v", "glm_ocr", "glm4v_moe")},
    "hunyuan_vl": {"text_config": {"rope_parameters": _TURNED_BY_ALPHA, "head_dim": 32}},
    "granite_docling": {"vision_config": {"out_hidden_size": 128, "num_position_embeddings": 64}},
    "qwen3_5": {"vision_config": {"out_hidden_size": 128, "num_position_embeddings": 64}},
    "gemma4_unified": {"text_config": _GEMMA4},
    "glm5_next": {"text_config": CHANGES["glm5_next_text"]},
    "minimax_m3_vl": {"text_config": CHANGES["minimax_m3_vl_text"]},
    "granite4_vision": {
        "text_config": {**_GRANITE_MULTIPLIERS, "num_hidden_layers": 4},
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-1, 0], [-2, 1]],
        "spatial_target_layers": [2, 3],
    },
    "muse_glimmer": {"text_config": _MUSE},
    "step3p7": {"text_config": _STEP},
    "paddleocr_vl": {"text_config": {"rope_parameters": _TURNED}},
    "qwen2_5_omni_thinker": {"text_config": {"rope_parameters": _TURNED}},
    "qwen3_omni_moe_thinker": {"text_config": {"rope_parameters": {**_TURNED, "mrope_interleaved": True}}},
}
"""Models that also see or hear, and the settings of their parts; their language models are of types of the table."""
_SEEN = {"vision_config": {"out_hidden_size": 128, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}}
for _kind in ("qwen3_vl", "qwen3_vl_moe"):
    WRAPPED[_kind] |= _SEEN

ONLY_WRAPPED = (
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "glm4v_text", "glm_ocr_text"),
    *("glm4v_moe_text", "hunyuan_vl_text", "granite_docling_text", "granite4_vision_text", "paddleocr_vl_text"),
    *("qwen2_5_omni_text", "qwen3_omni_moe_text", "muse_glimmer_text", "step3p5", "glm5_next_text"),
)
"""Types of the table whose models transformers has as parts of others alone."""

EXPERTS = 4
"""Of every tiny model that has any."""

CONFORMANCE: dict[str, dict[str, Any]] = {
    "falcon_h1": {
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 0.8,
        "key_multiplier": 0.4,
        "embedding_multiplier": 5.5,
        "lm_head_multiplier": 0.3,
        "mlp_multipliers": [0.9, 0.6],
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.35],
        "ssm_out_multiplier": 0.24,
    },
    "mistral": {"sliding_window": None},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "smollm3": {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4, "no_rope_layers": [1, 1, 1, 0]},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "granitemoeshared": {"shared_intermediate_size": 128},
}
"""The same, of models that are computed: kinds of layers that the shrunk defaults lack."""


@functools.cache
def _tiny_config(kind: str) -> str:
    from tests.helpers.tiny_models import tiny_config

    return json.dumps({**json.loads(tiny_config(kind).to_json_string()), **CHANGES.get(kind, {})})


def gguf_tiny_config(kind: str) -> dict[str, Any]:
    """config.json of a tiny model of that type, as llama.cpp can compute it."""
    found: dict[str, Any] = json.loads(_tiny_config(kind))
    return found


def gguf_tiny_model(kind: str) -> Any:
    """A random model of that type in float32, as llama.cpp can compute it."""
    import zlib

    import torch

    from tests.helpers import tiny_models
    from tests.helpers.tiny_overrides import OVERRIDES

    own = {**OVERRIDES.get(kind, {}), **CHANGES.get(kind, {}), **CONFORMANCE.get(kind, {}), **WRAPPED.get(kind, {})}
    config = tiny_models.tiny_config(kind, own)
    seed = zlib.crc32(kind.encode())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = tiny_models.model_class(kind)(config)
    tiny_models.random_weights(model, torch.Generator().manual_seed(seed))
    for parameter in model.parameters():
        if parameter.dim() == 2 and parameter.shape[0] == EXPERTS:  # a router: it is not to decide by next to nothing
            parameter.data *= 16
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):  # the experts of each token, as they are published: no token has one twice
            buffer.data = (
                torch.rand(buffer.shape[0], EXPERTS, generator=torch.Generator().manual_seed(seed))
                .argsort(-1)[:, : buffer.shape[1]]
                .contiguous()
            )
    return model.float().eval()
