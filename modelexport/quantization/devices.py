"""The device that computes: the CPU, or an accelerator that torch sees (CUDA, ROCm, XPU).

``--device auto`` is an accelerator where there is one and samples run through the model: rounding alone is faster on
the CPU than the way to a GPU and back. Ranks of one machine take its accelerators in turn, several of them one where
there are fewer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from modelexport.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["AUTO", "CPU", "check_name", "chosen", "deterministic", "free_memory", "kind_of", "of_rank"]

AUTO, CPU = "auto", "cpu"
_NAME = re.compile(r"[a-z]\w*(:\d+)?", re.ASCII)


def check_name(name: str) -> None:
    """Raise a UsageError for what cannot be the name of a device."""
    if not _NAME.fullmatch(name) or name.startswith((f"{AUTO}:", f"{CPU}:")):
        raise UsageError(f"--device {name}: {AUTO}, {CPU}, cuda or one of several such as cuda:1 is needed")


def kind_of(name: str) -> str:
    """Returns the kind of a device: ``cuda`` of ``cuda:1``."""
    return name.partition(":")[0]


def chosen(name: str, *, calibrated: bool) -> str:
    """The device that a setting means on this machine: ``cpu``, ``cuda`` or one of several, such as ``cuda:1``.

    Args:
        name: the setting.
        calibrated: whether samples run through the model.

    Raises:
        UsageError: torch does not see such a device.
    """
    if name == CPU or (name == AUTO and not calibrated):
        return CPU
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    usable = found is not None and found.type != "mps"  # which has no float64, in which errors are summed
    if name == AUTO:
        return found.type if found is not None and usable else CPU
    kind, _, index = name.partition(":")
    count = torch.accelerator.device_count() if found is not None and usable and found.type == kind else 0
    if not count or int(index or 0) >= count:
        seen = "none" if found is None else f"{torch.accelerator.device_count()} of {found.type}"
        raise UsageError(
            f"--device {name}: torch {torch.__version__} sees no such device with float64 ({seen}): leave it out, or "
            f"type --device {CPU}"
        )
    return name


def of_rank(name: str, local_rank: int) -> torch.device:
    """The device of one of a machine's ranks.

    Args:
        name: what :func:`chosen` returned.
        local_rank: the rank's number among those of this machine.
    """
    import torch

    if name == CPU or ":" in name:
        return torch.device(name)
    return torch.device(name, local_rank % torch.accelerator.device_count())


def free_memory(name: str, local_ranks: int = 1) -> int | None:
    """The memory that each rank may take of its device: what is free, less a tenth of it for torch's kernels and what
    its allocator cannot use, in equal parts for the ranks that share one. None where the device does not say.

    Args:
        name: what :func:`chosen` returned.
        local_ranks: the number of ranks of this machine.
    """
    import torch

    ranks = [of_rank(name, rank) for rank in range(local_ranks)]
    ask = getattr(getattr(torch, ranks[0].type, None), "mem_get_info", None)
    if ranks[0].type == CPU or ask is None:
        return None
    return min(int(ask(device)[0]) * 9 // 10 // ranks.count(device) for device in set(ranks))


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Has torch choose kernels that give the same bits every time, where it has the choice; those of the CPU do."""
    if device.type == CPU:  # the setting itself imports torch's compiler, which takes a second
        yield
        return
    import torch

    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product is computed
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
