"""An S3 server that enforces R2's rules, for tests."""

import argparse
import asyncio
import errno
import json
import logging
import os
import signal
import sys
from pathlib import Path

from tplr.errors import TplrError
from tplr.files import atomic_write
from tplr.testing.s3server.rules import Rules
from tplr.testing.s3server.server import serve


def main() -> int:
    """Run the server. Returns 0 after SIGTERM or SIGINT, 2 if it could not start; each reason is one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m tplr.testing.s3server", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of the objects; created if missing")
    parser.add_argument(
        "--keys", type=Path, required=True, help="JSON file of access keys and their rights; reloaded when it changes"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=9000, help="0 takes a free port (default: %(default)s)")
    parser.add_argument("--ready-file", type=Path, help="written once the server listens: JSON of host, port, pid")
    parser.add_argument("--fsync", action="store_true", help="sync objects to disk: they survive a power cut")
    parser.add_argument("--no-write-rate", action="store_true", help="allow more than one write per second to a key")
    parser.add_argument(
        "--permission-delay",
        type=float,
        default=0.0,
        help="seconds until a changed key file takes effect",
    )
    parser.add_argument("--faults", type=Path, help="JSON file of failures on demand; reloaded when it changes")
    parser.add_argument("--requests", type=Path, help="file that gets a line of JSON for each request")
    args = parser.parse_args()
    if not 0 <= args.port < 2**16:
        parser.error(f"--port {args.port}: expected 0 to 65535")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    try:
        asyncio.run(_run(args))
    except (TplrError, OSError) as error:
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        text = f"port {args.port} is in use on {args.host}; choose another with --port" if in_use else error
        print(text, file=sys.stderr)  # noqa: T201
        return 2
    return 0


async def _run(args: argparse.Namespace) -> None:
    rules = Rules(one_write_per_second=not args.no_write_rate, permission_delay=args.permission_delay)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    serving = serve(
        args.root,
        args.keys,
        host=args.host,
        port=args.port,
        rules=rules,
        fsync=args.fsync,
        faults=args.faults,
        requests=args.requests,
    )
    async with serving as server:
        if args.ready_file:
            facts = {"host": server.host, "port": server.port, "pid": os.getpid()}
            # Atomic: a reader that waits for the file may read it as soon as it exists.
            await asyncio.to_thread(atomic_write, args.ready_file, json.dumps(facts).encode())
        logging.info("serving %s on %s", args.root, server.endpoint)
        await stop.wait()


if __name__ == "__main__":
    sys.exit(main())
