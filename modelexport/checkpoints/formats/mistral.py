"""``mistral``: the layout of Mistral's own code, ``consolidated.safetensors`` (or ``.00.pth``) and ``params.json``.

It is read, and not written, as the Hugging Face model that it stands for: names are translated, ``config.json`` is made
of ``params.json``, and the rows of query and key weights are read in Hugging Face's rotary order
(:mod:`modelexport.checkpoints.native_llama`). Where Hugging Face's files lie beside it, as Mistral publishes both, they
are read instead. With ``--config`` the first Llama's files are read, too, which are of the same kind.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from modelexport.checkpoints.native_llama import NAMES, rotary_shares
from modelexport.checkpoints.safetensors.file import Checkpoint, Header, TensorInfo, read_header
from modelexport.checkpoints.safetensors.placement import Placement, whole_place
from modelexport.checkpoints.safetensors.reader import check_parts, read_index
from modelexport.checkpoints.torch_archive.state_dict import read_state_dict
from modelexport.errors import CheckpointError, listed, quoted
from modelexport.sharding.rules import TensorRule
from modelexport.system.dtypes import FLOATS, torch_name
from modelexport.system.json_values import JsonValues
from modelexport.system.small_files import LARGEST_CONFIG, has_file, read_json

READS = "mistral"
DESCRIPTION = "Mistral's own layout: consolidated.safetensors and params.json"
SIDE_FILES = ("params.json",)

_PARAMS = "params.json"
_INDEX = "consolidated.safetensors.index.json"
_SAFETENSORS = re.compile(r"consolidated(-\d+-of-\d+)?\.safetensors")
_PICKLED = re.compile(r"consolidated\.\d+\.pth")
_OTHERS = re.compile(r"(?!consolidated|adapter_model).*\.safetensors(\.index\.json)?")
_OTHER_PICKLES = re.compile(r"pytorch_model.*\.bin")
_BUFFERS = ("rope.freqs",)
_POSITIONS = 32768
_OF_THE_MODEL = {
    "dim",
    "n_layers",
    "head_dim",
    "hidden_dim",
    "n_heads",
    "n_kv_heads",
    "rope_theta",
    "norm_eps",
    "vocab_size",
    "max_position_embeddings",
    "max_seq_len",
    "sliding_window",
    "moe",
    "tied_embeddings",
}
_WITHOUT_MEANING = {"model_type": "transformer", "activation": "silu", "causal": True}
"""Keys that say what holds anyway, with the one value that they may have."""


def recognises(directory: Path) -> bool:
    """Returns whether the directory has such files, and no weights by Hugging Face's names."""
    names = os.listdir(directory)
    if _PARAMS not in names or any(map(_OTHERS.fullmatch, names)):
        return False
    own = any(_SAFETENSORS.fullmatch(name) or name == _INDEX for name in names)
    return own or (any(map(_PICKLED.fullmatch, names)) and not any(map(_OTHER_PICKLES.fullmatch, names)))


def open(directory: Path, config: dict[str, Any] | None, rules: Callable[..., list[TensorRule]]) -> Checkpoint:
    """Find the tensors of a checkpoint, by their Hugging Face names; their elements are not read.

    Args:
        config: the model's config.json; the directory's own where None, or else one made of params.json.
        rules: the tensors of a model by its config.json.

    Raises:
        CheckpointError: params.json lacks a number, or says what is not known here; a file is missing or damaged; or
            the tensors are not the model's. Everything that is wrong is listed.
    """
    headers, stored, places = _tensors(directory)
    notes = [
        f"the weights are read from Mistral's own layout ({', '.join(sorted({i.path.name for i in stored.values()}))})"
    ]
    if config is None and has_file(directory, "config.json"):
        config = read_json(directory / "config.json", largest=LARGEST_CONFIG)
    if config is None:
        params = JsonValues(read_json(directory / _PARAMS, largest=LARGEST_CONFIG), str(directory / _PARAMS))
        config = _made_config(params, stored)
        notes[0] += f", and config.json is made of {_PARAMS}"
        if not any(map(params.has, ("max_position_embeddings", "max_seq_len"))):
            notes.append(f"{_PARAMS} does not say how many positions the model knows: config.json says {_POSITIONS:,}")
    left = dict(stored)
    infos: dict[str, TensorInfo] = {}
    placements: dict[str, tuple[Placement, ...]] = {}
    problems = []
    for rule in rules(config, "BF16"):
        name = next((name for name in _names(rule) if name in left), None)
        if name is None:
            problems.append(f"{rule.name} is missing: {' or '.join(_names(rule)) or 'nothing'} is looked for")
            continue
        info = left.pop(name)
        if info.shape != rule.shape:
            problems.append(f"{name} is {list(info.shape)}, the model's {rule.name} is {list(rule.shape)}")
            continue
        infos[rule.name] = TensorInfo(rule.name, info.dtype, info.shape, info.path, info.offset, info.nbytes)
        found = _placed(rule, places.get(name, (whole_place(info),))[0])
        if name in places or len(found) > 1:
            placements[rule.name] = found
    if problems:
        raise CheckpointError(f"{directory}:{listed(problems)}")
    left_out = {name: "a buffer that every engine computes itself" for name in left if name in _BUFFERS}
    for name in left.keys() - left_out.keys():  # whoever plans refuses them by their names
        infos[name] = left[name]
        if name in places:
            placements[name] = places[name]
    return Checkpoint(directory, infos, config, headers, placements, READS, left_out, notes=tuple(notes))


def _tensors(
    directory: Path,
) -> tuple[dict[Path, Header], dict[str, TensorInfo], dict[str, tuple[Placement, ...]]]:
    """The headers of safetensors files, the tensors by their own names, and the places of views in a pickle."""
    names = sorted(name for name in os.listdir(directory) if _SAFETENSORS.fullmatch(name))
    weight_map = read_index(directory / _INDEX) if has_file(directory, _INDEX) else None
    if not names and weight_map is None:
        pickled = sorted(name for name in os.listdir(directory) if _PICKLED.fullmatch(name))
        if len(pickled) > 1:
            raise CheckpointError(
                f"{directory}: holds {pickled[0]} to {pickled[-1]}, parts for {len(pickled)} tensor-parallel ranks, "
                "which cannot be joined here: give the model by Hugging Face's names"
            )
        infos, places = read_state_dict(directory / pickled[0])
        return {}, infos, places
    if weight_map is not None:
        names = sorted(set(weight_map.values()))
    check_parts(directory, names)
    headers = {directory / name: read_header(directory / name) for name in names}
    infos = {}
    for header in headers.values():
        for name, info in header.infos.items():
            if name in infos:
                raise CheckpointError(f"tensor {quoted(name)} is in two files: {infos[name].path} and {info.path}")
            infos[name] = info
    for name, file in (weight_map or {}).items():
        if name not in infos or infos[name].path.name != file:
            raise CheckpointError(f"{directory / _INDEX}: tensor {quoted(name)} should be in {file}, and is not there")
    return headers, infos, {}


def _names(rule: TensorRule) -> list[str]:
    """The names that a tensor may have there."""
    layer = "" if rule.layer is None else f"layers.{rule.layer}."
    return [f"{layer}{name.replace('{e}', str(rule.expert))}.{rule.parameter}" for name in NAMES.get(rule.role, ())]


def _placed(rule: TensorRule, place: Placement) -> tuple[Placement, ...]:
    """The places of a tensor's rectangles in the array at ``place``."""
    found = []
    for share in rotary_shares(rule, 0, rule.shape[0], 0):
        steps = share.steps or (1,) * len(share.box)
        begin = place.offset + sum(i * stride for i, stride in zip(share.origin, place.strides, strict=True))
        strides = tuple(stride * step for stride, step in zip(place.strides, steps, strict=True))
        found.append(Placement(share.box, place.path, begin, strides))
    return tuple(found)


# ------------------------------------------------------------------ params.json


def _made_config(params: JsonValues, stored: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The config.json of the model that params.json describes.

    Raises:
        CheckpointError: a number is missing, or something is said that is not known here.
    """
    unknown = list(_unknown(params))
    if unknown:
        raise CheckpointError(
            f"{params.where}: what {', '.join(unknown)} would be in config.json is not known here: give the model's "
            "config.json with --config DIR"
        )
    heads, hidden = params.whole("n_heads"), params.whole("dim")
    moe = params.object("moe")
    window = params.whole("sliding_window") if params.has("sliding_window") else None
    positions = next((key for key in ("max_position_embeddings", "max_seq_len") if params.has(key)), "")
    dtypes = [info.dtype for info in stored.values() if info.dtype in FLOATS]
    return {
        "architectures": ["MixtralForCausalLM" if moe.content else "MistralForCausalLM"],
        "model_type": "mixtral" if moe.content else "mistral",
        "hidden_size": hidden,
        "num_hidden_layers": params.whole("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": params.whole("n_kv_heads", heads),
        "head_dim": params.whole("head_dim", hidden // heads),
        "intermediate_size": params.whole("hidden_dim"),
        "hidden_act": "silu",
        "vocab_size": params.whole("vocab_size"),
        "max_position_embeddings": params.whole(positions) if positions else _POSITIONS,
        "rms_norm_eps": params.number("norm_eps"),
        "rope_theta": params.number("rope_theta", 10000.0),
        "sliding_window": window,
        "tie_word_embeddings": bool(params.content.get("tied_embeddings")),
        "torch_dtype": torch_name(max(sorted(set(dtypes)), key=dtypes.count)) if dtypes else "float32",
        **({} if not moe.content else _experts(moe)),
    }


def _experts(moe: JsonValues) -> dict[str, int]:
    return {
        "num_local_experts": moe.whole("num_experts"),
        "num_experts_per_tok": moe.whole("num_experts_per_tok"),
    }


def _unknown(params: JsonValues) -> Iterator[str]:
    """Keys of params.json that say something, and that nothing here knows."""
    for key, value in params.content.items():
        if value in (None, False, [], {}) or key in _OF_THE_MODEL:
            continue
        if _WITHOUT_MEANING.get(key) != value:
            yield quoted(key)
    for key, value in params.object("moe").content.items():
        if value and key not in ("num_experts", "num_experts_per_tok"):
            yield quoted(f"moe.{key}")
    if isinstance(params.content.get("sliding_window"), list):
        yield "'sliding_window' of several values"
