"""Reads files of any other scheme (http, gs, azure, …) with smart_open, in threads."""

import io
import time
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, BinaryIO, cast

from tplr.concurrency.workers import Workers
from tplr.logging import logger
from tplr.streams.sources.bytes import FIRST_FETCHED, MAX_FETCHED, FetchedPieces

_THREADS = 8
_PAUSE_SECONDS, _LONGEST_PAUSE = 0.5, 20.0
# Errors that a retry can't fix. All others are retried: each transport has its own exceptions for a broken connection.
_FINAL = (FileNotFoundError, PermissionError, NotImplementedError, ImportError, ValueError, TypeError)


class Threads(AbstractContextManager["Threads", None]):
    """The threads of one pass that open and read files."""

    def __init__(self) -> None:
        self.retries = 0
        self._workers = Workers(lambda call: call(), _THREADS, "thread")
        self.submit = self._workers.submit

    def __exit__(self, *_: object) -> None:
        self._workers.close()


class OtherPieces(FetchedPieces):
    """A file in pieces. After a failure it is opened again at the end of the last piece, for at most ``timeout``
    seconds. A transport that can't seek reads the file again up to there."""

    def __init__(self, threads: Threads, url: str, offset: int, timeout: float, ahead: bool) -> None:
        super().__init__(self._begin, ahead)
        self._threads = threads
        self._url = url
        self._at = offset
        self._timeout = timeout
        self._piece = FIRST_FETCHED
        self._file: BinaryIO | None = None

    def _begin(self) -> "Future[bytes]":
        return self._threads.submit(self._fetch)

    def _fetch(self) -> bytes:
        deadline, pause = time.monotonic() + self._timeout, _PAUSE_SECONDS
        while True:
            try:
                if self._file is None:
                    self._file = open_at(self._url, self._at)
                data = self._file.read(self._piece)
                break
            except _FINAL:
                raise
            except Exception:
                self._file = None
                if time.monotonic() + pause > deadline:
                    raise
            self._threads.retries += 1
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        self._at += len(data)
        self._piece = min(2 * self._piece, MAX_FETCHED)
        return data

    def close(self) -> None:
        super().close()
        if self._file is not None:
            self._file.close()
            self._file = None


def open_at(url: str, offset: int) -> BinaryIO:
    """The file from ``offset`` on, not decompressed."""
    import smart_open

    opened: Any = smart_open.open(url, "rb", compression="disable")
    if offset:
        try:
            opened.seek(offset)
        except (io.UnsupportedOperation, NotImplementedError):
            logger.warning("%s: can't be read from byte %d on; reading it again from the start", url, offset)
            opened.close()  # the attempt to seek may have ended its response
            opened = smart_open.open(url, "rb", compression="disable")
            while offset:
                offset -= len(opened.read(min(offset, MAX_FETCHED))) or offset
    return cast(BinaryIO, opened)
