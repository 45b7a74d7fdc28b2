"""The parts that exporting and resharding share: ranks, the target directory, side files, several hosts, the hub."""
