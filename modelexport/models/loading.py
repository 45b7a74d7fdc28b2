"""The engines that were seen to load our checkpoints: a table of what the conformance tests ran, and of nothing else.

The other table, :mod:`~modelexport.models.engines`, has what engines are known to refuse. What is in neither was not
tried. Importing this does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from modelexport.models.engines import TRANSFORMERS, VLLM
from modelexport.quantization.ggml_layouts import LAYOUTS

__all__ = ["LOADINGS", "STAND_IN", "CheckpointKind", "Loading", "candidates"]

LLAMA_CPP = "llama.cpp (llama-cpp-python 0.3.36)"
TORCH = "torch 2.13"
MEGATRON = "Megatron-core 0.16.1"

_VLLM = """\
from vllm import LLM

model = LLM(model="CKPT")
"""
_VLLM_FP8_CACHE = """\
from vllm import LLM

model = LLM(model="CKPT", kv_cache_dtype="fp8")
"""
_VLLM_SHARDED = """\
from vllm import LLM

model = LLM(model="CKPT", load_format="sharded_state", tensor_parallel_size={tp})
"""
_TRANSFORMERS = """\
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("CKPT")
"""
_TRANSFORMERS_DECODED = """\
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

decoded = CompressedTensorsConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained("CKPT", quantization_config=decoded)
"""
_LLAMA_CPP = """\
from pathlib import Path

from llama_cpp import Llama

model = Llama(str(min(Path("CKPT").glob("*.gguf"))))  # of several parts, the first
"""
_DCP = """\
import torch.distributed.checkpoint as dcp

dcp.load(state_dict, checkpoint_id="CKPT")  # into the tensors of state_dict, DTensors too
"""
_HF_STORAGE = """\
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

dcp.load(state_dict, storage_reader=HuggingFaceStorageReader("CKPT"))  # into the tensors of state_dict
"""
_MEGATRON = """\
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling

wanted = model.sharded_state_dict(metadata=dist_checkpointing.load_content_metadata("CKPT"))
model.load_state_dict(dist_checkpointing.load(wanted, "CKPT", strict=StrictHandling.LOG_ALL), strict=False)
"""

_OWN = "with its own kernels (on a CPU), it computed what the dequantised weights do"
STAND_IN = (
    "it read the config and the weights, and with plain kernels in place of its own (which need a GPU, and were not "
    "run) it computed what the dequantised weights do"
)
_COMPUTES = "it computed what the dequantised weights do"
_SAME = "it loaded the same numbers"
_FILLED = "its model class found a tensor for every parameter that it has (built on a CPU, and not run)"


@dataclass(frozen=True)
class CheckpointKind:
    """A checkpoint, as far as it decides what loads it.

    Attributes:
        format: as ``--format`` spells it.
        number_formats: of its linears, ``"int4"`` or, in groups of another size than the format's own, ``"int4:32"``;
            linears that are not quantised do not count, and none at all is ``("none",)``.
        model_type: config.json's; None where it is not known.
        sharded: whether it is written for more than one rank.
        kv_cache: the KV cache that it has scales for, as ``--kv-cache`` spells it.
    """

    format: str
    number_formats: tuple[str, ...]
    model_type: str | None
    sharded: bool = False
    kv_cache: str | None = None


@dataclass(frozen=True)
class Loading:
    """A row: an engine, and what it was seen to load.

    Attributes:
        engine: with its version.
        format: of the checkpoint, as ``--format`` spells it.
        ran: model type -> number formats as in :class:`CheckpointKind`.
        command: Python; ``CKPT`` is the checkpoint, ``{tp}`` the tensor-parallel size that it is written for.
        seen: what the engine did, as the end of "in our tests, ...".
        test: the conformance test that ran it.
        sharded: whether it is about checkpoints that are written for several ranks: None says about either.
        mixed: whether several number formats in one checkpoint were tried.
        kv_cache: the KV cache that it is about checkpoints with scales for.
        any_group: whether it is about groups of any size: of names and shapes, which do not depend on it.
    """

    engine: str
    format: str
    ran: Mapping[str, tuple[str, ...]]
    command: str
    seen: str
    test: str
    sharded: bool | None = False
    mixed: bool = False
    kv_cache: str | None = None
    any_group: bool = False

    def is_about(self, stored: CheckpointKind) -> bool:
        """Returns whether it has run such a checkpoint of some model."""
        one = len(stored.number_formats) == 1 or self.mixed
        shape = self.format == stored.format and self.sharded in (None, stored.sharded)
        known = {name for names in self.ran.values() for name in names}
        return one and shape and self.kv_cache == stored.kv_cache and self._formats(stored) <= known

    def has_run(self, stored: CheckpointKind) -> bool:
        """Returns whether it has run such a checkpoint of that model type."""
        own = self.ran.get(stored.model_type or "", ())
        return self.is_about(stored) and self._formats(stored) <= set(own)

    def _formats(self, stored: CheckpointKind) -> set[str]:
        """The number formats of a checkpoint as ``ran`` names them."""
        return {name.partition(":")[0] if self.any_group else name for name in stored.number_formats}


FILLED_TEST = "tests/conformance/test_vllm_parameters.py"
_VLLM_TEST = "tests/conformance/test_engines.py"
_VLLM_OWN = ("none", "int8", "fp8", "int4", "int4-asym", "int8-static")
_VLLM_READ = (
    *("fp8", "fp8-block", "fp8-static", "int4", "int4-asym", "int8", "int8-static", "int8-wo", "int8-wo-asym"),
    *("mxfp4", "mxfp4-wo", "mxfp8", "none", "nvfp4", "nvfp4-wo", "w4a8", "int8-wo:32", "int4:-1"),
)
_VLLM_FAMILIES = (
    *("cohere", "exaone4", "gemma2", "gemma3_text", "glm4", "gpt_neox", "granite", "llama", "mistral", "nemotron"),
    *("olmo2", "opt", "phi", "phi3", "qwen2", "qwen3", "stablelm", "starcoder2"),
)
_VLLM_EXPERTS = ("mixtral", "olmoe", "qwen3_moe")
# fmt: off
_VLLM_FILLS = (
    "apertus", "arcee", "axk2", "bert-generation", "biogpt", "bitnet", "cohere", "cohere2", "cohere2_moe", "ctrl",
    "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32", "doge", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4",
    "exaone_moe", "falcon_h1", "flex_olmo", "gemma", "gemma2", "gemma3_text", "gemma4_unified_text", "glm", "glm4",
    "glm4_moe", "glm4_moe_lite", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "granite",
    "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax", "jais2", "lfm2", "lfm2_moe", "llama",
    "llama4_text", "mamba2", "minicpm3", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral",
    "moshi", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3",
    "phi4_multimodal", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe",
    "qwen3_next", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma", "youtu",
)
# Not calibrated: wrappers, and layers that do not run one by one.
_VLLM_FILLS_WEIGHTS = (
    "aya_vision", "blip-2", "cosmos3_omni", "deepseek_vl", "deepseek_vl_hybrid", "emu3", "exaone4_5",
    "gemma3n_text", "gemma4_text", "glm46v", "glm4v", "glm4v_moe", "glm_moe_dsa", "glm_ocr", "glmasr", "glmga",
    "got_ocr2", "granite_speech", "granite_speech_plus", "granitemoehybrid", "hrm_text", "hyperclovax_vision_v2",
    "idefics2", "idefics3", "internvl", "janus", "kosmos-2", "kosmos-2.5", "lighton_ocr", "llama4", "minicpmv4_6",
    "minicpmv4_7", "minimax_m2", "mistral3", "mistral4", "mllama", "nemotron_h", "ovis2", "paddleocr_vl", "qwen2_5_vl",
    "qwen2_audio", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_asr", "qwen3_vl", "qwen3_vl_moe", "smolvlm",
    "vibevoice_asr", "video_llama_3", "video_llava", "vipllava", "voxtral_realtime", "zaya",
)
# fmt: on
_VLLM_FILLED = {
    **dict.fromkeys(_VLLM_FILLS, ("none", "int4", "fp8", "nvfp4")),
    **dict.fromkeys(_VLLM_FILLS_WEIGHTS, ("none", "int4", "fp8", "nvfp4-wo")),
    "aria": ("none", "int4", "fp8"),
    "bloom": ("none", "fp8"),
    "gpt_oss": ("none",),
    **dict.fromkeys(("falcon_mamba", "jamba", "jetmoe", "mamba"), ("none",)),
}
_FAMILIES_TEST = "tests/conformance/test_engines_families.py"
_MODELOPT_READ = ("fp8", "fp8-static", "fp8-block", "nvfp4", "nvfp4-wo", "mxfp8")
_DECODED = ("int4-asym", "int8-wo-asym", "int4-asym:32")
_BY_TRANSFORMERS = (
    *("fp8", "fp8-block", "fp8-static", "int4", "int8", "int8-static", "int8-wo", "mxfp4", "mxfp4-wo", "mxfp8", "none"),
    *("nvfp4", "nvfp4-wo", "w4a8", "int8-wo:32", "int8-wo:-1", "int4:32", "int4:-1"),
)
_TRANSFORMERS_RAN = {
    "llama": _BY_TRANSFORMERS,
    "mistral": ("int4",),
    "mixtral": ("int4", "fp8", "int4:32"),
    "phi3": ("int4", "fp8", "int8"),
    "qwen2": ("int4", "int8"),
    "qwen3": ("int4", "fp8"),
    "qwen3_moe": ("int4", "fp8", "int4:32"),
    "deepseek_v3": ("int4", "fp8"),
}
_TRANSFORMERS_TEST = "tests/conformance/test_transformers_formats.py"
_PACKED_TEST = "tests/conformance/test_awq_gptq.py"
_LLAMA_CPP_ALL = (
    "none",
    "int8-wo:32",
    "int4:32",
    "mxfp4-wo",
    "nvfp4-wo",
    *(each.number_format for each in LAYOUTS.values()),
)
_LLAMA_CPP_TWO = dict.fromkeys(("mistral", "qwen2", "mixtral", "phi3"), ("none", "int4:32"))

LOADINGS: tuple[Loading, ...] = (
    Loading(VLLM, "hf", {"llama": _VLLM_OWN}, _VLLM, _OWN, _VLLM_TEST),
    Loading(VLLM, "hf", {"llama": _VLLM_READ}, _VLLM, STAND_IN, _VLLM_TEST, mixed=True),
    Loading(VLLM, "hf", dict.fromkeys(_VLLM_FAMILIES, ("int4:32",)), _VLLM, STAND_IN, _FAMILIES_TEST),
    Loading(VLLM, "hf", dict.fromkeys(_VLLM_EXPERTS, ("none",)), _VLLM, _OWN, _FAMILIES_TEST),
    Loading(VLLM, "hf", _VLLM_FILLED, _VLLM, _FILLED, FILLED_TEST, any_group=True),
    Loading(VLLM, "hf", {"llama": ("none", "int4")}, _VLLM_FP8_CACHE, STAND_IN, _VLLM_TEST, kv_cache="fp8"),
    Loading(
        VLLM,
        "awq",
        {"llama": ("int4", "int4-asym", "int4:64", "int4-asym:32", "int4-asym:-1")},
        _VLLM,
        _OWN,
        _PACKED_TEST,
    ),
    Loading(VLLM, "gptq", {"llama": ("int4", "int4:32", "int4:-1")}, _VLLM, _OWN, _PACKED_TEST),
    Loading(VLLM, "gptq", {"llama": ("int8-wo",)}, _VLLM, STAND_IN, _VLLM_TEST),
    Loading(VLLM, "fp8-block", {"llama": ("fp8-block",)}, _VLLM, STAND_IN, _VLLM_TEST),
    Loading(VLLM, "modelopt", {"llama": _MODELOPT_READ}, _VLLM, STAND_IN, _VLLM_TEST, mixed=True),
    Loading(VLLM, "modelopt", {"llama": ("nvfp4-wo",)}, _VLLM_FP8_CACHE, STAND_IN, _VLLM_TEST, kv_cache="fp8"),
    Loading(
        VLLM,
        "vllm-sharded",
        dict.fromkeys(("llama", "phi3", "mixtral"), ("none",)),
        _VLLM_SHARDED,
        "it computed what it does with the Hugging Face checkpoint",
        "tests/conformance/test_vllm_sharded_state.py",
        sharded=None,
    ),
    Loading(TRANSFORMERS, "hf", _TRANSFORMERS_RAN, _TRANSFORMERS, _COMPUTES, _TRANSFORMERS_TEST, mixed=True),
    Loading(TRANSFORMERS, "hf", {"llama": _DECODED}, _TRANSFORMERS_DECODED, _COMPUTES, _TRANSFORMERS_TEST),
    Loading(
        TRANSFORMERS, "hf", {"llama": ("none", "int4")}, _TRANSFORMERS, _COMPUTES, _TRANSFORMERS_TEST, kv_cache="fp8"
    ),
    Loading(
        TRANSFORMERS, "hf", {"llama": ("none",)}, _TRANSFORMERS, _COMPUTES, _TRANSFORMERS_TEST, kv_cache="fp8-head"
    ),
    Loading(
        LLAMA_CPP,
        "gguf",
        {"llama": _LLAMA_CPP_ALL, **_LLAMA_CPP_TWO},
        _LLAMA_CPP,
        "it computed what the dequantised weights do, up to its own rounding of activations",
        "tests/conformance/test_llama_cpp.py",
        mixed=True,
    ),
    Loading(TORCH, "dcp", {"llama": ("none",)}, _DCP, _SAME, "tests/conformance/test_dcp_torch.py", sharded=None),
    Loading(
        TORCH,
        "hf",
        {"llama": ("none", "int4", "int8", "fp8-static")},
        _HF_STORAGE,
        _SAME,
        "tests/conformance/test_hf_sharded_torch.py",
        sharded=True,
    ),
    Loading(
        MEGATRON,
        "megatron",
        dict.fromkeys(("llama", "mixtral"), ("none",)),
        _MEGATRON,
        _SAME,
        "tests/conformance/test_megatron_core.py",
        sharded=None,
    ),
)

Verdict = Literal["run", "other model"]


def candidates(stored: CheckpointKind) -> list[tuple[Loading, Verdict]]:
    """For each engine the best row about such a checkpoint, and whether a model of its type was run, or another."""
    found: dict[str, tuple[Loading, Verdict]] = {}
    for row in _about(stored):
        verdict: Verdict = "run" if row.has_run(stored) else "other model"
        if row.engine not in found or (verdict == "run" and found[row.engine][1] != "run"):
            found[row.engine] = row, verdict
    return list(found.values())


def _about(stored: CheckpointKind) -> Iterable[Loading]:
    return (row for row in LOADINGS if row.is_about(stored))
