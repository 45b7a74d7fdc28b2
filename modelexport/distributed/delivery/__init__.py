"""Delivery of pieces of data, each from the rank that has it to the ranks that want it, and to no other.

:mod:`~modelexport.distributed.delivery.pairwise` sends them over the process group,
:mod:`~modelexport.distributed.delivery.shared_mesh` maps them into the processes of one host.
"""
