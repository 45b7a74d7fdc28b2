"""Collectives in the manner of the first ``torch.distributed``, on the one of today (gloo on CPU, NCCL on CUDA).

They work with a process group of whatever origin (:func:`init_process_group`, ``launch``, torch itself), and without
one: then this process is rank 0 of 1, and there is nobody to send to. What holds for all of them:

- ``group``: ``group.WORLD``, a handle of :func:`new_group`, or torch's own group. Lists are in the order of the ranks
  given to ``new_group``. ``src`` and ``dst`` are ranks in the whole job. On a rank outside the group a call does
  nothing but warn.
- Every dtype is moved, also those that the back end refuses; tensors may have any strides, no dims or no elements,
  be parameters, and lie on another device than the back end serves. Nothing is differentiable.
- ``async_op=True`` returns a request; the data are in place after its ``wait()``.
- ``check``: True, or None with ``MODELEXPORT_DEBUG`` set (non-empty and not ``"0"``), lets the ranks compare what they
  call, with which shapes, dtypes, kinds of device, roots and operations, before anything is transferred. Where they
  differ, or one of them raises over its arguments, all raise a :class:`CollectiveMismatchError` (a ``ValueError`` and a
  ``RuntimeError``) that names the rank, and the group stays usable. Set it on all ranks. Sends and receives are not
  checked: their partner may not have come yet.
- In master-worker mode (:func:`init_master_worker`) calls are carried out by the workers: see
  :mod:`modelexport.distributed.collectives.collective_mode`.
"""

from __future__ import annotations

from typing import Any

from modelexport.distributed.collectives import operations
from modelexport.distributed.collectives.collective_mode import driver
from modelexport.distributed.collectives.operations import *  # noqa: F403

__all__ = [*operations.__all__, "init_master_worker"]


def init_master_worker(backend: str, init_method: str = "env://", **kwargs: Any) -> None:
    """Makes rank 0 the master, which alone calls collectives.

    See :mod:`modelexport.distributed.collectives.master_worker`.
    """
    from modelexport.distributed.collectives import master_worker

    master_worker.init_master_worker(backend, init_method, **kwargs)


def __getattr__(name: str) -> Any:
    # While a master drives its workers, the types of what it is given are public names too.
    present = driver()
    if present is not None and name in present.types:
        return present.types[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
