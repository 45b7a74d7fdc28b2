"""Tiny Llama checkpoints for tests: saved by transformers itself, or as headers alone for planning.

Import as ``from tests._models import ...``. What :func:`make_llama` saves has no constant tensor (transformers would
leave norms at one and biases at zero), so that a part that went astray shows. The default shape suits every number
format with its default group size.
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

from modelexport.checkpoints.safetensors_file import Checkpoint, TensorInfo, tensor_nbytes


@dataclass(frozen=True)
class LlamaShape:
    """Everything that distinguishes one tiny checkpoint from another.

    Attributes:
        head_dim: None leaves it out of config.json's defaults (``hidden // heads``).
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


def save_llama(directory: Path, shape: LlamaShape) -> Path:
    """Save a random Llama of that shape with ``save_pretrained``; returns ``directory``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        num_hidden_layers=shape.layers,
        attention_bias=shape.attention_bias,
        mlp_bias=shape.mlp_bias,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=128,
    )
    generator = torch.Generator().manual_seed(shape.seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre, spread = (1.0, 0.1) if name.endswith("norm.weight") else (0.0, 0.05)
            parameter.normal_(centre, spread, generator=generator)
    model.to(getattr(torch, shape.dtype)).save_pretrained(directory, max_shard_size=shape.max_shard_size)
    return directory


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
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "num_hidden_layers": shape.layers,
        "attention_bias": shape.attention_bias,
        "mlp_bias": shape.mlp_bias,
        "tie_word_embeddings": shape.tied,
    }
    if shape.head_dim is not None:
        config["head_dim"] = shape.head_dim
    return config


def tensor_shapes(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that transformers saves for that shape (test_models_agree says so)."""
    head_dim = shape.head_dim or shape.hidden // shape.heads
    queries, keys = shape.heads * head_dim, shape.kv_heads * head_dim
    linears = {
        "self_attn.q_proj": (queries, shape.hidden),
        "self_attn.k_proj": (keys, shape.hidden),
        "self_attn.v_proj": (keys, shape.hidden),
        "self_attn.o_proj": (shape.hidden, queries),
        "mlp.gate_proj": (shape.intermediate, shape.hidden),
        "mlp.up_proj": (shape.intermediate, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.intermediate),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, shape.hidden)}
    for i in range(shape.layers):
        prefix = f"model.layers.{i}"
        for name, size in linears.items():
            shapes[f"{prefix}.{name}.weight"] = size
            if shape.attention_bias if name.startswith("self_attn") else shape.mlp_bias:
                shapes[f"{prefix}.{name}.bias"] = size[:1]
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
    path = Path("/nonexistent/model.safetensors")
    infos: dict[str, TensorInfo] = {}
    at = 8
    for name, size in sorted(tensor_shapes(shape).items()):
        infos[name] = TensorInfo(name, dtype, size, path, at, tensor_nbytes(dtype, size))
        at += infos[name].nbytes
    return Checkpoint(path.parent, infos, config_json(shape), {})


def describe(shape: LlamaShape) -> str:
    """The fields in which ``shape`` differs from the default, for test ids."""
    plain = asdict(LlamaShape())
    return "-".join(f"{key}={value}" for key, value in asdict(shape).items() if plain[key] != value) or "default"
