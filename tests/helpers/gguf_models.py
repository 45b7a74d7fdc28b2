"""How the tiny models of GGUF's tests differ from their types' defaults, since llama.cpp computes no others."""

from __future__ import annotations

from typing import Any

CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "exaone4": {"sliding_window": None},
    "dots1": {"num_key_value_heads": 4},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention"]},
}
"""Model type -> settings of config.json beside those of :mod:`tests.helpers.tiny_overrides`."""

NOT_IN_TRANSFORMERS = ("kimi_k2",)
"""Types of the table whose models have code of their own."""
