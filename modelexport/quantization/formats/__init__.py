"""Number formats: one small file each, named as its ``--quant`` name with "-" written "_".

A file defines ``FORMAT``, a subclass of :class:`~modelexport.quantization.formats.base.NumberFormat`; being
in this directory registers it. Listing the names imports neither them nor torch.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelexport.errors import CheckpointError, UsageError, quoted

if TYPE_CHECKING:
    import torch

    from modelexport.quantization.formats.base import NumberFormat
    from modelexport.quantization.methods.base import Scheme

__all__ = ["get", "has_groups", "meaning", "names", "of_scheme"]

_NOT_FORMATS = {"base"}


def names() -> list[str]:
    """The ``--quant`` names there are, sorted."""
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name.replace("_", "-") for name in modules if name not in _NOT_FORMATS and not name.startswith("_"))


def get(
    name: str, *, group_size: int | None = None, observer: str = "amax", scale_dtype: torch.dtype | None = None
) -> NumberFormat:
    """The number format of that name; ``group_size`` None takes the format's own default.

    Args:
        observer, scale_dtype: see :class:`~modelexport.quantization.formats.base.NumberFormat`.

    Raises:
        UsageError: the name or the observer is unknown, the format has no groups, or not of that size.
    """
    known = names()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"unknown number format {quoted(name)}{hint} (known: {', '.join(known)})")
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    created: NumberFormat = module.FORMAT.create(group_size, observer=observer, scale_dtype=scale_dtype)
    return created


def has_groups(name: str) -> bool:
    """Whether a number format has groups; True for an unknown name, which :func:`get` refuses."""
    if name not in names():
        return True
    return bool(importlib.import_module(f"{__name__}.{name.replace('-', '_')}").FORMAT.group_sizes)


def of_scheme(scheme: Scheme, *, scale_dtype: torch.dtype | None = None) -> NumberFormat:
    """The number format that says the same as a scheme, whatever the quantisation method.

    Args:
        scale_dtype: of its scales, where that is not the model's dtype.

    Raises:
        CheckpointError: none does.
    """
    name = scheme.number_format
    if name in names():
        size = scheme.weights.get("group_size") if scheme.weights.get("strategy") == "group" else -1
        found = get(name, scale_dtype=scale_dtype)
        if found.group_sizes:
            with contextlib.suppress(UsageError):  # none of this size: said below
                found = get(name, group_size=size, scale_dtype=scale_dtype)
        own = meaning(found.weight_arguments()), meaning(found.input_arguments())
        if own == (meaning(scheme.weights), meaning(scheme.inputs)):
            return found
    raise CheckpointError(f"no number format of ours holds {scheme.describe()}; known: {', '.join(names())}")


def meaning(arguments: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What of a scheme's arguments decides the numbers; tools write more, such as observers."""
    if arguments is None:
        return None
    defaults = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": None, "dynamic": False}
    found = {key: arguments.get(key, default) for key, default in defaults.items()}
    if found["strategy"] in ("group", "tensor_group"):
        found["group_size"] = arguments.get("group_size")
    if found["strategy"] == "block":
        block = arguments.get("block_structure")
        found["block_structure"] = list(block) if isinstance(block, (list, tuple)) else block
    if arguments.get("actorder") in ("group", "dynamic", True):  # columns in another order than their groups
        found["indexed"] = True
    if found["strategy"] == "group":
        found["exponents"] = arguments.get("scale_dtype") in ("torch.uint8", "uint8")  # MX formats
    return found
