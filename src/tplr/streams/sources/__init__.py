"""Where samples come from, one kind a file."""
