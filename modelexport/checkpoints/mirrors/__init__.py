"""Copies of files that lie elsewhere, of which only the parts that are being read are on this machine's disk."""
