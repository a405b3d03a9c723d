"""Faults on demand: what a bad network or a bad server does, scripted by request and number of times.

server.faults.add(r"^GET /bucket/key", Status(503), times=2)
server.faults.add(r"^PUT ", LoseResponse())
"""

import asyncio
import re
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass

from aiohttp import web

from tplr.testing.s3server.request import Content


@dataclass(frozen=True)
class Status:
    """Answer so, and do nothing else. ``Status(200, "InternalError")`` is S3's error behind a 200."""

    status: int
    code: str = "InternalError"


@dataclass(frozen=True)
class Delay:
    """Wait ``seconds``, then serve as usual."""

    seconds: float


@dataclass(frozen=True)
class Reset:
    """Break the connection (RST) before the request is served."""


@dataclass(frozen=True)
class LoseResponse:
    """Serve the request, then break the connection (RST) in place of the answer."""


@dataclass(frozen=True)
class Truncate:
    """Announce the whole body, send ``after`` bytes of it, then end the connection: FIN, or RST if ``reset``."""

    after: int
    reset: bool = False


@dataclass(frozen=True)
class FlipBit:
    """Flip the lowest bit of byte ``at`` of the body."""

    at: int = 0


@dataclass(frozen=True)
class FlipSentBit:
    """Flip the lowest bit of byte ``at`` of the request's body on its way here."""

    at: int = 0


@dataclass(frozen=True)
class IgnoreDigests:
    """Take the request's body whatever its Content-MD5 and its signed SHA-256 say."""


@dataclass(frozen=True)
class Drip:
    """Send the body at ``bytes_per_second``; 0 sends the headers and then nothing, for ever."""

    bytes_per_second: float


Action = Status | Delay | Reset | LoseResponse | Truncate | FlipBit | FlipSentBit | IgnoreDigests | Drip


class ConnectionCut(Exception):
    """The body ends here, though more was announced."""

    def __init__(self, *, reset: bool) -> None:
        self.reset = reset
        super().__init__("cut by a fault")


@dataclass
class Fault:
    """One rule; ``left`` is how many requests it still hits, None for all."""

    pattern: re.Pattern[str]
    action: Action
    left: int | None


class Faults:
    """The rules of one server. Each request is hit by the first rule that matches and is not used up."""

    def __init__(self) -> None:
        self._rules: list[Fault] = []

    def add(self, pattern: str, action: Action, *, times: int | None = 1) -> Fault:
        """``pattern`` is searched for in ``METHOD /bucket/key?query`` as it was sent (percent-encoded)."""
        fault = Fault(re.compile(pattern), action, times)
        self._rules.append(fault)
        return fault

    def clear(self) -> None:
        self._rules.clear()

    def take(self, method: str, target: str) -> Action | None:
        for fault in self._rules:
            if fault.left != 0 and fault.pattern.search(f"{method} {target}"):
                fault.left = None if fault.left is None else fault.left - 1
                return fault.action
        return None


class DamagedContent:
    """A request's body with one bit flipped."""

    def __init__(self, content: Content, flip: FlipSentBit) -> None:
        self._content = content
        self._flip = flip

    def iter_any(self) -> AsyncIterator[bytes]:
        return damage(self._content.iter_any(), FlipBit(self._flip.at))


async def damage(blocks: AsyncIterator[bytes], action: Action | None) -> AsyncIterator[bytes]:
    """The body as the fault leaves it; raises ConnectionCut where it ends early."""
    sent = 0
    async for block in blocks:
        match action:
            case FlipBit(at) if sent <= at < sent + len(block):
                index = at - sent
                yield block[:index] + bytes([block[index] ^ 1]) + block[index + 1 :]
            case Truncate(after, reset) if sent + len(block) >= after:
                yield block[: after - sent]
                raise ConnectionCut(reset=reset)
            case Drip(rate):
                async for piece in _drip(block, rate):
                    yield piece
            case _:
                yield block
        sent += len(block)


async def _drip(block: bytes, rate: float) -> AsyncIterator[bytes]:
    pause = 0.05  # seconds; the pieces are what goes into one
    if rate <= 0:
        await asyncio.Event().wait()
    size = max(1, int(rate * pause))
    for start in range(0, len(block), size):
        piece = block[start : start + size]
        await asyncio.sleep(len(piece) / rate)
        yield piece


def break_connection(request: web.Request, *, reset: bool) -> None:
    """Ends the connection under the request: RST at once, or FIN behind what was already written."""
    transport = request.transport
    if transport is None:
        return
    if reset:
        # A socket that lingers for no time is reset when it is closed.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()  # pyright: ignore[reportAttributeAccessIssue] - TCP transports are write transports
    else:
        transport.close()
