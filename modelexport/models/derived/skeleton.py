"""A transformers model without storage: which tensors a checkpoint of it has, and what each of them is in the model.

Names in memory and on disk differ (transformers stacks experts as it loads them, and takes them apart again when it
saves): the same conversions that it saves by are run here, on tensors without storage.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from modelexport.errors import CheckpointError, ModelExportError, PlanError, error_text

NUMBERS = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "num_experts",
)
MOST_LAYERS = 4096
MOST_EXPERTS = 1 << 15
MOST_LISTED = 1 << 16
MOST_TENSORS = 1 << 20
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_EXPERTS = re.compile(r"(.*\.experts)\.\d+\.")
_COUNTED = re.compile(r"layers?$|depth|experts$|blocks$")  # keys of config.json that loops run over


@dataclass(frozen=True)
class Skeleton:
    """A model as transformers describes it: its modules, names on disk and tensor-parallel plan.

    Attributes:
        model_type, architecture: its type, and the name of its class.
        tensors: name on disk -> shape, in the order in which transformers saves them.
        targets: name on disk -> the parameter or buffer in memory that it becomes, or becomes a part of.
        changed: names on disk whose numbers are cut up or moved about as they become that.
        either_way: those of them that transformers reads with their last two dims in either order.
        copies: name in memory of a tensor that is tied to another and not saved -> what it is called on disk.
        wide: names in memory of what transformers computes with in float32, whatever the model's dtype.
        linears: name in memory of every Linear -> the name of the one that its weight is saved under.
        modules: name in memory -> the name of the module's class; ``Linear`` for any that is one.
        shapes: name in memory -> shape.
        stack: name in memory of the list of decoder layers.
        layers: how many there are.
        embedding, head: name in memory of the modules that tokens come in by, and go out; "" where there is none.
        tied: whether the head is the embedding.
        part_tied: the same by the config of the language model, where that is a part of the model.
        plan: name in memory, with ``*`` for numbers -> the style in which transformers' tensor parallelism cuts it.
        numbers: of the language model's config, by their usual names; None where it has no such single number.
        head_dims: name in memory of an attention -> features of each of its heads.
        base: what transformers calls the model without its head; checkpoints of that alone lack it.
        ignored: patterns of tensors of old checkpoints that the model does without.
        renamed: a name that any checkpoint of the model may have -> what transformers makes of it before it takes
            numbers apart.
        joined: parameters whose dim 0 has the features of all experts of a layer, one expert behind the other -> how
            many these are.
    """

    model_type: str
    architecture: str
    tensors: Mapping[str, tuple[int, ...]]
    targets: Mapping[str, str]
    changed: frozenset[str]
    either_way: frozenset[str]
    copies: Mapping[str, str]
    wide: frozenset[str]
    linears: Mapping[str, str]
    modules: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    stack: str
    layers: int
    embedding: str
    head: str
    tied: bool
    plan: Mapping[str, str]
    numbers: Mapping[str, int | None]
    head_dims: Mapping[str, int]
    base: str
    ignored: tuple[str, ...]
    part_tied: bool = True
    renamed: Callable[[str], str] = str
    joined: Mapping[str, int] = field(default_factory=dict)

    def style(self, target: str) -> str | None:
        """Transformers' cut of a parameter: the style of the parameter itself, or of its module."""
        general = re.sub(r"\.\d+(?=\.|$)", ".*", target)
        return self.plan.get(general) or self.plan.get(general.rpartition(".")[0])

    def named_as(self, names: Collection[str]) -> Skeleton:
        """The same by the names that a checkpoint has, where transformers would load it and save it by others.

        Makers' files often differ from what transformers saves: a tower in a module more, a model without its first
        part. Names go together where transformers renames both to the same.

        Args:
            names: every tensor of the checkpoint; those of quantised linears, too.
        """
        if (stacked := self._stacked_as(names)) is not self:
            return stacked.named_as(names)
        theirs = self._names_of(names)
        if not theirs:
            return self

        def name(own: str) -> str:
            module, _, leaf = own.rpartition(".")
            numbers = iter(_NUMBER.findall(f".{module}."))
            found = theirs.get(_general(module))
            return own if found is None else f"{_NUMBER.sub(lambda _: next(numbers), found).strip('.')}.{leaf}"

        return replace(
            self,
            tensors={name(own): shape for own, shape in self.tensors.items()},
            targets={name(own): target for own, target in self.targets.items()},
            changed=frozenset(map(name, self.changed)),
            either_way=frozenset(map(name, self.either_way)),
            copies={target: name(own) for target, own in self.copies.items()},
        )

    def _stacked_as(self, names: Collection[str]) -> Skeleton:
        """The same with all experts of a layer in one tensor, where a checkpoint has them so and transformers would
        save them one by one."""
        held: dict[str, str] = {}  # one of the tensors of an expert -> the stack's name
        for name, target in self.targets.items():
            match = _EXPERTS.match(name)
            if match is not None and len(self.shapes.get(target, ())) == 3:
                held[name] = f"{match[1]}.{target.rpartition('.')[2]}"
        leaves = {stack.rpartition("experts.")[2] for stack in held.values()}
        if not leaves or not any(name.endswith(f".experts.{leaf}") for leaf in leaves for name in names):
            return self
        tensors, targets = {}, {}
        for name, shape in self.tensors.items():
            new, target = held.get(name, name), self.targets[name]
            tensors[new] = self.shapes[target] if name in held else shape
            targets[new] = target
        return replace(self, tensors=tensors, targets=targets, changed=self.changed.difference(held))

    def _names_of(self, names: Collection[str]) -> dict[str, str]:
        """Modules that a checkpoint calls otherwise -> what it calls them; numbers are 0 in both."""
        there = {_general(name.rpartition(".")[0]): name.rpartition(".")[2] for name in names}
        own = {_general(name.rpartition(".")[0]): name.rpartition(".")[2] for name in self.tensors}
        own |= {_general(name.rpartition(".")[0]): name.rpartition(".")[2] for name in self.copies.values()}
        wanted = {self.renamed(_tensor(module, leaf)): module for module, leaf in own.items() if module not in there}
        found: dict[str, str] = {}
        for module, leaf in there.items() if wanted else ():
            for ending in (leaf, "weight"):
                new = self.renamed(_tensor(module, ending))
                spellings = (new, new.removeprefix(f"{self.base}."), f"{self.base}.{new}") if self.base else (new,)
                meant = next((wanted[each] for each in spellings if each in wanted), None)
                if meant is not None and module not in own and meant.count(".0.") == module.count(".0."):
                    found.setdefault(meant, module)
        return found


def _general(module: str) -> str:
    """A module's name between dots, 0 for each of its numbers."""
    return _NUMBER.sub("0", f".{module}.")


def _tensor(module: str, leaf: str) -> str:
    return f"{module.strip('.')}.{leaf}"


_OF_OTHER_PARTS = re.compile(r"\^|language_model|vision|projector|audio")


class JoinedModels(PlanError):
    """Several models are joined in one, as Qwen Omni's thinker and its talker."""


def read_skeleton(config: Mapping[str, Any], *, part: bool = False, in_whole: bool = False) -> Skeleton:
    """Build transformers' model of a config.json on torch's meta device, and look at it. No code but its own runs.

    Args:
        part: whether it may also be a language model that transformers has only as a part of others: as calibration
            builds it, with a head.
        in_whole: whether tensors within layers have the names and forms that the whole model is saved with.

    Raises:
        CheckpointError: transformers does not accept the numbers of config.json, or nobody has models so large.
        PlanError: it knows no such language model.
    """
    import torch

    _check_counts(config, "config.json")
    kind = str(config.get("model_type"))
    within = part and not _language_models(kind)
    model_class, parsed = _part_class(config, kind) if within else _model_class(config, kind)
    try:
        with torch.device("meta"):
            model = model_class(parsed)
        numbers = parsed.get_text_config(decoder=True)
        model.tie_weights()
    except ModelExportError:
        raise
    except Exception as error:  # a stranger's numbers can fail anywhere in transformers' code
        raise CheckpointError(
            f"config.json: transformers cannot build {model_class.__name__} of it: {_in_short(error)}"
        ) from error
    stack, layers = _decoder_layers(model, numbers, kind)
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    held = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    joined = _joined(model)
    counts = (value.shape[0] if value.ndim == 3 else joined.get(name, 1) for name, value in held.items())
    many = sum(counts)  # a stack is taken apart
    if many > MOST_TENSORS:
        raise CheckpointError(f"config.json makes {many:,} tensors; at most {MOST_TENSORS:,} are believed")
    if in_whole:
        model._weight_conversions = _conversions_of_whole(parsed)
    saved = _on_disk(model, held)
    embedding = _name_of(model, _token_embedding(model), held)
    embedding = tied.get(f"{embedding}.weight", f"{embedding}.").rpartition(".")[0]
    head = _name_of(model, model.get_output_embeddings(), held)
    plan = dict(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {})
    return Skeleton(
        model_type=kind,
        architecture=model_class.__name__,
        tensors=saved.shapes,
        targets=saved.targets,
        changed=saved.changed,
        either_way=saved.either_way,
        copies=_copies(model, tied),
        wide=_wide(model, held),
        linears={
            name: tied.get(f"{name}.weight", f"{name}.weight").removesuffix(".weight")
            for name, module in model.named_modules(remove_duplicate=False)
            if isinstance(module, torch.nn.Linear)
        },
        modules={
            name: "Linear" if isinstance(module, torch.nn.Linear) else type(module).__name__
            for name, module in model.named_modules()
        },
        shapes={name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
        stack=stack,
        layers=layers,
        embedding=embedding,
        head=head,
        tied=bool(head) and f"{head}.weight" in tied,
        plan=plan,
        numbers={key: _number(numbers, key) for key in NUMBERS},
        head_dims={name: size for name, module in model.named_modules() if (size := _whole_of(module, "head_dim"))},
        base=str(model.base_model_prefix),
        ignored=tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
        part_tied=bool(getattr(numbers, "tie_word_embeddings", True)),
        renamed=_renaming(model),
        joined=joined,
    )


def _joined(model: Any) -> dict[str, int]:
    """See ``Skeleton.joined``: by what a module of experts says of itself, as DBRX's does."""
    found = {}
    for name, module in model.named_modules():
        experts, inner = _whole_of(module, "moe_num_experts"), _whole_of(module, "ffn_hidden_size")
        for own, parameter in module.named_parameters(recurse=False):
            if experts and inner and parameter.ndim == 2 and parameter.shape[0] == experts * inner:
                found[f"{name}.{own}"] = experts
    return found


def _token_embedding(model: Any) -> Any:
    """The embedding of a model's tokens.

    Raises:
        JoinedModels: it has none that transformers can name.
    """
    try:
        return model.get_input_embeddings()
    except NotImplementedError as error:
        raise JoinedModels(
            f"transformers' {type(model).__name__} names no token embedding, as where several models are joined in "
            "one: export the checkpoint of its language model alone"
        ) from error


def _name_of(model: Any, wanted: Any, held: Mapping[str, Any]) -> str:
    """A module's name; of one that has several, that under which its weight is saved. "" for None."""
    names = [name for name, module in model.named_modules(remove_duplicate=False) if module is wanted and name]
    return next((name for name in names if f"{name}.weight" in held), next(iter(names), ""))


def _check_counts(config: Mapping[str, Any], where: str) -> None:
    """Refuse numbers that would keep a loop busy for ever."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check_counts(value, f"{where}: {key}")
        elif isinstance(value, (list, tuple)) and len(value) > MOST_LISTED:
            raise CheckpointError(f"{where}: {key} has {len(value):,} entries; at most {MOST_LISTED:,} are believed")
        elif key == "attention_types" and isinstance(value, list):  # [[kinds, how many times], ...]
            counts = [each[1] for each in value if isinstance(each, list) and len(each) == 2]
            _check_counts({"layers": max((n for n in counts if isinstance(n, int)), default=0)}, f"{where}: {key}")
        elif isinstance(value, int) and _COUNTED.search(str(key)):
            most = MOST_EXPERTS if "expert" in str(key) else MOST_LAYERS
            if value > most:
                raise CheckpointError(f"{where}: {key} is {value:,}; at most {most:,} are believed")


def _model_class(config: Mapping[str, Any], kind: str) -> tuple[Any, Any]:
    """transformers' class for a config.json, and the config as it parses it."""
    import transformers

    if kind not in transformers.CONFIG_MAPPING:
        raise PlanError(f"unknown architecture '{kind}': transformers {transformers.__version__} does not know it")
    named = config.get("architectures")
    wanted = str(named[0]) if isinstance(named, list) and named else ""
    own = transformers.CONFIG_MAPPING[kind]
    found = getattr(transformers, wanted, None) if wanted.isidentifier() else None
    fits = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    usual = _language_models(kind)
    if not usual:
        raise PlanError(
            f"'{kind}' is no language model that is exported: transformers {transformers.__version__} has no causal "
            "one of that type, nor one that takes images or sound beside the text"
        )
    if not fits or getattr(found, "config_class", None) is not own:
        found = next((getattr(transformers, name) for name in usual if hasattr(transformers, name)), None)
    if found is None:
        raise PlanError(f"transformers {transformers.__version__} lacks {usual[0]}, the model of '{kind}'")
    return found, _parsed(config, own)


def _part_class(config: Mapping[str, Any], kind: str) -> tuple[Any, Any]:
    """The same for a language model that is a part of others."""
    import transformers

    from modelexport.quantization.calibration.model import build

    def language_model(_: Any) -> Any:
        return build(config, {})

    language_model.__name__ = f"part of type {kind}"
    return language_model, _parsed(config, transformers.CONFIG_MAPPING[kind])


def _parsed(config: Mapping[str, Any], own: Any) -> Any:
    plain = {key: _special(value) for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    try:
        return own.from_dict(plain)
    except Exception as error:  # transformers checks a config in many ways
        raise CheckpointError(f"config.json: transformers refuses it: {_in_short(error)}") from error


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json's content with every key that transformers' class has, by the names that it saves them under.

    Raises:
        CheckpointError: transformers does not accept it.
    """
    import transformers

    return dict(_parsed(config, transformers.CONFIG_MAPPING[config["model_type"]]).to_dict())


def language_part(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config of the language model in one that has it as a part, by transformers' keys; None where it is the whole.

    Raises:
        CheckpointError: transformers does not accept config.json.
    """
    import transformers

    kind = config.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        return None
    _check_counts(config, "config.json")
    whole = _parsed(config, transformers.CONFIG_MAPPING[kind])
    part = whole.get_text_config(decoder=True)
    return None if part is whole else dict(part.to_dict())


def _language_models(kind: str) -> list[str]:
    """The classes of a type's language models: causal ones, and those that also see or hear."""
    from transformers.models.auto import modeling_auto

    found: list[str] = []
    for lists in ("CAUSAL_LM", "MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT"):
        names = getattr(modeling_auto, f"MODEL_FOR_{lists}_MAPPING_NAMES", {}).get(kind, ())
        found += [names] if isinstance(names, str) else list(names)
    return found


def _decoder_layers(model: Any, numbers: Any, kind: str) -> tuple[str, int]:
    """The list of decoder layers: the one with as many as the config says; else the longest of the decoder's."""
    from torch import nn

    names = {id(module): name for name, module in model.named_modules()}
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    if not isinstance(decoder, nn.Module) or id(decoder) not in names:
        decoder = model
    wanted = getattr(numbers, "num_hidden_layers", None)
    for root in (decoder, model):
        lists = [
            (names[id(module)], len(module))
            for module in root.modules()
            if isinstance(module, nn.ModuleList) and len(module) and _is_layer(module[0])
        ]
        exact = [each for each in lists if each[1] == wanted]
        if lists:
            return min(exact, key=lambda each: each[0].count(".")) if exact else max(lists, key=lambda each: each[1])
    raise PlanError(f"transformers' model for '{kind}' has no list of decoder layers")


def _is_layer(module: Any) -> bool:
    """Returns whether a module is more than a single linear or norm."""
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


@dataclass(frozen=True)
class _Saved:
    """Tensors as transformers saves them: see the attributes of :class:`Skeleton`."""

    shapes: dict[str, tuple[int, ...]]
    targets: dict[str, str]
    changed: frozenset[str] = frozenset()
    either_way: frozenset[str] = frozenset()


def _on_disk(model: Any, held: Mapping[str, Any]) -> _Saved:
    """The tensors of a model as transformers saves them."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            PrefixChange,
            WeightConverter,
            rename_source_key,
            revert_weight_conversion,
        )
    except ImportError:  # before transformers 5, names on disk are those in memory
        shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
        return _Saved(shapes, {name: name for name in shapes})
    saved = revert_weight_conversion(model, dict(held))
    set_before = getattr(model, "_weight_conversions", None)
    mapping = get_model_conversion_mapping(model, add_legacy=False) if set_before is None else set_before
    mapping = [each for each in mapping if not isinstance(each, PrefixChange)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    renamings = [each for each in mapping if not isinstance(each, WeightConverter)]
    flexible = {
        pattern
        for converter in converters
        if any(getattr(operation, "check_dims", False) for operation in converter.operations)
        for pattern in converter.source_patterns
    }
    targets, changed, either_way = {}, set(), set()
    for name in saved:
        target, pattern = rename_source_key(name, renamings, converters)
        targets[name] = target if target in held else _closest(target, name, held)
        if pattern is not None:
            changed.add(name)
        if pattern in flexible:
            either_way.add(name)
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    return _Saved(shapes, targets, frozenset(changed), frozenset(either_way))


def _conversions_of_whole(parsed: Any) -> list[Any]:
    """transformers' renamings and conversions within the layers of the model that a language model is a part of."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    found: list[Any] = []
    for each in vars(sys.modules[type(parsed).__module__]).values():
        if (getattr(each, "sub_configs", None) or {}).get("text_config") is type(parsed):
            found += get_checkpoint_conversion_mapping(each.model_type) or []
    return [
        each
        for each in found
        if not any(_OF_OTHER_PARTS.search(pattern) for pattern in (*each.source_patterns, *each.target_patterns))
    ]


def _renaming(model: Any) -> Callable[[str], str]:
    """The renaming that transformers applies to the names of a checkpoint as it loads it."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key
    except ImportError:  # before transformers 5
        return str
    mapping = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [each for each in mapping if not isinstance(each, WeightConverter)]
    return lambda name: str(rename_source_key(name, renamings, [])[0])


def _copies(model: Any, tied: Mapping[str, str]) -> dict[str, str]:
    """The names in checkpoints of tensors that are tied to others."""
    state = model.state_dict()
    return {name: next(iter(_on_disk(model, {name: state[name]}).shapes), name) for name in tied if name in state}


def _wide(model: Any, held: Iterable[str]) -> frozenset[str]:
    """The tensors that transformers keeps in float32."""
    kept = [each for each in getattr(model, "_keep_in_fp32_modules_strict", None) or () if isinstance(each, str)]
    pattern = re.compile("|".join(rf"(?:^|\.){each}(?:$|\.)" for each in kept))
    return frozenset(name for name in held if kept and pattern.search(name))


def _closest(target: str, name: str, held: Iterable[str]) -> str:
    """A conversion that is not undone by its own inverse: the name itself where the model has it."""
    return name if name in set(held) else target


def _special(value: Any) -> Any:
    """Infinity and NaN, which JSON has no numbers for, as transformers spells them in config.json."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _special(each) for key, each in value.items()}
    return [_special(each) for each in value] if isinstance(value, list) else value


def _number(config: Any, key: str) -> int | None:
    """A number of a config; None where it has none, or one for each layer (transformers refuses to say which)."""
    try:
        return _whole(getattr(config, key, None))
    except RuntimeError:
        return None


def _whole_of(module: Any, name: str) -> int | None:
    return _whole(vars(module).get(name))


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {error_text(error)}"
