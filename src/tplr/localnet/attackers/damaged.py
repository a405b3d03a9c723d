"""A miner that damages its updates in 20 ways."""

from collections.abc import Iterator

import numpy as np

from tplr.localnet.attackers.honest import Cheat
from tplr.localnet.simulation import World


class Malformed(Cheat):
    """Sends a malformed update in every window, cycling through 20 kinds of damage."""

    def body(self, world: World, window: int) -> bytes | None:
        """Return a damaged honest update."""
        body = super().body(world, window)
        assert body is not None
        ways = list(malformed(body, world, self.uid, window))
        return ways[window % len(ways)]


def malformed(body: bytes, world: World, uid: int, window: int) -> Iterator[bytes]:
    """Yield 20 malformed variants of an update."""
    spec = world.spec
    start, tensor = spec.data_start, next(one for one in spec.tensors.values() if not one.dense)
    random = np.random.default_rng(window).bytes(len(body))
    nan, infinite, huge = (np.float32(x).tobytes() for x in (np.nan, np.inf, 3e38))

    def patched(where: int, what: bytes) -> bytes:
        return body[:where] + what + body[where + len(what) :]

    yield b""  # empty
    yield body[:-1]  # a byte short
    yield body + b"\0"  # a byte more
    yield body[: len(body) // 2]  # half of it
    yield random  # noise of the right length
    yield b"\0" * len(body)  # zeros of the right length
    yield patched(0, (2**40).to_bytes(8, "little"))  # a header of a terabyte
    yield patched(0, (0).to_bytes(8, "little"))  # no header
    yield patched(8, b"\x80\x04")  # a pickle's first bytes
    yield patched(8, b"[" * 64)  # JSON nested deep
    yield body.replace(spec.layout.encode(), spec.layout[::-1].encode())  # of another scheme
    yield body.replace(f'"window":"{window:016d}"'.encode(), f'"window":"{window + 1:016d}"'.encode())
    yield body.replace(f'"uid":"{uid:05d}"'.encode(), f'"uid":"{uid + 1:05d}"'.encode())
    yield patched(start, nan)
    yield patched(start, infinite)
    yield patched(start, huge)
    if tensor.grouped:  # whose indices are valid whatever their bits are
        yield patched(start - len(spec.tail), b"[")  # metadata without an end
        yield patched(8 + len(spec.head), b"!")  # metadata that no update has
    else:
        yield patched(tensor.indices.start, b"\xff" * (tensor.indices.stop - tensor.indices.start))  # too many
        yield patched(tensor.indices.start, b"\0" * (tensor.indices.stop - tensor.indices.start))  # too few indices
    yield body[:start] + random[start:]  # a true header, noise below it
    yield patched(start - 2, b"!!")  # a header that is no JSON
