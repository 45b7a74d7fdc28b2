"""Quantisation: number formats, the kernels that compute them, and the algorithms that choose the numbers."""
