"""Returns freed memory to the system, once a window.

glibc keeps freed blocks for later allocations of the same thread. A node's tensors of a window are allocated and freed
by a dozen threads, each with its own arena. Without this, the unused part of the arenas becomes larger than all memory
in use, and still grows after hundreds of windows (``docs/benchmarks/long_run.md``).
"""

import ctypes
import sys
from collections.abc import Callable
from functools import cache


def release_freed_memory() -> None:
    """Return unused pages of all arenas; does nothing without glibc's ``malloc_trim``. Blocks for milliseconds."""
    if trim := _malloc_trim():
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    # musl and other systems lack it.
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
