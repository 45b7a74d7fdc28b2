"""gpt-oss: attention with sinks, and experts that are stacked into one tensor for all of a layer.

``mlp.experts.gate_up_proj`` is ``[experts, hidden, 2 * intermediate]`` with the columns of gate and up in turn, and
``down_proj`` is ``[experts, intermediate, hidden]``. The published checkpoints hold these as MXFP4 blocks
(``quant_method`` mxfp4), with output features ahead of input features.
"""

from modelexport.models.families._blocks import READS_ATTENTION_NORM, VALUES, attention, embedding, head, norm, router
from modelexport.models.families.base import Axis, ExpertStack, Family, Module

WHY = "all experts of a layer in one tensor"


def _stack(name: str, linears: tuple[str, ...], *shape: str) -> tuple[Module, Module]:
    """Linears that every expert has, stacked, and their biases."""
    role = f"experts.{name.removesuffix('_proj')}"
    paths = tuple((f"expert.{linear}", f"mlp.experts.{{e}}.{linear}_proj") for linear in linears)
    interleaved = len(linears) > 1
    return (
        Module(
            path="mlp.experts",
            parameter=name,
            kind="other",
            role=role,
            shape=("stacked", *shape),
            why=WHY,
            stacked=True,
            experts=ExpertStack(linears=paths, transposed=True, interleaved=interleaved, axis="intermediate"),
        ),
        Module(
            path="mlp.experts",
            parameter=f"{name}_bias",
            kind="other",
            role=f"{role}_bias",
            shape=("stacked", shape[-1]),
            stacked=True,
            experts=ExpertStack(linears=paths, parameter="bias", interleaved=interleaved),
        ),
    )


FAMILY = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    axes={
        "sinks": Axis(times="num_attention_heads", heads=True),
        "stacked": Axis(features=("num_local_experts",)),
        "gate_up": Axis(of="intermediate", each=2),
    },
    before=embedding(),
    layer=(
        norm("input_layernorm", "attention.norm"),
        *attention(bias="attention_bias"),
        Module(
            path="self_attn",
            parameter="sinks",
            kind="vector",
            role="attention.sinks",
            partition="column",
            axis="sinks",
            bias=False,
        ),
        norm("post_attention_layernorm", "mlp.norm"),
        router("mlp.router", axis="stacked", bias=True),
        *_stack("gate_up_proj", ("gate", "up"), "hidden", "gate_up"),
        *_stack("down_proj", ("down",), "intermediate", "hidden"),
    ),
    after=head(),
    scalings=(VALUES, READS_ATTENTION_NORM),
    defaults={"attention_bias": True, "head_dim": 64},
)
