"""Local files of transfers: errors of the disk become store errors, and are never a peer's fault."""

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import BinaryIO

from tplr.errors import StateError, StoreError, StoreUnavailable
from tplr.files import atomic_writer


def disk_error(error: OSError, bucket: str, key: str) -> StoreError:
    """StoreUnavailable for a failing disk; plain StoreError for a missing path, where no retry helps."""
    if isinstance(error, FileNotFoundError):
        return StoreError(f"no local file {error.filename}", bucket=bucket, key=key)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreUnavailable("disk full: free some space", bucket=bucket, key=key)
    return StoreUnavailable(f"local file: {error.strerror or error}", bucket=bucket, key=key)


@contextlib.contextmanager
def disk_errors(bucket: str, key: str) -> Iterator[None]:
    """Raise what the operating system or ``tplr.files`` raises in the block as store errors."""
    try:
        yield
    except StateError as error:
        cause = error.__cause__
        raise disk_error(cause if isinstance(cause, OSError) else OSError(str(error)), bucket, key) from error
    except OSError as error:
        raise disk_error(error, bucket, key) from error


@contextlib.asynccontextmanager
async def download_to(path: Path, bucket: str, key: str) -> AsyncIterator[BinaryIO]:
    """A file that is renamed to ``path`` when the block succeeds; opened, synced and renamed off the event loop.

    The block must not raise an OSError of the network.
    """
    with disk_errors(bucket, key):
        writer = atomic_writer(path)
        file = await asyncio.to_thread(writer.__enter__)
        try:
            yield file
        except BaseException as error:
            await asyncio.to_thread(writer.__exit__, type(error), error, error.__traceback__)
            raise
        await asyncio.to_thread(writer.__exit__, None, None, None)
