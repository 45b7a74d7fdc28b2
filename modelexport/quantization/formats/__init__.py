"""Number formats: one small file each, named as its ``--quant`` name with "-" written "_".

A file defines ``FORMAT``, a subclass of :class:`~modelexport.quantization.formats.base.NumberFormat`; being in this
directory registers it, or being named by a plugin's entry point. Listing the names imports neither the package's own
formats nor torch.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from modelexport import plugins
from modelexport.errors import CheckpointError, UsageError, nearest, quoted
from modelexport.quantization.ggml_layouts import LAYOUTS

if TYPE_CHECKING:
    import torch

    from modelexport.quantization.formats.base import NumberFormat
    from modelexport.quantization.methods.base import Scheme

__all__ = [
    "canonical",
    "check_name",
    "get",
    "has_groups",
    "has_name",
    "load_kernels",
    "meaning",
    "name_of",
    "names",
    "of_scheme",
]

_OWN_KINDS = (
    *("int8", "int8-static", "int8-wo", "int8-wo-asym", "int4", "int4-asym", "w4a8", "fp8", "fp8-static", "fp8-block"),
    *("nvfp4", "nvfp4-wo", "mxfp4", "mxfp4-wo", "mxfp8"),
    *(layout.number_format for layout in LAYOUTS.values()),
)
"""The formats that :func:`_own_kind` tells, so that checkpoints of these are looked at without torch."""

_NEEDED = ("name", "description", "weight_bits", "checkpoint_format")


@cache
def _catalogue() -> dict[str, Any]:
    """Every format by its name: a plugin's class, or the name of the package's own module."""
    own = (name for _, name, _ in pkgutil.iter_modules(__path__) if name != "base" and not name.startswith("_"))
    found: dict[str, Any] = {name.replace("_", "-"): f"{__name__}.{name}" for name in own}
    plugins.add(found, "FORMAT", kind="a number format", needed=_NEEDED)
    return dict(sorted(found.items()))


def names() -> list[str]:
    """Returns the ``--quant`` names there are, sorted."""
    return list(_catalogue())


def canonical(name: str) -> str:
    """Returns the name as the formats' files have it: llama.cpp's users write Q4_K for q4-k. Others come back as they
    are."""
    spelled = name.lower().replace("_", "-")
    return spelled if spelled in _catalogue() else name


def _class_of(name: str) -> type[NumberFormat]:
    found = _catalogue()[name]
    own: type[NumberFormat] = importlib.import_module(found).FORMAT if isinstance(found, str) else found
    return own


def get(
    name: str, *, group_size: int | None = None, observer: str = "amax", scale_dtype: torch.dtype | None = None
) -> NumberFormat:
    """Returns the number format of that name; ``group_size`` None takes the format's own default.

    Args:
        observer, scale_dtype: see :class:`~modelexport.quantization.formats.base.NumberFormat`.

    Raises:
        UsageError: the name or the observer is unknown, the format has no groups, or not of that size; or a plugin's
            format cannot be told from one of the package's.
    """
    name = canonical(name)
    check_name(name)
    found = _class_of(name).create(group_size, observer=observer, scale_dtype=scale_dtype)
    if name not in _OWN_KINDS and found.quantised:
        taken = _own_kind(found.scheme())
        if taken is not None and _with_arguments(taken, found.scheme()) is not None:
            raise UsageError(
                f"number format {name} has the weight_arguments() and input_arguments() of {taken}: its checkpoints "
                "would be taken for that one's: give it arguments of its own"
            )
    return found


def has_name(name: str) -> bool:
    """Returns whether :func:`get` knows a name."""
    return canonical(name) in names()


def check_name(name: str, others: Iterable[str] = ()) -> None:
    """Refuse a name that no number format has; ``others``: names that are known besides.

    Raises:
        UsageError: with the nearest.
    """
    if has_name(name):
        return
    known = dict.fromkeys([*names(), *(other for other in others if not has_name(other))])
    raise UsageError(f"unknown number format {quoted(name)}{nearest(name, known, listing='modelexport formats')}")


def load_kernels(name: str, observer: str) -> None:
    """Imports, and so loads or compiles, the compiled kernels of a number format: for a process that will fork."""
    for module in ("fused", *get(name, observer=observer).kernels):
        importlib.import_module(f"modelexport.quantization.kernels.{module}")


def has_groups(name: str) -> bool:
    """Returns whether a number format has groups; True for an unknown name, which :func:`get` refuses."""
    name = canonical(name)
    return name not in names() or bool(_class_of(name).group_sizes)


def of_scheme(scheme: Scheme, *, scale_dtype: torch.dtype | None = None) -> NumberFormat:
    """Returns the number format that says the same as a scheme, whatever the quantisation method.

    Args:
        scale_dtype: of its scales, where that is not the model's dtype.

    Raises:
        CheckpointError: none does.
    """
    from modelexport.quantization.methods import read_only_numbers  # --help needs the names alone

    name = None if read_only_numbers(scheme) else name_of(scheme)
    found = None if name is None else _with_arguments(name, scheme, scale_dtype)
    if found is None:
        raise CheckpointError(f"no number format of ours holds {scheme.describe()}; known: {', '.join(names())}")
    return found


def name_of(scheme: Scheme) -> str | None:
    """Returns the ``--quant`` name of a scheme's numbers, or the method's where they are only read; None for others.

    The package's own formats are told by the kind of weights and inputs alone, group sizes and other details being for
    :func:`of_scheme` to compare; others by all of their arguments.
    """
    from modelexport.quantization.methods import read_only_numbers

    only_read = read_only_numbers(scheme)
    if only_read is not None:
        return only_read.name
    own = _own_kind(scheme)
    others = [name for name in names() if name not in (*_OWN_KINDS, "none")]
    if others and (own is None or _with_arguments(own, scheme) is None):
        return next((name for name in others if _with_arguments(name, scheme) is not None), own)
    return own


def _with_arguments(name: str, scheme: Scheme, scale_dtype: torch.dtype | None = None) -> NumberFormat | None:
    """The format of that name, in the scheme's group size, if its arguments are the scheme's."""
    if name not in names():
        return None
    size = scheme.weights.get("group_size") if scheme.weights.get("strategy") == "group" else -1
    found = get(name, scale_dtype=scale_dtype)
    if found.group_sizes:
        with contextlib.suppress(UsageError):  # none of this size: its arguments differ
            found = get(name, group_size=size, scale_dtype=scale_dtype)
    own = meaning(found.weight_arguments()), meaning(found.input_arguments())
    return found if own == (meaning(scheme.weights), meaning(scheme.inputs)) else None


def _own_kind(scheme: Scheme) -> str | None:
    weights, inputs = scheme.weights, scheme.inputs
    block_type = LAYOUTS.get(str(weights.get("type")))
    if block_type is not None:
        return block_type.number_format if inputs is None else None
    kind = f"{weights.get('type', 'int')}{weights.get('num_bits', 8)}"
    exponents = weights.get("scale_dtype") in ("torch.uint8", "uint8")
    name = {
        ("int8", "channel"): "int8",
        ("int8", "group"): "int8",
        ("int4", "channel"): "int4",
        ("int4", "group"): "int4",
        ("float8", "tensor"): "fp8-static",
        ("float8", "channel"): "fp8",
        ("float8", "block"): "fp8-block",
        ("float8", "group"): "mxfp8" if exponents else None,
        ("float4", "tensor_group"): "nvfp4",
        ("float4", "group"): "mxfp4" if exponents else None,
    }.get((kind, str(weights.get("strategy"))))
    if name == "int8":
        name = "int8-wo" if inputs is None else "int8-static" if inputs.get("dynamic") is False else "int8"
    elif name == "int4" and inputs is not None:
        name = "w4a8" if inputs.get("type") == "float" else None
    elif name in ("nvfp4", "mxfp4") and inputs is None:
        name += "-wo"
    elif name in ("fp8", "fp8-static", "fp8-block", "mxfp8") and inputs is None:
        name = None
    return name if name is None or scheme.symmetric else f"{name}-asym"


def meaning(arguments: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns those of a scheme's arguments that decide the numbers; tools write more, such as observers."""
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
