"""Keys and words that checkpoints of some format know: where they stand in the wrong place, readers must notice."""

from __future__ import annotations

from modelexport.quantization.methods import methods

KEYS = (
    # config.json
    *("model_type", "architectures", "hidden_size", "head_dim", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "num_hidden_layers", "vocab_size", "tie_word_embeddings", "hidden_act", "rms_norm_eps"),
    *(
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "rope_type",
        "factor",
        "partial_rotary_factor",
        "sliding_window",
    ),
    *("original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor"),
    *("max_position_embeddings", "layer_types", "attention_bias", "mlp_bias", "torch_dtype", "dtype", "text_config"),
    *("num_local_experts", "num_experts", "num_experts_per_tok", "n_routed_experts", "moe_intermediate_size"),
    *("eos_token_id", "bos_token_id", "pad_token_id", "beta_fast", "mscale", "attention_factor", "truncate"),
    # quantisation
    *("quantization_config", "compression_config", "quantization", "quant_method", "quant_algo", "bits", "group_size"),
    *("config_groups", "group_0", "targets", "weights", "input_activations", "output_activations", "ignore", "format"),
    *("num_bits", "type", "symmetric", "strategy", "block_structure", "dynamic", "actorder", "scale_dtype", "version"),
    *("zero_point", "desc_act", "sym", "modules_to_not_convert", "exclude_modules", "kv_cache_scheme", "types"),
    *("kv_cache_quant_algo", "activation_scheme", "weight_block_size", "quantized_layers", "quantization_status"),
    *("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "llm_int8_skip_modules", "has_zero_point"),
    # other files
    *("weight_map", "metadata", "total_size", "dtype", "shape", "data_offsets", "__metadata__", "mapping", "tp_size"),
    *("pp_size", "world_size", "architecture", "moe", "rotary_scaling", "model", "vocab", "merges", "added_tokens"),
    *("pre_tokenizer", "post_processor", "content", "id", "special", "chat_template", "eos_token", "sharded_backend"),
    *("recipe", "sha256", "sqnr_db", "layers", "producer", "versions", "file_sha256", "calibration", "output_error"),
    *("modules", "tensors", "kind", "number_format", "name", "warnings", "kept", "evaluation", "source", "step"),
    *("record", "fingerprint", "boot", "publishing", "modelexport", "quant", "out", "tp", "calib", "input_ids", "text"),
    *("license", "language", "base_model", "tags"),
)

WORDS = (
    *methods(),
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma2", "gpt2", "gpt_oss", "deepseek_v3"),
    *("olmo", "stablelm", "opt", "bert", "clip", "mamba", "t5"),
    *("LlamaForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM", "bitsandbytes", "hqq", "quanto", "torchao"),
    *("int", "float", "channel", "group", "tensor", "block", "token", "tensor_group", "dynamic", "static", "local"),
    *("FP8", "NVFP4", "INT8", "W4A16_AWQ", "W4A8_AWQ", "W8A16", "MIXED_PRECISION", "W8A8_SQ_PER_CHANNEL", "Q4_0"),
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized", "dense"),
    *("mxfp4-pack-quantized", "mxfp8-quantized", "compressed", "frozen", "gemm", "gptq", "gptq_v2", "marlin", "ue8m0"),
    *("fp8", "nf4", "e4m3", "torch.uint8", "bfloat16", "Linear", "lm_head", "re:.*", "re:.*proj$", "mxfp4", "int4"),
    *(
        "default",
        "linear",
        "dynamic",
        "yarn",
        "llama3",
        "longrope",
        "su",
        "silu",
        "gelu",
        "swiglu",
        "sliding_attention",
    ),
    *("BPE", "Unigram", "ByteLevel", "Metaspace", "Sequence", "Split", "torch_dist", "torch", "zarr", "none", "keep"),
)
