"""State dicts as ``torch.save`` writes them: ``pytorch_model.bin``, ``consolidated.00.pth``, ``adapter_model.bin``.

Such a file is a zip archive of a pickle and of the tensors' elements, uncompressed. The pickle is parsed and never run
(:mod:`modelexport.checkpoints.torch_archive.pickle_reading`), so that a tensor is a range of bytes in a file, as in
safetensors; what is no plain tensor is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from modelexport.checkpoints.safetensors.header import TensorInfo
from modelexport.checkpoints.safetensors.placement import Placement, row_major
from modelexport.checkpoints.torch_archive.zip import ArchivedTensor, find_module_states, find_state_dict
from modelexport.errors import CheckpointError, quoted
from modelexport.sharding.boxes import whole
from modelexport.system.dtypes import dtype_bits, tensor_nbytes
from modelexport.system.small_files import open_regular, read_at

_ZIP = b"PK\x03\x04"

Tensors = tuple[dict[str, TensorInfo], dict[str, tuple[Placement, ...]]]
"""Tensors by their names, and the places of those that are not contiguous: transposed views, for one."""
_Found = TypeVar("_Found")


def read_state_dict(path: Path) -> Tensors:
    """Find the tensors of a file; their elements are not read.

    Raises:
        CheckpointError: the file cannot be read, is damaged, was written by torch before 1.6, or holds something else
            than plain tensors by their names.
    """
    return _described(path, _find(path, find_state_dict))


def read_module_states(path: Path) -> tuple[Tensors, dict[str, dict[str, Any]]]:
    """As :func:`read_state_dict`, of a dict of the state dicts of modules.

    Returns:
        The tensors; and module -> name -> what is no tensor, as inert data.

    Raises:
        CheckpointError: as :func:`read_state_dict`.
    """
    found, settings = _find(path, find_module_states)
    return _described(path, found), settings


def _find(path: Path, find: Callable[[int, int], _Found]) -> _Found:
    """Opens an archive, and finds in it what ``find`` does."""
    with open_regular(path) as file:
        try:
            length = os.fstat(file.fileno()).st_size
            if read_at(file.fileno(), 4, 0) != _ZIP:
                raise CheckpointError(
                    "is no zip archive, as torch.save writes since 1.6; load it once and save it again, as safetensors"
                )
            return find(file.fileno(), length)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error


def _described(path: Path, found: Mapping[str, ArchivedTensor]) -> Tensors:
    infos: dict[str, TensorInfo] = {}
    placements: dict[str, tuple[Placement, ...]] = {}
    for name, tensor in found.items():
        nbytes = tensor_nbytes(tensor.dtype, tensor.shape)
        infos[name] = TensorInfo(name, tensor.dtype, tensor.shape, path, tensor.offset, nbytes)
        if not _is_contiguous(tensor):
            if any(stride == 0 and size > 1 for stride, size in zip(tensor.strides, tensor.shape, strict=True)):
                raise CheckpointError(f"{path}: {quoted(name)} is expanded: all along a dim it is the same elements")
            placements[name] = (Placement(whole(tensor.shape), path, tensor.offset, tensor.strides),)
    return infos, placements


def _is_contiguous(tensor: ArchivedTensor) -> bool:
    """Returns whether elements lie in the order of their indices, with nothing between."""
    if 0 in tensor.shape:
        return True
    wanted = row_major(tensor.shape, dtype_bits(tensor.dtype) // 8)
    strides = zip(tensor.shape, tensor.strides, wanted, strict=True)
    return all(size == 1 or stride == own for size, stride, own in strides)
