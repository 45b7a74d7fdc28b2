"""transformers' model without storage, and which of a checkpoint's tensors each of a layer's is made of."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from modelexport.errors import CheckpointError, PlanError

__all__ = ["DYNAMIC", "Source", "build", "choosing_all", "is_stacked", "misshapen", "sources", "unknown"]

DYNAMIC = "choose what needs no calibration (such as --quant fp8 or int8 with --algorithm rtn), and no --kv-cache"
"""What else to do where a model cannot be calibrated."""

_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)\.weight")
_STACKED = re.compile(r"(.+)\.experts\.(gate_up_proj|down_proj)")
_PARTS = {"gate_up_proj": (("gate_proj", "w1"), ("up_proj", "w3")), "down_proj": (("down_proj", "w2"),)}
"""transformers' stacked parameter -> the linears that an expert has on disk in its stead, by any of their names."""


@dataclass(frozen=True)
class Source:
    """One tensor of the checkpoint within one of the model's.

    Attributes:
        name: in the checkpoint.
        expert: of a stacked tensor; None where it is the whole.
        part, parts: which of how many equal ones it is along the rows of the expert.
    """

    name: str
    expert: int | None = None
    part: int = 0
    parts: int = 1

    def view(self, of: Tensor) -> Tensor:
        """Its place in the model's tensor."""
        if self.expert is None:
            return of
        rows = of.shape[1] // self.parts
        return of[self.expert, self.part * rows : (self.part + 1) * rows]


def build(config: Mapping[str, Any], local: Mapping[str, int]) -> Any:
    """transformers' model without storage. By its class for the ``model_type``: no code but its own can come in.

    Args:
        config: config.json.
        local: keys whose values are others in the modules that this rank builds. They are set after transformers has
            checked the whole model's: half of the heads need not fit the hidden size.

    Raises:
        PlanError: transformers has no such model.
    """
    from accelerate import init_empty_weights
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise PlanError(f"calibration runs transformers' models, which know no model_type {kind!r}: {DYNAMIC}")
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    parsed = CONFIG_MAPPING[kind].from_dict(plain)
    parsed._experts_implementation = "eager"  # which calls F.linear, expert by expert
    for key, value in local.items():
        setattr(parsed, key, value)
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(parsed, attn_implementation="sdpa")
    except ValueError as error:
        raise PlanError(f"calibration cannot build transformers' model for {kind!r}: {error}; {DYNAMIC}") from error
    return model.eval()


def sources(empty: Mapping[str, Tensor], prefix: str, names: Collection[str]) -> dict[str, tuple[Source, ...]]:
    """Of which of the checkpoint's tensors each of a layer's is made; what cannot be found is left out.

    transformers may stack a layer's experts and rename what they are in: "block_sparse_moe" on disk is its "mlp".
    """
    own = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    found: dict[str, tuple[Source, ...]] = {key: (Source(prefix + key),) for key in empty if key in own}
    experts: dict[str, dict[tuple[int, str], str]] = {}
    for name in own:
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = prefix + name
    if len(experts) != 1:
        return found
    ((theirs, linears),) = experts.items()
    for key in empty:
        match = _STACKED.fullmatch(key)
        if key in found or match is None:
            continue
        parts = _PARTS[match[2]]
        stacked = [
            Source(linears[expert, name], expert, number, len(parts))
            for expert in range(empty[key].shape[0])
            for number, known in enumerate(parts)
            for name in known
            if (expert, name) in linears
        ]
        if len(stacked) == empty[key].shape[0] * len(parts):
            found[key] = tuple(stacked)
        for other in empty:
            renamed = theirs + other.removeprefix(match[1])
            if other not in found and other.startswith(f"{match[1]}.") and renamed in own:
                found[other] = (Source(prefix + renamed),)
    return found


@contextmanager
def choosing_all(layer: nn.Module) -> Iterator[None]:
    """With a layer's routers choosing all experts, as far as transformers' modules have a number for that."""
    routers: list[Any] = [each for each in layer.modules() if hasattr(each, "top_k") and hasattr(each, "num_experts")]
    before = [each.top_k for each in routers]
    for each in routers:
        each.top_k = each.num_experts
    try:
        yield
    finally:
        for each, number in zip(routers, before, strict=True):
            each.top_k = number


def is_stacked(key: str) -> bool:
    """Whether a layer's parameter holds the weights of all its experts."""
    return _STACKED.fullmatch(key) is not None


def unknown(model: nn.Module, name: str) -> PlanError:
    """The model has a tensor that the checkpoint has not."""
    kind = type(model).__name__
    return PlanError(f"calibration: transformers' {kind} has {name}, which the checkpoint has not: {DYNAMIC}")


def misshapen(name: str, shape: Any, wanted: Any) -> CheckpointError:
    """A tensor of the checkpoint has another shape than the model's."""
    return CheckpointError(f"{name} is {list(shape)}, but config.json's model has {list(wanted)} there")
