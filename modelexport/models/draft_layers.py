"""Draft layers (multi-token prediction) of a checkpoint: which modules they have, and checkpoints without them.

A draft layer is a decoder layer with a little around it: norms of its two inputs, a linear that joins these, perhaps an
embedding and a head of its own. The decoder layer's modules are those of the model's own layer that it is most like;
what stands around it is known by its names. They are found in a checkpoint's headers: config.json does not always count
them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from modelexport.checkpoints.safetensors.file import Checkpoint, TensorInfo
from modelexport.models.architecture import Dimensions, Family, Module, family_of, read_dimensions
from modelexport.models.families.drafts import draft_counts, without_counts
from modelexport.system.dtypes import FLOATS

__all__ = ["DraftModule", "draft_modules", "draft_tensors", "usual_drafts", "without_drafts"]

_JOINS = "of a draft layer: it joins two inputs, whose sizes differ"
_UNKNOWN = "of a draft layer, and of no decoder layer that is known"


@dataclass(frozen=True)
class DraftModule:
    """One module of a draft layer.

    Attributes:
        name: in full.
        module: its declaration: that of a decoder layer's module, or one of its own.
        root: name of what nothing else of the model is below: ``"model.layers.61"``, ``"mtp"``.
        path: its name within its decoder layer; ``""`` of what stands around that.
        expert: its number.
        twin: the module in full that it is like, of the last decoder layer of its kind; ``""`` where there is none.
        number: of its draft layer, from 0; what several of them share is the first one's.
    """

    name: str
    module: Module
    root: str
    path: str = ""
    expert: int | None = None
    twin: str = ""
    number: int = 0


def draft_modules(family: Family, dimensions: Dimensions, infos: Mapping[str, TensorInfo]) -> list[DraftModule]:
    """The modules of the draft layers among a checkpoint's tensors, in their order: none where there are none."""
    stacks: dict[str, dict[str, dict[str, TensorInfo]]] = {}  # root -> module -> suffix -> tensor
    for name, info in infos.items():
        root = family.draft_root(name, dimensions)
        if root is not None and not name.endswith(family.ignored_tensors or ("\0",)):
            module, _, suffix = name.rpartition(".")
            stacks.setdefault(root, {}).setdefault(module, {})[suffix] = info
    kinds = list(_kinds(family, dimensions)) if stacks else []
    frame = {module.path: module for module in _frame(dimensions)}
    found: list[DraftModule] = []
    for root, modules in stacks.items():
        layers: list[DraftModule] = []
        numbers: dict[str, int] = {}
        for prefix, own in _decoder_layers(root, modules, kinds).items():
            numbers[prefix] = _number(root, family, dimensions, len(numbers))
            kind = max(kinds, key=lambda kind: (kind.likeness(own), kind.number))
            if kind.likeness(own) > 0:
                layers += kind.draft_layer(family, root, prefix, numbers[prefix])
        known = {module.name for module in layers}
        for name, tensors in modules.items():
            if name not in known:
                inside = (number for prefix, number in numbers.items() if name.startswith(f"{prefix}."))
                number = next(inside, _number(root, family, dimensions, 0))
                found += (replace(each, number=number) for each in _around(name, root, tensors, frame, dimensions))
        found += layers
    return found


def _number(root: str, family: Family, dimensions: Dimensions, before: int) -> int:
    """The number of a draft layer: its root's behind the decoder layers, or as many as the root has before it."""
    number = root.removeprefix(family.layer_prefix.partition("{i}")[0])
    return int(number) - dimensions.layers if number.isdecimal() else before


_AROUND_NUMBERED = ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head.norm", "shared_head.head")
_AROUND_BELOW = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


def usual_drafts(family: Family, dimensions: Dimensions, twins: Sequence[int], *, below: str = "") -> list[DraftModule]:
    """The modules that draft layers may have where they are written as DeepSeek-V3 or as Qwen3-Next writes them.

    Args:
        twins: of each draft layer, the number of the decoder layer that has the same modules.
        below: the module that they are below; ``""``: they are numbered on behind the decoder layers.

    Returns:
        What may stand around a decoder layer (no ``path``) and the decoder layer's own modules, layer by layer.
    """
    frame = {module.path: module for module in _frame(dimensions)}
    found: list[DraftModule] = []
    for number, twin in enumerate(twins):
        root = below or family.layer_prefix.format(i=dimensions.layers + number)
        for path in () if below and number else _AROUND_BELOW if below else _AROUND_NUMBERED:
            name = f"{root}.{path}"
            found.append(DraftModule(name, replace(frame[path], path=name, bias=False), root, number=number))
        kind = _Kind.of(family, dimensions, twin)
        found += kind.draft_layer(family, root, f"{below}.layers.{number}" if below else root, number)
    return found


@dataclass(frozen=True)
class _Kind:
    """The modules of the decoder layers that have the same ones, and the number of the last of these."""

    number: int
    modules: Sequence[tuple[str, int | None, Module]]
    paths: frozenset[str]

    @classmethod
    def of(cls, family: Family, dimensions: Dimensions, number: int) -> _Kind:
        """The kind of a decoder layer; transformers has no draft layers, and so their modules no names there."""
        plain = {id(module): replace(module, in_memory="") for module in family.layer}
        modules = [(path, e, plain[id(module)]) for path, e, module in family.modules_of_layer(dimensions, number)]
        return cls(number, modules, frozenset(path for path, _, _ in modules if path))

    def draft_layer(self, family: Family, root: str, prefix: str, number: int) -> Iterator[DraftModule]:
        """The modules of a draft's decoder layer of this kind."""
        twin = family.layer_prefix.format(i=self.number)
        for path, expert, module in self.modules:
            if path:
                yield DraftModule(f"{prefix}.{path}", module, root, path, expert, f"{twin}.{path}", number)

    def likeness(self, paths: Iterable[str]) -> int:
        """Modules that a layer of these paths has in common with them, less those that it lacks."""
        common = len(self.paths.intersection(paths))
        return 2 * common - len(self.paths)


def _kinds(family: Family, dimensions: Dimensions) -> Iterator[_Kind]:
    numbers: dict[tuple[bool, ...], int] = {}
    for i in range(dimensions.layers):
        numbers[tuple(dimensions.has(module, i) for module in family.layer)] = i
    for number in numbers.values():
        yield _Kind.of(family, dimensions, number)


def _decoder_layers(root: str, modules: Iterable[str], kinds: Sequence[_Kind]) -> dict[str, set[str]]:
    """Prefix of each decoder layer at or below a root -> the paths in it that decoder layers have."""
    every = frozenset().union(*(kind.paths for kind in kinds))
    found: dict[str, set[str]] = {}
    for name in modules:
        parts = name.split(".")
        for end in range(root.count(".") + 1, len(parts)):
            path = ".".join(parts[end:])
            if path in every:
                found.setdefault(".".join(parts[:end]), set()).add(path)
                break
    return found


def _frame(dimensions: Dimensions) -> Iterator[Module]:
    """The modules that stand around a draft's decoder layer, by their names behind any number."""
    norms = ("enorm", "hnorm", "shared_head.norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    for path in (*norms, "final_layernorm"):
        yield Module(path=path, kind="norm", role=f"draft.{path}")
    for path in ("eh_proj", "fc"):
        shape = (dimensions.hidden, 2 * dimensions.hidden)
        yield Module(path=path, kind="linear", role=f"draft.{path}", bias=False, shape=shape, why=_JOINS)
    yield Module(path="embed_tokens", kind="embedding", role="draft.embedding", partition="column", axis="vocab")
    yield Module(path="shared_head.head", kind="head", role="draft.head", partition="column", axis="vocab")


def _around(
    name: str, root: str, tensors: Mapping[str, TensorInfo], frame: Mapping[str, Module], dimensions: Dimensions
) -> Iterator[DraftModule]:
    """A module outside of a draft's decoder layer: one that is known, a linear that is kept, or its tensors one by
    one."""
    inside = name.removeprefix(root).split(".")
    last = max((number for number, part in enumerate(inside) if part.isdecimal()), default=0)
    module = frame.get(".".join(inside[last + 1 :]))
    weight = tensors.get("weight")
    if module is not None and (weight is None or weight.shape == dimensions.weight_shape(module)):
        # vLLM asks for the head by the name that it has beside the norm in front of it.
        asked = f"{name.removesuffix('shared_head.head')}head" if module.kind == "head" else ""
        yield DraftModule(name, replace(module, path=name, in_memory=asked), root)
    elif weight is not None and len(weight.shape) == 2 and weight.dtype in FLOATS and {*tensors} <= {"weight", "bias"}:
        linear = Module(path=name, kind="linear", role=name, bias=None, shape=weight.shape, why=_UNKNOWN)
        yield DraftModule(name, linear, root)
    else:
        for suffix, info in tensors.items():
            other = Module(path=name, kind="other", role=name, parameter=suffix, bias=False, shape=info.shape)
            yield DraftModule(name, other, root)


def draft_tensors(config: Mapping[str, Any] | None, names: Collection[str]) -> list[str]:
    """Those of the names of a model's tensors that are of its draft layers, in their order.

    Raises:
        CheckpointError: config.json lacks a number, or contradicts itself.
        PlanError: the architecture is unknown.
    """
    if config is None:
        return []
    family = family_of(config, names)
    dimensions = read_dimensions(config, family)
    return [name for name in names if family.draft_root(name, dimensions) is not None]


def without_drafts(checkpoint: Checkpoint, why: str = "") -> tuple[Checkpoint, list[str]]:
    """Takes the draft layers out of a checkpoint, and out of what its config.json promises.

    Engines read the counts of config.json to set up speculative decoding, and would look for layers that are not there.

    Args:
        why: the reason, for people; ``""``: draft layers that are there stay, and only those that are promised and are
            not there are no longer.

    Returns:
        The checkpoint, whose ``left_out`` names the tensors, and warnings: none, or one for the user.

    Raises:
        CheckpointError: config.json counts draft layers in other than whole numbers.
        PlanError: the architecture is unknown.
    """
    config = checkpoint.config
    if config is None:
        return checkpoint, []
    counts = draft_counts(config)
    layers = read_dimensions(config, family_of(config, checkpoint.infos)).layers
    reason = f"of a draft layer behind the model's {layers}, which do not use it: {why}"
    drafts = dict.fromkeys(draft_tensors(config, checkpoint.infos), reason)
    if (drafts and not why) or (not counts and not drafts):
        return checkpoint, []
    changed = "".join(f"; config.json's {key} becomes 0, not {count}" for key, count in counts.items())
    has = f"{len(drafts)} tensors of draft layers (multi-token prediction) are not written: {why}"
    if not drafts:
        has = "the source has no tensors of the draft layers that it promises"
    warning = f"{has}{changed}: engines run the model, and cannot draft tokens with it (speculative decoding)"
    kept = replace(
        checkpoint,
        config=without_counts(config),
        infos={name: info for name, info in checkpoint.infos.items() if name not in drafts},
        placements={name: places for name, places in checkpoint.placements.items() if name not in drafts},
        left_out={**checkpoint.left_out, **drafts},
    )
    return kept, [warning]
