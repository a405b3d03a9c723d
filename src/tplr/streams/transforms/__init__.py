"""Transforms of samples, one kind per file."""
