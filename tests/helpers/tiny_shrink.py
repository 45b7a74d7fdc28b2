"""How a config class's defaults are made tiny: sizes by the names that transformers' config classes give them.

Data for ``tiny_models.py``. What one type needs beyond the common names is in ``tiny_overrides.py``.
"""

from __future__ import annotations

from typing import Any

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 128, 4, 2, 32, 256, 250

# Field of a config class -> its value, where the class's default is not None (nor 0, nor a list).
COMMON: dict[str, Any] = {
    **dict.fromkeys(
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "dim",
            "emb_dim",
            "embedding_dim",
            "embedding_size",
            "input_embedding_size",
        ),
        HIDDEN,
    ),
    **dict.fromkeys(("word_embed_proj_dim", "lru_width", "backbone_hidden_size", "hidden_size_global"), HIDDEN),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "decoder_layers",
            "encoder_layers",
            "num_decoder_layers",
            "num_encoder_layers",
            "depth",
            "num_blocks",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "decoder_attention_heads",
            "encoder_attention_heads",
            "num_encoder_attention_heads",
            "num_decoder_attention_heads",
            "attention_heads",
            "swa_num_attention_heads",
            "linear_num_heads",
            "conf_num_attention_heads",
        ),
        HEADS,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads"), KV_HEADS),
    **dict.fromkeys(
        ("head_dim", "attention_head_size", "d_head", "d_kv", "dim_head", "swa_head_dim", "linear_head_dim"), HEAD_DIM
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "intermediate_size_mlp",
            "dense_intermediate_size",
            "ffn_dim",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "ffn_hidden_size",
            "dim_ff",
            "dff",
            "d_ff",
            "d_inner",
            "n_inner",
            "mlp_dim",
            "feed_forward_size",
        ),
        INTERMEDIATE,
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "expert_ffn_hidden_size",
            "shared_expert_intermediate_size",
            "shared_experts_intermediate_size",
            "shared_intermediate_size",
            "moe_shared_expert_intermediate_size",
        ),
        128,
    ),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    "moe_layer_end_index": 1,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 64),
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 32,
    "v_head_dim": 32,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "index_topk": 8,
    "index_kpool": 4,
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length", "context_length"), 128
    ),
    **dict.fromkeys(("sliding_window", "window_size", "sliding_window_size", "attention_window_size"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 16),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), HEAD_DIM),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 16),
    "mamba_n_heads": 8,
    "mamba_d_head": "auto",
    "n_groups": 2,
    "time_step_rank": 8,
    "num_nextn_predict_layers": 0,
    "hidden_size_per_layer_input": 32,
    "rotary_dim": 16,
    "query_pre_attn_scalar": 32,
    "image_size": 28,
    "patch_size": 14,
}

# Set even where the default is None.
ALWAYS: dict[str, Any] = {"num_key_value_heads": KV_HEADS, "bos_token_id": 1, "eos_token_id": 2}

# Lists with an entry for each layer: the first layer of every combination is kept.
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")
