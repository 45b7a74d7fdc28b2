"""From a transformers model's skeleton to the modules of a family: what each is, and why some stay as they are."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from modelexport.models.derived.cuts import ROLES, STYLES, Axes
from modelexport.models.derived.skeleton import Skeleton
from modelexport.models.families.base import Dimensions, ExpertStack, Family, Kind, Module

BUFFERS = ("rotary_emb.inv_freq",)
"""Endings of the names of tensors that carry no weights."""

EXPERT = re.compile(r"(.*experts)\.(\d+)\.(.+)")
_OF_EXPERTS = {"v1": "up"}  # what ROLES says, of names that are a linear's in a stack of experts alone
_IN_AND_OUT = ("input_linear", "output_linear")  # of JetMoE: experts of an attention have them, and of an MLP
_FUSED = {**dict.fromkeys(("q", "k", "v"), "qkv_proj"), **dict.fromkeys(("gate", "up"), "gate_up_proj")}
_IN_ATTENTION = ("q", "k", "v", "o", "qkv")
_PICKERS = ("gate", "wg")  # a linear of that name may pick experts, or be a part of a gated MLP
_PICKS_TOKENS = "it picks the tokens that are attended to, and engines build it unquantised"
_USED_DIRECTLY = {  # the end of a linear's name -> why it stays
    "dt_proj": "the kernels of state-space layers take its weight as it is",
    "indexer.weights_proj": _PICKS_TOKENS,
    "indexer.wk": _PICKS_TOKENS,
}
SMALLEST = 32  # features: with fewer, what a group saves goes into its scale
_OUTSIDE = "outside of the language model's decoder layers"
_STACK = "all experts of a layer in one tensor: what quantises linears does not reach into it"
_SHARED = "shared experts in one tensor, of another number than those of a layer that are picked"
_CHANGED = "transformers takes its numbers apart as it loads them, which numbers in groups do not outlive"
_WIDE = "transformers computes with it in float32"


@dataclass(frozen=True)
class Found:
    """A module of the checkpoint: its name, within its layer if it is in one, and its tensors.

    Attributes:
        tensors: name within the module -> (shape, name in memory).
    """

    path: str
    layer: int | None
    tensors: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)

    @property
    def weight(self) -> tuple[int, ...]:
        """The shape of its weight, () where it has none."""
        return self.tensors["weight"][0] if "weight" in self.tensors else ()

    @property
    def target(self) -> str:
        """The tensor in memory of which its weight, or else its first tensor, is a part."""
        return self.tensors["weight"][1] if "weight" in self.tensors else next(iter(self.tensors.values()))[1]

    @property
    def leaf(self) -> str:
        """The last part of its name."""
        return self.path.rpartition(".")[2]


class Derivation:
    """Makes the family of one model.

    Args:
        skeleton: what transformers says of it.
    """

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton
        self.prefix = _layer_prefix(skeleton)
        self.found = self._grouped()
        self.experts = self._uniform_experts()
        self.axes = Axes(skeleton, self._dimensions())
        stacks = (shape for name, shape in skeleton.shapes.items() if len(shape) == 3 and "expert" in name.lower())
        self.most_experts = max((self.experts, *(shape[0] for shape in stacks), *skeleton.joined.values()))

    def family(self) -> Family:
        """The family."""
        skeleton = self.skeleton
        outside = [m for each in self.found if each.layer is None for m in self._named(self._outside(each), each)]
        after = [module for module in outside if module.kind in ("norm", "head")]
        if skeleton.tied:
            weight = f"{skeleton.head}.weight"
            path = skeleton.copies.get(weight, weight).removesuffix(".weight")
            head = self._vocabulary(path, "head", skeleton.shapes[weight], bias=None)
            after.append(replace(head, in_memory="" if path == skeleton.head else skeleton.head))
        before = [module for module in outside if module.kind not in ("norm", "head")]
        layer = self._layer_modules()
        return Family(
            name=skeleton.model_type,
            architecture=skeleton.architecture,
            layer_prefix=f"{self.prefix}.{{i}}",
            before=tuple(sorted(before, key=lambda module: module.kind != "embedding")),
            layer=layer,
            after=tuple(sorted(after, key=lambda module: module.kind == "head")),
            ignored_tensors=BUFFERS,
            ignored_patterns=self._ignored(),
            linears=self._linears(),
            old_prefix=self._old_prefix(),
            dimensions=replace(self.axes.dims, own_axes=tuple(self.axes.own.items())),
            notes=self._notes(layer, outside),
        )

    def _ignored(self) -> dict[str, str]:
        """Patterns of what checkpoints of the model may hold beside its own tensors -> why it is left out."""
        own = self.skeleton.tensors
        known = [each for each in self.skeleton.ignored if not any(re.search(each, name) for name in own)]
        copies = [name for target, name in self.skeleton.copies.items() if target != f"{self.skeleton.head}.weight"]
        return {
            **dict.fromkeys(known, "transformers' models of this type do without it"),
            **{f"^{re.escape(name)}$": "a copy of a tensor that it is tied to" for name in copies if name not in own},
        }

    def _linears(self) -> tuple[tuple[str, str, frozenset[int]], ...]:
        """Every Linear that engines build: see ``Family.linears``."""
        inside = re.compile(re.escape(self.skeleton.stack) + r"\.(\d+)(?=\.)")
        found: dict[tuple[str, str], set[int]] = {}
        for name, saved in self.skeleton.linears.items():
            match = inside.match(name)
            if match is not None and saved.startswith(f"{match[0]}."):
                general = f"{self.skeleton.stack}.{{i}}"
                pair = (general + name[match.end() :], general + saved[match.end() :])
            else:
                pair = (name, saved)
            found.setdefault(pair, set()).update([] if match is None else [int(match[1])])
        return tuple((*pair, frozenset(layers)) for pair, layers in found.items())

    def _old_prefix(self) -> str:
        """See ``Family.old_prefix``: that of all tensors but the head's, if they have one."""
        prefix, head = f"{self.skeleton.base}.", f"{self.skeleton.head}."
        names = [name for name in self.skeleton.tensors if not self.skeleton.targets[name].startswith(head)]
        return prefix if self.skeleton.base and all(name.startswith(prefix) for name in names) else ""

    # ------------------------------------------------------------ what there is

    def _grouped(self) -> list[Found]:
        found: dict[tuple[int | None, str], Found] = {}
        for name, shape in self.skeleton.tensors.items():
            layer, rest = self._split(name)
            path, _, parameter = rest.rpartition(".")
            module = found.setdefault((layer, path), Found(path, layer))
            module.tensors[parameter] = (shape, self.skeleton.targets[name])
        return list(found.values())

    def _split(self, name: str) -> tuple[int | None, str]:
        """The number of its decoder layer, and what is left of its name; None and the name outside of them."""
        rest = name.removeprefix(f"{self.prefix}.")
        number, _, path = rest.partition(".")
        inside = rest != name and number.isdecimal() and int(number) < self.skeleton.layers and path
        return (int(number), path) if inside else (None, name)

    def _uniform_experts(self) -> int:
        """The number of experts in every list of experts, those that some have beyond it not counted; 0: no lists."""
        lists: dict[tuple[int | None, str, str], set[int]] = {}
        for each in self.found:
            if each.layer is not None and (match := EXPERT.fullmatch(each.path)):
                lists.setdefault((each.layer, match[1], match[3]), set()).add(int(match[2]))
        return min((len(own) if own == set(range(len(own))) else 0 for own in lists.values()), default=0)

    def _dimensions(self) -> Dimensions:
        numbers = self.skeleton.numbers
        heads = numbers.get("num_attention_heads") or 1
        kv_heads = numbers.get("num_key_value_heads") or heads
        hidden = numbers.get("hidden_size") or 1
        embedding = self.skeleton.shapes.get(f"{self.skeleton.embedding}.weight", (1,))
        return Dimensions(
            layers=self.skeleton.layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads if heads % kv_heads == 0 else heads,
            head_dim=numbers.get("head_dim") or max(1, hidden // heads),
            intermediate=numbers.get("intermediate_size") or 1,
            vocab=embedding[0],
            tied_embeddings=self.skeleton.tied,
            experts=self.experts,
        )

    # ------------------------------------------------------------ what it is

    def _layer_modules(self) -> tuple[Module, ...]:
        """The modules of the decoder layers, each with the layers that have it."""
        layers: dict[Module, set[int]] = {}
        siblings = {(each.layer, each.path) for each in self.found}
        for each in self.found:
            if each.layer is not None:
                for module in self._named(self._inside(each, siblings), each):
                    layers.setdefault(module, set()).add(each.layer)
        every = set(range(self.skeleton.layers))
        return tuple(
            module if numbers == every else replace(module, layers=frozenset(numbers))
            for module, numbers in layers.items()
        )

    def _named(self, modules: Iterable[Module], found: Found) -> list[Module]:
        """The same with their names in memory, where transformers calls them otherwise."""
        name, own = found.target.rpartition(".")[0], found.path
        if found.layer is not None:
            own, number = f"{self.prefix}.{{i}}.{found.path}".rstrip("."), f"{self.skeleton.stack}.{found.layer}"
            name = f"{self.skeleton.stack}.{{i}}{name.removeprefix(number)}" if name.startswith(number) else name
        if name == own or self._is_of_a_stack(found):
            return list(modules)
        return [replace(module, in_memory=name) if not module.in_memory else module for module in modules]

    def _inside(self, found: Found, siblings: Iterable[tuple[int | None, str]]) -> list[Module]:
        """The modules that a module of a decoder layer on disk is declared as."""
        kind, path = self._class(found), found.path
        if (match := EXPERT.fullmatch(path)) and int(match[2]) < self.experts:
            path = f"{match[1]}.{{e}}.{match[3]}"
        bias = "bias" in found.tensors
        if len(found.weight) == 2 and self._picks_experts(found, kind):
            router = Module(path=path, kind="router", role="router", bias=bias, shape=found.weight)
            return [router, *self._further(found, path)]
        if len(found.weight) == 2 and (kind == "Linear" or self._is_of_a_stack(found)):
            return [self._linear(found, path, bias, siblings), *self._further(found, path)]
        if len(found.weight) == 1 and "norm" in f"{kind} {found.leaf}".lower():
            norm = Module(path=path, kind="norm", role=path, bias=bias, shape=found.weight)
            return [norm, *self._further(found, path)]
        return [self._other(found, path, name) for name in found.tensors]

    def _outside(self, found: Found) -> list[Module]:
        """The same for one that stands outside of them."""
        kind, name, path = self._class(found), found.target.rpartition(".")[0], found.path
        bias = "bias" in found.tensors
        for own, role in ((self.skeleton.embedding, "embedding"), (self.skeleton.head, "head")):
            if own and own == name and len(found.weight) == 2:
                vocabulary = self._vocabulary(path, role, found.weight, bias=bias)
                return [vocabulary, *self._further(found, path)]
        of_the_model = name.rpartition(".")[0] in _ancestors(self.skeleton.stack)
        if len(found.weight) == 1 and "norm" in kind.lower() and of_the_model:
            norm = Module(path=path, kind="norm", role="final_norm", bias=bias, shape=found.weight)
            return [norm, *self._further(found, path)]
        if len(found.weight) == 2 and kind == "Linear":
            linear = Module(path=path, kind="linear", role=path, bias=bias, shape=found.weight, why=_OUTSIDE)
            return [linear, *self._further(found, path)]
        return [self._other(found, path, tensor) for tensor in found.tensors]

    def _further(self, found: Found, path: str) -> list[Module]:
        """The tensors of a module beside its weight and bias."""
        return [self._other(found, path, name) for name in found.tensors if name not in ("weight", "bias")]

    def _other(self, found: Found, path: str, name: str) -> Module:
        """A tensor that is passed on as it is."""
        shape, target = found.tensors[name]
        role = f"{path}.{name}".lstrip(".")
        module = Module(path=path, kind="other", role=role, parameter=name, bias=False, shape=shape)
        parent = target.rpartition(".")[0]
        kind = self.skeleton.modules.get(parent, "")
        if found.layer is None:
            return replace(module, why=_OUTSIDE if self._is_large(shape) else "")
        if len(shape) > 1 and "expert" in f"{kind} {parent.rpartition('.')[2]}".lower():
            whole = shape == self.skeleton.shapes.get(target)
            if self._is_half_of_a_stack(found, name, target):  # it has a stack of its own on disk
                whole, target = True, role
            joined = self.skeleton.joined.get(target) if whole else None
            stacked = whole and not joined and shape[0] == self.most_experts
            saved = f"{self.prefix}.{found.layer}.{role}"
            why = _SHARED if "shared" in role and whole and len(shape) == 3 and not stacked else _STACK
            module = replace(
                module,
                stacked=stacked,
                either_way=saved in self.skeleton.either_way,
                why=why if self._is_large(shape) and "bias" not in name else "",
                experts=self._stack(role, shape, target) if stacked or joined else None,
            )
        elif self._is_large(shape):
            module = replace(module, why=f"of a {kind}, which is no linear to what engines quantise")
        return self.axes.other(module, found.tensors[name][1])

    def _is_half_of_a_stack(self, found: Found, name: str, target: str) -> bool:
        """Returns whether transformers joins a stack of experts with another of its shape as it loads them."""
        shape, joined = found.tensors[name][0], self.skeleton.shapes.get(target, ())
        does = ROLES.get(found.leaf) if name == "weight" else None
        return len(shape) == 3 and does in ("gate", "up") and joined == (shape[0], 2 * shape[1], shape[2])

    def _stack(self, role: str, shape: tuple[int, ...], target: str) -> ExpertStack | None:
        """The linears of a tensor that holds those of all experts, by what it is called in memory; None: not known."""
        stack = ExpertStack(linears=(), joined=self.skeleton.joined.get(target))
        hidden, does, shape = self.axes.dims.hidden, self._does_of_experts(target), stack.by_expert(shape)
        if len(shape) != 3 or self.experts or not does:
            return None
        style = self.skeleton.style(target)
        across = 1 if does in ("down", "o") else 2  # the dim of the hidden features, where it is not transposed
        fitting = [dim for dim in (1, 2) if shape[dim] == hidden]
        transposed = fitting == [3 - across]
        if stack.joined is not None:  # the inner features of all
            transposed = does == "down"
        elif len(fitting) != 1 and style is not None:
            transposed = STYLES.get(style) != ("row" if does == "down" else "column")
        parts = role.split(".")
        root = ".".join(parts[: parts.index("experts")] if "experts" in parts else parts[:-2])
        linears = [(f"expert.{part}", f"{root}.experts.{{e}}.{part}_proj".lstrip(".")) for part in does.split("_")]
        if stack.joined is not None:
            linears = [(f"expert.{does}", f"{'.'.join(parts[:-1])}.{{e}}.{parts[-1]}")]
        inner = shape[3 - across if not transposed else across]
        if inner % len(linears):
            return None
        inner //= len(linears)
        small = min(inner, hidden) < SMALLEST
        return replace(
            stack,
            linears=tuple(linears),
            transposed=transposed,
            axis=None if style is None else self.axes.features(inner),
            why=f"one of its dims is smaller than {SMALLEST}" if small else "",
        )

    def _does_of_experts(self, target: str) -> str:
        """Returns what a stack's linears do, a word of :data:`ROLES`, by its name in memory; "" where it is unknown."""
        module, _, leaf = target.removesuffix(".weight").rpartition(".")
        does = ROLES.get(leaf) or _OF_EXPERTS.get(leaf, "")
        if leaf in _IN_AND_OUT:
            inner, outer = (self.skeleton.shapes.get(f"{module}.{end}.weight", (0, 0, 0)) for end in _IN_AND_OUT)
            if inner[1] == 2 * outer[2]:
                return ("gate_up", "down")[_IN_AND_OUT.index(leaf)]
            in_attention = inner[1] == outer[2] and self.axes.is_attention(f"{module}.weight")
            return ("q", "o")[_IN_AND_OUT.index(leaf)] if in_attention else ""
        return does if does in ("gate", "up", "down", "gate_up") else ""

    def _class(self, found: Found) -> str:
        return self.skeleton.modules.get(found.target.rpartition(".")[0], "")

    def _is_large(self, shape: Sequence[int]) -> bool:
        """Returns whether the module is large enough to gain by quantisation."""
        return len(shape) > 1 and math.prod(shape) >= SMALLEST**2

    def _is_of_a_stack(self, found: Found) -> bool:
        """Returns whether it is one expert's linear, which transformers stacks with its like."""
        return len(self.skeleton.shapes.get(found.target, ())) == 3 and EXPERT.fullmatch(found.path) is not None

    def _picks_experts(self, found: Found, kind: str) -> bool:
        """Returns whether it is (of) a router: by its name, or a class; one called gate only if it has an output for
        each."""
        parts = found.path.lower().split(".")
        if "experts" in parts and "router" not in parts:  # JetMoE's experts of an attention have one below them
            return False
        above = found.target.split(".")
        depth = self.skeleton.stack.count(".") + 3  # a layer's own modules begin there
        classes = (self.skeleton.modules.get(".".join(above[:end]), "") for end in range(depth, len(above)))
        if "router" in parts or any("router" in name.lower() for name in (kind, *classes)):
            return True
        most = max(self.most_experts, self.skeleton.numbers.get("num_experts") or 0)
        return any(name in parts for name in _PICKERS) and found.weight[0] <= max(most, SMALLEST)

    def _linear(self, found: Found, path: str, bias: bool, siblings: Iterable[tuple[int | None, str]]) -> Module:
        does, expert, target = ROLES.get(found.leaf, ""), self._is_of_a_stack(found), found.target
        in_attention = self.axes.is_attention(target)
        place = "expert" if expert else "shared" if "shared" in path else "attention" if in_attention else "mlp"
        usual = does and in_attention == (does in _IN_ATTENTION)
        role = f"{place}.{does}" if usual else path
        style = self.skeleton.style(target)
        partition = STYLES.get(style or "", "replicated")
        if expert and style is not None:  # the stack may be transposed; what it does says how it is cut
            partition = "row" if does == "down" else "column"
        fused = None
        if expert and does in ("gate", "up"):
            fused = f"{path.partition('.{e}.')[0]}.w13" if "{e}" in path else None
        elif usual and does in _FUSED and (found.layer, found.path) in siblings:
            fused = f"{path.rpartition('.')[0]}.{_FUSED[does]}".lstrip(".")
        module = Module(
            path=path,
            kind="linear",
            role=role,
            bias=bias,
            shape=found.weight,
            why=self._why(found, expert=expert),
            partition=partition,
            fused_into=fused,
        )
        return self.axes.linear(module, does, target)

    def _why(self, found: Found, *, expert: bool) -> str:
        """The reason why a linear of a decoder layer is not quantised; "" where it may be."""
        for end, why in _USED_DIRECTLY.items():
            if f".{found.path}".endswith(f".{end}"):
                return why
        if not expert and f"{self.prefix}.{found.layer}.{found.path}.weight" in self.skeleton.changed:
            return _CHANGED
        if found.target in self.skeleton.wide:
            return _WIDE
        return f"one of its dims is smaller than {SMALLEST}" if min(found.weight) < SMALLEST else ""

    def _vocabulary(self, path: str, role: str, shape: tuple[int, ...], *, bias: bool | None) -> Module:
        """The embedding or the head."""
        kind: Kind = "embedding" if role == "embedding" else "head"
        if shape[0] != self.axes.dims.vocab:
            return Module(path=path, kind=kind, role=role, bias=bias, shape=shape)
        return Module(path=path, kind=kind, role=role, partition="column", axis="vocab", bias=bias, shape=shape)

    def _notes(self, layer: Sequence[Module], outside: Sequence[Module]) -> tuple[str, ...]:
        skeleton = self.skeleton
        cut = any(module.partition != "replicated" for module in layer)
        plan = (
            "" if cut else ", which has no tensor-parallel plan: a target of several ranks holds whole layers on each"
        )
        notes = [f"{skeleton.model_type}: derived from transformers' {skeleton.architecture}{plan}"]
        towers = sorted({_first(m.path) for m in outside if m.kind in ("linear", "other") and m.why == _OUTSIDE})
        if towers:
            notes.append(f"not of the language model's layers, and taken over as they are: {', '.join(towers[:6])}")
        return tuple(notes)


def _layer_prefix(skeleton: Skeleton) -> str:
    """The name on disk of the list of decoder layers."""
    votes: dict[str, int] = {}
    inside = re.compile(re.escape(skeleton.stack) + r"\.(\d+)\.")
    for name, target in skeleton.targets.items():
        if match := inside.match(target):
            parts = name.split(".")
            for place, part in enumerate(parts):
                if part == match[1]:
                    prefix = ".".join(parts[:place])
                    votes[prefix] = votes.get(prefix, 0) + 1
    return max(votes, key=lambda prefix: (votes[prefix], -len(prefix))) if votes else skeleton.stack


def _ancestors(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(len(parts))}


def _first(path: str) -> str:
    """The part of a model that a module belongs to, by its name."""
    parts = [part for part in path.split(".") if part not in ("model",)]
    return parts[0] if parts else path
