"""Rendezvous of ranks over the process group's store: connections between them, and one outcome for all of them."""
