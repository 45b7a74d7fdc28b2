"""modelexport: post-training quantisation and export of language models under tensor parallelism."""

__version__ = "0.1.0"
