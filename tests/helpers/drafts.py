"""Tiny checkpoints with draft layers, by the names and with the keys of config.json that published models have."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from modelexport.checkpoints.safetensors.file import open_checkpoint
from tests.helpers.models import make_llama
from tests.helpers.tiny_models import _root, tiny_checkpoint

KINDS = ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5", "mimo_v2_flash")
BELOW_MTP = ("qwen3_next", "qwen3_5")
BELOW_MODEL = ("mimo_v2_flash",)


@functools.cache
def draft_checkpoint(kind: str) -> Path:
    """Directory of a tiny model of one of :data:`KINDS` with one draft layer; shared by the session: read it only."""
    deepseek = {"model_type": kind, "layers": 2, "hidden": 128, "heads": 4, "vocab": 256, "experts": 4}
    plain = make_llama(**deepseek) if kind == "deepseek_v3" else tiny_checkpoint(kind)
    return add_draft_layer(plain, _root() / f"draft-{kind}")


def add_draft_layer(plain: Path, out: Path) -> Path:
    """Copies a model's weights and config.json, with a draft layer more; returns ``out``.

    Its decoder layer is like the last one that has full attention; its numbers are random. Numbered on behind the
    model's layers and with an embedding and a head of its own, as DeepSeek-V3 and GLM-4.5 have it; below ``mtp`` as
    Qwen3-Next and Qwen3.5 have it; below ``model.mtp``, with attention as of layers with a sliding window and the MLP
    of the first layer, as MiMo-V2-Flash has it.
    """
    out.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(plain.glob("*.safetensors")):
        tensors |= load_file(path)
    config: dict[str, Any] = json.loads((plain / "config.json").read_text())
    part = config.get("text_config", config)
    layers, hidden = part["num_hidden_layers"], part["hidden_size"]
    (norm,) = (name for name in tensors if name.endswith(("model.norm.weight", "language_model.norm.weight")))
    stack = norm.removesuffix("norm.weight")
    attention = [
        f"{stack}layers.{i}." for i in range(layers) if f"{stack}layers.{i}.self_attn.o_proj.weight" in tensors
    ]
    generator = torch.Generator().manual_seed(1)

    def numbers(shape: tuple[int, ...], like: str) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / 10).to(tensors[like].dtype)

    numbered = config["model_type"] not in (*BELOW_MTP, *BELOW_MODEL)
    prefix = f"{stack}layers.{layers}." if numbered else "mtp.layers.0."
    like = {name.removeprefix(attention[-1]): name for name in tensors if name.startswith(attention[-1])}
    around: dict[str, tuple[int, ...]] = {}
    if config["model_type"] in BELOW_MODEL:
        prefix = "model.mtp.layers.0."
        like = _sliding_and_dense(tensors, part["layer_types"])
        around |= {f"{prefix}{name}": (hidden,) for name in ("enorm", "hnorm", "final_layernorm")}
        around[f"{prefix}eh_proj"] = (hidden, 2 * hidden)
    elif numbered:
        vocabulary = tuple(tensors[f"{stack}embed_tokens.weight"].shape)
        around |= {f"{prefix}{name}": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
        around |= {f"{prefix}{name}": vocabulary for name in ("embed_tokens", "shared_head.head")}
        around[f"{prefix}eh_proj"] = (hidden, 2 * hidden)
        part["num_nextn_predict_layers"] = 1
    else:
        around |= {f"mtp.{name}": (hidden,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
        around["mtp.fc"] = (hidden, 2 * hidden)
        if config["model_type"] == "qwen3_5":  # Qwen3-Next's config.json does not count it
            part["mtp_num_hidden_layers"] = 1
    drafts = {f"{prefix}{path}": numbers(tuple(tensors[name].shape), name) for path, name in like.items()}
    framed = {f"{name}.weight": numbers(shape, norm) for name, shape in around.items()}
    save_file({**tensors, **drafts, **framed}, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    return out


def _sliding_and_dense(tensors: dict[str, torch.Tensor], kinds: list[str]) -> dict[str, str]:
    """A draft layer's tensors, and those of decoder layers that they are like: the attention of one with a sliding
    window, all else of the first."""
    sliding = f"model.layers.{max(i for i, kind in enumerate(kinds) if kind == 'sliding_attention')}."
    own = {name.removeprefix(sliding): name for name in tensors if name.startswith(f"{sliding}self_attn.")}
    first = [name for name in tensors if name.startswith("model.layers.0.") and ".self_attn." not in name]
    renamed = (name.replace("post_attention_layernorm", "pre_mlp_layernorm") for name in first)
    return own | {path.removeprefix("model.layers.0."): name for path, name in zip(renamed, first, strict=True)}


def draft_names(directory: Path) -> set[str]:
    """The names of the tensors of a checkpoint's draft layers, without what this package knows of them."""
    config = json.loads((directory / "config.json").read_text())
    layers = config.get("text_config", config).get("num_hidden_layers")
    beginnings = ("mtp.", "model.mtp.", f"model.layers.{layers}.")
    return {name for name in open_checkpoint(directory).infos if name.startswith(beginnings)}
