"""What single model types need beyond the common sizes: settings, classes, and why some cannot be made here.

Data for ``tests/helpers/tiny_models.py``. A setting whose value is a dict, named as a sub-config, is that sub-config's.
"""

from __future__ import annotations

from typing import Any

ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_DOTS3_TEXT = {
    "num_key_value_heads": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 64,
    "swa_kv_lora_rank": 64,
    "swa_head_dim": 32,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 32,
}

_GEMMA3N_TEXT = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "intermediate_size": 256,
    "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
    "laurel_rank": 32,
}

_QWEN4_TEXT = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 32,
}

_VISION = {"out_hidden_size": 128, "num_position_embeddings": 64}

_AUDIO_DECODER = {"audio_encoder": {"num_filters": 4, "codebook_size": 256, "codebook_dim": 32, "hidden_size": 32}}

OVERRIDES: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 50, "local_attention_window_len": 16},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note": {
        "text_config": _DOTS3_TEXT,
        "vision_config": {"adapter_in_dim": 128, "adapter_out_dim": 128, "pyramid_num_routed": [-1, 4]},
        "audio_config": {"adapter_input_size": 128, "adapter_out_dim": 128, "downsample_hidden_size": 32},
    },
    "dots3_note_text": _DOTS3_TEXT,
    "emu3": {
        "vocabulary_map": {
            "<image>": 200,
            "<|extra_200|>": 201,
            **{f"<|visual token {i:06d}|>": 210 + i for i in range(32)},
        },
        "vq_config": {"base_channels": 32, "codebook_size": 32, "hidden_size": 64},
    },
    "falcon_h1": {"mamba_d_ssm": 256},
    "gemma3n_text": _GEMMA3N_TEXT,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "jamba": {
        "num_hidden_layers": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_offset": 0,
        "mamba_dt_rank": 8,
    },
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "llama4": {"vision_config": {"projector_input_dim": 128, "projector_output_dim": 128, "vision_output_dim": 128}},
    "longcat_flash": {"head_dim": 16},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 32},
    "mllama": {
        "text_config": {"cross_attention_layers": [1]},
        "vision_config": {"intermediate_layers_indices": [0], "num_global_layers": 1, "vision_output_dim": 256},
    },
    "musicgen": _AUDIO_DECODER,
    "musicgen_melody": _AUDIO_DECODER,
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 32},
    "phi4_multimodal": {
        "audio_config": {"ext_pw_out_channel": 128, "depthwise_separable_out_channel": 128, "nemo_conv_channels": 64}
    },
    "qwen3_5": {"vision_config": _VISION},
    "qwen3_5_moe": {"vision_config": _VISION},
    "qwen4_exp": {"text_config": _QWEN4_TEXT, "vision_config": _VISION},
    "qwen4_exp_text": _QWEN4_TEXT,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [8, 16],
        "axial_pos_embds_dim": [32, 96],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "roc_bert": {
        "shape_vocab_size": 250,
        "shape_embed_dim": 32,
        "pronunciation_vocab_size": 250,
        "pronunciation_embed_dim": 32,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}

# Types whose checkpoints hold more than the causal language model's class: what is saved instead.
CLASSES: dict[str, str] = {
    "dots3_note": "Dots3NoteForConditionalGeneration",
    "emu3": "Emu3ForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "mllama": "MllamaForConditionalGeneration",
    "musicgen": "MusicgenForConditionalGeneration",
    "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen4_exp": "Qwen4ExpForConditionalGeneration",
}

_ASSISTANT = (
    "transformers 5.23 cannot build it: the config has every layer share another model's keys and values, "
    "and the layers refuse that"
)

NOT_MADE: dict[str, str] = {
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
    "gemma3n": "its vision tower is a timm model, and timm is not installed",
}
