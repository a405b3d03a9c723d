"""Emulates a link to a server, 1 Gbit/s in each direction, shared by all its connections: a relay in its own process.

    python scripts/benchmarks/slow_link.py ENDPOINT [--mbit 20]

Prints its port, and serves until standard input ends.
"""

import argparse
import asyncio
import contextlib
import sys
import time

LINK_MBIT = 1000  # Mbit per second, in each direction


class Lane:
    """One direction of a link, for all its connections."""

    def __init__(self, mbit: float) -> None:
        self.free_at = 0.0
        self._bytes = mbit * 1e6 / 8  # bytes per second

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            while data := await reader.read(2**16):
                now = time.perf_counter()
                # Catches up after a sleep that lasted too long.
                self.free_at = max(self.free_at, now - 0.005) + len(data) / self._bytes
                await asyncio.sleep(self.free_at - now)
                writer.write(data)
                await writer.drain()


async def relay(endpoint: str, mbit: float) -> None:
    """Print the port of a link to ``endpoint``, and serve until standard input ends."""
    up, down = Lane(mbit), Lane(mbit)
    host, port = endpoint.removeprefix("http://").split(":")

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, there = await asyncio.open_connection(host, int(port))
        await asyncio.gather(up.carry(reader, there), down.carry(back, writer))

    async with await asyncio.start_server(connect, host, 0) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint")
    parser.add_argument("--mbit", type=float, default=LINK_MBIT)
    given = parser.parse_args()
    asyncio.run(relay(given.endpoint, given.mbit))
