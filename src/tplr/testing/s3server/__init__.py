"""An object store that speaks S3 and holds to R2's rules, for localnet and tests.

    async with serve(root, keys) as server:
        ...  # any S3 client on server.endpoint; server.faults.add(...) scripts failures

A request's way through the files: ``app`` (order of checks) → ``sigv4`` and ``keys`` (who, and may they) →
``operations`` (what) → ``rules`` (R2's limits), ``body``, ``preconditions``, ``listing`` → ``objects`` and
``multipart`` (on disk, each object one ``blobfile``).
"""

from tplr.testing.s3server.faults import (
    Delay,
    Drip,
    Faults,
    FlipBit,
    FlipSentBit,
    IgnoreDigests,
    LoseResponse,
    Reset,
    Status,
    Truncate,
)
from tplr.testing.s3server.rules import Rules
from tplr.testing.s3server.server import Server, serve

__all__ = [
    "Delay",
    "Drip",
    "Faults",
    "FlipBit",
    "FlipSentBit",
    "IgnoreDigests",
    "LoseResponse",
    "Reset",
    "Rules",
    "Server",
    "Status",
    "Truncate",
    "serve",
]
