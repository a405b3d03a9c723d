"""Reads files of other schemes in threads: http and https with smart_open, all others (gs, az, hf, …) with fsspec."""

import io
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, BinaryIO, cast

from tplr.concurrency.workers import Workers
from tplr.errors import ConfigError
from tplr.logging import logger
from tplr.streams.sources.bytes import FIRST_FETCHED, MAX_FETCHED, FetchedPieces
from tplr.urls import check_version, scheme_of, version_of

_HTTP = ("http", "https")
_THREADS = 8
_PAUSE_SECONDS, _LONGEST_PAUSE = 0.5, 20.0
# Errors that a retry can't fix. All others are retried, because each transport has its own connection errors.
_FINAL = (FileNotFoundError, PermissionError, NotImplementedError, ImportError, ConfigError, ValueError, TypeError)
# Entries of fsspec's ``info`` that change with a file's content. Others, such as the time of the last access, change
# without it.
_TAGS = ("ETag", "etag", "blob_id", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified")


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
    seconds. A transport that can't seek reads the file again up to there.

    Raises, when it is read:
        DataError: the file's version is not ``version``, or changes meanwhile.
    """

    def __init__(  # noqa: PLR0917
        self, threads: Threads, url: str, offset: int, version: str, timeout: float, ahead: bool
    ) -> None:
        super().__init__(self._begin, offset, ahead)
        self.version = version
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
                    self._file, self.version = open_at(self._url, self._at, self.version)
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


def open_version(url: str, version: str) -> tuple[BinaryIO, str]:
    """Open the file without decompression; return it and its version, empty if unknown.

    Raises:
        ConfigError: as ``_file_system``.
        DataError: its version is not ``version``.
    """
    opened = open_other(url)
    try:
        found = _version(url, opened)
        check_version(url, version, found)
    except BaseException:
        opened.close()
        raise
    return opened, found


def open_at(url: str, offset: int, version: str) -> tuple[BinaryIO, str]:
    """As ``open_version``, from ``offset`` on."""
    opened, found = open_version(url, version)
    if offset:
        try:
            opened.seek(offset)
        except (io.UnsupportedOperation, NotImplementedError):
            logger.warning("%s: can't resume at byte %d; reading it again from the start", url, offset)
            opened.close()  # the attempt to seek may have ended its response
            opened = open_other(url)
            while offset:
                offset -= len(opened.read(min(offset, MAX_FETCHED))) or offset
    return opened, found


def open_other(url: str) -> BinaryIO:
    """Open the file without decompression. Raises ConfigError as ``_file_system``."""
    if scheme_of(url) in _HTTP:
        import smart_open

        return cast(BinaryIO, smart_open.open(url, "rb", compression="disable"))
    system, path = _file_system(url)
    return system.open(path, "rb")


def other_status(url: str) -> tuple[int, str]:
    """Return the size, and the ETag or an equivalent; 0 and empty if unknown."""
    if scheme_of(url) in _HTTP:
        with open_other(url) as file:
            return _http_status(file)
    system, path = _file_system(url)
    return system.info(path).get("size") or 0, str(system.ukey(path))


def _http_status(file: BinaryIO) -> tuple[int, str]:
    """As ``other_status``, of a file that was opened just now."""
    headers: Mapping[str, str] = cast(Any, file).response.headers
    size = headers.get("Content-Length", "")
    return int(size) if size.isdecimal() else 0, headers.get("ETag") or headers.get("Last-Modified", "")


def _version(url: str, file: BinaryIO) -> str:
    """Return the version of a file that was opened just now."""
    if scheme_of(url) in _HTTP:
        size, tag = _http_status(file)
    else:
        system, path = _file_system(url)
        info = system.info(path)
        size, tag = info.get("size") or 0, next((str(info[name]) for name in _TAGS if info.get(name)), "")
    return version_of(size, tag) if size else tag and f":{tag}"


def other_matches(url: str) -> list[str]:
    """Return the files that match a pattern, sorted. Raises FileNotFoundError if there is none."""
    system, path = _file_system(url)
    found = sorted(system.unstrip_protocol(name) for name in system.glob(path) if system.isfile(name))
    if not found:
        raise FileNotFoundError(f"{url}: no file matches")
    return found


def _file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it.

    Raises:
        ConfigError: fsspec does not know the scheme, or needs a package that is not installed.
    """
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{url}: {error} (expected paths, s3://, r2://, http://, https://, and the schemes of fsspec)"
        ) from error
