"""A request's body from a file, in pieces that are worth a thread's while."""

import asyncio
from typing import IO, Any

from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import IOBasePayload

PIECE_BYTES = 2**20


class FileBody(IOBasePayload):
    """As aiohttp's own, but in larger pieces than its 64 KiB, as each costs a change of threads."""

    def __init__(self, file: IO[bytes], **more: Any) -> None:
        super().__init__(file, **more)
        self._file = file
        self._start = file.tell()

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        # aiohttp writes the same body once more if a connection broke that had served before.
        await asyncio.to_thread(self._file.seek, self._start)
        left = content_length
        while left is None or left > 0:
            piece = await asyncio.to_thread(self._file.read, PIECE_BYTES if left is None else min(PIECE_BYTES, left))
            if not piece:
                break
            await writer.write(piece)
            left = None if left is None else left - len(piece)
