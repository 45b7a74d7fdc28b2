"""Services around the work: limits of the process, small files, terminal output, JSON and YAML values, startup."""
