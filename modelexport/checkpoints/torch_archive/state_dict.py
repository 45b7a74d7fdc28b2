"""State dicts as ``torch.save`` writes them: ``pytorch_model.bin``, ``consolidated.00.pth``, ``adapter_model.bin``.

Such a file is a zip archive of a pickle and of the tensors' elements, uncompressed. The pickle is parsed and never run
(:mod:`modelexport.checkpoints.torch_archive.pickle_reading`), so that a tensor is a range of bytes in a file, as in
safetensors; what is no plain tensor is refused.
"""

from __future__ import annotations

import os
from pathlib import Path

from modelexport.checkpoints.safetensors.header import TensorInfo
from modelexport.checkpoints.safetensors.placement import Placement, row_major
from modelexport.checkpoints.torch_archive.zip import ArchivedTensor, find_state_dict
from modelexport.errors import CheckpointError, quoted
from modelexport.sharding.boxes import whole
from modelexport.system.dtypes import dtype_bits, tensor_nbytes
from modelexport.system.small_files import open_regular

_ZIP = b"PK\x03\x04"


def read_state_dict(path: Path) -> tuple[dict[str, TensorInfo], dict[str, tuple[Placement, ...]]]:
    """Find the tensors of a file; their elements are not read.

    Returns:
        The tensors by their names, and the places of those that are not contiguous: transposed views, for one.

    Raises:
        CheckpointError: the file cannot be read, is damaged, was written by torch before 1.6, or holds something else
            than plain tensors by their names.
    """
    with open_regular(path) as file:
        try:
            length = os.fstat(file.fileno()).st_size
            if os.pread(file.fileno(), 4, 0) != _ZIP:
                raise CheckpointError(
                    "is no zip archive, as torch.save writes since 1.6; load it once and save it again, as safetensors"
                )
            found = find_state_dict(file.fileno(), length)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
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
