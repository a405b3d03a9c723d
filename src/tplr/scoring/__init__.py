"""Scores, weights and the choice of peers: pure functions over a small keyed state."""
