"""Where ranks meet: connections between them, and agreement over the store of the process group."""
