"""``dcp``: a distributed checkpoint as torch writes it for FSDP and torchtitan runs.

A directory of ``.metadata`` and ``__RANK_N.distcp`` files. It is read whatever its sharding, and whatever else the run
kept in it; its tensors have Hugging Face's names, perhaps behind a prefix (``model.``), or those that torchtitan gives
to a Llama. It is written with Hugging Face's names, one file for each rank, every rectangle once.

torchtitan's Llama rotates neighbouring features of a head, Hugging Face's the two halves: rows of its query and key
weights are permuted accordingly (row ``2j + half`` of a head is row ``half * head_dim / 2 + j`` there).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from modelexport.checkpoints.draft_names import PREFIX
from modelexport.checkpoints.fused_rows import Heads, heads_of, row_spans
from modelexport.checkpoints.native_llama import NAMES, rotary_shares
from modelexport.checkpoints.safetensors.arrays import Array, Share
from modelexport.checkpoints.safetensors.file import Checkpoint, Layout
from modelexport.checkpoints.torch_archive import dcp_container as container
from modelexport.checkpoints.torch_archive.dcp_container import Option, StoredKey
from modelexport.checkpoints.torch_archive.dcp_metadata import METADATA_NAME, Metadata, metadata_bytes, read_metadata
from modelexport.errors import CheckpointError, listed, quoted
from modelexport.sharding.boxes import extent, offset, whole
from modelexport.sharding.rules import TensorRule
from modelexport.sharding.shard_plan import ShardPlan
from modelexport.system.small_files import has_file

NAME = "dcp"
DESCRIPTION = "torch's distributed checkpoint (DCP), as FSDP and torchtitan write it"
LOADS_TENSOR_PARALLEL = False
HOLDS_DRAFTS = True
SIDE_FILES = (".metadata",)


def arrays(plan: ShardPlan, config: Mapping[str, Any]) -> list[Array]:
    """Every rectangle once, in the file of the first rank that holds it."""
    found = []
    for rank in range(plan.parallelism.size):
        for rule in plan.rules.values():
            for _, box in plan.owned(rule.name, rank):
                share = Share(rule.name, box, (0,) * len(box))
                chunk = (offset(box), rule.shape)
                found.append(Array(file_name(rank), rule.name, rule.dtype, extent(box), (share,), chunk))
    return found


def file_name(rank: int) -> str:
    """The file of a rank."""
    return f"__{rank}_0{container.SUFFIX}"


def lay_out(plan: ShardPlan, config: dict[str, Any], *, max_shard_bytes: int = 0) -> Layout:
    """Returns the layout. A rank has one file, however large: ``max_shard_bytes`` does not matter here.

    Raises:
        CheckpointError: a dtype that torch.save cannot keep.
    """
    return container.lay_out(arrays(plan, config), plan.rules)


def side_files(plan: ShardPlan, config: dict[str, Any], layout: Layout | None = None) -> dict[str, bytes]:
    """``.metadata``, and the model's config.json, which torch does not need and whoever exports the model does."""
    stored = container.stored_tensors(arrays(plan, config))
    return {METADATA_NAME: metadata_bytes(stored), "config.json": (json.dumps(config, indent=2) + "\n").encode()}


def recognises(directory: Path) -> bool:
    """Returns whether there is a ``.metadata``, and no ``metadata.json`` that makes it Megatron's."""
    return has_file(directory, METADATA_NAME) and container.sharded_backend(directory) is None


def open(directory: Path, config: dict[str, Any] | None, rules: Callable[..., list[TensorRule]]) -> Checkpoint:
    """Find a model's tensors in a distributed checkpoint; their elements are not read.

    Args:
        config: the model's config.json; the directory's own where None.
        rules: the tensors of a model by its config.json.

    Raises:
        CheckpointError: no config.json; damaged metadata; files missing or damaged; no model of that config.json, or
            not all of it. Everything that is wrong is listed.
    """
    config = container.own_config(directory, config)
    metadata = read_metadata(directory)
    prefix, chosen, shapes = _matched(directory, metadata, config, rules(config, "BF16"))
    infos, places = container.bind(directory, metadata, chosen, shapes, prefix)
    used = {prefix + stored.key for option in chosen.values() for stored in option}
    left_out = container.grouped(metadata, used)
    return Checkpoint(directory, infos, config, {}, places, NAME, left_out)


_Matched = tuple[str, dict[str, Option], dict[str, tuple[int, ...]]]


def _matched(
    directory: Path, metadata: Metadata, config: Mapping[str, Any], expected: Sequence[TensorRule]
) -> _Matched:
    """The prefix of the model's keys, how each tensor is kept, and its shape."""
    keys = metadata.keys
    names = [rule.name for rule in expected]
    prefixes, hits = container.find_prefixes(keys, names)
    titan: dict[str, list[Option]] = {}
    if config.get("model_type") == "llama" and not config.get("quantization_config"):
        heads = heads_of(expected)
        titan = {rule.name: titan_options(rule, heads) for rule in expected}
    own = (stored.key for options in titan.values() for (stored,) in options)
    titan_prefixes, titan_hits = container.find_prefixes(keys, own)
    if not max(hits, titan_hits):
        raise CheckpointError(
            f"{directory}: none of its {len(keys):,} tensors is of the model in config.json: it has "
            f"{', '.join(sorted(keys)[:4]) or 'none'}, and {names[0]}, {names[-1]} are looked for (behind any prefix)"
        )
    prefix = container.the_prefix(directory, *((titan_prefixes, titan_hits) if titan_hits > hits else (prefixes, hits)))
    if titan_hits > hits:
        there = {key.removeprefix(prefix): True for key in keys if key.startswith(prefix)}
        chosen = container.choose(expected, lambda rule: titan[rule.name], there)
        shapes = {rule.name: rule.shape for rule in expected}
    else:
        chosen, shapes = _canonical(metadata, prefix, names)
    missing = [name for name in names if name not in chosen]
    if missing:
        under = f" behind {quoted(prefix)}" if prefix else ""
        raise CheckpointError(
            f"{directory}: {len(missing):,} of the model's {len(names):,} tensors are missing{under}:{listed(missing)}"
        )
    return prefix, chosen, shapes


def _canonical(
    metadata: Metadata, prefix: str, names: Sequence[str]
) -> tuple[dict[str, Option], dict[str, tuple[int, ...]]]:
    """Every tensor behind the prefix whose name begins as a model's do: an unknown one among them is seen later."""
    roots = {name.partition(".")[0] for name in names}
    order = {name: number for number, name in enumerate(names)}
    chosen: dict[str, Option] = {}
    shapes = {}
    for key in metadata.keys:
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or not (name.partition(".")[0] in roots or name.startswith(PREFIX)):
            continue
        try:
            shape = metadata.tensor(key).shape
        except CheckpointError:  # bind says so, with all the others
            shape = ()
        chosen[name] = (StoredKey(name, shape, (Share(name, whole(shape), (0,) * len(shape)),)),)
        shapes[name] = shape
    return dict(sorted(chosen.items(), key=lambda pair: order.get(pair[0], len(order)))), shapes


# ------------------------------------------------------------------ torchtitan


def titan_options(rule: TensorRule, heads: Heads) -> list[Option]:
    """Yields the forms in which torchtitan may keep a tensor of a Llama; none for tensors that it does not have.

    Newer versions wrap q, k and v in a module, or fuse them (for each key/value head its query heads, k and v), and
    call the head as Hugging Face does.
    """
    if rule.parameter != "weight":
        return []
    layer = "" if rule.layer is None else f"layers.{rule.layer}."
    found: list[Option] = []
    for module in NAMES.get(rule.role, ()):
        shares = tuple(rotary_shares(rule, 0, rule.shape[0], 0))
        found.append((StoredKey(f"{layer}{module}.weight", rule.shape, shares),))
    if rule.role in ("attention.q", "attention.k", "attention.v"):
        rows, spans = row_spans(rule, heads)
        shares = tuple(share for span in spans for share in rotary_shares(rule, *span))
        found.append((StoredKey(f"{layer}attention.qkv_linear.wqkv.weight", (rows, *rule.shape[1:]), shares),))
    return found
