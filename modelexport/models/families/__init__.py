"""Model families, one declarative file each, registered by being there."""
