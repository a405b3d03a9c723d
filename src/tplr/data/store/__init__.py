"""Pretokenized data: keys as long rows of numbers, in files that are mapped, loaded, or read from a bucket."""
