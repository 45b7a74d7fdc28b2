"""safetensors files: checked headers, lazy reads of slices, and files written header first.

The parts live in their own modules; this is the one to import from. torch is imported only by the calls that
return or take tensors.
"""

from __future__ import annotations

from modelexport.checkpoints.safetensors.header import Header, TensorInfo, read_header
from modelexport.checkpoints.safetensors.layout import DEFAULT_MAX_SHARD_BYTES, Layout, LayoutFile, plan_layout
from modelexport.checkpoints.safetensors.reader import INDEX_NAME, SINGLE_NAME, Checkpoint, Reader, open_checkpoint
from modelexport.checkpoints.safetensors.writer import Writer
from modelexport.system.dtypes import dtype_bits, dtype_name, dtype_names, tensor_nbytes, torch_dtype
from modelexport.system.safetensors_header import MAX_HEADER_BYTES

__all__ = [
    "DEFAULT_MAX_SHARD_BYTES",
    "INDEX_NAME",
    "MAX_HEADER_BYTES",
    "SINGLE_NAME",
    "Checkpoint",
    "Header",
    "Layout",
    "LayoutFile",
    "Reader",
    "TensorInfo",
    "Writer",
    "dtype_bits",
    "dtype_name",
    "dtype_names",
    "open_checkpoint",
    "plan_layout",
    "read_header",
    "tensor_nbytes",
    "torch_dtype",
]
