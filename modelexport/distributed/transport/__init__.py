"""Transport of trees of tensors between processes: as payloads in shared memory or in files, without pickle.

:mod:`~modelexport.distributed.transport.tree` splits a tree into JSON and tensors,
:mod:`~modelexport.distributed.transport.payload` makes safetensors bytes of them, and
:mod:`~modelexport.distributed.transport.link` carries those between two processes.
"""
