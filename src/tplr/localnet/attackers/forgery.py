"""Plans a hostile node's behaviour in each window, and forges documents.

The plan follows from a seed. A forgery is a pure function of the true document's bytes and a random stream. It needs no
schema: it changes the parts that all documents share: lists, hashes, sizes, uids and window numbers.
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
    """Return a hostile node's behaviour in a window. Each cycle of windows has all behaviours once, in random order."""
    cycle, place = divmod(window, len(BEHAVIOURS))
    return random.Random(derive("behaviours", seed, cycle)).sample(BEHAVIOURS, len(BEHAVIOURS))[place]


def falsified(body: bytes, random: random.Random) -> bytes:
    """Return the document changed by a random one of ``FORGERIES``; the same bytes if none of them changes it."""
    for forge in random.sample(FORGERIES, len(FORGERIES)):
        document = json.loads(body)
        if (false := forge(document, random)) != document:
            return encoded(false)
    return body


def with_false_hashes(body: bytes, random: random.Random) -> bytes:
    """Return the document with every hash, including fingerprints, replaced by one that matches nothing."""
    return encoded(_other_hashes(json.loads(body), random))


def encoded(document: Any) -> bytes:
    """Return a JSON value's bytes, in the format of nodes."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode()


def bomb(body: bytes, random: random.Random, size: int = BOMB_BYTES) -> bytes:
    """Return a document of about ``size`` bytes that costs an unprotected reader much time or memory."""
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
    """Return a copy of a JSON value with ``change(name, value)`` applied to every entry, innermost first."""
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
    """Add an unlisted uid to lists of uids and to tables by uid."""

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
    """Move the windows that a document announces far ahead. Its own window stays, or no reader would read further."""
    announced = ("start_window", "first_effective_window")
    return _mapped(document, lambda name, value: value + FAR_WINDOW if name in announced else value)


def _nothing_in_it(document: Any, _: random.Random) -> Any:
    return _mapped(document, lambda _, value: type(value)() if isinstance(value, list) else value)


FORGERIES: tuple[Forgery, ...] = (_huge_sizes, _unlisted_uids, _other_hashes, _far_windows, _nothing_in_it)
