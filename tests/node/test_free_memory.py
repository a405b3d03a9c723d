"""Memory that is freed in pieces is returned to the system."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tplr.node.free_memory import _malloc_trim, release_freed_memory

BLOCK = 100_000  # bytes; glibc maps blocks of 128 KiB and more on their own, and returns those at once
BLOCKS = 2_000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux" or _malloc_trim() is None, reason="the C library is not glibc")
def test_unused_pages_between_used_ones_are_returned() -> None:
    # In a separate process, because one that has freed much memory before reuses it for the blocks.
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def fill_and_free() -> None:
    before = resident_bytes()
    blocks = [np.ones(BLOCK, np.uint8) for _ in range(BLOCKS)]
    kept = blocks[::100]  # including the last one, because glibc returns the end of the heap by itself
    kept.append(blocks[-1])
    blocks.clear()
    freed = resident_bytes()
    release_freed_memory()
    after = resident_bytes()
    assert freed - before > 0.8 * BLOCK * BLOCKS, "nothing was kept, so nothing is shown"
    assert after - before < 0.2 * BLOCK * BLOCKS
    assert all(one.all() for one in kept)


if __name__ == "__main__":
    fill_and_free()
