"""Outer schemes: how gradients become updates, and updates a step of the model."""
