"""Combinations that engines are known to refuse: a table, looked at before the work starts.

Each row was read in the engine's own code or seen by running it, in the versions named here; its comment says where.
What is not in the table is not known to fail, which is less than known to load. Importing this does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from modelexport.sharding.plan import admissible_tp

__all__ = ["REFUSALS", "Linear", "Refusal", "loadable_tp", "warnings"]

VLLM = "vLLM 0.32"
SGLANG = "SGLang 0.5.23"
TRANSFORMERS = "transformers 5.23 (compressed-tensors 0.20)"


@dataclass(frozen=True)
class Linear:
    """One linear that will be written, or one for all layers that are alike.

    Attributes:
        name: to be named by.
        number_format: as ``--quant`` spells it.
        shape: ``[out_features, in_features]``.
        group_size: of its number format: -1 is a whole row, None is no groups.
        role: as its family has it, e.g. ``"attention.q"``.
        partition: how engines cut it over tensor-parallel ranks: ``column``, ``row`` or ``replicated``.
        is_expert: whether a layer has one for each expert.
    """

    name: str
    number_format: str
    shape: tuple[int, int]
    group_size: int | None = None
    role: str = ""
    partition: str = "replicated"
    is_expert: bool = False

    def share(self, tp: int) -> tuple[int, int]:
        """Its shape on one of ``tp`` ranks, as engines cut it; the whole where that is not even."""
        rows, cols = self.shape
        if self.partition == "column" and rows % tp == 0:
            return rows // tp, cols
        if self.partition == "row" and cols % tp == 0:
            return rows, cols // tp
        return rows, cols


@dataclass(frozen=True)
class Refusal:
    """A row: an engine, what it refuses, and why. Fields that are None or empty ask for nothing.

    Attributes:
        formats: of the checkpoint, as ``--format`` spells them.
        number_formats: any of these; empty: any that quantises.
        why: what the engine does, as the end of "vLLM 0.32 and this: ...".
        instead: what to type.
        experts: only linears that are experts (True), or only those that are not.
        roles: only these.
        partition: only linears that are cut so.
        models: only models of these types.
        groups: only these group sizes.
        groups_but: only other group sizes than these.
        units: only shapes that are no multiple of this, ``(out, in)``, on one rank.
        caches: any of these KV caches, as ``--kv-cache`` spells them: then the row is about a checkpoint with one, and
            about none of its linears.
        several: only checkpoints with several number formats (True), or, of caches, only with none (False).
        without: only checkpoints that have none of these number formats.
    """

    engine: str
    formats: tuple[str, ...]
    number_formats: tuple[str, ...]
    why: str
    instead: str
    experts: bool | None = None
    roles: tuple[str, ...] = ()
    partition: str | None = None
    models: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    groups_but: tuple[int, ...] = ()
    units: tuple[int, int] | None = None
    caches: tuple[str, ...] = ()
    several: bool | None = None
    without: tuple[str, ...] = ()

    def means_cache(self, cache: str, number_formats: int) -> bool:
        """Returns whether the row applies to a KV cache beside linears of so many number formats."""
        fits = self.several is None or (number_formats > 1 if self.several else number_formats == 0)
        return cache in self.caches and fits

    def means(self, linear: Linear, tp: int, model: str, kinds: Collection[tuple[str, int | None]]) -> bool:
        """Returns whether the row applies to that linear, of a model of that type, on ``tp`` ranks, in a checkpoint of
        these number formats, each with its group size."""
        return (
            not self.caches
            and (self.several is None or (len(kinds) > 1 and self.several))
            and not any(name in self.without for name, _ in kinds)
            and (not self.models or model in self.models)
            and (not self.number_formats or linear.number_format in self.number_formats)
            and (self.experts is None or linear.is_expert is self.experts)
            and (not self.roles or linear.role in self.roles)
            and (self.partition is None or linear.partition == self.partition)
            and (not self.groups or linear.group_size in self.groups)
            and (not self.groups_but or linear.group_size not in self.groups_but)
            and (self.units is None or any(n % unit for n, unit in zip(linear.share(tp), self.units, strict=True)))
        )


_HF = ("hf",)
_ASYMMETRIC_8 = "--quant int8-wo, or int4-asym"
_MAMBA = ("mixer.in_proj", "mixer.x_proj", "mixer.out_proj", "mamba.in_proj", "mamba.x_proj", "mamba.out_proj")
_PLAIN_EMBEDDINGS = (
    *("afmoe", "bloom", "cohere", "cohere2", "cohere2_moe", "dbrx", "falcon", "falcon_h1", "gemma", "gemma2"),
    *("glm4_moe", "gpt_oss", "granitemoe", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "longcat_flash", "mamba"),
    *("mamba2", "mixtral", "nemotron", "olmo_hybrid", "opt", "phimoe", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"),
    *("qwen3_5_text", "qwen3_next", "zamba2"),
)
_PLAIN_HEADS = ("bloom", "falcon_h1", "gpt_oss", "jamba", "mamba", "mamba2", "opt", "qwen3_next", "zamba2")
_EXPERTS_AS_THEY_ARE = "--quant '*experts*=none,*=int4'"
_FIRST_OF_FUSED = ("attention.q", "attention.k", "mlp.gate", "shared.gate")

REFUSALS: tuple[Refusal, ...] = (
    # auto_gptq.py: TYPE_MAP has (4, True) and (8, True) alone. Run: the configuration is refused as it is read.
    Refusal(VLLM, ("gptq",), ("int4-asym",), "it reads symmetric gptq only", "--format awq or hf"),
    Refusal(VLLM, ("gptq",), ("int8-wo-asym",), "it reads symmetric gptq only", "--quant int8-wo"),
    # gpt_oss.py looks for quantised experts in a quantised model, and for no gate and up by themselves. Run: KeyError
    # 'layers.0.mlp.experts.w2_bias' with bfloat16 experts; with experts one by one it loads, and fills none of theirs.
    Refusal(
        VLLM,
        _HF,
        (),
        "it reads experts in bfloat16 where nothing is quantised, or as MXFP4 blocks beside bfloat16",
        "--format mxfp4 --quant '*experts*=mxfp4-wo,*=none', or --quant none",
        models=("gpt_oss",),
    ),
    # weight_utils.py: maybe_remap_moe_expert_param_name has no input_global_scale. Run: KeyError of it.
    Refusal(
        VLLM,
        _HF,
        ("nvfp4",),
        "its loader of Granite 4's experts does not know the scales of their inputs",
        "--quant nvfp4-wo, fp8 or int4",
        experts=True,
        models=("granitemoehybrid",),
    ),
    # aria.py gives its experts a loader of its own. Run: IndexError at weight_global_scale.
    Refusal(
        VLLM,
        _HF,
        ("nvfp4", "nvfp4-wo"),
        "its loader of Aria's experts takes no scale of a whole weight",
        "--quant int4 or fp8",
        experts=True,
        models=("aria",),
    ),
    # dbrx.py names the parameters of experts as they were before its RoutedExperts had them. Run: KeyError
    # 'blocks.0.ffn.experts.w13_weight' in bfloat16, and of the first expert's name where they are quantised.
    Refusal(
        VLLM,
        ("hf", "modelopt", "awq", "gptq", "fp8-block"),
        (),
        "its loader of DBRX finds the experts of no checkpoint, in bfloat16 either",
        "transformers to run it, with experts as they are: --quant '*experts*=none,*=int4'",
        models=("dbrx",),
    ),
    # It runs transformers' modules, whose experts of a layer are one parameter. Run: no module 'layers.0.mlp.experts'.
    Refusal(
        VLLM,
        ("hf", "modelopt", "awq", "gptq", "fp8-block"),
        (),
        "it reads the experts of a layer in one tensor, which quantised ones are not",
        _EXPERTS_AS_THEY_ARE,
        experts=True,
        models=("jetmoe",),
    ),
    # Run: their parameters are missing from the checkpoint (docs/families.md).
    Refusal(
        TRANSFORMERS,
        _HF,
        (),
        "it reads the experts of a layer in one tensor, which quantised ones are not",
        f"{_EXPERTS_AS_THEY_ARE}, if transformers is to load them",
        experts=True,
        models=("dbrx", "jetmoe"),
    ),
    # auto_awq.py: in_features of a rank // in_features groups, which is none. Run: tp 2 fails, groups of 32 load.
    # layers/mamba/mamba_mixer.py gives its linears no quantisation. Run: loading fails on weight_packed.
    Refusal(
        VLLM,
        ("hf", "modelopt", "awq", "gptq", "fp8-block"),
        (),
        "it builds the linears of Mamba-1 layers unquantised, and fails on quantised ones",
        "--quant none, or patterns of --quant that leave these linears out",
        roles=_MAMBA,
        models=("falcon_mamba", "jamba", "mamba"),
    ),
    # models/*.py: of these, VocabParallelEmbedding and ParallelLMHead are made without quant_config.
    Refusal(
        VLLM,
        _HF,
        (),
        "its model of this type makes its embedding unquantised",
        "a --quant that leaves the embedding out",
        roles=("embedding",),
        models=_PLAIN_EMBEDDINGS,
    ),
    Refusal(
        VLLM,
        ("hf", "modelopt", "awq", "gptq"),
        (),
        "its model of this type makes its head unquantised",
        "a --quant that leaves the head out",
        roles=("head",),
        models=_PLAIN_HEADS,
    ),
    # Run: AttributeError, 'Embedding' object has no attribute 'weight', once its tensors are loaded.
    Refusal(
        TRANSFORMERS,
        _HF,
        (),
        "it looks no rows up in a quantised embedding",
        "a --quant that leaves the embedding out, if transformers is to load it",
        roles=("embedding",),
    ),
    # bloom.py reorders the rows of all tensors of query_key_value as it loads them. Run: what has no rows fails.
    Refusal(
        VLLM,
        _HF,
        ("int4", "int4-asym", "int8-wo", "int8-wo-asym", "w4a8", "fp8-block", "fp8-static", "nvfp4", "nvfp4-wo"),
        "it reorders the rows of Bloom's query_key_value, which scales of a whole weight do not have",
        "--quant int8 or fp8",
        roles=("attention.qkv",),
        models=("bloom",),
    ),
    Refusal(
        VLLM,
        ("awq",),
        ("int4", "int4-asym"),
        "one group for a whole row cannot be cut: it loads at tensor-parallel size 1 only",
        "--group-size 128, or --format hf",
        partition="row",
        groups=(-1,),
    ),
    # kernels/linear/mixed_precision: of those that need no further package, only Machete takes zero points of 8 bits
    # (machete_utils.py: capability 9.0, groups -1, 64, 128); Marlin, Exllama and Triton do not.
    Refusal(
        VLLM,
        _HF,
        ("int8-wo-asym",),
        "its one kernel for 8-bit zero points (Machete) has no groups of 32",
        f"--group-size 128, {_ASYMMETRIC_8}",
        experts=False,
        groups=(32,),
    ),
    Refusal(
        VLLM,
        _HF,
        ("int8-wo-asym",),
        "its one kernel for 8-bit zero points (Machete) runs on Hopper GPUs alone",
        _ASYMMETRIC_8,
        experts=False,
        groups_but=(32,),
    ),
    # machete_utils.py: check_machete_supports_shape.
    Refusal(
        VLLM,
        _HF,
        ("int8-wo-asym",),
        "its one kernel for 8-bit zero points (Machete) takes multiples of 128 outputs and 64 inputs",
        _ASYMMETRIC_8,
        experts=False,
        units=(128, 64),
    ),
    # fused_moe/oracle/int_wna16.py, and _supports_quant_scheme of marlin_moe.py and triton_moe.py: no such key.
    Refusal(VLLM, _HF, ("int8-wo-asym",), "it has no kernel for experts with 8-bit zero points", _ASYMMETRIC_8, True),
    # compressed_tensors.py: _is_fp8_w4a8_sm90 asks for capability 9.0 exactly, and no other scheme fits.
    Refusal(VLLM, _HF, ("w4a8",), "its kernel for int4 with fp8 runs on Hopper GPUs alone", "--quant int4"),
    # compressed_tensors_w4a8_fp8.py and compressed_tensors_moe_w4a8_fp8.py: group size 128 alone.
    Refusal(
        VLLM,
        _HF,
        ("w4a8",),
        "its kernel for int4 with fp8 has groups of 128 alone",
        "--group-size 128",
        groups_but=(128,),
    ),
    # kernels/linear/mixed_precision/cutlass.py: can_implement.
    Refusal(
        VLLM,
        _HF,
        ("w4a8",),
        "its kernel for int4 with fp8 takes multiples of 128 on both sides",
        "--quant int4",
        experts=False,
        units=(128, 128),
    ),
    # compressed_tensors_moe_w4a8_fp8.py: create_weights.
    Refusal(
        VLLM,
        _HF,
        ("w4a8",),
        "its kernel for experts in int4 with fp8 takes multiples of 256 on both sides",
        "--quant int4",
        experts=True,
        units=(256, 256),
    ),
    # compressed_tensors_moe.py: of int8 it has _is_dynamic_token_w8a8 alone, then "Unsupported FusedMoe scheme".
    Refusal(VLLM, _HF, ("int8-static",), "it has no experts in int8 with static activations", "--quant int8", True),
    # fp8_utils.py: validate_fp8_block_shape, of all but the last part of a fused matrix also on one rank.
    Refusal(
        VLLM,
        (*_HF, "fp8-block"),
        ("fp8-block",),
        "parts of a fused matrix (q/k/v, gate/up) must have multiples of 128 outputs on each rank",
        "--quant fp8",
        experts=False,
        roles=_FIRST_OF_FUSED,
        units=(128, 1),
    ),
    # fp8_utils.py: validate_fp8_block_shape_moe.
    Refusal(
        VLLM,
        (*_HF, "fp8-block"),
        ("fp8-block",),
        "experts must have an inner width of multiples of 128 on each rank",
        "--quant fp8",
        experts=True,
        roles=("expert.gate", "expert.up"),
        units=(128, 1),
    ),
    # modelopt.py: LINEAR_ALGOS has neither W8A8_SQ_PER_CHANNEL, W8A16, W4A16_AWQ, W4A8_AWQ nor those of mxfp4.
    Refusal(
        VLLM,
        ("modelopt",),
        ("int8", "int8-static", "int8-wo", "int4", "w4a8", "mxfp4", "mxfp4-wo"),
        "of modelopt's algorithms it knows those of fp8, nvfp4 and mxfp8",
        "--format hf",
    ),
    # modelopt.py: ModelOptFp8MoEMethod has one scale for a weight, whatever quant_algo says.
    Refusal(
        VLLM,
        ("modelopt",),
        ("fp8", "fp8-block"),
        "its experts in modelopt's fp8 have one scale for a weight",
        "--quant fp8-static, or --format hf",
        experts=True,
    ),
    # modelopt.py: KFp8Static128Block.create_weights.
    Refusal(
        VLLM,
        ("modelopt",),
        ("fp8-block",),
        "modelopt's fp8 blocks must divide the inputs on each rank",
        "--format hf",
        experts=False,
        units=(1, 128),
    ),
    # configs/model_config.py: _parse_modelopt_quant_config.
    Refusal(
        SGLANG,
        ("modelopt",),
        (),
        "modelopt's mixed precision without NVFP4 in it is DeepSeek's W4AFP8 to it",
        "--format hf",
        several=True,
        without=("nvfp4", "nvfp4-wo"),
    ),
    # modelopt_quant.py: ModelOptMixedPrecisionConfig.get_quant_method.
    Refusal(
        SGLANG,
        ("modelopt",),
        ("fp8", "int8", "int8-static", "int8-wo", "int4", "w4a8", "mxfp4", "mxfp4-wo"),
        "beside other number formats it takes these numbers for unquantised weights",
        "fp8-static, fp8-block or mxfp8 beside nvfp4, or --format hf",
        several=True,
    ),
    # layers/quantization/__init__.py: gguf is not among the methods, and nothing loads such a file.
    Refusal(VLLM, ("gguf",), (), "it reads no GGUF", "llama.cpp to run it, or --format hf"),
    # integrations/compressed_tensors.py, CompressedTensorsDequantize: experts are looked for as weight_packed with
    # weight_scale, or as fp8 with a scale that broadcasts. Run with a Mixtral: int8, int4-asym, fp8-block, mxfp8 fail.
    Refusal(
        TRANSFORMERS,
        _HF,
        ("int8", "int8-static", "int4-asym", "int8-wo-asym", "fp8-block", "mxfp8"),
        "it does not load such experts",
        "--quant fp8, int4 or int8-wo, if transformers is to load them",
        experts=True,
    ),
    # compressed_tensors/quantization/lifecycle/initialize.py makes zero points as they are unpacked, those of the
    # file are
    # packed. Run: the shapes do not fit, and with dequantize=True they are unpacked first.
    Refusal(
        TRANSFORMERS,
        _HF,
        ("int4-asym", "int8-wo-asym"),
        "it makes no room for packed zero points",
        "CompressedTensorsConfig(dequantize=True) as it loads, or --quant int4 or int8-wo",
        experts=False,
    ),
    # CompressedTensorsDequantize again: weight_global_scale is left out. Run with a Mixtral: it loads, and its
    # logits are noise.
    Refusal(
        TRANSFORMERS,
        _HF,
        ("nvfp4", "nvfp4-wo"),
        "it leaves out the experts' global scale, and computes nonsense without an error",
        "--quant fp8, int4 or mxfp4-wo, if transformers is to load them",
        experts=True,
    ),
    # quantizers/auto.py: supports_quant_method knows no modelopt, warns, and reads the weights as unquantised ones.
    Refusal(
        TRANSFORMERS,
        ("modelopt",),
        (),
        "it knows no modelopt, and takes the stored numbers for the weights",
        "--format hf, if transformers is to load it",
    ),
    # v1/attention/backend.py, validate_configuration: a backend without scales for heads is not taken; of all,
    # flash_attn.py has them, from FlashAttention 3 on.
    Refusal(
        VLLM,
        _HF,
        (),
        "of its attentions only FlashAttention 3 or later (Hopper GPUs) takes a scale for each head",
        "--kv-cache fp8 for other devices",
        caches=("fp8-head",),
    ),
    # v1/attention/backends/flashinfer.py: supports_kv_cache_dtype, supports_combination, get_supported_head_sizes.
    Refusal(
        VLLM,
        ("modelopt",),
        (),
        "of its attentions only FlashInfer (NVIDIA GPUs) reads it, and heads of 128, 256 or 512; of 64 on Blackwell",
        "--kv-cache fp8 for others",
        caches=("nvfp4",),
    ),
    # modelopt.py, ModelOptQuantConfigBase.from_config.
    Refusal(
        VLLM,
        ("modelopt",),
        (),
        "it reads no modelopt checkpoint in which nothing but the cache is quantised (quant_algo)",
        "--quant fp8 or nvfp4 beside it",
        caches=("nvfp4",),
        several=False,
    ),
    # modelopt.py: of kv_cache_scheme from_config takes FP8 alone, and ModelOptMixedPrecisionConfig.get_quant_method
    # loads no scales where it took none.
    Refusal(
        VLLM,
        ("modelopt",),
        (),
        "beside several number formats it leaves the scales out, and takes 1 for them",
        "one --quant for all linears",
        caches=("nvfp4",),
        several=True,
    ),
)


def loadable_tp(
    limits: Iterable[tuple[int, int]], kv_heads: int, head_dim: int, kv_units: Iterable[int] = ()
) -> list[int]:
    """Tensor-parallel sizes at which an engine can load a checkpoint; one rank can always, since nothing is cut.

    Args:
        limits: for each dimension that an engine cuts, its size and the unit that must stay whole; none: of what is
            not known how it is cut, one rank is all that can be promised.
        kv_heads, head_dim: key/value heads, of which a rank holds at least one, and the rows of each.
        kv_units: rows of key and value projections that must stay whole.
    """
    units, limits = set(kv_units), sorted(set(limits))
    if not limits:
        return [1]
    cut = [
        tp
        for tp in admissible_tp(limits, kv_heads)
        if tp > 1 and all(max(1, kv_heads // tp) * head_dim % unit == 0 for unit in units)
    ]
    return [1, *cut]


def warnings(
    format_name: str, linears: Iterable[Linear], *, tp: int = 1, model: str = "", cache: str | None = None
) -> list[str]:
    """Warnings for these linears, and for a KV cache: one line for each row of the table that applies to any.

    Args:
        format_name: as ``--format`` spells it.
        linears: those that will be written; the ones that are kept (``number_format`` ``"none"``) may be among them.
        tp: the tensor-parallel size that the checkpoint is meant for, 1 where that is open.
        model: config.json's model_type.
        cache: the number format of the KV cache that the checkpoint has scales for.
    """
    alike: dict[Linear, Linear] = {}  # whatever their names: a line tells how many kinds there are
    for linear in linears:
        if linear.number_format != "none":
            alike.setdefault(replace(linear, name=""), linear)
    quantised = list(alike.values())
    kinds = {(linear.number_format, linear.group_size) for linear in quantised}
    lines = []
    for refusal in REFUSALS:
        if format_name not in refusal.formats:
            continue
        if cache is not None and refusal.means_cache(cache, len(kinds)):
            what = f"a KV cache in {cache} as {format_name}"
            lines.append(f"{refusal.engine} and {what}: {refusal.why}; use {refusal.instead}")
        meant = [linear for linear in quantised if refusal.means(linear, tp, model, kinds)]
        if meant:
            lines.append(_line(refusal, format_name, meant, len(quantised)))
    return lines


def _line(refusal: Refusal, format_name: str, meant: list[Linear], of: int) -> str:
    names = ", ".join(dict.fromkeys(linear.number_format for linear in meant))
    where = ""
    if len(meant) < of:
        first = meant[0]
        others = f" and {len(meant) - 1} more of another kind" if len(meant) > 1 else ""
        where = f" ({first.name}, {first.shape[0]} x {first.shape[1]}{others})"
    return f"{refusal.engine} and {names} as {format_name}{where}: {refusal.why}; use {refusal.instead}"
