"""Gives memory that was freed back to the system, once a window.

glibc keeps freed blocks for the thread that will ask next. A node's tensors of a window are allocated and freed by a
dozen threads, each with an arena of its own, so without this the unused part of the arenas becomes larger than all that
is in use, and still grows after hundreds of windows (``docs/benchmarks/long_run.md``).
"""

import ctypes
import sys
from collections.abc import Callable
from functools import cache


def release_freed_memory() -> None:
    """Return unused pages of all arenas; does nothing where the C library can't. Blocks for milliseconds."""
    if trim := _malloc_trim():
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    # musl and other systems do without.
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
