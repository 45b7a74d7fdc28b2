"""vLLM's rules for which modules it takes for quantised, in our own words, over data that vLLM 0.32 printed of itself.

``vllm_modules.json`` has for each model type the modules that vLLM builds of a tiny model of it: the names by which it
asks its quantization config about each, whether what a checkpoint holds for it is quantised (``quantised``: every
parameter was then filled), how its model class renames what config.json names, and which modules it fuses.
``vllm_parameters.py --modules`` prints it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["asked", "expected", "types"]


@cache
def _data() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("vllm_modules.json").read_text())


def types() -> list[str]:
    """The model types that there are data for."""
    return sorted(_data())


def expected(model_type: str) -> dict[str, bool]:
    """Each module that vLLM asks about -> whether a checkpoint whose every parameter is filled has it quantised."""
    return {name: module["quantised"] for name, module in _data()[model_type]["modules"].items()}


def asked(model_type: str, quantization: Mapping[str, Any]) -> dict[str, bool]:
    """Each of these modules -> whether vLLM takes it for quantised, given config.json's ``quantization_config``.

    Raises:
        ValueError: parts of a module that vLLM fuses are not all of one kind.
    """
    data = _data()[model_type]
    ignore = [renamed for each in quantization["ignore"] if (renamed := _renamed(each, data["renames"])) is not None]
    targets = [t for group in quantization["config_groups"].values() for t in group["targets"]]
    targets = [renamed for each in targets if (renamed := _renamed(each, data["renames"])) is not None]
    found = {}
    for name, module in data["modules"].items():
        kinds = {
            not _ignored(each, ignore, data["fused"]) and _targeted(each, module["kind"], targets, data["fused"])
            for each in module["asks"]
        }
        if len(kinds) > 1:
            raise ValueError(f"{name}: some parts are quantised and some not")
        found[name] = kinds.pop()
    return found


def _renamed(name: str, renames: Mapping[str, Any]) -> str | None:
    """A name as vLLM's model class has it; patterns and names of classes stay. None: it drops the name."""
    if name.startswith("re:") or "." not in name:
        return name
    for pattern, new in renames["regex"].items():
        if re.search(pattern, name):
            if new is None:
                return None
            name = re.sub(pattern, new, name)
    for old, new in renames["substr"].items():
        if old in name:
            if new is None:
                return None
            name = name.replace(old, new, 1)
    for old, new in renames["prefix"].items():
        if name.startswith(old):
            if new is None:
                return None
            name = new + name[len(old) :]
    for old, new in renames["suffix"].items():
        if name.endswith(old):
            if new is None:
                return None
            name = name[: -len(old)] + new
    return name


def _matches(name: str, entries: Sequence[str]) -> bool:
    return any(re.match(each[3:], name) if each.startswith("re:") else each == name for each in entries)


def _parts(name: str, fused: Mapping[str, Sequence[str]]) -> list[str]:
    """The modules of a checkpoint that a fused one consists of; none where it is not fused."""
    leaf = name.rpartition(".")[2]
    return [name.replace(leaf, part) for part in fused.get(leaf, ())]


def _ignored(name: str, ignore: Sequence[str], fused: Mapping[str, Sequence[str]]) -> bool:
    if _matches(name, ignore):
        return True
    parts = [_matches(part, ignore) for part in _parts(name, fused)]
    if any(parts) and not all(parts):
        raise ValueError(f"{name}: of its parts some are ignored and some not")
    return bool(parts) and all(parts)


def _targeted(name: str, kind: str, targets: Sequence[str], fused: Mapping[str, Sequence[str]]) -> bool:
    """``kind`` is the name of the module's class: "Linear" is a part of those of all linears; experts count as such."""
    parts = _parts(name, fused)
    by_name = _matches(name, targets) or (bool(parts) and all(_matches(part, targets) for part in parts))
    return by_name or any(not t.startswith("re:") and t.lower() in kind.lower() for t in targets)
