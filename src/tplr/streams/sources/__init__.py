"""Sources of samples, one kind per file."""
