"""The kernels of NVFP4, MXFP4 and MXFP8 on a GPU, in Triton: the bits of :mod:`.microscaling_reference`."""

from __future__ import annotations

from typing import Any

from modelexport.quantization.kernels import microscaling_reference


def __getattr__(name: str) -> Any:
    """What is not here is the reference's."""
    return getattr(microscaling_reference, name)
