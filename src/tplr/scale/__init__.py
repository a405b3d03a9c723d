"""Simulates networks up to and beyond the size of a subnet, and computes their costs.

There is no I/O. The protocol's own decision code (``Election``, ``WindowQuestion``, ``UploadBounds``,
``earned_peers``) runs on simulated links, stores and participants.
"""
