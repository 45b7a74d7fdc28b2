"""Supervision of ranks: the phase and heartbeat of each, and the root cause where one fails.

A rank reports through :mod:`~modelexport.distributed.supervision.status`; our launcher reads that, or, under another
launcher, rank 0's :mod:`~modelexport.distributed.supervision.watch_hub`.
"""
