"""``megatron``: Megatron-core's ``torch_dist`` checkpoint of a GPT-style model.

torch's distributed checkpoint with Megatron's names: q, k and v fused group by group, gate and up fused one after the
other, the vocabulary padded, the layers (and their experts) stacked along leading dims of one global tensor, norms
named after the linear that they are fused into. So Megatron-core 0.14 to 0.16 writes it by default; layers that differ
(some dense, some of experts) are numbered. Numbered layers, numbered experts, separate gate and up and separate norms
are always read as well. Only unquantised models have such a form.

Beside the tensors there are ``metadata.json``, which names the format, and ``common.pt``, a small dict as
``torch.save`` writes it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelexport.checkpoints.fused_arrays import check_type
from modelexport.checkpoints.fused_rows import Heads, Span, heads_of, row_spans
from modelexport.checkpoints.safetensors.arrays import Array, Share
from modelexport.checkpoints.safetensors.file import Checkpoint, Layout
from modelexport.checkpoints.torch_archive import dcp_container as container
from modelexport.checkpoints.torch_archive.dcp_container import Option, StoredKey
from modelexport.checkpoints.torch_archive.dcp_metadata import METADATA_NAME, metadata_bytes, read_metadata
from modelexport.checkpoints.torch_archive.zip import object_archive
from modelexport.errors import CheckpointError, PlanError, listed
from modelexport.sharding.boxes import Box, extent, intersect, offset, relative, whole
from modelexport.sharding.rules import TensorRule
from modelexport.sharding.shard_plan import ShardPlan
from modelexport.system.small_files import has_file

NAME = "megatron"
DESCRIPTION = "Megatron-core's torch_dist"
LOADS_TENSOR_PARALLEL = False
HOLDS_QUANTISED = False
_TYPES = frozenset({"llama", "mistral", "mixtral", "phi3", "qwen2"})
SIDE_FILES = (".metadata", "metadata.json", "common.pt")
BACKEND = "torch_dist"
VOCABULARY_UNIT = 128
"""Megatron's default: the vocabulary is padded to a multiple of this for each tensor-parallel rank."""

# role -> the module's names, the one that is written first
_MODULES = {
    "embedding": ("embedding.word_embeddings",),
    "attention.q": ("self_attention.linear_qkv",),
    "attention.k": ("self_attention.linear_qkv",),
    "attention.v": ("self_attention.linear_qkv",),
    "attention.qkv": ("self_attention.linear_qkv",),
    "attention.o": ("self_attention.linear_proj",),
    "mlp.gate": ("mlp.linear_fc1",),
    "mlp.up": ("mlp.linear_fc1",),
    "mlp.gate_up": ("mlp.linear_fc1",),
    "mlp.down": ("mlp.linear_fc2",),
    "router": ("mlp.router",),
    "expert.gate": ("linear_fc1",),
    "expert.up": ("linear_fc1",),
    "expert.down": ("linear_fc2",),
    "final_norm": ("decoder.final_layernorm",),
    "head": ("output_layer",),
}
_FUSED_NORMS = {"attention.norm": "self_attention.linear_qkv", "mlp.norm": "mlp.linear_fc1"}
_NORMS = {"attention.norm": "input_layernorm", "mlp.norm": "pre_mlp_layernorm"}
_PADDED = ("embedding", "head")
_QKV = ("attention.q", "attention.k", "attention.v", "attention.qkv")


@dataclass(frozen=True)
class Names:
    """The facts that Megatron's names of a model's tensors depend on."""

    layers: int
    experts: int
    heads: Heads
    sparse: frozenset[int]
    """The layers that have experts."""
    alike: bool
    """Whether every layer has the same tensors; else they cannot be stacked, and are numbered."""

    @classmethod
    def of(cls, rules: Sequence[TensorRule]) -> Names:
        """From a model's rules."""
        kinds: dict[int, set[tuple[object, ...]]] = defaultdict(set)
        sparse = set()
        for rule in rules:
            if rule.layer is not None:
                kinds[rule.layer].add((rule.role, rule.parameter, rule.expert, rule.shape))
                if rule.expert is not None:
                    sparse.add(rule.layer)
        layers = max(kinds, default=-1) + 1
        experts = max((rule.expert + 1 for rule in rules if rule.expert is not None), default=0)
        alike = all(kinds[layer] == kinds[0] for layer in range(layers))
        return cls(layers, experts, heads_of(rules), frozenset(sparse), alike)

    def options(self, rule: TensorRule) -> list[Option]:
        """Yields the forms in which Megatron may keep a tensor, the one that is written first; none for tensors it does
        not have."""
        found: list[Option] = []
        for suffix in self._parameters(rule):
            for prefix, lead, sizes in self._stacks(rule):
                found.append((self._stored_key(rule, prefix + suffix, lead, sizes),))
            for prefix, lead, sizes in self._stacks(rule):
                halves = _halves(rule, prefix + suffix, lead, sizes)
                if halves:
                    found.append(halves)
        return found

    def _parameters(self, rule: TensorRule) -> list[str]:
        """The tensor's name within its layer (or expert, or the model)."""
        if rule.role in _NORMS:
            fused = f"{_FUSED_NORMS[rule.role]}.layer_norm_{rule.parameter}"
            alone = f"{_NORMS[rule.role]}.{rule.parameter}"
            # In front of experts there is no single linear that a norm could be fused into.
            return [alone, fused] if rule.role == "mlp.norm" and rule.layer in self.sparse else [fused, alone]
        return [f"{module}.{rule.parameter}" for module in _MODULES.get(rule.role, ())]

    def _stacks(self, rule: TensorRule) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """(the key's beginning, indices of the leading dims, their sizes): stacked or numbered layers and experts."""
        if rule.layer is None:
            return [("", (), ())]
        layers = [
            ("decoder.layers.", (rule.layer,), (self.layers,)),
            (f"decoder.layers.{rule.layer}.", (), ()),
        ][:: 1 if self.alike else -1]
        if rule.expert is None:
            return layers
        experts = [
            ("mlp.experts.experts.", (rule.expert,), (self.experts,)),
            (f"mlp.experts.experts.{rule.expert}.", (), ()),
        ]
        return [
            (prefix + inner, lead + index, sizes + counts)
            for prefix, lead, sizes in layers
            for inner, index, counts in experts
        ]

    def _stored_key(self, rule: TensorRule, key: str, lead: tuple[int, ...], sizes: tuple[int, ...]) -> StoredKey:
        rows, spans = rule.shape[0], [(0, rule.shape[0], 0)]
        if rule.role in _QKV:
            rows, spans = row_spans(rule, self.heads)
        elif rule.role in ("mlp.gate", "mlp.up", "expert.gate", "expert.up"):
            spans = [(0, rows, rows if rule.role.endswith("up") else 0)]
            rows *= 2
        return StoredKey(key, (*sizes, rows, *rule.shape[1:]), _shares(rule, lead, spans), rule.role in _PADDED)


def _shares(rule: TensorRule, lead: tuple[int, ...], spans: Iterable[Span]) -> tuple[Share, ...]:
    rest = whole(rule.shape[1:])
    zeros = (0,) * len(rest)
    return tuple(Share(rule.name, ((start, stop), *rest), (*lead, row, *zeros)) for start, stop, row in spans)


def _halves(rule: TensorRule, key: str, lead: tuple[int, ...], sizes: tuple[int, ...]) -> Option:
    """Gate and up under keys of their own, ``_w`` and ``_v``; nothing for other roles."""
    kind = rule.role.rpartition(".")[2]
    spans = {"gate": [(0, rule.shape[0], "_w")], "up": [(0, rule.shape[0], "_v")]}.get(kind, [])
    if kind == "gate_up":
        half = rule.shape[0] // 2
        spans = [(0, half, "_w"), (half, 2 * half, "_v")]
    return tuple(
        StoredKey(
            key + end,
            (*sizes, stop - start, *rule.shape[1:]),
            _shares(rule, lead, [(start, stop, 0)]),
        )
        for start, stop, end in spans
    )


# ------------------------------------------------------------------ writing


def arrays(plan: ShardPlan, config: Mapping[str, Any]) -> list[Array]:
    """Every rectangle once, in the file of the first rank that holds it, as Megatron names it.

    Raises:
        PlanError: a quantised model, tensors that Megatron has no name for, dtypes that differ within a key.
    """
    rules = list(plan.rules.values())
    names = Names.of(rules)
    quantised = bool(config.get("quantization_config"))  # of such a model there may be no whole heads to name
    kept = {rule.name: [] if quantised else names.options(rule)[:1] for rule in rules}
    _check(config, rules, kept)
    found: list[Array] = []
    for rank in range(plan.parallelism.size):
        rectangles: dict[tuple[str, Box], list[tuple[TensorRule, StoredKey, Share]]] = defaultdict(list)
        for rule in rules:
            for _, box in plan.owned(rule.name, rank):
                ((stored,),) = kept[rule.name]
                for share in filter(None, (_within(share, box) for share in stored.shares)):
                    rectangles[stored.key, _beside(share)].append((rule, stored, share))
        for (key, _), pieces in rectangles.items():
            found += _joined(f"__{rank}_0{container.SUFFIX}", key, pieces, plan.parallelism.tp)
    return found


def _check(config: Mapping[str, Any], rules: Sequence[TensorRule], kept: Mapping[str, list[Option]]) -> None:
    quantised = bool(config.get("quantization_config"))
    odd = [rule.name for rule in rules if rule.parameter not in ("weight", "bias") and (quantised or kept[rule.name])]
    if odd or quantised:
        what = f" ({odd[0]} and {len(odd) - 1} more)" if odd else ""
        raise PlanError(f"--format megatron holds unquantised models only, this one is quantised{what}; use hf or dcp")
    problems = [f"{rule.name} ({rule.role}) has no name in Megatron" for rule in rules if not kept[rule.name]]
    dtypes: dict[str, str] = {}
    for rule in rules:
        for ((stored,),) in (kept[rule.name],) if kept[rule.name] else ():
            first = dtypes.setdefault(stored.key, rule.dtype)
            if first != rule.dtype:
                problems.append(f"{rule.name} is {rule.dtype}, other tensors of Megatron's {stored.key} are {first}")
    if problems:
        raise PlanError(f"--format megatron cannot hold this model, hf and dcp can:{listed(problems)}")
    check_type(config, NAME, _TYPES)


def _within(share: Share, box: Box) -> Share | None:
    """The part of a share that lies in a rectangle of the tensor."""
    part = intersect(share.box, box)
    if part is None:
        return None
    lead = len(share.origin) - len(part)
    inner = offset(relative(part, share.box))
    return Share(share.tensor, part, (*share.origin[:lead], *map(sum, zip(share.origin[lead:], inner, strict=True))))


def _beside(share: Share) -> Box:
    """The place of a share in every dim of its key but the rows: shares that agree in it can be one rectangle."""
    lead = len(share.origin) - len(share.box)
    sizes = (1,) * lead + extent(share.box)
    box = tuple((at, at + size) for at, size in zip(share.origin, sizes, strict=True))
    return (*box[:lead], *box[lead + 1 :])


def _joined(file: str, key: str, pieces: list[tuple[TensorRule, StoredKey, Share]], tp: int) -> list[Array]:
    """One array for each run of adjoining rows; the last of a vocabulary gets its padding."""
    rule, stored, first = pieces[0]
    lead = len(first.origin) - len(first.box)
    unit = VOCABULARY_UNIT * tp
    rows = -(-stored.shape[lead] // unit) * unit if stored.padded else stored.shape[lead]
    shape = (*stored.shape[:lead], rows, *stored.shape[lead + 1 :])
    runs: list[tuple[int, int, list[Share]]] = []
    for share in sorted((piece[2] for piece in pieces), key=lambda share: share.origin[lead]):
        start = share.origin[lead]
        stop = start + extent(share.box)[0]
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop, [*runs[-1][2], share])
        else:
            runs.append((start, stop, [share]))
    found = []
    for start, stop, shares in runs:
        end = rows if stop == stored.shape[lead] else stop
        corner = (*first.origin[:lead], start, *first.origin[lead + 1 :])
        size = ((1,) * lead) + (end - start, *extent(first.box)[1:])
        moved = tuple(
            replace(share, origin=tuple(a - b for a, b in zip(share.origin, corner, strict=True))) for share in shares
        )
        found.append(Array(file, key, rule.dtype, size, moved, (corner, shape)))
    return found


def lay_out(plan: ShardPlan, config: dict[str, Any], *, max_shard_bytes: int = 0) -> Layout:
    """Returns the layout. A rank has one file, however large: ``max_shard_bytes`` does not matter here.

    Raises:
        PlanError: see :func:`arrays`.
        CheckpointError: a dtype that torch.save cannot keep.
    """
    return container.lay_out(arrays(plan, config), plan.rules)


def side_files(plan: ShardPlan, config: dict[str, Any], layout: Layout | None = None) -> dict[str, bytes]:
    """``.metadata``, ``metadata.json``, ``common.pt``, and the model's config.json, which Megatron does not look at."""
    stored = container.stored_tensors(arrays(plan, config))
    backend = {
        "sharded_backend": BACKEND,
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    alike = Names.of(list(plan.rules.values())).alike
    common = {
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {"singleton_local_shards": False, "non_homogeneous_layers": not alike},
    }
    return {
        METADATA_NAME: metadata_bytes(stored),
        "metadata.json": json.dumps(backend).encode(),
        "common.pt": object_archive(common),
        "config.json": (json.dumps(config, indent=2) + "\n").encode(),
    }


# ------------------------------------------------------------------ reading


def recognises(directory: Path) -> bool:
    """Returns whether ``metadata.json`` names Megatron's ``torch_dist``."""
    return has_file(directory, METADATA_NAME) and container.sharded_backend(directory) == BACKEND


def open(directory: Path, config: dict[str, Any] | None, rules: Callable[..., list[TensorRule]]) -> Checkpoint:
    """Find a model's tensors in a checkpoint of Megatron's; their elements are not read.

    Args:
        config: the model's config.json; the directory's own where None.
        rules: the tensors of a model by its config.json.

    Raises:
        CheckpointError: no config.json, or that of a quantised model; damaged metadata; files missing or damaged; no
            model of that config.json, or not all of it. Everything that is wrong is listed.
    """
    config = container.own_config(directory, config)
    if config.get("quantization_config"):
        raise CheckpointError(
            f"{directory}: Megatron's checkpoints hold unquantised models; config.json's is quantised"
        )
    metadata = read_metadata(directory)
    keys = metadata.keys
    needed = {rule.name for rule in rules(config, "BF16")}
    every = rules(config, "BF16", has=lambda name: True)
    names = Names.of(every)
    options = {rule.name: names.options(rule) for rule in every}
    possible = [stored.key for kept in options.values() for option in kept for stored in option]
    prefixes, hits = container.find_prefixes(keys, possible)
    prefix = container.the_prefix(directory, prefixes, hits)
    there = {key.removeprefix(prefix): True for key in keys if key.startswith(prefix)}
    chosen = container.choose(every, lambda rule: options[rule.name], there) if hits else {}
    missing = [
        f"{name} (as {' or '.join(dict.fromkeys(s.key for option in options[name] for s in option))})"
        for name in options
        if name in needed and name not in chosen
    ]
    if missing:
        raise CheckpointError(
            f"{directory}: {len(missing):,} of the model's {len(needed):,} tensors are missing; it has "
            f"{', '.join(sorted(keys)[:4]) or 'none'}:{listed(missing)}"
        )
    shapes = {rule.name: rule.shape for rule in every}
    infos, places = container.bind(directory, metadata, chosen, shapes, prefix)
    left_out = container.grouped(metadata, (prefix + s.key for option in chosen.values() for s in option))
    if (directory / "common.pt").is_file():
        left_out["common.pt"] = "arguments and progress of the run, not looked at"
    return Checkpoint(directory, infos, config, {}, places, NAME, left_out)
