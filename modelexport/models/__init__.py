"""What a checkpoint consists of, whoever wrote it: its modules, how their numbers are stored, how they may be cut."""
