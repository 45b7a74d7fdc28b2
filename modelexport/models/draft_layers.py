"""Draft layers (multi-token prediction) of a checkpoint: which modules they have, and checkpoints without them.

A draft layer is a decoder layer with a little around it: norms of its two inputs, a linear that joins these, perhaps an
embedding and a head of its own. The decoder layer's modules are those of the model's own layer that it is most like,
its attention or its MLP those of another layer where these are more like its own; what stands around it is known by its
names. They are found in a checkpoint's headers: config.json does not always count them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from modelexport.checkpoints.draft_names import LAYOUTS, DraftNames
from modelexport.checkpoints.safetensors.file import Checkpoint, TensorInfo
from modelexport.models.architecture import Dimensions, Family, Module, family_of, read_dimensions
from modelexport.models.families.drafts import draft_counts, without_counts
from modelexport.system.dtypes import FLOATS

__all__ = ["DraftModule", "draft_modules", "draft_tensors", "usual_drafts", "without_drafts"]

_JOINS = "of a draft layer: it joins two inputs, whose sizes differ"
_UNKNOWN = "of a draft layer, and of no decoder layer that is known"
_USUAL = {own: usual for names in LAYOUTS for own, usual in names.usual.items()}


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
            if any(kind.likeness(own) > 0 for kind in kinds):
                layers += _draft_layer(family, kinds, own, root, prefix, numbers[prefix])
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


def usual_drafts(
    family: Family, dimensions: Dimensions, drafts: Sequence[Collection[str]], names: DraftNames
) -> list[DraftModule]:
    """The modules that draft layers may have where they are named as in published checkpoints.

    Args:
        drafts: of each draft layer, the paths within a decoder layer of the modules that it has.

    Returns:
        What may stand around a decoder layer (no ``path``) and the decoder layer's own modules, layer by layer.
    """
    frame = {module.path: module for module in _frame(dimensions)}
    kinds = list(_kinds(family, dimensions)) if drafts else []
    found: list[DraftModule] = []
    for number, paths in enumerate(drafts):
        root = names.below or family.layer_prefix.format(i=dimensions.layers + number)
        prefix = f"{root}.layers.{number}" if names.below else root
        for path in () if names.shared and number else names.around:
            name = f"{root if names.shared else prefix}.{path}"
            found.append(DraftModule(name, replace(frame[path], path=name, bias=False), root, number=number))
        own = {path: names.renamed.get(path, path) for path in paths}
        found += _draft_layer(family, kinds, own, root, prefix, number)
    return found


def _draft_layer(
    family: Family, kinds: Sequence[_Kind], own: Mapping[str, str], root: str, prefix: str, number: int
) -> Iterator[DraftModule]:
    """The modules of a draft's decoder layer: of the kind that is most like it, and in place of a block of that (its
    attention, its MLP) the block of another kind that is more like the draft's.

    Args:
        own: paths within a decoder layer -> within the draft layer, of what the draft layer has.
    """
    likest = max(kinds, key=lambda kind: (kind.likeness(own), kind.number))
    chosen: dict[_Kind, set[str]] = {likest: set()}
    for block in likest.blocks:
        paths = [path for path in own if _block(path) == block]
        best = max(kinds, key=lambda kind: (kind.likeness(paths, block), kind is likest, kind.number))
        chosen.setdefault(best if paths else likest, set()).add(block)
    for kind, blocks in chosen.items():
        twin = family.layer_prefix.format(i=kind.number)
        for path, expert, module in kind.modules:
            if path and _block(path) in blocks:
                here = own.get(path, path)
                declared = module if here == path else replace(module, path=here)
                yield DraftModule(f"{prefix}.{here}", declared, root, here, expert, f"{twin}.{path}", number)


def _block(path: str) -> str:
    """The first part of a path within a decoder layer: ``"self_attn"``."""
    return path.partition(".")[0]


@dataclass(frozen=True, eq=False)
class _Kind:
    """The modules of the decoder layers that have the same ones, and the number of the last of these.

    Attributes:
        blocks: the first part of their paths -> the paths.
    """

    number: int
    modules: Sequence[tuple[str, int | None, Module]]
    blocks: Mapping[str, frozenset[str]]

    @cached_property
    def paths(self) -> frozenset[str]:
        """The paths of all of its modules."""
        return frozenset().union(*self.blocks.values())

    @classmethod
    def of(cls, family: Family, dimensions: Dimensions, number: int) -> _Kind:
        """The kind of a decoder layer; transformers has no draft layers, and so their modules no names there."""
        plain = {id(module): replace(module, in_memory="") for module in family.layer}
        modules = [(path, e, plain[id(module)]) for path, e, module in family.modules_of_layer(dimensions, number)]
        blocks: dict[str, set[str]] = {}
        for path, _, _ in modules:
            if path:
                blocks.setdefault(_block(path), set()).add(path)
        return cls(number, modules, {block: frozenset(paths) for block, paths in blocks.items()})

    def likeness(self, paths: Iterable[str], block: str = "") -> int:
        """Modules that a layer of these paths has in common with them, less those that it lacks; of one block of
        them, or of all."""
        own = self.blocks.get(block, frozenset()) if block else self.paths
        return 2 * len(own.intersection(paths)) - len(own)


def _kinds(family: Family, dimensions: Dimensions) -> Iterator[_Kind]:
    numbers: dict[tuple[bool, ...], int] = {}
    for i in range(dimensions.layers):
        numbers[tuple(dimensions.has(module, i) for module in family.layer)] = i
    for number in numbers.values():
        yield _Kind.of(family, dimensions, number)


def _decoder_layers(root: str, modules: Iterable[str], kinds: Sequence[_Kind]) -> dict[str, dict[str, str]]:
    """Prefix of each decoder layer at or below a root -> the paths that decoder layers have -> their own in it."""
    every = frozenset().union(*(kind.paths for kind in kinds))
    found: dict[str, dict[str, str]] = {}
    for name in modules:
        parts = name.split(".")
        for end in range(root.count(".") + 1, len(parts)):
            path = ".".join(parts[end:])
            if path in every:
                found.setdefault(".".join(parts[:end]), {})[path] = path
                break
            if _USUAL.get(path) in every:
                found.setdefault(".".join(parts[:end]), {}).setdefault(_USUAL[path], path)
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
