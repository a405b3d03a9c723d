"""Builds a self-contained HTML page of a run, and the JSON document that it shows."""
