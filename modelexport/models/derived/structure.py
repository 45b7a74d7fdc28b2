"""A family made from the names and shapes of a checkpoint's tensors, for a type that nothing here knows.

Which layers there are follows from the numbers in names, what a tensor is from the last part of its name, as engines
and makers have it (:data:`LINEARS`). Nothing says how a layer computes, nor how its tensors may be cut: one rank has
all of them whole, and whatever no convention names stays as it is.

The description stands in config.json, by :data:`KEY`, so that a quantised checkpoint, whose tensors no longer have the
shapes of the weights, is matched against the same modules as its source was.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from modelexport.errors import CheckpointError, PlanError, quoted, shown
from modelexport.models.derived.cuts import ROLES
from modelexport.models.derived.modules import BUFFERS, EXPERT, SMALLEST, Derivation, Found
from modelexport.models.derived.skeleton import MOST_EXPERTS, MOST_LAYERS, MOST_TENSORS, NUMBERS, Skeleton
from modelexport.models.families.base import MOST_DIGITS, ExpertStack, Module, mtp_root
from modelexport.models.families.drafts import draft_counts
from modelexport.system.json_values import JsonValues

KEY = "modelexport_structure"
"""The key of config.json that has the description."""

LINEARS = frozenset(
    {
        *ROLES,
        *("out_proj", "dense", "dense_h_to_4h", "dense_4h_to_h", "fc1", "fc2", "fc_in", "fc_out"),
        *("in_proj", "wqkv", "W_pack"),
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    }
)
"""Last parts of names that are a linear's, its weight ``[out_features, in_features]``, in every model that has them."""

_EMBEDDINGS = ("embed_tokens", "tok_embeddings", "word_embeddings", "embed_in", "wte", "embedding")
_HEADS = ("lm_head", "embed_out", "output_layer", "output")
_PARTS = ("text_config", "llm_config", "language_config")  # of a model that also sees or hears
_LAYER = re.compile(rf"(.+?)\.(\d{{1,{MOST_DIGITS}}})\.(.+)")
_LONGEST_NAME = 512
_UNNAMED = "its name is no linear's by any convention of engines"
_STACK = "all experts of a layer in one tensor, whose names and shapes do not say how they are laid out in it"


def described(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> dict[str, Any]:
    """The description of a model by its tensors, for config.json.

    Args:
        shapes: name -> shape of every tensor that an unquantised checkpoint of the model has.
        config: config.json's content.

    Returns:
        ``stack`` and ``layers``, the name of the list of decoder layers and their number; ``embedding``, ``head`` and
        ``tied``; and ``tensors``, each a name with ``{i}`` for the layer's number and ``{e}`` for the expert's, a
        shape, the ``layers`` that have it unless all have, and the number of its ``experts``.

    Raises:
        PlanError: no tensor's name has the number of a layer.
    """
    language = _language_part(config)
    # Draft layers are told by the layers that they are like.
    own = {name: shape for name, shape in shapes.items() if mtp_root(name) is None and not name.endswith(BUFFERS)}
    matrices = {name.removesuffix(".weight"): shape for name, shape in own.items() if _is_matrix(name, shape)}
    embedding = _largest({name: shape for name, shape in matrices.items() if not _LAYER.match(name)}, _EMBEDDINGS)
    stack, layers = _stack_of(own, language, embedding)
    drafts = max(draft_counts(config).values(), default=0)
    prefix, held = f"{stack}.", {}
    for name, shape in own.items():
        number = name.removeprefix(prefix).partition(".")[0]
        is_draft = name.startswith(prefix) and number.isdecimal() and 0 <= int(number) - layers < drafts
        if not is_draft:
            held[name] = shape
    width = matrices[embedding][1] if embedding else 0
    outside = {name: shape for name, shape in matrices.items() if not name.startswith(prefix) and shape[1] == width}
    head = _largest(outside, _HEADS)
    said = [part["tie_word_embeddings"] for part in (config, language) if part.get("tie_word_embeddings") is not None]
    other = not head and any(name.startswith(f"{_HEADS[0]}.") for name in held)  # a head of several modules
    # A head that is there is a copy only if config.json says so, in all of its parts that say anything.
    tied = bool(embedding) and not other and all(said) and bool(said or not head)
    if tied:
        head = head or _HEADS[0]
        held.pop(f"{head}.weight", None)
    tensors = list(_entries(held, prefix, layers))
    return {"stack": stack, "layers": layers, "embedding": embedding, "head": head, "tied": tied, "tensors": tensors}


def _language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model; all of it where that is no part."""
    parts = (config.get(key) for key in _PARTS)
    return next((part for part in parts if isinstance(part, Mapping)), config)


def _stack_of(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], embedding: str) -> tuple[str, int]:
    """The name of the list of decoder layers and their number.

    It is as long as config.json says, if any is; of several, the one nearest to the embedding, by their names; of
    these, the one with most weights.
    """
    numbers: dict[str, set[int]] = {}
    weights: dict[str, int] = {}
    for name, shape in shapes.items():
        match = _LAYER.fullmatch(name)
        if match is not None:
            numbers.setdefault(match[1], set()).add(int(match[2]))
            weights[match[1]] = weights.get(match[1], 0) + (shape[0] * shape[1] if len(shape) == 2 else 0)
    lengths = {stack: next(n for n in range(len(own) + 1) if n not in own) for stack, own in numbers.items()}
    lengths = {stack: length for stack, length in lengths.items() if length}
    if not lengths:
        raise PlanError(
            f"none of its {len(shapes)} tensors has a layer's number in its name (as model.layers.0.mlp.up_proj.weight "
            "has): which of them are linears cannot be told"
        )
    wanted = config.get("num_hidden_layers")
    wanted = wanted if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted > 0 else 0
    counted = max(draft_counts(config).values(), default=0)
    fitting = [stack for stack, length in lengths.items() if wanted <= length <= wanted + counted]
    stack = max(
        fitting if wanted and fitting else lengths, key=lambda stack: (-_apart(stack, embedding), weights[stack])
    )
    return stack, min(wanted, lengths[stack]) if wanted and fitting else lengths[stack]


def _apart(name: str, other: str) -> int:
    """The modules between two, up from one to what has both and down to the other."""
    parts, others = name.split("."), other.split(".")
    common = next((n for n, (a, b) in enumerate(zip(parts, others, strict=False)) if a != b), 0)
    return len(parts) + len(others) - 2 * common


def _largest(shapes: Mapping[str, tuple[int, ...]], leaves: tuple[str, ...]) -> str:
    """The module with most rows among those whose last part is one of ``leaves``; "" where there is none."""
    fitting = [name for name in shapes if name.rpartition(".")[2] in leaves]
    return max(fitting, key=lambda name: shapes[name][0], default="")


def _entries(shapes: Mapping[str, tuple[int, ...]], prefix: str, layers: int) -> Iterator[dict[str, Any]]:
    """The tensors, those that layers and experts have in common taken together."""
    found: dict[tuple[str, tuple[int, ...], int], list[int]] = {}
    experts: dict[tuple[int, str, tuple[int, ...]], list[int]] = {}
    for name, shape in shapes.items():
        number, _, path = name.removeprefix(prefix).partition(".")
        if not (name.startswith(prefix) and path and number.isdecimal() and int(number) < layers):
            found.setdefault((name, shape, 0), [])
        elif match := EXPERT.fullmatch(path):
            general = f"{prefix}{{i}}.{match[1]}.{{e}}.{match[3]}"
            experts.setdefault((int(number), general, shape), []).append(int(match[2]))
        else:
            found.setdefault((f"{prefix}{{i}}.{path}", shape, 0), []).append(int(number))
    for (layer, general, shape), numbers in experts.items():
        if sorted(numbers) == list(range(len(numbers))):
            found.setdefault((general, shape, len(numbers)), []).append(layer)
        else:
            for e in numbers:
                found.setdefault((general.replace("{e}", str(e)), shape, 0), []).append(layer)
    every = list(range(layers))
    for (name, shape, count), own in found.items():
        entry: dict[str, Any] = {"name": name, "shape": list(shape)}
        if own and own != every:
            entry["layers"] = own
        yield {**entry, "experts": count} if count else entry


def read_structure(config: Mapping[str, Any]) -> Skeleton:
    """The skeleton of the model that :data:`KEY` of a config.json describes.

    Raises:
        CheckpointError: it is none, contradicts itself, or makes more tensors than are believed.
    """
    values = JsonValues(config).object(KEY)
    stack, layers = values.text("stack"), values.whole("layers", most=MOST_LAYERS)
    shapes = _expanded(values, stack, layers)
    embedding, head, tied = values.text("embedding", ""), values.text("head", ""), values.content.get("tied") is True
    for name in (embedding, "" if tied else head):
        if name and len(shapes.get(f"{name}.weight", ())) != 2:
            raise CheckpointError(f"{values.where}: {shown(name)}.weight is no matrix among its tensors")
    if tied and not (embedding and head):
        raise CheckpointError(
            f"{values.where}: the head is tied, and there is no name for {'it' if embedding else 'an embedding'}"
        )
    own = {f"{head}.weight": shapes[f"{embedding}.weight"]} if tied else {}
    targets, stacks = _targets(shapes, stack)
    modules = {
        name: kind
        for tensor, shape in shapes.items()
        if (kind := _class_of(name := tensor.rpartition(".")[0], tensor, shape))
    }
    matrices = [name.removesuffix(".weight") for name, shape in {**shapes, **own}.items() if _is_matrix(name, shape)]
    named = config.get("architectures")
    numbers = _language_part(config)
    return Skeleton(
        model_type=str(config.get("model_type")),
        architecture=str(named[0]) if isinstance(named, list) and named else str(config.get("model_type")),
        tensors=shapes,
        targets=targets,
        changed=frozenset(),
        either_way=frozenset(),
        copies={name: name for name in own},
        wide=frozenset(),
        linears={name: embedding if tied and name == head else name for name in matrices if name != embedding},
        modules=modules,
        shapes={**shapes, **stacks, **own},
        stack=stack,
        layers=layers,
        embedding=embedding,
        head=head,
        tied=tied,
        plan={},
        numbers={key: _number(numbers.get(key)) for key in NUMBERS},
        head_dims={},
        base="",
        ignored=(),
    )


def _expanded(values: JsonValues, stack: str, layers: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a description.

    Raises:
        CheckpointError: an entry is none, or there are more than are believed.
    """
    entries = values.content.get("tensors")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CheckpointError(f"{values.where}: tensors is {quoted(entries)}; a list of objects is needed")
    found: dict[str, tuple[int, ...]] = {}
    for number, entry in enumerate(entries):
        each = JsonValues(entry, f"{values.where}: tensors[{number}]")
        name, shape = each.text("name"), entry.get("shape")
        if len(name) > _LONGEST_NAME or not isinstance(shape, list) or len(shape) > 8:
            raise CheckpointError(f"{each.where} has no name of at most {_LONGEST_NAME} characters and no shape")
        sizes = tuple(JsonValues({"shape": size}, each.where).whole("shape", least=0) for size in shape)
        numbers = entry.get("layers", range(layers))
        if not isinstance(numbers, (list, range)) or not all(type(n) is int and 0 <= n < layers for n in numbers):
            raise CheckpointError(f"{each.where}: layers is {quoted(numbers)}; numbers below {layers} are needed")
        inside = name.startswith(f"{stack}.{{i}}.")
        experts = each.whole("experts", 1, most=MOST_EXPERTS)
        if len(found) + (len(numbers) if inside else 1) * experts > MOST_TENSORS:
            raise CheckpointError(f"{values.where} makes more than {MOST_TENSORS:,} tensors, which are not believed")
        for layer in numbers if inside else (0,):
            own = name.replace(f"{stack}.{{i}}.", f"{stack}.{layer}.", 1) if inside else name
            found |= {own.replace("{e}", str(e)): sizes for e in range(experts)} if "experts" in entry else {own: sizes}
    return found


def _targets(shapes: Mapping[str, tuple[int, ...]], stack: str) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """Every tensor -> the one in memory that it is a part of; and the shapes of those that engines stack of experts."""
    targets: dict[str, str] = {}
    stacks: dict[str, tuple[int, ...]] = {}
    inside = re.compile(re.escape(stack) + r"\.\d+\.(.+)\.weight")
    for name, shape in shapes.items():
        targets[name] = name
        if len(shape) == 2 and (path := inside.fullmatch(name)) and (match := EXPERT.fullmatch(path[1])):
            start = name.removesuffix(f"{path[1]}.weight")
            target = targets[name] = f"{start}{match[1]}.{match[3]}.weight"
            stacks[target] = (max(int(match[2]) + 1, stacks.get(target, (0,))[0]), *shape)
    return targets, stacks


def _class_of(name: str, tensor: str, shape: tuple[int, ...]) -> str:
    """The class that a module would have in memory, by its name and one of its tensors; "" where nothing tells."""
    leaf = name.rpartition(".")[2]
    if not tensor.endswith(".weight"):
        return ""
    if len(shape) == 1 and ("norm" in leaf or leaf == "ln_f"):
        return "Norm"
    return "Linear" if len(shape) == 2 and leaf in LINEARS else ""


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return name.endswith(".weight") and len(shape) == 2


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1 << 40 else None


class StructuralDerivation(Derivation):
    """Makes the family of a model of which there are names and shapes alone."""

    def _stack(self, role: str, shape: tuple[int, ...], target: str) -> ExpertStack | None:
        return None

    def _other(self, found: Found, path: str, name: str) -> Module:
        module = super()._other(found, path, name)
        shape = found.tensors[name][0]
        if found.layer is None or len(shape) < 2:
            return module
        # Kernels of convolutions, which have three dims as well, are a few elements wide.
        stacked = module.stacked or (len(shape) == 3 and min(shape[1:]) >= SMALLEST)
        return replace(module, stacked=stacked, why=_STACK if stacked else _UNNAMED)

    def _notes(self, layer: object, outside: object) -> tuple[str, ...]:
        skeleton = self.skeleton
        linears = dict.fromkeys(
            m.path.rpartition(".")[2] for m in self._layer_modules() if m.kind == "linear" and not m.why
        )
        named = ", ".join(linears) or "none"
        return (
            f"{skeleton.model_type}: not known to transformers: what its tensors are is told by their names and shapes "
            f"alone; linears of the {skeleton.layers} layers of {skeleton.stack}: {named}",
        )
