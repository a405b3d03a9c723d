"""What is done to samples on their way, one kind a file."""
