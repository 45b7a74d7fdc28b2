"""Modules and scalings of decoders that several family files share.

Plain functions that return data. Their defaults are Llama's names, which most others took over. ``bias`` is what
:class:`~modelexport.models.families.base.Module` has: True, False, or the key of config.json that says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from modelexport.models.families.base import Module, Scaling

Bias = str | bool | None
Layers = Literal["all", "dense", "sparse"]

BUFFERS = ("rotary_emb.inv_freq",)
"""Of checkpoints that were converted long ago; every reader computes them anew."""


def norm(path: str, role: str, *, axis: str | None = None, bias: Bias = None) -> Module:
    """A norm; along the hidden axis, or over another (a head's features)."""
    return Module(path=path, kind="norm", role=role, axis=axis, bias=bias)


def column(path: str, role: str, axis: str, *, bias: Bias = False, into: str | None = None) -> Module:
    """A linear whose output features are cut."""
    return Module(path=path, kind="linear", role=role, partition="column", axis=axis, bias=bias, fused_into=into)


def row(path: str, role: str, axis: str, *, bias: Bias = False) -> Module:
    """A linear whose input features are cut."""
    return Module(path=path, kind="linear", role=role, partition="row", axis=axis, bias=bias)


def fused(path: str, role: str, parts: tuple[tuple[str, str], ...], *, bias: Bias = False) -> Module:
    """Several linears of the same input that are one on disk, their rows one after the other."""
    return Module(path=path, kind="linear", role=role, partition="column", parts=parts, bias=bias)


def embedding(path: str = "model.embed_tokens") -> tuple[Module, ...]:
    """The embedding of the tokens."""
    return (Module(path=path, kind="embedding", role="embedding", partition="column", axis="vocab"),)


def head(
    final: str = "model.norm", path: str = "lm_head", *, norm_bias: Bias = None, in_memory: str = ""
) -> tuple[Module, ...]:
    """The norm behind the layers, and the head."""
    return (
        norm(final, "final_norm", bias=norm_bias),
        Module(path=path, kind="head", role="head", partition="column", axis="vocab", in_memory=in_memory),
    )


def attention(*, bias: Bias = False, output_bias: Bias = None, path: str = "self_attn") -> tuple[Module, ...]:
    """Grouped-query attention: q, k, v and o; ``output_bias`` is of o, where that is not ``bias``."""
    into = f"{path}.qkv_proj"
    return (
        column(f"{path}.q_proj", "attention.q", "heads", bias=bias, into=into),
        column(f"{path}.k_proj", "attention.k", "kv_heads", bias=bias, into=into),
        column(f"{path}.v_proj", "attention.v", "kv_heads", bias=bias, into=into),
        row(f"{path}.o_proj", "attention.o", "heads", bias=bias if output_bias is None else output_bias),
    )


def head_norms(path: str = "self_attn") -> tuple[Module, ...]:
    """Norms over each head of the queries and of the keys, whose weights all heads share (axis ``head``)."""
    return (
        norm(f"{path}.q_norm", "attention.q_norm", axis="head"),
        norm(f"{path}.k_norm", "attention.k_norm", axis="head"),
    )


def gated_mlp(
    path: str = "mlp",
    role: str = "mlp",
    *,
    axis: str = "intermediate",
    bias: Bias = False,
    layers: Layers = "all",
    into: str | None = None,
    names: Mapping[str, str] | None = None,
) -> tuple[Module, ...]:
    """``down(act(gate(x)) * up(x))``; of each expert, where the path has ``{e}``.

    Args:
        into: what engines join gate and up into.
        names: gate, up and down -> their names on disk, in the order in which they are written.
    """
    names = names or {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    return tuple(
        Module(
            path=f"{path}.{name}",
            kind="linear",
            role=f"{role}.{part}",
            partition="row" if part == "down" else "column",
            axis=axis,
            fused_into=None if part == "down" else into or f"{path}.gate_up_proj",
            bias=bias,
            layers=layers,
        )
        for part, name in names.items()
    )


def experts(
    path: str, *, axis: str, layers: Layers = "all", names: Mapping[str, str] | None = None
) -> tuple[Module, ...]:
    """Gated MLPs with linears of their own; ``path`` is what their numbers come behind."""
    return gated_mlp(f"{path}.{{e}}", "expert", axis=axis, layers=layers, into=f"{path}.w13", names=names)


def router(path: str, *, axis: str = "experts", bias: Bias = False, layers: Layers = "all") -> Module:
    """The router of a mixture of experts."""
    return Module(path=path, kind="router", role="router", axis=axis, bias=bias, layers=layers)


VALUES = Scaling(source="attention.v", into=("attention.o",))
"""Attention adds up values, and only then projects the sums."""
QKV = ("attention.q", "attention.k", "attention.v")
READS_ATTENTION_NORM = Scaling(source="attention.norm", into=QKV)
GATED = Scaling(source="mlp.up", into=("mlp.down",))
"""What is up's is multiplied by what the gate gives, which is not scaled."""
READS_MLP_NORM = Scaling(source="mlp.norm", into=("mlp.gate", "mlp.up"))
DENSE = (VALUES, GATED, READS_ATTENTION_NORM, READS_MLP_NORM)
"""Of a pre-norm decoder with a gated MLP."""
SPARSE = (
    VALUES,
    Scaling(source="expert.up", into=("expert.down",)),
    READS_ATTENTION_NORM,
    Scaling(source="mlp.norm", into=("router", "expert.gate", "expert.up")),
)
"""Of a pre-norm decoder whose every MLP is a mixture of experts."""


def llama_layer(*, bias: Bias, mlp_bias: Bias, output_bias: Bias = None) -> tuple[Module, ...]:
    """Llama's decoder layer."""
    return (
        norm("input_layernorm", "attention.norm"),
        *attention(bias=bias, output_bias=output_bias),
        norm("post_attention_layernorm", "mlp.norm"),
        *gated_mlp(bias=mlp_bias),
    )


def fused_layer(end: str = "") -> tuple[Module, ...]:
    """Phi-3's decoder layer: q, k and v in one linear, and gate and up in another.

    Args:
        end: what the names of its linears end with on disk, and not in memory.
    """
    linears: tuple[Module, ...] = (
        fused(
            "self_attn.qkv_proj",
            "attention.qkv",
            (("attention.q", "heads"), ("attention.k", "kv_heads"), ("attention.v", "kv_heads")),
        ),
        row("self_attn.o_proj", "attention.o", "heads"),
        fused("mlp.gate_up_proj", "mlp.gate_up", (("mlp.gate", "intermediate"), ("mlp.up", "intermediate"))),
        row("mlp.down_proj", "mlp.down", "intermediate"),
    )
    if end:
        linears = tuple(
            replace(module, path=f"{module.path}{end}", in_memory=f"model.layers.{{i}}.{module.path}")
            for module in linears
        )
    norms = norm("input_layernorm", "attention.norm"), norm("post_attention_layernorm", "mlp.norm")
    return (norms[0], *linears[:2], norms[1], *linears[2:])
