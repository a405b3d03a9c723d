"""A link of 1 Gbit/s each way to a server, shared by all its connections: a relay in a process of its own.

    python scripts/benchmarks/slow_link.py ENDPOINT

Prints its port, and serves until standard input ends.
"""

import asyncio
import contextlib
import sys
import time

LINK_BYTES = 10**9 // 8  # a second, each way


class Lane:
    """One direction of a link, for all its connections."""

    def __init__(self) -> None:
        self.free_at = 0.0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            while data := await reader.read(2**16):
                now = time.perf_counter()
                # Who comes late, as sleepers do, makes up for it.
                self.free_at = max(self.free_at, now - 0.005) + len(data) / LINK_BYTES
                await asyncio.sleep(self.free_at - now)
                writer.write(data)
                await writer.drain()


async def relay(endpoint: str) -> None:
    """Print the port of a link to ``endpoint``, and serve until standard input ends."""
    up, down = Lane(), Lane()
    host, port = endpoint.removeprefix("http://").split(":")

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, there = await asyncio.open_connection(host, int(port))
        await asyncio.gather(up.carry(reader, there), down.carry(back, writer))

    async with await asyncio.start_server(connect, host, 0) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(relay(sys.argv[1]))
