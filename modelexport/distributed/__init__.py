"""Rank processes and the data that pass between them. Knows nothing of models; builds on torch's process groups.

- :mod:`~modelexport.distributed.launch`: processes, the process group, the grid of tensor, pipeline and data ranks
- :mod:`~modelexport.distributed.supervision`: heartbeats, phases, and the root cause of a failed job
- :mod:`~modelexport.distributed.transport`: trees of tensors as payloads, shared memory, the sockets between ranks
- :mod:`~modelexport.distributed.rendezvous`: connections, and agreement over the process group's store
- :mod:`~modelexport.distributed.gather`: configs and tensors of all ranks on the first one
- :mod:`~modelexport.distributed.collectives`: collectives for every dtype, and the master-worker mode
- :mod:`~modelexport.distributed.delivery`: pieces from the rank that has each to the ranks that want it

Modules of their own: :mod:`~modelexport.distributed.config` and :mod:`~modelexport.distributed.environment`, which all
of these read; :mod:`~modelexport.distributed.workspace` and :mod:`~modelexport.distributed.ranks`, which are public.
"""
