"""The modules of a checkpoint in any file format: their tensors, how numbers are stored, how they may be cut."""
