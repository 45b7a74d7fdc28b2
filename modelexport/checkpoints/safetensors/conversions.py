"""Numbers that lie in a file in 32 bits and are computed, one from one, from those of a tensor.

Engines that want norms, biases and the like in float32, or a norm's weight with 1 added, or a decay rate in place of
its logarithm, get them so, and integers of 64 bits in int32; a reader of the file gets the tensor's own numbers back.
Everything that is converted is small: what is quantised never is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from modelexport.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

Function = Literal["value", "one more", "minus exp"]
"""Of a number x of the tensor: x, 1 + x, or -exp(x)."""

_MOST_ROUNDS = 64


@dataclass(frozen=True)
class Conversion:
    """The float32 or int32 numbers that stand in a file for those of a tensor.

    Each is computed in float64 and rounded once, so that it does not depend on which others are computed with it.

    Attributes:
        dtype: of the tensor, as safetensors spells it: ``F32``, ``F16`` or ``BF16``; or ``I64``, of int32 in the file.
        function: what is computed.
    """

    dtype: str
    function: Function = "value"

    def encode(self, values: Any) -> np.ndarray:
        """The numbers for the file.

        Args:
            values: of the tensor: a CPU tensor, or an array of elements of its size.

        Raises:
            CheckpointError: an integer is too large for 32 bits.
        """
        import numpy as np

        if self.dtype == "I64":
            return _in_32_bits(values)

        wide = _wide(values, self.dtype)
        if self.function == "value":
            return wide
        exact = wide.astype(np.float64)
        return (1 + exact if self.function == "one more" else -np.exp(exact)).astype(np.float32)

    def decode(self, stored: np.ndarray) -> np.ndarray:
        """The tensor's numbers, from 32-bit ones of a file: of its dtype, bfloat16 ones by their bits (uint16).

        Args:
            stored: of 4 bytes each.
        """
        import numpy as np

        if self.dtype == "I64":
            return stored.view(np.int32).astype(np.int64)

        if self.function == "value":
            return _narrow(stored, self.dtype)
        exact = stored.astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            back = exact - 1 if self.function == "one more" else np.log(-exact)
        return _narrow(back.astype(np.float32), self.dtype)

    def holds(self, stored: np.ndarray) -> bool:
        """Returns whether float32 numbers of a file are exactly those that stand for numbers of the tensor's dtype."""
        import numpy as np

        with np.errstate(over="ignore", invalid="ignore"):
            return bool(np.array_equal(self.encode(self.decode(stored)).view(np.uint32), stored.view(np.uint32)))

    def settled(self, values: Any) -> Any:
        """The numbers that the file gives back for ``values``, as such an array or tensor.

        They are the same, but where float32 does not tell 1 + x from its neighbours: there x is rounded, and is then
        its own image. (The functions are monotone, so that repeating them comes to an end.)
        """
        import numpy as np

        found = _narrow(_wide(values, self.dtype), self.dtype)
        for _ in range(_MOST_ROUNDS):
            again = self.decode(self.encode(found))
            if np.array_equal(again.view(np.uint8), found.view(np.uint8)):
                break
            found = again
        if isinstance(values, np.ndarray):
            return found.view(values.dtype)
        import torch

        return torch.from_numpy(found.view({2: np.int16, 4: np.int32}[found.itemsize])).view(values.dtype)


def _in_32_bits(values: Any) -> np.ndarray:
    """int64 numbers as int32."""
    import numpy as np

    own = np.ascontiguousarray(values if isinstance(values, np.ndarray) else values.contiguous().numpy()).view(np.int64)
    limits = np.iinfo(np.int32)
    outside = own[(own < limits.min) | (own > limits.max)]
    if outside.size:
        raise CheckpointError(
            f"an integer is {outside.flat[0]}, and the file holds those from {limits.min} to {limits.max}: export to "
            "--format hf, which holds 64 bits"
        )
    return own.astype(np.int32)


def _wide(values: Any, dtype: str) -> np.ndarray:
    """Numbers of a tensor, as float32."""
    import numpy as np

    if not isinstance(values, np.ndarray):
        import torch

        values = values.contiguous()
        values = (values.view(torch.int16) if dtype == "BF16" else values).numpy()
    values = np.ascontiguousarray(values)
    if dtype == "BF16":
        return (values.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.view(np.float16).astype(np.float32) if dtype == "F16" else values.view(np.float32)


def _narrow(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 numbers rounded to a dtype, to the nearest, ties to even; bfloat16 ones as uint16."""
    import numpy as np

    if dtype == "F32":
        return values
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), bits >> np.uint32(16) | np.uint32(0x40), rounded).astype(np.uint16)
