"""One page of a listing: a pure function of the bucket's sorted keys."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """Keys, and common prefixes, each of which replaces a group of keys. The next page starts after key ``resume``."""

    keys: tuple[str, ...]
    prefixes: tuple[str, ...]
    resume: str | None


def list_page(keys: Sequence[str], *, prefix: str, delimiter: str, after: str, limit: int) -> Page:
    """The first ``limit`` entries after ``after`` among the keys that begin with ``prefix``.

    Keys that contain ``delimiter`` after the prefix are grouped by their text up to it; a group is one entry.

    Args:
        keys: sorted by code point, which is the order of their UTF-8 bytes.
        after: a key, or the ``resume`` of the previous page; keys after it are listed.
    """
    found: list[str] = []
    groups: list[str] = []
    at = max(bisect.bisect_right(keys, after), bisect.bisect_left(keys, prefix))
    while at < len(keys) and keys[at].startswith(prefix):
        if len(found) + len(groups) == limit:
            # An empty page has no key to resume after, so it is the last one.
            return Page(tuple(found), tuple(groups), keys[at - 1] if limit else None)
        key = keys[at]
        cut = key.find(delimiter, len(prefix)) if delimiter else -1
        if cut < 0:
            found.append(key)
            at += 1
        else:
            group = key[: cut + len(delimiter)]
            groups.append(group)
            at = _end_of_group(keys, group, at)
    return Page(tuple(found), tuple(groups), None)


def _end_of_group(keys: Sequence[str], group: str, start: int) -> int:
    """Index of the first key from ``start`` on that does not begin with ``group``."""
    return bisect.bisect_right(keys, group, lo=start, key=lambda key: key[: len(group)])
