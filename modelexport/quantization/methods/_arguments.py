"""Words that several methods share: compressed-tensors' arguments of common schemes, and lists of kept modules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from modelexport.quantization.methods._patterns import from_wildcard


def numbers(kind: str, bits: int, strategy: str, *, dynamic: bool | str = False, **more: Any) -> dict[str, Any]:
    """compressed-tensors' arguments for symmetric numbers of a ``kind`` ("int" or "float")."""
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": dynamic, **more}


FP8_TENSOR = numbers("float", 8, "tensor")
FP8_ROW = numbers("float", 8, "channel")
FP8_TOKEN = numbers("float", 8, "token", dynamic=True)
MXFP8 = numbers("float", 8, "group", group_size=32, scale_dtype="torch.uint8")
MXFP4 = numbers("float", 4, "group", group_size=32, scale_dtype="torch.uint8")
NVFP4 = numbers("float", 4, "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")


def fp8_block(rows: int, cols: int) -> dict[str, Any]:
    """Weights in blocks of ``[rows, cols]``."""
    return numbers("float", 8, "block", block_structure=[rows, cols])


def fp8_groups(cols: int) -> dict[str, Any]:
    """Activations, ``cols`` channels of a token to a scale."""
    return numbers("float", 8, "group", dynamic=True, group_size=cols)


def meaning(arguments: Mapping[str, Any] | None) -> tuple[Any, ...] | None:
    """Returns those of a scheme's arguments that decide which tensors there are and what they stand for."""
    if arguments is None:
        return None
    strategy = arguments.get("strategy")
    extent = None
    if strategy in ("group", "tensor_group"):
        extent = arguments.get("group_size")
    elif strategy == "block":
        extent = tuple(arguments.get("block_structure") or ())
    return (
        arguments.get("num_bits", 8),
        arguments.get("type", "int"),
        arguments.get("symmetric", True),
        strategy,
        arguments.get("dynamic", False),
        extent,
        strategy == "group" and arguments.get("scale_dtype") in ("torch.uint8", "uint8"),
        bool(arguments.get("actorder")),
    )


def with_modules_below(names: Iterable[str]) -> tuple[str, ...]:
    """A list of kept modules, and one pattern for what it means beyond its own words.

    Tools list containers ("vision_tower"), ends of names ("mlp.gate") and wildcards ("model.layers.0*"); engines keep
    what is below, too. The pattern matches whole components of a name. One pattern for all, since such lists have
    hundreds of entries and mixtures of experts tens of thousands of modules; entries that differ in one number share
    a branch of it. A name with several numbers is that of an expert's linear, which has nothing below it.
    """
    listed = tuple(names)
    branches: dict[str, None] = {}
    numbered: dict[tuple[str, str], list[str]] = {}
    for name in listed:
        if not name or name.startswith("re:"):
            continue
        parts = re.split(r"(?:^|(?<=\.))(\d+)(?=\.|$)", name)
        if "*" in name or "?" in name or len(parts) == 1:
            branches[from_wildcard(name)] = None
        elif len(parts) == 3:
            numbered.setdefault((parts[0], parts[2]), []).append(parts[1])
    for (before, after), found in numbered.items():
        branches[f"{re.escape(before)}(?:{'|'.join(dict.fromkeys(found))}){re.escape(after)}"] = None
    if not branches:
        return listed
    return (*listed, rf"re:(?:.*\.)?(?:{'|'.join(branches)})(?:\.|$)")
