"""A server that runs while its context is open, in this process's event loop."""

import fcntl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from tplr.errors import ConfigError
from tplr.testing.s3server.app import S3App
from tplr.testing.s3server.blobfile import BLOCK
from tplr.testing.s3server.faults import Faults
from tplr.testing.s3server.keys import KeyTable
from tplr.testing.s3server.objects import ObjectStore
from tplr.testing.s3server.rules import Rules
from tplr.testing.s3server.storage import Storage

# Above what the rules allow (keys of 1024 bytes, thrice as long when encoded; 8 KiB of metadata), so that the rules
# answer and not the HTTP parser.
MAX_LINE = 16 * 1024


@dataclass(frozen=True)
class Server:
    """A listening server. ``keys.replace(table)`` changes rights, ``faults.add(...)`` scripts failures."""

    host: str
    port: int
    keys: KeyTable
    faults: Faults
    objects: ObjectStore

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
    clock: Callable[[], float] = time.time,
) -> AsyncIterator[Server]:
    """Serves the buckets under ``root`` until the context ends.

    Args:
        root: made if missing; one server at a time may have it.
        keys: the key table, or the path of one in JSON (:mod:`tplr.testing.s3server.keys`). Every bucket that it
            names exists.
        port: 0 takes a free one.
        fsync: survive a loss of power too, not only of the process.
        clock: unix seconds: what LastModified says and signatures are compared with.

    Raises:
        ConfigError: the key table is wrong, or another server has ``root``.
        OSError: the port is in use (EADDRINUSE).
    """
    rules = rules or Rules()
    with _sole_owner(root):
        table = KeyTable(keys, delay=rules.permission_delay)
        storage = Storage(ObjectStore(root, fsync=fsync, clock=clock), rules)
        faults = Faults()
        app = web.Application()
        # (?s): a key may hold a newline.
        app.router.add_route("*", "/{target:(?s:.*)}", S3App(storage, table, faults, clock).handle)
        runner = web.AppRunner(
            app,
            access_log=None,
            # Bodies are stored as they come: decompressing them is the reader's business.
            auto_decompress=False,
            read_bufsize=BLOCK,  # aiohttp's default stops a large body's sender thousands of times
            max_line_size=MAX_LINE,
            max_field_size=MAX_LINE,
            shutdown_timeout=0.5,
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            yield Server(host, runner.addresses[0][1], table, faults, storage.objects)
        finally:
            await runner.cleanup()


@contextmanager
def _sole_owner(root: Path) -> Iterator[None]:
    """Two servers on one folder would each trust an index that the other makes wrong."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{root}: another storage server has this folder; choose another with --root") from error
        yield
