"""Real sizes of the published checkpoints, and layouts at these sizes: headers alone, without weights.

A repository is listed where its config.json is known for certain; those that are not listed have no figure in the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from modelexport.exporting import export
from modelexport.exporting.result import ExportResult
from tests.published._layouts import LAYOUTS
from tests.published._models import Layout
from tests.published._sizes import at_sizes
from tests.published._writing import write_headers

# A layer of the tiny layout, or of several: by the module within the layer, "" for all others.
Like = int | Mapping[str, int]


@dataclass(frozen=True)
class Real:
    """What a published checkpoint is at its real size.

    Attributes:
        weights: billions of weights, as its makers count them.
        sizes: by the names that tests/published/_parts.py and _models.py give them.
        layers: for each numbered layer of the language model, draft layers included, that of the tiny layout which it
            is like; all like the first where it is empty.
        config: keys of config.json, at any depth, that follow from no size.
        layout: the layout's name, where the repository is not the one that the layout names.
        group: the group size of int4, where the usual one divides no row of some linear.
    """

    weights: float
    sizes: Mapping[str, int]
    layers: tuple[Like, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    layout: str = ""
    group: int = 128


def sizes(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocabulary: int, head: int = 0, **others: int
) -> dict[str, int]:
    """A language model's; ``head``: ``hidden // heads`` where it is 0."""
    named = {"hidden": hidden, "mlp": mlp, "layers": layers, "heads": heads, "kv_heads": kv_heads}
    return {**named, "vocabulary": vocabulary, "head": head or hidden // heads, **others}


def vision(hidden: int, mlp: int, layers: int, heads: int, image: int, patch: int, **others: int) -> dict[str, int]:
    """A vision tower's."""
    named = {"hidden": hidden, "mlp": mlp, "layers": layers, "heads": heads, "head": hidden // heads}
    return {**{f"vision_{name}": value for name, value in named.items()}, "image": image, "patch": patch, **others}


def latent(q_lora: int, **others: int) -> dict[str, int]:
    """Those of DeepSeek's attention."""
    return {"q_lora": q_lora, "kv_lora": 512, "nope": 128, "rope": 64, "value": 128, **others}


def delta(values: int) -> dict[str, int]:
    """Those of Qwen's linear attention."""
    return {"delta_keys": 16, "delta_values": values, "delta_head": 128}


def at(layers: int, *others: int) -> tuple[int, ...]:
    """The layers numbered ``others`` like the tiny layout's second, the rest like its first."""
    return tuple(int(index in others) for index in range(layers))


LLAMA_8B = Real(8.03, sizes(4096, 14336, 32, 32, 8, 128256))
LLAMA_7B = Real(6.74, sizes(4096, 11008, 32, 32, 32, 32000))
QWEN2_7B = sizes(3584, 18944, 28, 28, 4, 152064)
QWEN3_8B = sizes(4096, 12288, 36, 32, 8, 151936, 128)
QWEN3_30B = sizes(2048, 6144, 48, 32, 4, 151936, 128, expert_mlp=768, experts=128)
SIGLIP = vision(1152, 4304, 27, 16, 896, 14)
QWEN_VIT = vision(1280, 3420, 32, 16, 28, 14)
QWEN3_VIT = vision(1152, 4304, 27, 16, 32, 16, positions=2304, deepstack=3)
PIXTRAL = vision(1024, 4096, 24, 16, 1540, 14)
GEMMA3_4B = Real(4.30, {**sizes(2560, 10240, 34, 8, 4, 262208, 256), **SIGLIP})
MISTRAL_24B = Real(24.01, {**sizes(5120, 32768, 40, 32, 8, 131072, 128), **PIXTRAL})
MOE_V3 = {"expert_mlp": 2048, "experts": 256, "shared_experts": 1}
DEEPSEEK_V3 = {**sizes(7168, 18432, 61, 128, 128, 129280), **latent(1536), **MOE_V3}
V3_LAYERS = (0,) * 3 + (1,) * 58
KIMI = {**sizes(7168, 18432, 61, 64, 64, 163840), **latent(1536), **MOE_V3, "experts": 384}
EIGHT = {"num_experts_per_tok": 8}
GRANITE_TINY = sizes(1536, 1024, 40, 12, 4, 100352, expert_mlp=512, experts=64, mamba_heads=48)
GRANITE_SMALL = sizes(4096, 1536, 40, 32, 8, 100352, expert_mlp=768, experts=72, mamba_heads=128)
GRANITE_STATE = {"mamba_head": 64, "mamba_groups": 1, "state": 128}
NEMOTRON = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
CROSS = (3, 8, 13, 18, 23, 28, 33, 38)


def _jamba(index: int) -> Like:
    return {"": int(index % 8 == 4), "feed_forward": index % 2}


REAL: dict[str, Real] = {
    "meta-llama/Llama-2-7b-hf": LLAMA_7B,
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_8B,
    "meta-llama/Llama-3.2-1B-Instruct": Real(1.24, sizes(2048, 8192, 16, 32, 8, 128256)),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": LLAMA_8B,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": Real(7.62, QWEN2_7B),
    "Qwen/Qwen2.5-7B-Instruct": Real(7.62, QWEN2_7B),
    "Qwen/Qwen2.5-0.5B-Instruct": Real(0.494, sizes(896, 4864, 24, 14, 2, 151936)),
    "Qwen/Qwen3-8B": Real(8.19, QWEN3_8B),
    "Qwen/Qwen3-0.6B": Real(0.596, sizes(1024, 3072, 28, 16, 8, 151936, 128)),
    "mistralai/Mistral-7B-Instruct-v0.3": Real(7.25, sizes(4096, 14336, 32, 32, 8, 32768)),
    "google/gemma-2-9b-it": Real(9.24, sizes(3584, 14336, 42, 16, 8, 256000, 256)),
    "google/gemma-3-1b-it": Real(1.00, sizes(1152, 6912, 26, 4, 1, 262144, 256)),
    "microsoft/Phi-3-mini-4k-instruct": Real(3.82, sizes(3072, 8192, 32, 32, 32, 32064)),
    "microsoft/Phi-4-mini-instruct": Real(3.84, sizes(3072, 8192, 32, 24, 8, 200064)),
    "ibm-granite/granite-3.3-8b-instruct": Real(8.17, sizes(4096, 12800, 40, 32, 8, 49159)),
    "zai-org/GLM-4-9B-0414": Real(9.40, sizes(4096, 13696, 40, 32, 2, 151552)),
    "allenai/OLMo-2-1124-7B-Instruct": Real(7.30, sizes(4096, 11008, 32, 32, 32, 100352)),
    "allenai/Olmo-3-7B-Instruct": Real(7.30, sizes(4096, 11008, 32, 32, 32, 100278)),
    "HuggingFaceTB/SmolLM3-3B": Real(3.08, sizes(2048, 11008, 36, 16, 4, 128256)),
    "CohereLabs/c4ai-command-r7b-12-2024": Real(8.03, sizes(4096, 14336, 32, 32, 8, 256000)),
    "bigcode/starcoder2-7b": Real(7.17, sizes(4608, 18432, 32, 36, 4, 49152)),
    "baidu/ERNIE-4.5-0.3B-PT": Real(0.361, sizes(1024, 3072, 18, 16, 2, 103424, 128)),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": Real(46.7, sizes(4096, 14336, 32, 32, 8, 32000, experts=8)),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": Real(30.5, QWEN3_30B, config=EIGHT),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": Real(
        81.3,
        {**sizes(2048, 5120, 48, 16, 2, 151936, 256, expert_mlp=512, experts=512), **delta(32)},
        (0, 0, 0, 1) * 12,
        {"num_experts_per_tok": 10, "full_attention_interval": 4},
    ),
    "openai/gpt-oss-20b": Real(20.9, sizes(2880, 2880, 24, 64, 8, 201088, 64, experts=32), (0, 1) * 12, group=32),
    "openai/gpt-oss-120b": Real(
        116.8, sizes(2880, 2880, 36, 64, 8, 201088, 64, experts=128), (0, 1) * 18, layout="gpt-oss", group=32
    ),
    "deepseek-ai/DeepSeek-V2-Lite-Chat": Real(
        15.7,
        {**sizes(2048, 10944, 27, 16, 16, 102400), **latent(0, expert_mlp=1408, experts=64, shared_experts=2)},
        (0, *(1,) * 26),
        {"num_experts_per_tok": 6},
        group=64,
    ),
    "deepseek-ai/DeepSeek-V3-0324": Real(684.5, DEEPSEEK_V3, (*V3_LAYERS, 2), {"first_k_dense_replace": 3}),
    "deepseek-ai/DeepSeek-V3.2": Real(
        685.4,
        {**DEEPSEEK_V3, "index_heads": 64, "index_head": 128},
        (*V3_LAYERS, 2),
        {"first_k_dense_replace": 3},
    ),
    "nvidia/DeepSeek-R1-FP4": Real(671.0, DEEPSEEK_V3, V3_LAYERS, {"first_k_dense_replace": 3}),
    "moonshotai/Kimi-K2-Instruct-0905": Real(1026.5, KIMI, (0, *(1,) * 60)),
    "moonshotai/Kimi-K2-Thinking": Real(1026.5, KIMI, (0, *(1,) * 60)),
    "zai-org/GLM-4.5-Air": Real(
        110.5,
        sizes(4096, 10944, 46, 96, 8, 151552, 128, expert_mlp=1408, experts=128, shared_experts=1),
        (0, *(1,) * 45, 2),
        EIGHT,
        group=64,
    ),
    "zai-org/GLM-4.6-FP8": Real(
        357.0,
        sizes(5120, 12288, 92, 96, 8, 151552, 128, expert_mlp=1536, experts=160, shared_experts=1),
        (*(0,) * 3, *(1,) * 89, 2),
        {**EIGHT, "first_k_dense_replace": 3},
    ),
    "MiniMaxAI/MiniMax-M2": Real(228.7, sizes(3072, 1536, 62, 48, 8, 200064, 128, experts=256), config=EIGHT),
    "tencent/Hunyuan-A13B-Instruct": Real(80.4, sizes(4096, 3072, 32, 32, 8, 128167, experts=64)),
    "baidu/ERNIE-4.5-21B-A3B-PT": Real(
        21.9,
        sizes(2560, 12288, 28, 20, 4, 103424, 128, expert_mlp=1536, experts=64),
        (0, *(1,) * 27),
        {"moe_layer_end_index": 27, "moe_k": 6},
    ),
    "microsoft/Phi-3.5-MoE-instruct": Real(41.9, sizes(4096, 6400, 32, 32, 8, 32064, experts=16)),
    "databricks/dbrx-instruct": Real(131.6, sizes(6144, 10752, 40, 48, 8, 100352, experts=16)),
    "ai21labs/AI21-Jamba-1.5-Mini": Real(
        51.6,
        sizes(4096, 14336, 32, 32, 8, 65536, experts=16, state=16, dt_rank=256),
        tuple(_jamba(index) for index in range(32)),
        {"attn_layer_offset": 4, "attn_layer_period": 8},
    ),
    "ibm-granite/granite-4.0-h-tiny": Real(6.94, {**GRANITE_TINY, **GRANITE_STATE}, at(40, 5, 15, 25, 35)),
    "ibm-granite/granite-4.0-h-small": Real(
        32.2, {**GRANITE_SMALL, **GRANITE_STATE}, at(40, 5, 15, 25, 35), layout="Granite 4.0 H"
    ),
    "ibm-granite/granite-4.0-micro": Real(
        3.40, sizes(2560, 8192, 40, 40, 8, 100352, mamba_heads=128, mamba_head=40, mamba_groups=1, state=256)
    ),
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": Real(
        8.89,
        sizes(4480, 15680, 56, 40, 8, 131072, 128, mamba_heads=128, mamba_head=80, mamba_groups=8, state=128),
        tuple("M-*".index(kind) for kind in NEMOTRON),
        {"hybrid_override_pattern": NEMOTRON, "num_hidden_layers": 56},
        group=64,
    ),
    "tiiuae/Falcon-H1-7B-Instruct": Real(
        7.59, sizes(3072, 12288, 44, 12, 2, 130048, 128, mamba_heads=24, mamba_head=128, mamba_groups=1, state=256)
    ),
    "meta-llama/Llama-3.2-11B-Vision-Instruct": Real(
        10.67,
        {
            **sizes(4096, 14336, 40, 32, 8, 128256),
            **vision(1280, 5120, 32, 16, 560, 14, vision_out=7680, vision_global_layers=8),
        },
        at(40, *CROSS),
        {"cross_attention_layers": list(CROSS), "intermediate_layers_indices": [3, 7, 15, 23, 30]},
    ),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": Real(
        108.6,
        {
            **sizes(5120, 8192, 48, 40, 8, 202048, 128, experts=16),
            **vision(1408, 5632, 34, 16, 336, 14, vision_out=4096),
        },
        config={"intermediate_size_mlp": 16384},
    ),
    "llava-hf/llava-1.5-7b-hf": Real(
        7.06, {**sizes(4096, 11008, 32, 32, 32, 32064), **vision(1024, 4096, 24, 16, 336, 14)}
    ),
    "mistral-community/pixtral-12b": Real(
        12.68, {**sizes(5120, 14336, 40, 32, 8, 131072, 128), **vision(1024, 4096, 24, 16, 1024, 16)}
    ),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": MISTRAL_24B,
    "RedHatAI/Mistral-Small-3.1-24B-Instruct-2503-FP8-dynamic": MISTRAL_24B,
    "mistralai/Ministral-3-8B-Instruct-2512": Real(8.92, {**sizes(4096, 14336, 34, 32, 8, 131072, 128), **PIXTRAL}),
    "google/gemma-3-4b-it": GEMMA3_4B,
    "RedHatAI/gemma-3-4b-it-quantized.w4a16": GEMMA3_4B,
    "Qwen/Qwen2-VL-7B-Instruct": Real(8.29, {**QWEN2_7B, **QWEN_VIT}),
    "Qwen/Qwen2.5-VL-7B-Instruct": Real(8.29, {**QWEN2_7B, **QWEN_VIT}),
    "Qwen/Qwen2.5-VL-7B-Instruct-AWQ": Real(8.29, {**QWEN2_7B, **QWEN_VIT}),
    "Qwen/Qwen3-VL-8B-Instruct": Real(
        8.77, {**QWEN3_8B, **QWEN3_VIT}, config={"deepstack_visual_indexes": [8, 16, 24]}
    ),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": Real(
        31.1, {**QWEN3_30B, **QWEN3_VIT}, config={**EIGHT, "deepstack_visual_indexes": [8, 16, 24]}
    ),
    "Qwen/Qwen3.5-27B": Real(
        27.8,
        {**sizes(5120, 17408, 64, 24, 4, 248320, 256), **delta(48), **QWEN3_VIT},
        (0, 0, 0, 1) * 16,
        {"full_attention_interval": 4},
    ),
    "Qwen/Qwen3.5-35B-A3B": Real(
        35.95,
        {**sizes(2048, 512, 40, 16, 2, 248320, 256, expert_mlp=512, experts=256), **delta(32), **QWEN3_VIT},
        (0, 0, 0, 1) * 10,
        {**EIGHT, "full_attention_interval": 4},
    ),
    "zai-org/GLM-4.1V-9B-Thinking": Real(
        10.3, {**sizes(4096, 13696, 40, 32, 2, 151552), **vision(1536, 13696, 24, 12, 336, 14)}
    ),
    "OpenGVLab/InternVL3-8B-hf": Real(
        7.94, {**sizes(3584, 18944, 28, 28, 4, 151674), **vision(1024, 4096, 24, 16, 448, 14)}
    ),
    "Qwen/Qwen2.5-7B-Instruct-AWQ": Real(7.62, QWEN2_7B),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": Real(7.62, QWEN2_7B),
    "TheBloke/Llama-2-7B-Chat-GPTQ": LLAMA_7B,
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": LLAMA_8B,
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8": LLAMA_8B,
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic": LLAMA_8B,
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8": LLAMA_8B,
    "Qwen/Qwen3-8B-FP8": Real(8.19, QWEN3_8B),
    "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8": Real(30.5, QWEN3_30B, config=EIGHT),
    "nvidia/Llama-3.1-8B-Instruct-FP8": LLAMA_8B,
    "nvidia/Llama-3.1-8B-Instruct-FP4": LLAMA_8B,
    "meta-llama/Llama-3.1-405B-Instruct-FP8": Real(405.9, sizes(16384, 53248, 126, 128, 8, 128256), (*(0,) * 125, 1)),
    "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit": LLAMA_8B,
    "mobiuslabsgmbh/Llama-3.1-8b-instruct_4bitgs64_hqq_hf": LLAMA_8B,
}

_LANGUAGE = r"(?P<before>(?:model\.|language_model\.model\.|model\.language_model\.|backbone\.|transformer\.)?"
_LAYER = re.compile(_LANGUAGE + r"(?:layers|blocks)\.)(?P<index>\d+)(?P<after>\..*)")
_NUMBERED = {  # which size counts them -> the containers of modules that are alike
    "experts": re.compile(r"(?P<before>.*experts\.)(?P<index>\d+)(?P<after>\..*)"),
    "vision_global_layers": re.compile(r"(?P<before>.*global_transformer\.layers\.)(?P<index>\d+)(?P<after>\..*)"),
    "deepstack": re.compile(r"(?P<before>.*deepstack_merger_list\.)(?P<index>\d+)(?P<after>\..*)"),
    "vision_layers": re.compile(
        r"(?P<before>.*(?:vision|visual).*\.(?:layers?|blocks)\.)(?P<index>\d+)(?P<after>\..*)"
    ),
}
_BY_LAYER = (
    "layer_types",
    "no_rope_layers",
    "attn_type_list",
    "moe_intermediate_size",
    "moe_topk",
    "num_shared_expert",
)


def at_real_size(layout: Layout, real: Real) -> Layout:
    """The layout with the real sizes, all its layers and all its experts."""
    tensors = {
        found: (dtype, at_sizes(tuple(shape), real.sizes))
        for name, (dtype, shape) in layout.tensors.items()
        for found in _names(name, real)
    }
    files = {name: _config(content, real) for name, content in layout.files.items()}
    return replace(layout, config=_config(layout.config, real), tensors=tensors, files=files)


def _names(name: str, real: Real) -> Iterator[str]:
    """The real names that a name of the tiny layout stands for; none where no real layer is like its layer."""
    if layer := _LAYER.fullmatch(name):
        for index, like in enumerate(real.layers or (0,) * real.sizes["layers"]):
            module = layer["after"].split(".")[1]
            if int(layer["index"]) == (like if isinstance(like, int) else like.get(module, like[""])):
                yield from _repeated(f"{layer['before']}{index}{layer['after']}", real)
    else:
        yield from _repeated(name, real)


def _repeated(name: str, real: Real) -> Iterator[str]:
    for size, pattern in _NUMBERED.items():
        if found := pattern.fullmatch(name):
            if found["index"] == "0":  # the others are like it
                yield from (f"{found['before']}{index}{found['after']}" for index in range(real.sizes[size]))
            return
    yield name


def _config(value: Any, real: Real, key: str = "") -> Any:
    """A file of JSON, or what stands under ``key`` in it, of the real model."""
    if key in real.config:
        return real.config[key]
    if isinstance(value, Mapping):
        return {name: _config(part, real, name) for name, part in value.items()}
    if isinstance(value, list) and key in _BY_LAYER and value:
        likes = (real.layers or (0,) * real.sizes["layers"])[: real.sizes["layers"]]
        return [at_sizes(value[like if isinstance(like, int) else like[""]], real.sizes) for like in likes]
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return [name for part in value for name in _names(part, real)]
    return at_sizes(value, real.sizes)


def repositories(name: str) -> list[str]:
    """The repositories of a layout whose real sizes are known, that which the layout names first."""
    like = LAYOUTS[name].like
    return [*([like] if like in REAL else []), *(found for found, real in REAL.items() if real.layout == name)]


def planned(name: str, repository: str, directory: Path) -> ExportResult:
    """The plan of int4 of a layout at a repository's real size, from config.json and headers alone."""
    real = REAL[repository]
    source = write_headers(at_real_size(LAYOUTS[name], real), directory)
    return export(model=str(source), quant="int4", group_size=real.group, dry_run=True, quiet=True)


def weights(plan: ExportResult) -> int:
    """How many weights a plan has; two bytes each where no tensor of a module is named so, as of stacks that stay."""
    return sum(row.weights or row.nbytes // 2 for row in plan.rows)


def cell(plans: Mapping[str, ExportResult]) -> str:
    """What the page says of the plans of a layout's repositories, in their order."""
    told = []
    for repository, plan in plans.items():
        bits, group = 8 * plan.output_bytes / weights(plan), REAL[repository].group
        groups = f", groups of {group}" if group != Real.group else ""
        other = f"{repository}: " if REAL[repository].layout else ""
        billions = weights(plan) / 1e9
        told.append(f"{other}{bits:.2f} of {billions:{'.0f' if billions >= 100 else '.3g'}} B{groups}")
    return "; ".join(told) or "-"
