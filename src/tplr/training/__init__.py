"""Builds, trains and measures the model: mathematics only, no I/O, no await."""
