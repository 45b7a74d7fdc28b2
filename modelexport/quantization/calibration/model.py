"""transformers' model without storage, and which of a checkpoint's tensors each of a layer's is made of."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modelexport.errors import CheckpointError, ModelExportError, PlanError, error_text, quoted, shown
from modelexport.quantization.calibration.attention import watched_attention
from modelexport.quantization.calibration.cut import ForwardCut

__all__ = [
    "DYNAMIC",
    "OF_MODELS",
    "TensorSource",
    "attention_of",
    "body",
    "build",
    "causal_class",
    "choosing_all",
    "decoder_layers",
    "in_memory",
    "kv_heads",
    "misshapen",
    "narrow",
    "on_disk",
    "parsed_config",
    "running",
    "sources",
    "text_class",
    "unknown",
]

DYNAMIC = "choose what needs no calibration (such as --quant fp8 or int8 with --algorithm rtn), and no --kv-cache"
"""What else to do where a model cannot be calibrated."""
OF_MODELS = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What transformers' modules raise that are run in a way they are not made for."""

_BESIDE_LORA = ".base_layer."
"""What peft puts into the name of a linear that has LoRA branches, where a checkpoint holds them side by side."""
_EXPERT = re.compile(r"(.+\.|)experts\.(\d+)\.(\w+)\.(weight|bias)")
_STACKED = re.compile(r"(.+\.|)experts\.(gate_up_proj|up_proj|down_proj)(_bias)?")
_PARTS = {
    "gate_up_proj": (("gate_proj", "w1"), ("up_proj", "w3")),
    "up_proj": (("up_proj",),),  # of experts without a gate
    "down_proj": (("down_proj", "w2"),),
}
"""transformers' stacked parameter -> the linears that an expert has on disk in its stead, by any of their names."""
_NAMED_STACKS = tuple(
    (re.compile(key), linears, transposed)
    for key, linears, transposed in (
        (r"(.+)\.input_linear\.weight", (r"\1.experts.{e}.gate_proj.weight", r"\1.experts.{e}.up_proj.weight"), False),
        (r"(.+)\.output_linear\.weight", (r"\1.experts.{e}.down_proj.weight",), False),
        (r"(.+\.experts)\.input_linear\.weight", (r"\1.{e}.q_proj.weight",), False),
        (r"(.+\.experts)\.output_linear\.weight", (r"\1.{e}.o_proj.weight",), False),
        (r"(.+\.experts\.mlp)\.(w1|v1)", (r"\1.{e}.\2.weight",), False),
        (r"(.+\.experts\.mlp)\.w2", (r"\1.{e}.w2.weight",), True),
    )
)
"""The same of single models, JetMoE and DBRX: the names on disk with ``{e}`` for the expert's number, and whether the
parameter has input features ahead of output features."""


@dataclass(frozen=True)
class TensorSource:
    """One tensor of the checkpoint within one of the model's.

    Attributes:
        name: in the checkpoint.
        expert: of a stacked tensor; None where it is the whole.
        part, parts: which of how many equal ones it is along the output features of the expert.
        interleaved: whether these have features in turn, and not one behind the other.
        transposed: whether the model's tensor is ``[experts, in, out]``.
        joined: of a model's tensor of two dims: how many experts lie in it one behind the other; 0: it has three.
    """

    name: str
    expert: int | None = None
    part: int = 0
    parts: int = 1
    interleaved: bool = False
    transposed: bool = False
    joined: int = 0

    @property
    def is_multiplied(self) -> bool:
        """True if layers multiply by an expert's ``[in, out]`` of it, and do not call ``F.linear``."""
        return self.transposed or self.joined > 0

    def span(self, size: int) -> slice:
        """Its output features among the ``size`` of the expert."""
        if self.interleaved:
            return slice(self.part, size, self.parts)
        rows = size // self.parts
        return slice(self.part * rows, (self.part + 1) * rows)

    def matrix(self, of: Tensor) -> Tensor:
        """The expert's ``[out, in]``, or bias, of the model's tensor."""
        own = of
        if self.expert is not None and self.joined:
            rows = of.shape[0] // self.joined
            own = of[self.expert * rows : (self.expert + 1) * rows]
        elif self.expert is not None:
            own = of[self.expert]
        return own.t() if self.transposed else own

    def view(self, of: Tensor) -> Tensor:
        """Its place in the model's tensor."""
        own = self.matrix(of)
        return own if self.expert is None else own[self.span(own.shape[0])]


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
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    kind = config.get("model_type")
    parsed = parsed_config(config)
    parsed._experts_implementation = "eager"  # which calls F.linear, expert by expert
    for key, value in local.items():
        setattr(parsed, key, value)

    def made(attention: str) -> Any:
        with init_empty_weights(include_buffers=False):
            if type(parsed) in MODEL_FOR_CAUSAL_LM_MAPPING:
                return AutoModelForCausalLM.from_config(parsed, attn_implementation=attention).eval()
            own = causal_class(str(kind))
            if own is not None:
                return own._from_config(parsed, attn_implementation=attention).eval()
            return _with_head(parsed, attention).eval()

    attention = attention_of(parsed)
    try:
        try:
            return made(attention)
        except KeyError as error:  # old models look theirs up in tables of their own
            if error.args != (attention,):
                raise
            return made("eager")
    except ValueError as error:
        raise PlanError(
            f"calibration cannot build transformers' model for {quoted(kind)}: {error_text(error)}; {DYNAMIC}"
        ) from error


def parsed_config(config: Mapping[str, Any]) -> Any:
    """transformers' config of a config.json.

    Raises:
        PlanError: transformers does not know its model_type.
        CheckpointError: transformers refuses it.
    """
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise PlanError(f"calibration runs transformers' models, which know no model_type {quoted(kind)}: {DYNAMIC}")
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    try:
        return CONFIG_MAPPING[kind].from_dict(_special(plain))
    except Exception as error:  # transformers checks a config in many ways
        what = f"{type(error).__name__}: {error_text(error)}"
        raise CheckpointError(f"config.json: transformers refuses it: {what}") from error


def causal_class(kind: str) -> Any | None:
    """transformers' causal model of a type that it lists under the name of the whole model only: that of ``mllama``,
    Llama 3.2 Vision, takes a ``mllama_text_model``. None where there is none, or where the type is listed itself."""
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

    whole = model_type_to_module_name(kind)
    if kind in MODEL_MAPPING_NAMES or whole not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    found = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[whole], None)
    return found if getattr(getattr(found, "config_class", None), "model_type", None) == kind else None


def text_class(kind: str) -> Any | None:
    """transformers' language model, without a head, of a type that no list of its has: beside a model that also sees or
    hears, and generates, the one class that takes a config of the type, and caches keys and values of its own alone.
    None where there is none, or where the type is listed itself."""
    import importlib
    import importlib.util
    import inspect

    from transformers import CONFIG_MAPPING, GenerationMixin, PreTrainedModel
    from transformers.models.auto import modeling_auto

    if kind in modeling_auto.MODEL_MAPPING_NAMES or kind not in CONFIG_MAPPING:
        return None
    own = CONFIG_MAPPING[kind]
    name = own.__module__.replace(".configuration_", ".modeling_")
    if importlib.util.find_spec(name) is None:
        return None
    classes: list[Any] = [each for each in vars(importlib.import_module(name)).values() if isinstance(each, type)]
    lists = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
    wholes = {each for of in lists for each in getattr(modeling_auto, f"MODEL_FOR_{of}_MAPPING_NAMES").values()}
    if not any(each.__name__ in wholes and issubclass(each, GenerationMixin) for each in classes):
        return None
    found = {each for each in classes if issubclass(each, PreTrainedModel) and each.config_class is own}
    inputs = {each: inspect.signature(each.forward).parameters for each in found if not each.can_generate()}
    decoders = {each for each, of in inputs.items() if "past_key_values" in of and "encoder_hidden_states" not in of}
    kept = [each for each in decoders if decoders.isdisjoint(each.__mro__[1:])]
    return kept[0] if len(kept) == 1 else None


def _with_head(parsed: Any, attention: str) -> Any:
    """The language model of one that also sees or hears: transformers has it as a part of that alone, without a head.

    Raises:
        ValueError: it has none of the type.
    """
    from transformers import AutoModel, PreTrainedModel

    own = text_class(parsed.model_type)
    made = AutoModel.from_config if own is None else own._from_config

    class LanguageModel(PreTrainedModel):
        base_model_prefix = "model"
        _supports_sdpa = True
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # where config.json says so  # noqa: RUF012

        def __init__(self) -> None:
            base = made(parsed, attn_implementation=attention)
            super().__init__(base.config)
            self.model = base
            self.lm_head = nn.Linear(parsed.hidden_size, parsed.vocab_size, bias=False)
            self.all_tied_weights_keys = self.get_expanded_tied_weights_keys(all_submodels=False)

        def forward(self, **inputs: Any) -> Any:
            from transformers.modeling_outputs import CausalLMOutput

            logits = self.lm_head(self.model(**inputs).last_hidden_state)
            return CausalLMOutput(logits=_scaled_logits(logits, parsed))

    return LanguageModel()


def _scaled_logits(logits: Tensor, parsed: Any) -> Tensor:
    """The logits as the whole model has them, which does behind its head what its language model's config says."""
    logits = logits * getattr(parsed, "output_multiplier", 1.0) / getattr(parsed, "logits_scaling", 1.0)
    cap = getattr(parsed, "final_logit_softcapping", None)
    return cap * torch.tanh(logits / cap) if cap else logits


def _special(value: Any) -> Any:
    """With infinity and NaN, which JSON has no numbers for, in place of what transformers writes for them."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _special(each) for key, each in value.items()}
    return [_special(each) for each in value] if isinstance(value, list) else value


@contextmanager
def running(model: Any, *, derived: bool, what: str = "its decoder layers do not run one at a time") -> Iterator[None]:
    """Within it, modules of a model run by themselves.

    Args:
        what: could not be done.
        derived: whether nobody has looked at how these do: what they raise is then said in a sentence, and else is an
            error of ours.

    Raises:
        PlanError: that sentence.
    """
    try:
        yield
    except OF_MODELS as error:
        if not derived or isinstance(error, ModelExportError):
            raise
        raise PlanError(
            f"of a {shown(model.config.model_type)} model in transformers, {what} ("
            f"{type(error).__name__}: {error_text(error)}): {DYNAMIC}"
        ) from error


def body(model: Any) -> Any:
    """The model without its head."""
    found = [each for each in (model.base_model, model.get_decoder()) if each is not model]
    tokens = model.get_input_embeddings()
    return next(iter([*found, *(child for child in model.children() if tokens in child.modules())]), model)


def attention_of(parsed: Any) -> str:
    """The name of transformers' attention function: torch's own, where that does all that the model does.

    It knows neither soft caps on scores nor sinks; the model's own function, head by head, does.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(parsed), None)
    fused = getattr(known, "_supports_sdpa", True) and not getattr(parsed, "attn_logit_softcapping", None)
    return "sdpa" if fused else watched_attention()


def kv_heads(parsed: Any, layer: int) -> int | None:
    """Heads of keys and values of a decoder layer, by transformers' config; None where it does not say."""
    of_layer = parsed.per_layer_config[layer] if getattr(parsed, "is_heterogeneous", False) else parsed
    return getattr(of_layer, "num_key_value_heads", None)


def decoder_layers(model: Any) -> nn.ModuleList | None:
    """The stack of decoder layers, by whatever name; None where there is none."""
    base, count = model.base_model, getattr(model.config, "num_hidden_layers", None)
    named = getattr(base, "layers", None)
    if isinstance(named, nn.ModuleList):
        return named
    stacks = (each for each in base.modules() if isinstance(each, nn.ModuleList))
    return next((each for each in stacks if len(each) == count), None)


def narrow(layer: nn.Module, cut: ForwardCut) -> None:
    """Give a layer without storage parameters as narrow as a rank holds them, where its config has not done so."""
    for key, parameter in list(layer.named_parameters()):
        path, _, name = key.rpartition(".")
        share = cut.share(path)
        if share.dim is None or share.dim >= parameter.dim() or (name != "weight" and share.dim != 0):
            continue
        shape = list(parameter.shape)
        shape[share.dim] = sum(stop - start for start, stop in share.spans)
        if shape != list(parameter.shape):
            less = nn.Parameter(torch.empty(shape, device="meta", dtype=parameter.dtype), requires_grad=False)
            setattr(layer.get_submodule(path), name, less)


def on_disk(model: Any, stack: str, names: Collection[str]) -> tuple[dict[str, str], str]:
    """transformers' name of a tensor -> its name in the checkpoint, where that is another; and that of the layers.

    Args:
        stack: transformers' name of the list of decoder layers.
        names: every tensor of the checkpoint, of which the model may be a part: it is then found by its embedding and
            its layers.
    """
    place = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    base = place.rpartition(".")[0]
    inside = f"{base}." if stack.startswith(f"{base}.") else ""
    tokens, layers = f"{place.removeprefix(inside)}.weight", stack.removeprefix(inside)
    if not inside or f"{inside}{tokens}" in names or any(name.startswith(f"{stack}.0.") for name in names):
        return in_memory(model, names), stack
    found = (name.removesuffix(tokens) for name in names if name.endswith(f".{tokens}"))
    prefixes = [prefix for prefix in found if any(name.startswith(f"{prefix}{layers}.0.") for name in names)]
    if len(prefixes) != 1:
        return in_memory(model, names), stack
    (prefix,) = prefixes
    theirs = {f"{inside}{name.removeprefix(prefix)}": name for name in names if name.startswith(prefix)}
    above = prefix.strip(".").split(".")
    for key in model.state_dict():
        if not key.startswith(inside):  # the head: beside the model, or outside of what the model is a part of
            outer = [name for depth in range(len(above) + 1) if (name := ".".join([*above[:depth], key])) in names]
            if outer:
                theirs[key] = outer[0]
    renamed = {key: theirs[name] for key, name in in_memory(model, theirs.keys()).items()}
    return {**theirs, **renamed}, f"{prefix}{layers}"


def in_memory(model: Any, names: Collection[str]) -> dict[str, str]:
    """transformers' name of a tensor -> its name in the checkpoint, of those that it renames as it loads them."""
    held = model.state_dict().keys()
    strange = [name for name in names if name not in held]
    if not strange:
        return {}
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:  # before version 5 nothing was renamed
        return {}
    renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    renamed = ((rename_source_key(name.replace(_BESIDE_LORA, "."), renamings, [])[0], name) for name in strange)
    return {new: name for new, name in renamed if new in held and new not in names}


def sources(layer: nn.Module, prefix: str, names: Collection[str]) -> dict[str, tuple[TensorSource, ...]]:
    """Of which of the checkpoint's tensors each of a layer's is made; what cannot be found is left out.

    transformers may stack a layer's experts and rename what they are in: "block_sparse_moe" on disk is its "mlp".

    Args:
        layer: transformers' module, without storage.
        prefix: of the layer's tensors in the checkpoint.
        names: every tensor of the checkpoint.
    """
    empty = layer.state_dict()
    own = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    found: dict[str, tuple[TensorSource, ...]] = {key: (TensorSource(prefix + key),) for key in empty if key in own}
    found |= {key: named for key in empty if key not in found and (named := _named_stack(key, empty[key], prefix, own))}
    experts: dict[str, dict[tuple[int, str, str], str]] = {}
    for name in own:
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(match[1], {})[int(match[2]), match[3], match[4]] = prefix + name
    if len(experts) != 1:
        return found
    ((theirs, linears),) = experts.items()
    for key in empty:
        match = _STACKED.fullmatch(key)
        if key in found or match is None:
            continue
        parts, parameter = _PARTS[match[2]], "weight" if match[3] is None else "bias"
        module = layer.get_submodule(f"{match[1]}experts")
        stacked = [
            TensorSource(
                linears[expert, name, parameter],
                expert,
                number,
                len(parts),
                interleaved=len(parts) > 1 and _is_interleaved(module),
                transposed=parameter == "weight" and _is_transposed(module),
            )
            for expert in range(empty[key].shape[0])
            for number, known in enumerate(parts)
            for name in known
            if (expert, name, parameter) in linears
        ]
        if len(stacked) == empty[key].shape[0] * len(parts):
            found[key] = tuple(stacked)
        for other in empty:
            renamed = theirs + other.removeprefix(match[1])
            if other not in found and other.startswith(match[1]) and renamed in own:
                found[other] = (TensorSource(prefix + renamed),)
    return found


def _named_stack(key: str, tensor: Tensor, prefix: str, names: Collection[str]) -> tuple[TensorSource, ...]:
    """Returns what one of :data:`_NAMED_STACKS` is made of; () where it is none, or whole in the checkpoint."""
    for pattern, linears, transposed in _NAMED_STACKS:
        match = pattern.fullmatch(key)
        paths = [] if match is None else [match.expand(linear) for linear in linears]
        if match is None or not all(path.format(e=0) in names for path in paths):
            continue
        joined = tensor.dim() == 2
        count = next(e for e in itertools.count() if paths[0].format(e=e) not in names) if joined else tensor.shape[0]
        found = tuple(
            TensorSource(
                prefix + path.format(e=expert),
                expert,
                number,
                len(paths),
                transposed=transposed,
                joined=count if joined else 0,
            )
            for expert in range(count)
            for number, path in enumerate(paths)
        )
        if all(each.name.removeprefix(prefix) in names for each in found) and tensor.shape[0] % count == 0:
            return found
    return ()


def _is_transposed(experts: nn.Module) -> bool:
    """Returns whether stacks of experts are ``[experts, in, out]``: what goes into the one comes out of the other."""
    said = getattr(experts, "is_transposed", None)
    if said is not None:
        return bool(said)
    shapes = {name: tuple(parameter.shape) for name, parameter in experts.named_parameters(recurse=False)}
    up, down = shapes.get("gate_up_proj") or shapes["up_proj"], shapes["down_proj"]
    return up[2] != down[1] and up[1] == down[2]


def _is_interleaved(experts: nn.Module) -> bool:
    """Returns whether gate and up have features in turn: a change of the second changes what comes out first."""
    gated = getattr(experts, "_apply_gate", None)
    if gated is None:
        return False
    ones = torch.ones(2, 8)
    ones[1, 1] = 2.0
    before, after = gated(ones)
    return bool(before[0] != after[0])


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


def unknown(model: nn.Module, name: str) -> PlanError:
    """The model has a tensor that the checkpoint has not."""
    kind = type(model).__name__
    return PlanError(f"calibration: transformers' {kind} has {name}, which the checkpoint has not: {DYNAMIC}")


def misshapen(name: str, shape: Any, wanted: Any) -> CheckpointError:
    """A tensor of the checkpoint has another shape than the model's."""
    return CheckpointError(f"{name} is {list(shape)}, but config.json's model has {list(wanted)} there")
