"""Samples that run through decoder layers on several ranks, and the statistics taken of them."""
