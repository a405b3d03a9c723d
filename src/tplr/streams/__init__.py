"""Checkpointable pipelines: sources, transforms, combination, state."""
