"""Tiny checkpoints with draft layers, by the names and with the keys of config.json that published models have."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.models import make_llama
from tests.helpers.tiny_models import _root, tiny_checkpoint

KINDS = ("deepseek_v3", "glm4_moe", "qwen3_next")


def _plain(kind: str) -> Path:
    if kind == "deepseek_v3":
        return make_llama(model_type=kind, layers=2, hidden=128, heads=4, vocab=256, experts=4)
    return tiny_checkpoint(kind)


@functools.cache
def draft_checkpoint(kind: str, *, linears: bool = True) -> Path:
    """Directory of a tiny model of one of :data:`KINDS` with one draft layer; shared by the session, so read it only.

    Args:
        linears: whether the draft's decoder layer is there; else only what stands around it.
    """
    plain, out = _plain(kind), _root() / f"draft-{kind}-{linears}"
    out.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(plain.glob("*.safetensors")):
        tensors |= load_file(path)
    config: dict[str, Any] = json.loads((plain / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    numbered = kind != "qwen3_next"
    with_attention = [i for i in range(layers) if f"model.layers.{i}.self_attn.o_proj.weight" in tensors]
    last, prefix = f"model.layers.{with_attention[-1]}.", f"model.layers.{layers}." if numbered else "mtp.layers.0."
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int, like: str = "model.norm.weight") -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / 10).to(tensors[like].dtype)

    drafts = {
        prefix + name.removeprefix(last): numbers(*value.shape, like=name)
        for name, value in tensors.items()
        if name.startswith(last)
    }
    vocabulary = tensors["model.embed_tokens.weight"].shape
    if numbered:
        around = {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden)}
        around |= {"shared_head.norm": (hidden,), "shared_head.head": vocabulary, "embed_tokens": vocabulary}
        names = {f"{prefix}{name}.weight": shape for name, shape in around.items()}
        config["num_nextn_predict_layers"] = 1
    else:
        around = {"fc": (hidden, 2 * hidden), "norm": (hidden,)}
        around |= {"pre_fc_norm_embedding": (hidden,), "pre_fc_norm_hidden": (hidden,)}
        names = {f"mtp.{name}.weight": shape for name, shape in around.items()}
    framed = {name: numbers(*shape) for name, shape in names.items()}
    save_file({**tensors, **(drafts if linears else {}), **framed}, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    return out


def draft_names(directory: Path) -> set[str]:
    """The names of the tensors of a checkpoint's draft layers, by the files' headers."""
    config = json.loads((directory / "config.json").read_text())
    prefixes = ("mtp.", f"model.layers.{config['num_hidden_layers']}.")
    names: set[str] = set()
    for path in directory.glob("*.safetensors"):
        names |= set(load_file(path))
    return {name for name in names if name.startswith(prefixes)}
