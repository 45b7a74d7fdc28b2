"""The listings of number formats, checkpoint formats, algorithms and model types."""
