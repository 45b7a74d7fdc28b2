"""Checkpoints that lie elsewhere: only the parts that are being read are on this machine's disk."""
