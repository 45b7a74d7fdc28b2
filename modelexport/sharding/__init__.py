"""Shards of tensors: boxes, rules of how tensors are cut, plans, and the exchange of shards between ranks.

Knows tensors and ranks, not models.
"""
