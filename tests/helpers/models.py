"""Tiny checkpoints for tests: saved by transformers itself, or as headers alone for planning.

Llamas by default; other families with ``model_type``. Import as ``from tests.helpers.models import ...``. What
:func:`make_llama` saves has no constant tensor (transformers would leave norms at one and biases at zero), so that a
part that went astray shows. The default shape suits every number format with its default group size.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from modelexport.checkpoints.safetensors.file import Checkpoint, TensorInfo, tensor_nbytes


@dataclass(frozen=True)
class LlamaShape:
    """Everything that distinguishes one tiny checkpoint from another.

    Attributes:
        model_type: ``llama``, ``mistral``, ``qwen2``, ``qwen3``, ``qwen3_moe``, ``phi3``, ``mixtral``, ``deepseek_v3``
            or ``deepseek_v2``.
        head_dim: None leaves it out of config.json's defaults (``hidden // heads``).
        attention_bias, mlp_bias: llama, qwen3 (attention's) and deepseek only.
        experts: mixtral, qwen3_moe and deepseek only.
        expert_intermediate: qwen3_moe and deepseek only.
        query_rank, kv_rank, nope_dim, rope_dim, value_dim, shared_experts, dense_layers: deepseek only; it has as many
            key/value heads as heads.
        dtype: ``bfloat16``, ``float16`` or ``float32``.
        max_shard_size: as ``save_pretrained`` takes it; small values give several files and an index.
    """

    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = None
    intermediate: int = 384
    vocab: int = 211
    layers: int = 2
    attention_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    dtype: str = "bfloat16"
    max_shard_size: str = "5GB"
    seed: int = 0
    model_type: str = "llama"
    experts: int = 4
    query_rank: int | None = 128
    kv_rank: int = 128
    nope_dim: int = 16
    rope_dim: int = 8
    value_dim: int = 32
    expert_intermediate: int = 256
    shared_experts: int | None = 1
    dense_layers: int = 1

    @property
    def is_deepseek(self) -> bool:
        """Whether it has latent attention, and dense first layers."""
        return self.model_type.startswith("deepseek")

    @property
    def is_qwen3(self) -> bool:
        """Whether it has norms over heads."""
        return self.model_type.startswith("qwen3")


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
}


def save_llama(directory: Path, shape: LlamaShape) -> Path:
    """Save a random model of that shape with ``save_pretrained``; returns ``directory``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    own = {key: value for key, value in config_json(shape).items() if key not in ("architectures", "model_type")}
    config = AutoConfig.for_model(shape.model_type, **own, max_position_embeddings=128, **_SPECIAL_TOKENS)
    generator = torch.Generator().manual_seed(shape.seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        corrections = [(name, b) for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for name, parameter in (*model.named_parameters(), *corrections):
            centre, spread = (1.0, 0.1) if name.endswith("norm.weight") else (0.0, 0.05)
            parameter.normal_(centre, spread, generator=generator)
    model.to(getattr(torch, shape.dtype)).save_pretrained(directory, max_shard_size=shape.max_shard_size)
    return directory


_SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}  # within any vocabulary


def make_llama(**shape: Any) -> Path:
    """Directory of a tiny checkpoint with these fields of :class:`LlamaShape`; ``dtype`` may be torch's.

    Each shape is saved once per session and shared: read it, never write into it (see :func:`copy_checkpoint`).
    """
    if "dtype" in shape:
        shape["dtype"] = str(shape["dtype"]).removeprefix("torch.")
    return _saved(LlamaShape(**shape))


@functools.cache
def _saved(shape: LlamaShape) -> Path:
    return save_llama(_root() / f"llama-{_saved.cache_info().misses}", shape)


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="modelexport-tests-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def copy_checkpoint(
    source: Path,
    target: Path,
    *,
    tensors: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """A copy to spoil.

    Args:
        tensors: gets every tensor of a checkpoint of one file by name, changes them (or returns others).
        config: keys to set in config.json; a value of None removes the key.
    """
    shutil.copytree(source, target)
    if config is not None:
        path = target / "config.json"
        keys = {**json.loads(path.read_text()), **config}
        path.write_text(json.dumps({key: value for key, value in keys.items() if value is not None}))
    if tensors is not None:
        from safetensors.torch import load_file, save_file

        path = target / "model.safetensors"
        found = load_file(path)
        found = tensors(found) or found
        save_file(found, path, metadata={"format": "pt"})
    return target


def config_json(shape: LlamaShape) -> dict[str, Any]:
    """config.json of that shape as far as planning reads it, without transformers."""
    config = {
        "architectures": [_ARCHITECTURES[shape.model_type]],
        "model_type": shape.model_type,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "num_hidden_layers": shape.layers,
        "tie_word_embeddings": shape.tied,
    }
    if shape.model_type == "llama":
        config |= {"attention_bias": shape.attention_bias, "mlp_bias": shape.mlp_bias}
    if shape.is_qwen3:
        config |= {"attention_bias": shape.attention_bias, "head_dim": shape.head_dim or shape.hidden // shape.heads}
    if shape.model_type == "qwen3_moe":
        config |= {"num_experts": shape.experts, "num_experts_per_tok": min(2, shape.experts)}
        config["moe_intermediate_size"] = shape.expert_intermediate
    if shape.model_type == "mixtral":
        config["num_local_experts"] = shape.experts
        config["num_experts_per_tok"] = min(2, shape.experts)
    if shape.is_deepseek:
        config |= {
            "num_key_value_heads": shape.heads,
            "head_dim": shape.rope_dim,  # as transformers saves it
            "attention_bias": shape.attention_bias,
            **({"mlp_bias": shape.mlp_bias} if shape.model_type == "deepseek_v2" else {}),
            "n_routed_experts": shape.experts,
            "num_experts_per_tok": min(2, shape.experts),
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": shape.query_rank,
            "kv_lora_rank": shape.kv_rank,
            "qk_nope_head_dim": shape.nope_dim,
            "qk_rope_head_dim": shape.rope_dim,
            "v_head_dim": shape.value_dim,
            "moe_intermediate_size": shape.expert_intermediate,
            "n_shared_experts": shape.shared_experts,
            "first_k_dense_replace": shape.dense_layers,
            "num_nextn_predict_layers": 0,
        }
    elif shape.head_dim is not None:
        config["head_dim"] = shape.head_dim
    return config


def _deepseek_layer(shape: LlamaShape, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank = shape.hidden, shape.heads, shape.query_rank
    queries = heads * (shape.nope_dim + shape.rope_dim)
    tensors: dict[str, tuple[int, ...]] = {
        "self_attn.kv_a_proj_with_mqa": (shape.kv_rank + shape.rope_dim, hidden),
        "self_attn.kv_a_layernorm": (shape.kv_rank,),
        "self_attn.kv_b_proj": (heads * (shape.nope_dim + shape.value_dim), shape.kv_rank),
        "self_attn.o_proj": (hidden, heads * shape.value_dim),
    }
    if rank is None:
        tensors["self_attn.q_proj"] = (queries, hidden)
    else:
        tensors |= {"self_attn.q_a_proj": (rank, hidden), "self_attn.q_a_layernorm": (rank,)}
        tensors["self_attn.q_b_proj"] = (queries, rank)
    mlps = {"mlp": shape.intermediate}
    if layer >= shape.dense_layers:
        mlps = {f"mlp.experts.{e}": shape.expert_intermediate for e in range(shape.experts)}
        if shape.shared_experts:
            mlps["mlp.shared_experts"] = shape.shared_experts * shape.expert_intermediate
        tensors["mlp.gate"] = (shape.experts, hidden)
    for name, width in mlps.items():
        tensors |= {f"{name}.gate_proj": (width, hidden), f"{name}.up_proj": (width, hidden)}
        tensors[f"{name}.down_proj"] = (hidden, width)
    return tensors


def _layer_linears(shape: LlamaShape, layer: int) -> dict[str, tuple[int, ...]]:
    if shape.is_deepseek:
        return _deepseek_layer(shape, layer)
    head_dim = shape.head_dim or shape.hidden // shape.heads
    queries, keys = shape.heads * head_dim, shape.kv_heads * head_dim
    up, down = (shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)
    linears: dict[str, tuple[int, ...]] = {"self_attn.o_proj": (shape.hidden, queries)}
    if shape.model_type == "phi3":
        linears["self_attn.qkv_proj"] = (queries + 2 * keys, shape.hidden)
        linears |= {"mlp.gate_up_proj": (2 * shape.intermediate, shape.hidden), "mlp.down_proj": down}
        return linears
    linears |= {"self_attn.q_proj": (queries, shape.hidden)}
    linears |= {f"self_attn.{name}_proj": (keys, shape.hidden) for name in "kv"}
    if shape.is_qwen3:
        linears |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
    if shape.model_type == "qwen3_moe":
        width = shape.expert_intermediate
        linears["mlp.gate"] = (shape.experts, shape.hidden)
        for e in range(shape.experts):
            prefix = f"mlp.experts.{e}"
            linears |= {f"{prefix}.{name}_proj": (width, shape.hidden) for name in ("gate", "up")}
            linears[f"{prefix}.down_proj"] = (shape.hidden, width)
        return linears
    if shape.model_type == "mixtral":
        linears["block_sparse_moe.gate"] = (shape.experts, shape.hidden)
        for e in range(shape.experts):
            prefix = f"block_sparse_moe.experts.{e}"
            linears |= {f"{prefix}.w1": up, f"{prefix}.w2": down, f"{prefix}.w3": up}
        return linears
    return linears | {"mlp.gate_proj": up, "mlp.up_proj": up, "mlp.down_proj": down}


def _has_bias(shape: LlamaShape, linear: str) -> bool:
    if shape.model_type == "qwen2":
        return linear in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    if shape.is_deepseek and linear.startswith("self_attn"):
        return shape.attention_bias and linear.endswith(("q_a_proj", "kv_a_proj_with_mqa", "o_proj"))
    if shape.model_type == "deepseek_v2" and linear != "mlp.gate" and ".experts." not in linear:
        return shape.mlp_bias
    if shape.is_qwen3:
        return shape.attention_bias and linear.startswith("self_attn") and linear.endswith("proj")
    if shape.model_type != "llama":
        return False
    return shape.attention_bias if linear.startswith("self_attn") else shape.mlp_bias


def tensor_shapes(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that transformers saves for that shape (test_models_agree says so)."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, shape.hidden)}
    for i in range(shape.layers):
        prefix = f"model.layers.{i}"
        for name, size in _layer_linears(shape, i).items():
            shapes[f"{prefix}.{name}.weight"] = size
            if _has_bias(shape, name):
                shapes[f"{prefix}.{name}.bias"] = size[:1]
            if shape.model_type == "deepseek_v3" and name == "mlp.gate":
                shapes[f"{prefix}.{name}.e_score_correction_bias"] = size[:1]
        shapes[f"{prefix}.input_layernorm.weight"] = (shape.hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (shape.hidden,)
    shapes["model.norm.weight"] = (shape.hidden,)
    if not shape.tied:
        shapes["lm_head.weight"] = (shape.vocab, shape.hidden)
    return shapes


def headers_only(shape: LlamaShape | None = None, **changes: Any) -> Checkpoint:
    """A checkpoint without a byte of weights behind it: whoever reads from it fails. Any size is cheap."""
    shape = replace(shape or LlamaShape(), **changes)
    dtype = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[shape.dtype]
    return _headers({name: (dtype, size) for name, size in sorted(tensor_shapes(shape).items())}, config_json(shape))


def _headers(tensors: dict[str, tuple[str, tuple[int, ...]]], config: dict[str, Any]) -> Checkpoint:
    path = Path("/nonexistent/model.safetensors")
    infos: dict[str, TensorInfo] = {}
    at = 8
    for name, (dtype, size) in tensors.items():
        infos[name] = TensorInfo(name, dtype, size, path, at, tensor_nbytes(dtype, size))
        at += infos[name].nbytes
    return Checkpoint(path.parent, infos, config, {})


SCHEMES: dict[str, dict[str, Any]] = {  # as compressed-tensors' presets of these names have them
    "int8": {
        "format": "int-quantized",
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
    },
    "fp8-static": {
        "format": "float-quantized",
        "weights": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
    },
    "fp8-block": {
        "format": "float-quantized",
        "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True},
    },
    "int4": {
        "format": "pack-quantized",
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True},
    },
    "int4-asym": {
        "format": "pack-quantized",
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
    },
    "int4-actorder": {
        "format": "pack-quantized",
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "actorder": "group"},
    },
    "int8-wo": {
        "format": "pack-quantized",
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    },
    "nvfp4": {
        "format": "nvfp4-pack-quantized",
        "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        "input_activations": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    },
    "mxfp4": {
        "format": "mxfp4-pack-quantized",
        "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    },
    "mxfp8": {
        "format": "mxfp8-quantized",
        "weights": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32},
    },
}


def quantised_headers(scheme: str, shape: LlamaShape | None = None, **changes: Any) -> Checkpoint:
    """The headers of a checkpoint whose linears are quantised with one of :data:`SCHEMES`, head and routers not.

    The tensors are those that :func:`~modelexport.quantization.methods.tensor_specs` names; the tests of ``inspect``
    compare that with what compressed-tensors itself writes.
    """
    from modelexport.quantization.methods import read_quantization_config, tensor_specs

    plain = headers_only(shape, **changes)
    quantization = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], **SCHEMES[scheme]}},
        "ignore": ["lm_head", r"re:.*(block_sparse_moe|mlp)\.gate$"],
    }
    config = {**(plain.config or {}), "quantization_config": quantization}
    read = read_quantization_config(config)
    assert read is not None
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, info in plain.infos.items():
        module, suffix = name.rsplit(".", 1)
        found = None if suffix != "weight" or len(info.shape) != 2 else read.scheme_of(module)
        if found is None or "embed" in name:
            tensors[name] = (info.dtype, info.shape)
        else:
            for own, promise in tensor_specs(found, (info.shape[0], info.shape[1])).items():
                tensors[f"{module}.{own}"] = (promise.dtypes[0], promise.shapes[0])
    return _headers(tensors, config)


def describe(shape: LlamaShape) -> str:
    """The fields in which ``shape`` differs from the default, for test ids."""
    plain = asdict(LlamaShape())
    return "-".join(f"{key}={value}" for key, value in asdict(shape).items() if plain[key] != value) or "default"


def without(checkpoint: Checkpoint, *names: str, **changed: Any) -> Checkpoint:
    """The checkpoint without these tensors, and with fields of config.json changed."""
    infos = {name: info for name, info in checkpoint.infos.items() if name not in names}
    return replace(checkpoint, infos=infos, config={**(checkpoint.config or {}), **changed})


def with_tensor(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtype: str = "BF16") -> Checkpoint:
    """The checkpoint with one more tensor, or another in its place; its file does not exist."""
    info = TensorInfo(name, dtype, shape, Path("/nonexistent/model.safetensors"), 8, tensor_nbytes(dtype, shape))
    return replace(checkpoint, infos={**checkpoint.infos, name: info})
