"""Runs the server in this process's event loop, while a context is open."""

import fcntl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from tplr.errors import ConfigError
from tplr.testing.s3server.app import S3App
from tplr.testing.s3server.blobfile import BLOCK
from tplr.testing.s3server.faults import Faults
from tplr.testing.s3server.keys import KeyTable
from tplr.testing.s3server.objects import ObjectFiles
from tplr.testing.s3server.rules import Rules
from tplr.testing.s3server.storage import Storage

# Above the limits of the rules (keys of 1024 bytes, three times as long when encoded; 8 KiB of metadata), so that the
# rules refuse a request, and not the HTTP parser.
MAX_LINE = 16 * 1024
# Connections that wait to be accepted. The system drops packets of others, and clients repeat them after ever longer
# times; aiohttp's 128 is less than a validator opens at once.
BACKLOG = 1024


class FolderInUse(ConfigError):
    """Another server uses the folder."""


@dataclass(frozen=True)
class Server:
    """A listening server. ``keys.replace(table)`` changes rights, ``faults.add(...)`` scripts failures."""

    host: str
    port: int
    keys: KeyTable
    faults: Faults
    objects: ObjectFiles

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"


@asynccontextmanager
async def serve(
    root: Path,
    keys: Path | Mapping[str, Any],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    rules: Rules | None = None,
    fsync: bool = False,
    faults: Path | None = None,
    clock: Callable[[], float] = time.time,
    requests: Path | None = None,
    shared: bool = False,
) -> AsyncIterator[Server]:
    """Serves the buckets under ``root`` while the context is open.

    Args:
        root: created if missing; one server at a time may use it, or several with ``shared``.
        keys: the key table (:func:`tplr.testing.s3server.keys.parse_keys`), or the path of a JSON file with one. Every
            bucket that it names exists.
        port: 0 takes a free port.
        fsync: objects survive a power cut, not only a crash of the process.
        faults: a JSON file of rules (``faults.parse_faults``), in addition to those of ``Server.faults``.
        clock: unix seconds; sets LastModified, and signatures are checked against it.
        requests: a file that gets a line of JSON for each request: arrival (``time``, unix seconds), duration
            (``seconds``), ``method``, ``path`` with query, ``status``, ``bytes`` of the response's body.
        shared: other servers with ``shared`` may use ``root``, too; none of them is written to.

    Raises:
        FolderInUse: another server uses ``root``.
        ConfigError: the key table or the file of faults is invalid.
        OSError: the port is in use (EADDRINUSE).
    """
    rules = rules or Rules()
    with _locked(root, shared=shared), requests.open("a") if requests else nullcontext() as log:
        table = KeyTable(keys, delay=rules.permission_delay)
        storage = Storage(ObjectFiles(root, fsync=fsync, clock=clock), rules)
        scripted = Faults(faults)
        app = web.Application()
        # (?s): a key may hold a newline.
        app.router.add_route("*", "/{target:(?s:.*)}", S3App(storage, table, scripted, clock, log).handle)
        runner = web.AppRunner(
            app,
            access_log=None,
            # Bodies are stored as they arrive; the reader decompresses them.
            auto_decompress=False,
            read_bufsize=BLOCK,  # aiohttp's default stops a large body's sender thousands of times
            max_line_size=MAX_LINE,
            max_field_size=MAX_LINE,
            shutdown_timeout=0.5,
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
            yield Server(host, runner.addresses[0][1], table, scripted, storage.objects)
        finally:
            await runner.cleanup()


@contextmanager
def _locked(root: Path, *, shared: bool) -> Iterator[None]:
    """Lock ``root``: the index of each of two servers on one folder would miss the other's writes."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderInUse(f"{root}: another S3 server uses this folder; choose another with --root") from error
        yield
