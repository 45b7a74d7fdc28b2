"""Checkpoint formats, one module each, registered by being there."""
