"""An S3 server that enforces R2's rules, for tests and localnet. ``docs/s3server.md`` is its guide.

    async with serve(root, keys) as server:
        ...  # any S3 client on server.endpoint; server.faults.add(...) scripts failures

A request passes these files: ``app`` (order of checks) → ``sigv4`` and ``keys`` (identity and rights) → ``operations``
(the operation) → ``rules`` (R2's limits), ``body`` and ``checksums``, ``preconditions``, ``listing`` →
``objects`` and ``multipart`` (on disk; each object is one ``blobfile``).
"""

from tplr.testing.s3server.faults import (
    Delay,
    Drip,
    Faults,
    FlipBit,
    FlipSentBit,
    IgnoreDigests,
    Instead,
    LoseResponse,
    Reset,
    Status,
    Truncate,
)
from tplr.testing.s3server.rules import Rules
from tplr.testing.s3server.server import FolderInUse, Server, serve

__all__ = [
    "Delay",
    "Drip",
    "Faults",
    "FlipBit",
    "FlipSentBit",
    "FolderInUse",
    "IgnoreDigests",
    "Instead",
    "LoseResponse",
    "Reset",
    "Rules",
    "Server",
    "Status",
    "Truncate",
    "serve",
]
