"""Computes scores and weights, and selects peers: pure functions over a small keyed state."""
