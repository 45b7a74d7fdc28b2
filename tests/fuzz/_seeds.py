"""What is damaged: a tiny checkpoint of every format and quantisation method, and small files that are read alone."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from modelexport.assets import demo_model_path
from modelexport.checkpoints.gguf.tokenizer.pretokenizers import BY_NAME
from modelexport.checkpoints.staging import staging_directory
from modelexport.errors import PlanError
from modelexport.exporting import export
from modelexport.jobs.target_directory import TargetDirectory
from tests.helpers.models import copy_checkpoint, make_llama
from tests.helpers.small_tokenizers import byte_level, sentencepiece, unigram

VOCABULARY = 104
SHAPE: dict[str, Any] = {"hidden": 128, "intermediate": 128, "heads": 4, "kv_heads": 2, "layers": 1}
_EXPORTS: Mapping[str, Mapping[str, Any]] = {
    "hf": {"quant": "none"},
    "hf-indexed": {"quant": "none", "max_shard_bytes": 60_000},
    "hf-sharded": {"quant": "none", "target_tp": 2},
    "int8": {"quant": "int8"},
    "int4": {"quant": "int4", "group_size": 64},
    "nvfp4": {"quant": "nvfp4-wo"},
    "mixed": {"quant": "*.self_attn.*=mxfp4-wo,*.mlp.*=fp8-block"},
    "modelopt": {"quant": "fp8", "format": "modelopt"},
    "modelopt-nvfp4": {"quant": "nvfp4-wo", "format": "modelopt"},
    "awq": {"quant": "int4-asym", "group_size": 64, "format": "awq"},
    "gptq": {"quant": "int4", "format": "gptq"},
    "fp8": {"quant": "fp8-block", "format": "fp8-block"},
    "dcp": {"quant": "none", "format": "dcp"},
    "megatron": {"quant": "none", "format": "megatron"},
    "gguf": {"quant": "none", "format": "gguf"},
    "gguf-quantised": {"quant": "int8-wo", "group_size": 32, "format": "gguf"},
    "trtllm": {"quant": "none", "format": "trtllm", "target_tp": 2},
    "trtllm-fp8": {"quant": "fp8", "format": "trtllm"},
    "vllm-sharded": {"quant": "none", "format": "vllm-sharded", "target_tp": 2},
}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
_MODELS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {  # shape, keys of config.json
    "llama3": ({}, {"rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 8192}}),
    "yarn": ({}, {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0}}),
    "phi3": ({"model_type": "phi3"}, {"rope_parameters": _LONG, "original_max_position_embeddings": 64}),
    "mixtral": ({"model_type": "mixtral", "experts": 2}, {}),
    "deepseek": ({"model_type": "deepseek_v3", "experts": 2, "dense_layers": 0}, {}),
}
_ENGINES = ("gguf", "trtllm", "vllm-sharded", "megatron")
RESUMED: dict[str, Any] = {"quant": "int8", "quiet": True, "evaluate": False}
RECIPE = """\
model: somewhere
out: ckpt
quant: [["*.mlp.*", "int4:64"], ["*", "int8"]]
algorithm: gptq
tp: 2
calib: text.jsonl
calib-samples: 4
timeout: 60
dry-run: true
"""
_CARD = """\
---
license: apache-2.0
language: [en, de]
base_model: somebody/model
tags: [a, b]
---
# A model
"""


def make_seeds(root: Path) -> dict[str, Path]:
    """Writes a checkpoint of every kind below ``root``; by name."""
    source = _source(root / "source")
    seeds = {"source": source}
    for name, settings in _EXPORTS.items():
        seeds[name] = root / name
        export(model=str(source), out=str(seeds[name]), quiet=True, evaluate=False, **settings)
    for model, (shape, keys) in _MODELS.items():
        made = make_llama(vocab=VOCABULARY, **{**SHAPE, **shape})
        seeds[model] = copy_checkpoint(made, root / model, config=dict(keys))
        for engine in _ENGINES:
            out = root / f"{model}-{engine}"
            with contextlib.suppress(PlanError):  # not every engine has every model
                export(model=str(seeds[model]), out=str(out), quant="none", format=engine, quiet=True, evaluate=False)
                seeds[out.name] = out
    seeds["bitsandbytes"] = _bitsandbytes(seeds["hf"], root / "bitsandbytes")
    seeds["hqq"] = _hqq(seeds["hf"], root / "hqq")
    seeds["hqq-pickled"] = _hqq(seeds["hf"], root / "hqq-pickled", pickled=True)
    seeds["mxfp4"] = _mxfp4(root / "mxfp4")
    seeds["modelopt-beside"] = _beside(seeds["modelopt"], root / "modelopt-beside")
    seeds["bare"] = root / "bare"  # nothing but what engines need: no record, no card
    shutil.copytree(source, seeds["bare"], ignore=shutil.ignore_patterns("README.md", "generation_config.json"))
    return seeds


def _source(target: Path) -> Path:
    """A Llama with a card and a tokenizer, the demo model's cut down to the tiny vocabulary."""
    shutil.copytree(make_llama(vocab=VOCABULARY, **SHAPE), target)
    (target / "README.md").write_text(_CARD)
    demo = demo_model_path()
    tokenizer = json.loads((demo / "tokenizer.json").read_text())
    model = tokenizer["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < VOCABULARY}
    model["merges"] = [["a", "b"]] if {"a", "b", "ab"} <= model["vocab"].keys() else []
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(demo / "tokenizer_config.json", target)
    return target


def make_tokenizers() -> dict[str, dict[str, Any]]:
    """A tokenizer.json of every kind that goes into a GGUF file."""
    return {
        "byte-level": byte_level(BY_NAME["llama-bpe"], size=400),
        "sentencepiece": sentencepiece(size=400),
        "by-merges": sentencepiece(prefix="never", every_pair=False, size=400),
        "unigram": unigram(300),
    }


def _with_config(source: Path, target: Path, tensors: dict[str, torch.Tensor], **keys: Any) -> Path:
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | keys))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _bitsandbytes(source: Path, target: Path) -> Path:
    """Linears in NF4 with doubly quantised scales, as bitsandbytes' own state dicts have them."""
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(tensor.shape)}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.01}
        tensors[name] = torch.zeros(tensor.numel() // 2, 1, dtype=torch.uint8)
        tensors[f"{name}.absmax"] = torch.zeros(tensor.numel() // 64, dtype=torch.uint8)
        tensors[f"{name}.quant_map"] = torch.linspace(-1, 1, 16)
        tensors[f"{name}.nested_absmax"] = torch.ones(tensor.numel() // (64 * 256) or 1)
        tensors[f"{name}.nested_quant_map"] = torch.linspace(-1, 1, 256)
        packed = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = packed
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    said |= {"bnb_4bit_use_double_quant": True, "llm_int8_skip_modules": ["lm_head"]}
    return _with_config(source, target, tensors, quantization_config=said)


def _hqq(source: Path, target: Path, *, pickled: bool = False) -> Path:
    """Linears of HQQ as its library writes them: config.json says nothing of it."""
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        own = name.removesuffix("weight")
        groups = tensor.numel() // 64
        tensors[f"{own}W_q"] = torch.zeros(groups // 2, 64, dtype=torch.uint8)
        for scale in ("scale", "zero"):
            tensors[f"{own}{scale}"] = torch.ones(groups, 1, dtype=torch.bfloat16)
        tensors |= {
            f"{own}{key}": torch.tensor(value) for key, value in (("nbits", 4), ("group_size", 64), ("axis", 1))
        }
        tensors[f"{own}shape"] = torch.tensor(tensor.shape)
    if not pickled:
        return _with_config(source, target, tensors)
    target.mkdir()
    shutil.copy(source / "config.json", target)
    states: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        module, _, key = name.rpartition(".")
        states.setdefault(module, {})[key] = tensor if tensor.dim() == 2 or key == "weight" else tensor.tolist()
    torch.save(states, target / "qmodel.pt")
    return target


def _mxfp4(target: Path) -> Path:
    """A Mixtral whose experts are stored as gpt-oss stores its own: all of a layer in one tensor."""
    source = make_llama(model_type="mixtral", vocab=VOCABULARY, experts=2, **SHAPE)
    kept = {name: tensor for name, tensor in load_file(source / "model.safetensors").items() if ".experts." not in name}
    prefix = "model.layers.0.mlp.experts."
    for what, rows in (("gate_up_proj", 256), ("down_proj", 128)):
        kept[f"{prefix}{what}_blocks"] = torch.zeros(2, rows, 4, 16, dtype=torch.uint8)
        kept[f"{prefix}{what}_scales"] = torch.full((2, rows, 4), 127, dtype=torch.uint8)
        kept[f"{prefix}{what}_bias"] = torch.zeros(2, rows, dtype=torch.bfloat16)
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return _with_config(source, target, kept, model_type="gpt_oss", quantization_config=said)


def _beside(source: Path, target: Path) -> Path:
    """ModelOpt's older checkpoints: only hf_quant_config.json says that they are quantised."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("modelexport.json"))
    config = json.loads((target / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    return target


def interrupted_export(source: Path, out: Path) -> Path:
    """The staging directory of an export to ``out`` that was cut off after its last step; see :func:`resumed`."""
    with (
        mock.patch.object(TargetDirectory, "finish", side_effect=KeyboardInterrupt),
        contextlib.suppress(KeyboardInterrupt),
    ):
        export(model=str(source), out=str(out), **RESUMED)
    return staging_directory(out)
