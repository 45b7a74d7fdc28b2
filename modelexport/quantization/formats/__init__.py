"""Number formats: one small file each, named as its ``--quant`` name with "-" written "_".

A file defines ``FORMAT``, a subclass of :class:`~modelexport.quantization.formats.base.NumberFormat`; being
in this directory registers it. Listing the names imports neither them nor torch.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from typing import TYPE_CHECKING

from modelexport.errors import UsageError

if TYPE_CHECKING:
    from modelexport.quantization.formats.base import NumberFormat

__all__ = ["get", "names"]

_NOT_FORMATS = {"base"}


def names() -> list[str]:
    """The ``--quant`` names there are, sorted."""
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name.replace("_", "-") for name in modules if name not in _NOT_FORMATS and not name.startswith("_"))


def get(name: str, *, group_size: int | None = None) -> NumberFormat:
    """The number format of that name; ``group_size`` None takes the format's own default.

    Raises:
        UsageError: the name is unknown, the format has no groups, or not of that size.
    """
    known = names()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"unknown number format {name!r}{hint} (known: {', '.join(known)})")
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    number_format: NumberFormat = module.FORMAT.create(group_size)
    return number_format
