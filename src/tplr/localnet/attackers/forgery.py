"""What a hostile node does in each window, and the false documents that it writes.

A plan follows from a seed. A forgery is a pure function of the true document's bytes and a random stream, and knows no
schema: it changes what every document has, lists, hashes, sizes, uids and numbers of windows.
"""

import json
import random
import re
from collections.abc import Callable
from typing import Any, Literal, get_args

from tplr.seeds import derive

Behaviour = Literal["honest", "equivocate", "false-set", "false-fingerprint", "bomb", "silent", "hang"]
BEHAVIOURS: tuple[Behaviour, ...] = get_args(Behaviour)

BOMB_BYTES = 2**24
HUGE = 2**50
UNLISTED_UID = 60_000
FAR_WINDOW = 10**6

SHA256 = re.compile(r"[0-9a-f]{64}")

Forgery = Callable[[Any, random.Random], Any]


def behaviour(seed: int, window: int) -> Behaviour:
    """Of a hostile node in a window: each once in as many windows, in an order that follows from the seed."""
    cycle, place = divmod(window, len(BEHAVIOURS))
    return random.Random(derive("behaviours", seed, cycle)).sample(BEHAVIOURS, len(BEHAVIOURS))[place]


def falsified(body: bytes, random: random.Random) -> bytes:
    """A document that says something else, by one of ``FORGERIES`` that changes it; the same bytes if none does."""
    for forge in random.sample(FORGERIES, len(FORGERIES)):
        document = json.loads(body)
        if (false := forge(document, random)) != document:
            return encoded(false)
    return body


def with_false_hashes(body: bytes, random: random.Random) -> bytes:
    """A document in which every hash, so also every fingerprint, is another one that nothing has."""
    return encoded(_other_hashes(json.loads(body), random))


def encoded(document: Any) -> bytes:
    """JSON as nodes write it."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode()


def bomb(body: bytes, random: random.Random, size: int = BOMB_BYTES) -> bytes:
    """A document of about ``size`` bytes that costs an unwary reader much time or memory."""
    kinds: list[Callable[[], bytes]] = [
        lambda: b"[" * size,
        lambda: b'{"a":' * (size // 6) + b"1" + b"}" * (size // 6),
        lambda: body + b" " * (size - len(body)),
        lambda: b'{"included":[' + b"0," * (size // 2) + b"0]}",
        lambda: body.rstrip()[:-1] + b"".join(b',"x%d":0' % number for number in range(size // 12)) + b"}",
        lambda: b'{"window":' + b"9" * size + b"}",
        lambda: b'{"version":"' + b"v" * size + b'"}',
        lambda: bytes(size),
    ]
    return random.choice(kinds)()


def _mapped(value: Any, change: Callable[[str, Any], Any], name: str = "") -> Any:
    """A copy of a JSON value in which every entry, innermost first, is what ``change`` makes of its name and value."""
    if isinstance(value, dict):
        value = {key: _mapped(inner, change, key) for key, inner in value.items()}
    elif isinstance(value, list):
        value = [_mapped(inner, change, name) for inner in value]
    return change(name, value)


def _other_hashes(document: Any, random: random.Random) -> Any:
    others: dict[str, str] = {}

    def change(_: str, value: Any) -> Any:
        if isinstance(value, str) and SHA256.fullmatch(value):
            return others.setdefault(value, random.randbytes(32).hex())
        return value

    return _mapped(document, change)


def _huge_sizes(document: Any, _: random.Random) -> Any:
    return _mapped(document, lambda name, value: HUGE if name == "size" else value)


def _unlisted_uids(document: Any, random: random.Random) -> Any:
    """Lists of uids, and tables by uid, have one more."""

    def change(_: str, value: Any) -> Any:
        if isinstance(value, list) and value and all(type(one) is int for one in value):
            return [*value, UNLISTED_UID]
        if isinstance(value, list) and value and all(isinstance(one, dict) and "uid" in one for one in value):
            return [*value, {**random.choice(value), "uid": UNLISTED_UID}]
        if isinstance(value, dict) and value and all(key.isdecimal() for key in value):
            return {**value, str(UNLISTED_UID): random.choice([*value.values()])}
        return value

    return _mapped(document, change)


def _far_windows(document: Any, _: random.Random) -> Any:
    """Windows that a document announces are far ahead; its own stays, else nobody would look further."""
    announced = ("start_window", "first_effective_window")
    return _mapped(document, lambda name, value: value + FAR_WINDOW if name in announced else value)


def _nothing_in_it(document: Any, _: random.Random) -> Any:
    return _mapped(document, lambda _, value: type(value)() if isinstance(value, list) else value)


FORGERIES: tuple[Forgery, ...] = (_huge_sizes, _unlisted_uids, _other_hashes, _far_windows, _nothing_in_it)
