"""Run by the interpreter of another environment: nvidia-modelopt's own export of TensorRT-LLM checkpoints.

``python modelopt_trtllm.py CASE OUT``: CASE holds ``case.json`` (modelopt's word for the quantisation, the block size,
heads, layers and experts) and ``tensors.safetensors`` (weights in float32 and scales, by the names of modelopt's
dataclasses, of the whole model); OUT gets ``rank{n}.safetensors`` and ``quantization.json``. From modelopt's
ModelConfig on everything is modelopt's: the cut for tensor parallelism, the joining of q, k and v, the packing.
"""

import json
import sys
from pathlib import Path

import torch
from modelopt.torch.export import model_config as mc
from modelopt.torch.export.model_config_utils import (
    merge_gate_fc,
    merge_qkv,
    model_config_to_dict,
    pack_linear_weights,
    split_config_and_weights,
)
from modelopt.torch.export.postprocess import _split_model_config_for_tp, postprocess_tensors
from modelopt.torch.export.quant_utils import process_layer_quant_config
from safetensors.torch import load_file, save_file

CASE, OUT = Path(sys.argv[1]), Path(sys.argv[2])
case = json.loads((CASE / "case.json").read_text())
tensors = load_file(CASE / "tensors.safetensors")


def linear(name: str, kind: str) -> mc.LinearConfig:
    start = f"{name}."
    own = {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
    quantised = len(own) > 1
    return mc.LinearConfig(
        quantization=case["quantization"] if quantised else None,
        linear_type=kind,
        awq_block_size=case["block"] if quantised else 0,
        **own,
    )


def layer(i: int) -> mc.DecoderLayerConfig:
    start = f"layers.{i}."
    qkv = mc.QKVConfig(*(linear(f"{start}{n}", mc.LINEAR_COLUMN) for n in "qkv"))
    cache = {f"{n}_cache_scaling_factor": tensors.get(f"{start}{n}_cache") for n in "kv"}
    attention = mc.AttentionConfig(qkv=qkv, dense=linear(f"{start}dense", mc.LINEAR_ROW), **cache)
    if case["experts"]:
        router = linear(f"{start}router", mc.LINEAR_ROW)
        router.tp = False
        fc, proj = linear(f"{start}fc", mc.LINEAR_COLUMN), linear(f"{start}proj", mc.LINEAR_ROW)
        mlp = mc.MOEConfig(router=router, experts=mc.ExpertConfig(fc=fc, proj=proj))
    else:
        fc, gate = linear(f"{start}fc", mc.LINEAR_COLUMN), linear(f"{start}gate", mc.LINEAR_COLUMN)
        mlp = mc.MLPConfig(fc=fc, gate=gate, proj=linear(f"{start}proj", mc.LINEAR_ROW))
    return mc.DecoderLayerConfig(
        decoder_type="llama",
        input_layernorm=mc.LayernormConfig(weight=tensors[f"{start}input_layernorm"]),
        attention=attention,
        post_layernorm=mc.LayernormConfig(weight=tensors[f"{start}post_layernorm"]),
        mlp=mlp,
    )


model = mc.ModelConfig(
    dtype="bfloat16",
    quantization=case["quantization"],
    vocab_embedding=mc.EmbeddingConfig(weight=tensors["vocab_embedding"]),
    layers=[layer(i) for i in range(case["layers"])],
    ln_f=mc.LayernormConfig(weight=tensors["ln_f"]),
    lm_head=linear("lm_head", mc.LINEAR_COLUMN),
)
for rank, part in enumerate(_split_model_config_for_tp(model, case["tp"]) if case["tp"] > 1 else [model]):
    merge_qkv(part)
    merge_gate_fc(part)
    pack_linear_weights(part)
    weights: dict[str, torch.Tensor] = {}
    per_layer: dict[str, object] = {}
    split_config_and_weights(model_config_to_dict(part), weights, "transformer", per_layer)
    postprocess_tensors(weights, dtype=torch.bfloat16, force_non_view=False)
    save_file(weights, OUT / f"rank{rank}.safetensors")
(OUT / "quantization.json").write_text(json.dumps(process_layer_quant_config(per_layer)))
