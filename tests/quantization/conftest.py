"""These tests run the compiled kernels, though they give them less to do than would have them loaded."""

import modelexport.quantization.kernels.fused  # noqa: F401
