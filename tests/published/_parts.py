"""What published layouts are built of: names and shapes of linears, norms and layers, and how others encode them.

A tensor is ``(dtype, shape)``, dtypes as safetensors spells them. Names are within a layer or a module until
:func:`under` puts something in front.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tests.published._sizes import size

Tensors = dict[str, tuple[str, tuple[int, ...]]]

H, MLP, M, V = size("hidden", 256), size("mlp", 512), size("expert_mlp", 256), size("vocabulary", 256)
LAYERS = size("layers", 2)
HEADS, KV_HEADS, HEAD = size("heads", 4), size("kv_heads", 2), size("head", 64)
WIDE = size("head", 128)  # a head where config.json says it: blocks of FP8 hold whole ones
Q, KV = HEADS * HEAD, KV_HEADS * HEAD
EXPERTS, SHARED_EXPERTS = size("experts", 4), size("shared_experts", 1)
Q_LORA, KV_LORA = size("q_lora", 128), size("kv_lora", 128)  # latent attention
NOPE, ROPE, VALUE = size("nope", 64), size("rope", 64), size("value", 64)
DELTA_KEYS, DELTA_VALUES, DELTA_HEAD = size("delta_keys", 2), size("delta_values", 4), size("delta_head", 64)
MAMBA_HEADS, MAMBA_HEAD, MAMBA_GROUPS = size("mamba_heads", 8), size("mamba_head", 64), size("mamba_groups", 1)
STATE, INNER = size("state", 16), MAMBA_HEADS * MAMBA_HEAD
# of the vision tower
VH, VMLP, VLAYERS = size("vision_hidden", 256), size("vision_mlp", 512), size("vision_layers", 1)
VHEADS, VHEAD = size("vision_heads", 4), size("vision_head", 64)
IMAGE, PATCH = size("image", 28), size("patch", 14)
PATCHES = (IMAGE // PATCH) * (IMAGE // PATCH)


def bare(name: str, *shape: int, dtype: str = "BF16") -> Tensors:
    """A tensor."""
    return {name: (dtype, shape)}


def linear(name: str, rows: int, cols: int, *, bias: bool = False) -> Tensors:
    """A linear."""
    return {**bare(f"{name}.weight", rows, cols), **(bare(f"{name}.bias", rows) if bias else {})}


def norms(*names: str, size: int = H, bias: bool = False) -> Tensors:
    """Norms of one size."""
    found: Tensors = {}
    for name in names:
        found |= {**bare(f"{name}.weight", size), **(bare(f"{name}.bias", size) if bias else {})}
    return found


def under(prefix: str, *parts: Tensors) -> Tensors:
    """All of them, with a prefix."""
    return {f"{prefix}{name}": tensor for part in parts for name, tensor in part.items()}


def stacked(prefix: str, numbers: int | Iterable[int], *parts: Tensors) -> Tensors:
    """The same for each of some numbers."""
    numbers = range(numbers) if isinstance(numbers, int) else numbers
    found: Tensors = {}
    for number in numbers:
        found |= under(f"{prefix}{number}.", *parts)
    return found


def attention(
    name: str = "self_attn", *, bias: bool = False, out_bias: bool = False, qk: int = 0, head: int = HEAD
) -> Tensors:
    """Grouped-query attention; ``qk``: features of the norms of queries and keys."""
    found = {
        **linear(f"{name}.q_proj", HEADS * head, H, bias=bias),
        **linear(f"{name}.k_proj", KV_HEADS * head, H, bias=bias),
        **linear(f"{name}.v_proj", KV_HEADS * head, H, bias=bias),
        **linear(f"{name}.o_proj", H, HEADS * head, bias=out_bias),
    }
    return {**found, **(norms(f"{name}.q_norm", f"{name}.k_norm", size=qk) if qk else {})}


def gated(name: str = "mlp", width: int = MLP, *, bias: bool = False, hidden: int = H) -> Tensors:
    """A gated MLP."""
    return {
        **linear(f"{name}.gate_proj", width, hidden, bias=bias),
        **linear(f"{name}.up_proj", width, hidden, bias=bias),
        **linear(f"{name}.down_proj", hidden, width, bias=bias),
    }


def experts(name: str = "mlp.experts", width: int = M, count: int = EXPERTS) -> Tensors:
    """Experts in a list, with a gate, an up and a down projection each."""
    return stacked(f"{name}.", count, {key.removeprefix("x."): value for key, value in gated("x", width).items()})


def w123(name: str, width: int = MLP, count: int = EXPERTS) -> Tensors:
    """Experts in a list, as Mixtral calls their linears."""
    return stacked(f"{name}.", count, linear("w1", width, H), linear("w2", H, width), linear("w3", width, H))


PRE = norms("input_layernorm", "post_attention_layernorm")
FOUR = norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def decoder(*layer: Tensors, prefix: str = "model.", head: str = "lm_head", layers: int | Iterable[int] = 2) -> Tensors:
    """Embedding, layers, final norm and, unless its name is empty, the head."""
    found = under(prefix, linear("embed_tokens", V, H), stacked("layers.", layers, *layer), norms("norm"))
    return {**found, **(linear(head, V, H) if head else {})}


# ----------------------------------------------------------------- quantised

Encoded = Callable[[int, int], Tensors]


def encode(tensors: Mapping[str, tuple[str, tuple[int, ...]]], which: str, encoded: Encoded) -> Tensors:
    """With the linears whose names match a pattern encoded; ``encoded``: rows and columns -> suffix -> tensor."""
    found: Tensors = {}
    for name, (dtype, shape) in tensors.items():
        module = name.removesuffix(".weight")
        if module != name and len(shape) == 2 and re.search(which, module):
            found |= under(f"{module}.", encoded(*shape))
        else:
            found[name] = (dtype, shape)
    return found


def _up(size: int, unit: int) -> int:
    return -(-size // unit)


def fp8_blocks(rows: int, cols: int) -> Tensors:
    """DeepSeek's: blocks of 128 x 128."""
    return {
        **bare("weight", rows, cols, dtype="F8_E4M3"),
        **bare("weight_scale_inv", _up(rows, 128), _up(cols, 128), dtype="F32"),
    }


def fp8_channels(rows: int, cols: int) -> Tensors:
    """compressed-tensors, dynamic activations."""
    return {**bare("weight", rows, cols, dtype="F8_E4M3"), **bare("weight_scale", rows, 1)}


def fp8_static(rows: int, cols: int) -> Tensors:
    """compressed-tensors, static activations."""
    return {**bare("weight", rows, cols, dtype="F8_E4M3"), **bare("weight_scale", 1), **bare("input_scale", 1)}


def int8_channels(rows: int, cols: int) -> Tensors:
    """compressed-tensors, W8A8."""
    return {**bare("weight", rows, cols, dtype="I8"), **bare("weight_scale", rows, 1)}


def packed(group: int = 128) -> Encoded:
    """compressed-tensors, W4A16."""

    def encoded(rows: int, cols: int) -> Tensors:
        return {
            **bare("weight_packed", rows, cols // 8, dtype="I32"),
            **bare("weight_scale", rows, cols // group),
            **bare("weight_shape", 2, dtype="I64"),
        }

    return encoded


def awq(rows: int, cols: int, group: int = 128) -> Tensors:
    """AutoAWQ's gemm."""
    return {
        **bare("qweight", cols, rows // 8, dtype="I32"),
        **bare("qzeros", cols // group, rows // 8, dtype="I32"),
        **bare("scales", cols // group, rows, dtype="F16"),
    }


def gptq(rows: int, cols: int, group: int = 128) -> Tensors:
    """AutoGPTQ's."""
    return {
        **bare("g_idx", cols, dtype="I32"),
        **bare("qweight", cols // 8, rows, dtype="I32"),
        **bare("qzeros", cols // group, rows // 8, dtype="I32"),
        **bare("scales", cols // group, rows, dtype="F16"),
    }


def modelopt_fp8(rows: int, cols: int) -> Tensors:
    """ModelOpt's FP8."""
    return {
        **bare("weight", rows, cols, dtype="F8_E4M3"),
        **bare("weight_scale", dtype="F32"),
        **bare("input_scale", dtype="F32"),
    }


def modelopt_nvfp4(rows: int, cols: int) -> Tensors:
    """ModelOpt's NVFP4."""
    return {
        **bare("weight", rows, cols // 2, dtype="U8"),
        **bare("weight_scale", rows, cols // 16, dtype="F8_E4M3"),
        **bare("weight_scale_2", dtype="F32"),
        **bare("input_scale", dtype="F32"),
    }


def fbgemm(rows: int, cols: int) -> Tensors:
    """fbgemm's FP8."""
    return {
        **bare("weight", rows, cols, dtype="F8_E4M3"),
        **bare("weight_scale", rows, 1, dtype="F32"),
    }


def nf4(rows: int, cols: int) -> Tensors:
    """bitsandbytes' NF4, with nested scales."""
    blocks = _up(rows * cols, 64)
    return {
        **bare("weight", rows * cols // 2, 1, dtype="U8"),
        **bare("weight.absmax", blocks, dtype="U8"),
        **bare("weight.nested_absmax", _up(blocks, 256), dtype="F32"),
        **bare("weight.nested_quant_map", 256, dtype="F32"),
        **bare("weight.quant_map", 16, dtype="F32"),
        **bare("weight.quant_state.bitsandbytes__nf4", 160, dtype="U8"),
    }


def hqq(rows: int, cols: int) -> Tensors:
    """HQQ's 4-bit weights, as transformers saves them: groups of 64, meta data beside."""
    groups = rows * cols // 64
    flags = ("view_as_float", "quant_scale", "quant_zero", "offload_meta", "encoded_state_dict", "stores_quant_config")
    return {
        **bare("W_q", groups // 2, 64, dtype="U8"),
        **bare("scale", groups, 1),
        **bare("zero", groups, 1),
        **bare("shape", 2, dtype="I64"),
        **dict.fromkeys(("nbits", "group_size", "axis"), ("I32", ())),
        **dict.fromkeys((*flags, "channel_wise", "optimize", "round_zero"), ("U8", ())),
        **bare("packing", 7, dtype="U8"),
        **bare("unpack_view_dtype", 11, dtype="U8"),
        **bare("compute_dtype", 14, dtype="U8"),
    }


def static_fp8_of_mistral(rows: int, cols: int) -> Tensors:
    """transformers' fp8 without blocks, by its words."""
    return {
        **bare("weight", rows, cols, dtype="F8_E4M3"),
        **bare("weight_scale_inv"),
        **bare("activation_scale"),
    }


def compressed(form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, ignore: list[str]) -> Any:
    """A quantization_config of compressed-tensors with one group."""
    group = {
        "targets": ["Linear"],
        "weights": {"dynamic": False, "symmetric": True, "observer": "minmax", **weights},
        "input_activations": None if inputs is None else {"symmetric": True, **inputs},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "actorder": None}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
FP8_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor"}
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
