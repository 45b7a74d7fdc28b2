"""safetensors files, read and written by hand: in pieces, from several ranks, at their offsets."""
