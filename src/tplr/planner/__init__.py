"""Computes a run's needs on a host before it starts: memory, disk, traffic, its price, and a window's timeline.

Every figure is a formula over the run's constants (``HParams``) and a ``Host``; nothing is allocated. ``tplr plan``
prints the figures, and a node's start-up check refuses a configuration that does not fit. It imports nothing: the names
of GPUs (``host.py``) are checked before PyTorch is loaded.
"""
