"""Small models of the type and the structure of a large one, by its config.json with smaller numbers.

What scales into what depends on a model's structure and on none of its widths, so it can be found out on few and
narrow layers. There is no telling from a config which numbers go together (heads and their features, states, ranks):
candidates are made, smallest first, and whoever builds one compares its structure with the large one's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

__all__ = ["small_configs"]

_HEADS = 4
_NARROWEST = 32
_EXPERTS = 4
_HEAD_COUNTS = re.compile(r"(^|_)(n|num)_?(.*_)?(heads?|head_count)$|^n_heads?$|heads$")
_GROUP_COUNTS = re.compile(r"n_groups$|ngroups$|num_groups$")
_WIDTHS = re.compile(
    r"hidden_size|hidden_dim|intermediate|inner|ffn|mlp_dim|d_model|n_embd|embed(ding)?_(dim|size)|d_ssm|lru_width|"
    r"(^|_)width$|^dim$|ssm_size"
)
_NARROW = re.compile(r"head|per_layer|vocab|range|ratio|factor")  # what a head has, and what is no width
_EXPERT_COUNTS = re.compile(r"(^|_)(num|n)_(routed_|local_)?experts$|^moe_num_experts$")
_CHOSEN = re.compile(r"experts_per_tok(en)?$|^moe_(topk|k|top_k)$|^top_?k_experts$|^num_selected_experts$")
_OF_LAYERS = re.compile(r"layer|ind(ex|ices)|idx")


def small_configs(config: Mapping[str, Any], layers: int) -> Iterator[dict[str, Any]]:
    """Yields the content of config.json for smaller and smaller numbers of what a model has; the smallest first, and
    last the model itself.

    Args:
        config: of a language model, as transformers completes it: every key has its value, by the name that
            transformers saves it under.
        layers: the first so many decoder layers are of every kind that there is.
    """
    names = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}
    keys = {what: _own_name(config, name) for what, name in names.items()}
    changes: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (
        lambda found: _narrower(found, keys),
        _fewer_experts,
        lambda found: _fewer_layers(found, keys["layers"], layers),
    )
    seen = set()
    for chosen in ((0, 1, 2), (1, 2), (0, 1), (0, 2), (2,), (1,), (0,), ()):
        found = json.loads(json.dumps(config, default=str))
        for number in chosen:
            found = changes[number](found)
        said = json.dumps(found, sort_keys=True)
        if said not in seen:
            seen.add(said)
            yield found


def _own_name(config: Mapping[str, Any], name: str) -> str:
    """The key of config.json for one of transformers' names."""
    from transformers import CONFIG_MAPPING

    own = CONFIG_MAPPING[config["model_type"]].attribute_map.get(name, name)
    return own if own in config else name


def _fewer_layers(config: dict[str, Any], key: str, count: int) -> dict[str, Any]:
    """The first layers alone, with what lists and patterns say of these."""
    every = config.get(key)
    if isinstance(every, int) and every > count:
        config[key] = count
    for name, value in config.items():
        if isinstance(value, (list, str)) and len(value) == every and name != "model_type":
            config[name] = value[:count]
        elif isinstance(value, list) and _OF_LAYERS.search(name) and all(isinstance(each, int) for each in value):
            config[name] = [each for each in value if each < count]
    return config


def _fewer_experts(config: dict[str, Any]) -> dict[str, Any]:
    """A few experts, of which each token goes to one or two."""
    for name, value in config.items():
        if isinstance(value, dict):
            config[name] = _fewer_experts(value)
        elif not isinstance(value, int) or isinstance(value, bool):
            continue
        elif _EXPERT_COUNTS.search(name):
            config[name] = min(value, _EXPERTS)
        elif _CHOSEN.search(name):
            config[name] = min(value, 2)
        elif name in ("n_group", "topk_group", "num_expert_group", "num_limited_groups"):
            config[name] = min(value, 1)
    return config


def _narrower(config: dict[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """Fewer heads of the same size, and all that is as wide as some of them by as much narrower."""
    heads, hidden = config.get(keys["heads"]), config.get(keys["hidden"])
    if not isinstance(heads, int) or not isinstance(hidden, int) or heads <= _HEADS:
        return config
    return _divided(config, heads, Fraction(_HEADS, heads))


def _divided(config: dict[str, Any], heads: int, ratio: Fraction) -> dict[str, Any]:
    for name, value in config.items():
        if isinstance(value, dict):
            config[name] = _divided(value, heads, ratio)
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            continue
        elif _HEAD_COUNTS.search(name) or _GROUP_COUNTS.search(name):
            config[name] = _fewer_heads(value, heads, ratio)
        elif _WIDTHS.search(name) and not _NARROW.search(name) and value * ratio >= _NARROWEST:
            less = value * ratio  # what goes with heads stays whole; what does not may be anything
            config[name] = int(less) if less.denominator == 1 else int(less) // _NARROWEST * _NARROWEST
    return config


def _fewer_heads(value: int, heads: int, ratio: Fraction) -> int:
    """Of keys and values (or of states) at least 2, where there were that many."""
    less = value * ratio
    if less.denominator == 1 and (less >= 2 or value == heads):
        return int(less)
    return next((n for n in (2, 1) if value % n == 0), value) if value < heads else value
