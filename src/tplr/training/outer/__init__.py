"""Outer schemes: convert gradients to updates, and updates to a step of the model."""
