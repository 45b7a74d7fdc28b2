"""The integer and FP8 formats' kernels on a GPU, in Triton: the bits of :mod:`.reference`."""

from __future__ import annotations

from typing import Any

from modelexport.quantization.kernels import reference


def __getattr__(name: str) -> Any:
    """What is not here is the reference's."""
    return getattr(reference, name)
