"""Attributes the records of a uid to its owners: a uid that changes hands is another node."""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from tplr.page.history import WindowRecord

OwnRecords = Sequence[WindowRecord | None]  # by window; None: the uid had another owner


class UidOwner(NamedTuple):
    """A uid and its owner's hotkey, which is empty if it is not known."""

    uid: int
    hotkey: str


class Owners:
    """The owners of all uids in consecutive windows.

    A window whose record lacks a uid's owner counts for the owner of the windows before, unless the next known owner is
    another one.
    """

    def __init__(self, span: Sequence[WindowRecord]) -> None:
        self._span = span
        uids = {uid for one in span for uid in one.uids}
        self._hotkeys = {uid: _filled([one.hotkeys.get(uid) for one in span]) for uid in uids}

    def of(self, uids: Callable[[WindowRecord], Iterable[int]]) -> set[UidOwner]:
        """Return the owners, in each window, of the uids that ``uids`` returns of its record."""
        return {UidOwner(uid, self._hotkeys[uid][index]) for index, one in enumerate(self._span) for uid in uids(one)}

    def newest(self, uid: int, windows: Collection[int]) -> UidOwner:
        """Return the owner of ``uid`` in the newest of ``windows``; in the last window if none of them is here."""
        if uid not in self._hotkeys:
            return UidOwner(uid, "")
        known = [index for index, one in enumerate(self._span) if one.window in windows]
        return UidOwner(uid, self._hotkeys[uid][known[-1] if known else -1])

    def records(self, node: UidOwner) -> OwnRecords:
        """Return the records of the windows in which ``node`` had its uid."""
        return [
            one if hotkey == node.hotkey else None
            for one, hotkey in zip(self._span, self._hotkeys[node.uid], strict=True)
        ]

    def in_order(self, nodes: Iterable[UidOwner]) -> list[UidOwner]:
        """Sort by uid; owners of one uid by their first window."""
        return sorted(nodes, key=lambda node: (node.uid, self._hotkeys[node.uid].index(node.hotkey)))


def _filled(hotkeys: Sequence[str | None]) -> list[str]:
    """Return each window's owner, "" if it is not known."""
    before = accumulate(hotkeys, _newer)
    after = [*accumulate(reversed(hotkeys), _newer)]
    return [
        last if last and following in (None, last) else ""
        for last, following in zip(before, reversed(after), strict=True)
    ]


def _newer(known: str | None, own: str | None) -> str | None:
    return own or known
