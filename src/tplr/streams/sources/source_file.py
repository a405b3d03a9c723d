"""A file of any scheme, compressed or not: its bytes from any offset on, or all of it as a seekable file."""

import contextlib
import io
import shutil
import tempfile
from typing import Any, BinaryIO, NamedTuple, cast

from tplr.errors import DataError
from tplr.streams.iterator import PipelineContext
from tplr.streams.sources.bytes import InflatedPieces, LocalPieces, Pieces
from tplr.streams.sources.compression import Compression, compression_of
from tplr.streams.sources.others import OtherPieces, Threads, open_version, other_matches, other_status
from tplr.urls import (
    STORE_SCHEMES,
    check_version,
    file_name,
    is_pattern,
    local_matches,
    local_path,
    local_version,
    scheme_of,
    version_of,
)

TIMEOUT = 60.0  # seconds of retries


class FileStatus(NamedTuple):
    """Size in bytes, and a version that changes with the content (such as an ETag); 0 and empty if unknown."""

    size: int
    version: str


class SourceFile:
    """A file at a path or URL. Nothing is opened before a method is called.

    Args:
        timeout: seconds of retries.
        ahead: fetch pieces of remote files before they are read.
    """

    def __init__(self, context: PipelineContext, url: str, timeout: float = TIMEOUT, *, ahead: bool = True) -> None:
        self._context, self.url, self._timeout, self._ahead = context, url, timeout, ahead
        self.scheme = scheme_of(url)
        self.compression: Compression | None = compression_of(file_name(url))[1]

    def pieces(self, offset: int = 0, version: str = "") -> Pieces:
        """Return the decompressed bytes from ``offset`` on.

        Raises, also when they are read:
            DataError: the file's version is not ``version``, or it does not have its suffix's compression.
            StoreError, OSError: it can't be read.
        """
        start = 0 if self.compression else offset
        pieces: Pieces
        if self.scheme == "file":
            pieces = LocalPieces(local_path(self.url), start, version)
        elif self.scheme in STORE_SCHEMES:
            from tplr.streams.sources.objects import StorePieces

            pieces = StorePieces(self._stores(), self.url, start, version, self._timeout, self._ahead)
        else:
            pieces = OtherPieces(self._context.shared(Threads), self.url, start, version, self._timeout, self._ahead)
        return InflatedPieces(pieces, self.compression, self.url, offset) if self.compression else pieces

    def seekable(self, version: str = "") -> tuple[BinaryIO, str]:
        """Return the decompressed file and its version. A file that can't seek is first copied to a temporary file,
        which takes at most half of the free space of its disk.

        Raises:
            DataError: the temporary file would be larger; or as ``pieces``.
            StoreError, OSError: as ``pieces``.
        """
        if self.compression:
            return self._copied(version)
        if self.scheme == "file":
            file = local_path(self.url).open("rb")
            try:
                found = local_version(file.fileno())
                check_version(self.url, version, found)
            except BaseException:
                file.close()
                raise
            return file, found
        if self.scheme in STORE_SCHEMES:
            from tplr.storage.blocking import open_ranged

            file, found = open_ranged(self._stores(), self.url, self._timeout, version)
            return cast(BinaryIO, file), found
        file, found = open_version(self.url, version)
        try:
            file.seek(-1, io.SEEK_END)  # a server may ignore ranges, or not tell the length
        except io.UnsupportedOperation:
            file.close()
            return self._copied(version)
        return file, found

    def status(self) -> FileStatus:
        """Return stored size and version of a file that is not on this machine. Raises StoreError, OSError."""
        if self.scheme in STORE_SCHEMES:
            from tplr.storage.blocking import StoreObject

            stores = self._stores()
            info = stores.submit(StoreObject(stores, self.url, self._timeout).info()).result()
            return FileStatus(info.size, version_of(info.size, info.etag))
        return FileStatus(*other_status(self.url))

    def _stores(self) -> Any:
        from tplr.storage.blocking import BucketConnections

        return self._context.shared(BucketConnections)

    def _copied(self, version: str) -> tuple[BinaryIO, str]:
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
        with contextlib.closing(self.pieces(version=version)) as pieces:
            file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 - the caller closes it
            try:
                while piece := pieces.read():
                    # A file of a few KB can hold gigabytes, and others write to this disk, too.
                    if file.tell() + len(piece) > free // 2:
                        raise DataError(
                            f"{self.url}: its temporary copy takes more than half of the {free} bytes that are free in "
                            f"{folder}: set TMPDIR to a folder on a larger disk"
                        )
                    file.write(piece)
                file.seek(0)
                return file, pieces.version
            except BaseException as error:
                with contextlib.suppress(OSError):  # it may try to write the rest
                    file.close()
                if isinstance(error, OSError) and error.errno and not error.filename:
                    raise OSError(
                        error.errno, f"{error.strerror} while {self.url} was copied there; set TMPDIR", folder
                    ) from error
                raise


def expand_pattern(context: PipelineContext, url: str, timeout: float = TIMEOUT) -> list[str]:
    """Return the files that a pattern matches, sorted; without a pattern, ``url`` itself.

    Raises:
        DataError: it is a folder.
        FileNotFoundError: nothing matches.
        StoreError: a bucket can't be listed.
    """
    scheme = scheme_of(url)
    if not is_pattern(url):
        if scheme == "file" and local_path(url).is_dir():
            raise DataError(f"{url} is a folder: name its files, for instance {url}/*.jsonl")
        return [url]
    if scheme == "file":
        return local_matches(url)
    if scheme in STORE_SCHEMES:
        from tplr.storage.blocking import BucketConnections

        return context.shared(BucketConnections).matches(url, timeout)
    return other_matches(url)
