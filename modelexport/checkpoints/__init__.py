"""Files: checkpoint formats, the containers below them, staging."""
