"""Scripted failures of a network or a server, selected by request and count.

server.faults.add(r"^GET /bucket/key", Status(503), times=2)
server.faults.add(r"^PUT ", LoseResponse())

A server that runs as a process takes its rules from a JSON file, which may change at any time.
"""

import asyncio
import re
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from aiohttp import web

from tplr.errors import ConfigError
from tplr.testing.s3server.request import Content
from tplr.testing.s3server.watched import WatchedJson


@dataclass(frozen=True)
class Status:
    """Answers with this status and error code instead of serving. ``Status(200)`` is S3's error behind a 200."""

    status: int
    code: str = "InternalError"


@dataclass(frozen=True)
class Delay:
    """Waits ``seconds``, then serves as usual."""

    seconds: float


@dataclass(frozen=True)
class Reset:
    """Resets the connection (RST) before the request is served."""


@dataclass(frozen=True)
class LoseResponse:
    """Serves the request, then resets the connection (RST) instead of replying."""


@dataclass(frozen=True)
class Truncate:
    """Announces the whole body, sends ``after`` bytes of it, then closes the connection: FIN, or RST if ``reset``."""

    after: int
    reset: bool = False


@dataclass(frozen=True)
class FlipBit:
    """Flips the lowest bit of byte ``at`` of the reply's body."""

    at: int = 0


@dataclass(frozen=True)
class FlipSentBit:
    """Flips the lowest bit of byte ``at`` of the request's body before it is checked and stored."""

    at: int = 0


@dataclass(frozen=True)
class IgnoreDigests:
    """Stores the request's body without checking its digests (Content-MD5, signed SHA-256, x-amz-checksum)."""


@dataclass(frozen=True)
class Drip:
    """Sends the body at ``bytes_per_second``; with 0, sends the headers and then nothing."""

    bytes_per_second: float


@dataclass(frozen=True)
class Instead:
    """Serves the object with ``suffix`` appended to its key, like a bucket owner that shows readers different
    objects."""

    suffix: str


Action = Status | Delay | Reset | LoseResponse | Truncate | FlipBit | FlipSentBit | IgnoreDigests | Drip | Instead


class ConnectionCut(Exception):
    """Ends a body before its announced length."""

    def __init__(self, *, reset: bool) -> None:
        self.reset = reset
        super().__init__("cut by a fault")


@dataclass
class Fault:
    """One rule.

    Attributes:
        left: number of requests to which it still applies; None: all.
        every: it applies to every ``every``-th matching request.
        seen: number of matching requests.
    """

    pattern: re.Pattern[str]
    action: Action
    left: int | None
    every: int = 1
    seen: int = 0

    def applies(self, request: str) -> bool:
        """Count this request, and return whether the rule applies to it."""
        if self.left == 0 or not self.pattern.search(request):
            return False
        self.seen += 1
        if self.seen % self.every:
            return False
        self.left = None if self.left is None else self.left - 1
        return True


class Faults:
    """The rules of one server. The first one that applies to a request is used.

    Args:
        file: JSON file with more rules, see ``parse_faults``.

    Raises:
        ConfigError: the file can't be used. If it becomes invalid later, that is logged, and the last valid rules stay.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._rules: list[Fault] = []
        self._file = WatchedJson(file, parse_faults) if file else None

    def add(self, pattern: str, action: Action, *, times: int | None = 1, every: int = 1) -> Fault:
        """Adds a rule.

        Args:
            pattern: regular expression, searched in ``METHOD /bucket/key?query`` as sent (percent-encoded).
            times: number of requests it applies to; None: all.
            every: 2 skips the first, the third … of the matching requests, and so on.
        """
        fault = Fault(re.compile(pattern), action, times, every)
        self._rules.append(fault)
        return fault

    def clear(self) -> None:
        self._rules.clear()

    def take(self, method: str, target: str) -> Action | None:
        if self._file:
            self._file.changed()
        rules = [*self._rules, *(self._file.content if self._file else ())]
        return next((fault.action for fault in rules if fault.applies(f"{method} {target}")), None)


def parse_faults(rules: Any) -> list[Fault]:
    """``[{"pattern": "^GET /bucket/", "fault": "Delay", "seconds": 3600}, ...]``: the names of the classes above.

    ``times`` (default null: all) and ``every`` are as in ``Faults.add``; the other names are the fault's own.

    Raises:
        ConfigError: names the first invalid rule.
    """
    kinds = {kind.__name__: kind for kind in get_args(Action)}
    found: list[Fault] = []
    for rule in rules if isinstance(rules, list) else [rules]:
        try:
            rest = dict(rule) if isinstance(rule, Mapping) else {}
            pattern, kind = re.compile(rest.pop("pattern")), kinds[rest.pop("fault")]
            times, every = rest.pop("times", None), rest.pop("every", 1)
            found.append(Fault(pattern, kind(**rest), times, every))
        except (KeyError, TypeError, re.error) as error:
            text = f"fault {str(rule)[:200]}: {type(error).__name__} {error}; expected a pattern, a fault of {[*kinds]}"
            raise ConfigError(f"{text} and its own fields") from error
    return found


class DamagedContent:
    """A request's body with one bit flipped."""

    def __init__(self, content: Content, flip: FlipSentBit) -> None:
        self._content = content
        self._flip = flip

    def iter_any(self) -> AsyncIterator[bytes]:
        return damage(self._content.iter_any(), FlipBit(self._flip.at))


async def damage(blocks: AsyncIterator[bytes], action: Action | None) -> AsyncIterator[bytes]:
    """Yield the body with the fault applied; raise ConnectionCut at an early end."""
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
    pause = 0.05  # seconds between pieces
    if rate <= 0:
        await asyncio.Event().wait()
    size = max(1, int(rate * pause))
    for start in range(0, len(block), size):
        piece = block[start : start + size]
        await asyncio.sleep(len(piece) / rate)
        yield piece


def break_connection(request: web.Request, *, reset: bool) -> None:
    """Closes the connection of the request: RST at once, or FIN after the bytes already written."""
    transport = request.transport
    if transport is None:
        return
    if reset:
        # A socket with a linger time of 0 is reset when it is closed.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()  # pyright: ignore[reportAttributeAccessIssue] - TCP transports are write transports
    else:
        transport.close()
