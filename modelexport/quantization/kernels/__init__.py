"""The choice of kernels: the fused ones on CPU where numba imports, Triton's on CUDA and ROCm where it can start, else
the plain torch ones; the same bits.

``MODELEXPORT_KERNELS=reference`` forces the plain ones on every device, ``fused`` the fused ones on the CPU from the
first byte on. ``triton`` has CPU tensors take Triton's, where TRITON_INTERPRET=1 has its interpreter run them: slow,
and how their bits are checked without a GPU.

The first :data:`LITTLE` bytes of a process that has not loaded the fused kernels take the reference: to load them takes
longer, to compile them much longer. Before ranks are forked, :func:`modelexport.quantization.formats.load_kernels` is
called, so that they inherit compiled kernels.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from modelexport.errors import UsageError, error_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "LITTLE",
    "Backend",
    "backend",
    "backend_on",
    "by_rows",
    "copy_finite",
    "dequantise",
    "descend",
    "expect",
    "is_little",
    "nearest_groups",
    "nearest_moved",
    "of",
    "quantise_blocks",
    "quantise_groups",
    "quantise_rows",
    "row_amax",
    "row_extremes",
    "set_threads",
    "split",
    "split_rows",
    "squared_error",
]

LITTLE = 1 << 25
"""Bytes of weights that plain torch rounds and reads back (0.5 s) before the compiled kernels could be loaded."""
_PASSES = 4  # that a weight makes through kernels, about: its magnitudes, rounding, NaN and Inf, the error
_MIN_BYTES_PER_THREAD = 1 << 20
"""Below this much input per thread, handing work over costs more than it saves."""


_CHOICES = ("reference", "fused", "triton")  # of MODELEXPORT_KERNELS
_TRITON_DEVICES = ("cuda",)  # as torch calls them, ROCm's too; tests compile for both


class Backend(NamedTuple):
    """The kernels that tensors of a device take. ``name`` is "fused", "triton", "reference" or "plain" (the
    reference's, where they are quicker); ``reason`` is one line."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} kernels ({self.reason})"


def backend(nbytes: int | None = None, *, foretold: bool = False) -> Backend:
    """Returns the kernels that CPU tensors take, with the reason; those of a job of so many bytes of weights, if given.

    Args:
        foretold: whether it is enough that they are installed. Importing numba takes as long as a large plan.

    Raises:
        UsageError: ``MODELEXPORT_KERNELS`` is none of its values, or asks for what cannot run.
    """
    if is_little(nbytes):
        return Backend("plain", f"quicker for {LITTLE >> 20} MiB or less")
    forced = os.environ.get("MODELEXPORT_KERNELS", "")
    if foretold and not forced and importlib.util.find_spec("numba") is not None:
        return Backend("fused", "CPU tensors, numba is installed")
    return _backend(forced)


def is_little(nbytes: int | None) -> bool:
    """Returns whether plain torch goes through so many bytes of weights before the fused kernels could be loaded."""
    return nbytes is not None and nbytes <= LITTLE and not os.environ.get("MODELEXPORT_KERNELS")


def backend_on(kind: str) -> Backend:
    """Returns the kernels that tensors of a kind of device take that is not the CPU (``cuda``), with the reason.

    Raises:
        UsageError: ``MODELEXPORT_KERNELS`` is none of its values, or asks for what cannot run.
    """
    return _backend_on(kind, os.environ.get("MODELEXPORT_KERNELS", ""))


def _check_choice(forced: str) -> None:
    if forced not in ("", *_CHOICES):
        choices = f"{', '.join(map(repr, _CHOICES[:-1]))} or {_CHOICES[-1]!r}"
        raise UsageError(f"MODELEXPORT_KERNELS is {forced!r}: set it to {choices}, or unset it")


@cache
def _backend(forced: str) -> Backend:
    _check_choice(forced)
    if forced == "reference":
        return Backend("reference", "MODELEXPORT_KERNELS=reference")
    if forced == "triton":
        return _interpreted()
    try:
        import numba
    except ImportError as error:
        if forced:
            raise UsageError(
                f"MODELEXPORT_KERNELS=fused, but numba cannot be imported "
                f"({error_text(error)}): install it or unset that"
            ) from error
        return Backend("reference", f"numba cannot be imported: {error_text(error)}")
    why = "MODELEXPORT_KERNELS=fused" if forced else "CPU tensors"
    return Backend("fused", f"{why}, numba {numba.__version__}")


def _interpreted() -> Backend:
    """Triton's kernels for CPU tensors."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise UsageError(
            "MODELEXPORT_KERNELS=triton runs on tensors of the CPU by Triton's interpreter alone: set "
            "TRITON_INTERPRET=1, too, or unset MODELEXPORT_KERNELS (tensors of a GPU take Triton's kernels without it)"
        )
    try:
        import triton
    except ImportError as error:
        raise UsageError(
            f"MODELEXPORT_KERNELS=triton, but triton cannot be imported ({error_text(error)}): install it or unset that"
        ) from error
    return Backend("triton", f"MODELEXPORT_KERNELS=triton, the interpreter of triton {triton.__version__}")


@cache
def _backend_on(kind: str, forced: str) -> Backend:
    _check_choice(forced)
    if forced == "reference":
        return Backend("reference", "MODELEXPORT_KERNELS=reference")
    if kind not in _TRITON_DEVICES:
        return Backend("reference", f"there are no others for {kind} tensors")
    try:
        import triton
        from triton.runtime import driver

        if os.environ.get("TRITON_INTERPRET") != "1":
            driver.active.get_current_target()  # builds what launches kernels, for which there must be a C compiler
    except Exception as error:
        return _without_triton(kind, forced, error)
    return Backend("triton", f"{kind} tensors, triton {triton.__version__}")


def _without_triton(kind: str, forced: str, error: Exception) -> Backend:
    """The reference, with a warning where Triton is installed and cannot start: nobody would know why it is slow."""
    how = "be imported" if isinstance(error, ImportError) else "start"
    reason = f"triton cannot {how}: {error_text(error)}"
    if forced == "triton":
        raise UsageError(f"MODELEXPORT_KERNELS=triton, but {reason}: mend that or unset MODELEXPORT_KERNELS") from error
    if not isinstance(error, ImportError):
        silent = "MODELEXPORT_KERNELS=reference says that this is meant"
        warnings.warn(f"plain torch kernels on {kind}, which are slower: {reason}; {silent}", stacklevel=2)
    return Backend("reference", reason)


_plain_bytes = LITTLE * _PASSES  # that plain torch may still go through in this process


def expect(nbytes: int) -> None:
    """Has the fused kernels run from now on where a job of so many bytes of weights is not little."""
    global _plain_bytes
    if not is_little(nbytes):
        _plain_bytes = 0


def of(tensor: Tensor, family: str = "", *, at_once: bool = False) -> Any:
    """The module of kernels that such a tensor takes: ``fused``, ``triton`` or ``reference``.

    Args:
        family: what its name begins with: ``"microscaling_"``, ``"feedback_"``.
        at_once: load the fused kernels for the first bytes too: plain torch takes longer than that even for these.
    """
    return importlib.import_module(f"{__name__}.{family}{_kernels_of(tensor, at_once)}")


def _kernels_of(tensor: Tensor, at_once: bool) -> str:
    """The last part of the name of the module that a tensor takes."""
    if tensor.numel() == 0:
        return "reference"
    if tensor.device.type != "cpu":
        return backend_on(tensor.device.type).name
    return backend().name if at_once or _worth_loading(tensor.nbytes) else "reference"


def _worth_loading(nbytes: int) -> bool:
    """False where the fused kernels need not be loaded yet for a tensor of so many bytes, which are counted."""
    global _plain_bytes
    if os.environ.get("MODELEXPORT_KERNELS") or f"{__name__}.fused" in sys.modules:
        return True
    _plain_bytes -= nbytes
    return _plain_bytes < 0


_threads = 1
_pool: tuple[int, int, ThreadPoolExecutor] | None = None
_working = threading.local()
_pool_lock = threading.Lock()


def set_threads(count: int) -> None:
    """From now on, split the rows of large CPU tensors over ``count`` threads (1, the start value: none).

    Raises:
        ValueError: ``count`` is less than 1.
    """
    global _threads
    if count < 1:
        raise ValueError(f"the number of kernel threads is {count}; it must be at least 1")
    _threads = count


def _executor(workers: int) -> ThreadPoolExecutor:
    """The pool of this process and size. A pool of another size ends by itself once nobody holds it."""
    global _pool
    with _pool_lock:
        if _pool is None or _pool[:2] != (os.getpid(), workers):
            _pool = (os.getpid(), workers, ThreadPoolExecutor(workers, "modelexport-kernel"))
        return _pool[2]


def _forget_pool() -> None:
    """In a forked child: the pool's threads are gone, and the lock may have been held by one of them."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def split_rows(weight: Tensor, work: Callable[[slice], int | None], unit: int = 1) -> int:
    """Runs ``work`` on ranges of rows that cover the weight, cut on multiples of ``unit``; the first bad row, or -1.

    Called by ``work``, it runs on the thread that it is called on: the others have ranges of their own.
    """
    rows = weight.shape[0]
    units = -(-rows // unit)
    parts = min(_parts(weight), units, weight.numel() * weight.element_size() // _MIN_BYTES_PER_THREAD)
    cuts = [0, rows]
    if parts > 1:
        cuts = [min(rows, units * part // parts * unit) for part in range(parts + 1)]
    ranges = [slice(start, stop) for start, stop in pairwise(cuts)]
    results = _each(ranges, work)
    bad = [part.start + row for part, row in zip(ranges, results, strict=True) if row is not None and row >= 0]
    return min(bad, default=-1)


def split(count: int, work: Callable[[slice], None], on: Tensor) -> None:
    """Runs ``work`` on ranges that cover 0 .. ``count``, in several threads where the tensor ``on`` is on the CPU."""
    parts = max(1, min(count, _parts(on)))
    _each([slice(*cut) for cut in pairwise(count * part // parts for part in range(parts + 1))], work)


def _parts(tensor: Tensor) -> int:
    """Threads for work on a tensor: one on a thread that works on a range already, and for other devices."""
    return _threads if tensor.device.type == "cpu" and not getattr(_working, "on_range", False) else 1


def _each(ranges: Sequence[slice], work: Callable[[slice], Any]) -> list[Any]:
    """Runs ``work`` on every range, on a thread each."""

    def alone(part: slice) -> Any:
        _working.on_range = True
        try:
            return work(part)
        finally:
            _working.on_range = False

    if len(ranges) < 2:
        return [work(part) for part in ranges]
    pool = _executor(_threads - 1)
    futures = [pool.submit(alone, part) for part in ranges[1:]]
    return [alone(ranges[0]), *(future.result() for future in futures)]


def by_rows(kernel: str, weight: Tensor, *arguments: Any, family: str = "", unit: int = 1, **options: Any) -> int:
    """Runs a kernel on ranges of a weight's rows, in several threads; returns the first bad row, or -1.

    Args:
        kernel, family: see :func:`of`, which chooses by ``weight``.
        arguments, options: the kernel's. Of a tensor among them that has a row for each of the weight's, or for each
            ``unit`` of these, the kernel is given the rows of its range; of others the whole.
        unit: rows that are not parted.
    """
    run = getattr(of(weight, family), kernel)
    rows = weight.shape[0]
    blocks = -(-rows // unit)

    def cut(value: Any, part: slice) -> Any:
        if not hasattr(value, "data_ptr"):
            return value
        if value.shape[0] == rows:
            return value[part]
        return value[part.start // unit : -(-part.stop // unit)] if value.shape[0] == blocks else value

    def work(part: slice) -> int | None:
        named = {name: cut(value, part) for name, value in options.items()}
        found: int | None = run(*(cut(value, part) for value in arguments), **named)
        return found

    return split_rows(weight, work, unit)


def row_amax(weight: Tensor) -> Tensor:
    """Largest magnitude of each row: float32 ``[rows]``, non-finite where the row holds NaN or Inf."""
    return _per_row(weight, of(weight).row_amax)


def row_extremes(weight: Tensor) -> Tensor:
    """See :func:`.reference.row_extremes`."""
    return _per_row(weight, of(weight).row_extremes)


def _per_row(weight: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
    if _threads == 1:
        return of(weight)
    import torch

    out = of(weight[:0])
    out = torch.empty(weight.shape[0], *out.shape[1:], dtype=out.dtype, device=out.device)

    def work(part: slice) -> None:
        out[part] = of(weight[part])

    split_rows(weight, work)
    return out


def quantise_rows(weight: Tensor, amax: Tensor | None, q: Tensor, scale: Tensor, limit: float) -> int:
    """See :func:`.reference.quantise_rows`."""
    return by_rows("quantise_rows", weight, weight, amax, q, scale, limit)


def quantise_groups(
    weight: Tensor,
    group: int,
    q: Tensor,
    scale: Tensor,
    limit: float,
    *,
    bits: int = 4,
    zero: Tensor | None = None,
    amax: Tensor | None = None,
) -> int:
    """See :func:`.reference.quantise_groups`."""
    return by_rows("quantise_groups", weight, weight, group, q, scale, limit, bits=bits, zero=zero, amax=amax)


def nearest_groups(
    weight: Tensor, group: int, out: Tensor, scale_dtype: torch.dtype, limit: float, *, bits: int, affine: bool = False
) -> int:
    """See :func:`.reference.nearest_groups`; of tensors on the CPU."""
    return by_rows("nearest_groups", weight, weight, group, out, scale_dtype, limit, bits=bits, affine=affine)


def quantise_blocks(weight: Tensor, side: int, amax: Tensor | None, q: Tensor, scale: Tensor, limit: float) -> int:
    """See :func:`.reference.quantise_blocks`."""
    return by_rows("quantise_blocks", weight, weight, side, amax, q, scale, limit, unit=side)


def copy_finite(weight: Tensor, out: Tensor) -> int:
    """See :func:`.reference.copy_finite`."""
    return by_rows("copy_finite", weight, weight, out)


def dequantise(
    q: Tensor, scale: Tensor, out: Tensor, *, group: int | None = None, bits: int = 4, zero: Tensor | None = None
) -> None:
    """See :func:`.reference.dequantise`."""
    by_rows("dequantise", out, q, scale, out, group=group, bits=bits, zero=zero)


def squared_error(
    weight: Tensor,
    q: Tensor,
    scale: Tensor | None,
    out: Tensor,
    *,
    group: int | None = None,
    bits: int = 4,
    zero: Tensor | None = None,
) -> None:
    """See :func:`.reference.squared_error`."""
    by_rows("squared_error", weight, weight, q, scale, out, group=group, bits=bits, zero=zero)


def nearest_moved(
    weight: Tensor,
    offset: Tensor,
    step: Tensor,
    zero: Tensor | None,
    columns: int,
    storage: torch.dtype,
    low: float,
    high: float,
    out: Tensor,
) -> None:
    """See :func:`.feedback_reference.nearest_moved`; of tensors on the CPU."""
    by_rows("nearest_moved", weight, weight, offset, step, zero, columns, storage, low, high, out, family="feedback_")


def descend(
    weight: Tensor,
    offset: Tensor,
    gradient: Tensor,
    step: Tensor,
    zero: Tensor | None,
    columns: int,
    storage: torch.dtype,
    low: float,
    high: float,
    rate: float,
) -> None:
    """See :func:`.feedback_reference.descend`; of tensors on the CPU."""
    by_rows(
        "descend", weight, weight, offset, gradient, step, zero, columns, storage, low, high, rate, family="feedback_"
    )
