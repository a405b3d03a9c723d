"""Assigns the places of each epoch to ranks, and divides the rest of an epoch between another number of ranks."""

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Sequence
from operator import length_hint
from typing import Any, NamedTuple

from tplr.sharding import Share
from tplr.streams.state import StateReader

_MAX_EPOCH = 1 << 32
ENDLESS = 1 << 62  # places of an order without end


class SharedPlaces:
    """The places of one share: every ``count``-th of an epoch's ``length`` places, epoch after epoch.

        while True:
            for place in places.run: ...
            if not places.advance():
                break

    The state is a number, ``next``. After a change of the number of ranks it also has ``rest``: ranges of places before
    ``next`` that some former ranks had not read. For a shuffled epoch it has a check sum as well, because a wrong epoch
    would cost a shuffle for each previous epoch.

    Attributes:
        epoch: epoch of the current run.
        run: iterator over its places.

    Raises:
        ValueError: there are fewer places than shares.
        StateError: ``saved`` is damaged.
    """

    def __init__(
        self,
        length: int,
        share: Share,
        repeat: bool,
        what: str,
        saved: StateReader | None = None,
        *,
        shuffled: bool = False,
    ) -> None:
        if length < share.count and (length or repeat):
            raise ValueError(
                f"shard_by_rank: {length} {what} can't be shared by {share.count} ranks × workers: use fewer workers, "
                f"split the data into more {what}, or use stride"
            )
        self.length, self.repeat, self._shuffled = length, repeat, shuffled
        self._share = share
        self.epoch = 0
        self._range = range(share.index, length, share.count)
        self._rest: deque[tuple[int, range]] = deque()
        if saved:
            self._load(*_read(saved, length))
        self.run: Iterator[int] = iter(self._range)

    def left(self) -> range:
        """The remaining places of the current run."""
        return self._range[len(self._range) - length_hint(self.run) :]

    def put_back(self) -> None:
        """Undo the last step of ``run``."""
        self.run = iter(self._range[len(self._range) - length_hint(self.run) - 1 :])

    def following(self) -> int | None:
        """The epoch of the next run; None at the end."""
        if self._rest:
            return self._rest[0][0]
        return self.epoch + 1 if self.repeat else None

    def advance(self) -> bool:
        """Advance to the next run; return False at the end."""
        if self._rest:
            self.epoch, self._range = self._rest.popleft()
        elif self.repeat:
            self.epoch, self._range = self.epoch + 1, range(self._share.index, self.length, self._share.count)
        else:
            return False
        self.run = iter(self._range)
        return True

    def state(self) -> dict[str, Any]:
        runs = [(self.epoch, self.left()), *self._rest]
        epoch, last = runs.pop()
        rest = [[at, run.start, run.stop, run.step] for at, run in runs if run]
        state = {"epoch": epoch, "next": last.start, "step": last.step, **({"rest": rest} if rest else {})}
        return {**state, "check": _check_sum(state)} if self._shuffled else state

    def _load(self, epoch: int, last: range, rest: list[tuple[int, range]]) -> None:
        self._rest.extend([*rest, (epoch, last)])
        self.epoch, self._range = self._rest.popleft()


class Former(NamedTuple):
    """A share before the change: its position (None at the beginning); ``ended``: it has read all its places."""

    share: Share
    saved: StateReader | None
    ended: bool = False


def divide_places(
    parts: Sequence[Former], length: int, share: Share, finer: int = 1, *, shuffled: bool = False
) -> dict[str, Any]:
    """Return the state of ``share`` for the places that ``parts``, all former shares, have left.

    Up to the last place that any former share has read, the remaining ranges are divided evenly. Beyond it each share
    takes every ``count``-th place, as in any epoch. Each place becomes ``finer`` places.
    """
    read = [_read(part.saved, length) if part.saved else (0, _untouched(part, length), []) for part in parts]
    epoch = max((at for at, _, _ in read), default=0)
    rest: list[tuple[int, range]] = []
    ahead: list[range] = []
    for part, (at, last, before) in zip(parts, read, strict=True):
        whole = range(part.share.index, length, part.share.count)
        runs = [(at, last), *((later, whole) for later in range(at + 1, epoch + 1))]
        rest += [*before, *runs[:-1]]
        ahead.append(runs[-1][1])
    read_up_to = max((last.start - last.step + 1 for last in ahead), default=0)
    begin = min(length, max(0, read_up_to))
    rest += [(epoch, range(last.start, begin, last.step)) for last in ahead]
    rest = [
        (at, range(run.start * finer + j, run.stop * finer + j, run.step * finer))
        for at, run in rest
        for j in range(finer)
    ]
    rest.sort(key=lambda run: (run[0], run[1].start, run[1].step))
    state = {
        "epoch": epoch,
        "next": begin * finer + share.index,
        "step": share.count,
        "rest": [[at, run.start, run.stop, run.step] for at, run in _slice(rest, share)],
    }
    return {**state, "check": _check_sum(state)} if shuffled else state


def _untouched(part: Former, length: int) -> range:
    """Return the places of a share that has not begun; none if it has ended."""
    start = length + part.share.count - 1 if part.ended else part.share.index
    return range(start, max(start, length), part.share.count)


def _slice(runs: list[tuple[int, range]], share: Share) -> list[tuple[int, range]]:
    """Return one of ``share.count`` equal consecutive parts of ``runs``."""
    total = sum(len(run) for _, run in runs)
    start, stop = share.index * total // share.count, (share.index + 1) * total // share.count
    found, before = [], 0
    for epoch, run in runs:
        part = run[max(0, start - before) : max(0, stop - before)]
        before += len(run)
        if part:
            found.append((epoch, part))
    return found


def _read(saved: StateReader, length: int) -> tuple[int, range, list[tuple[int, range]]]:
    """Return epoch and range of the last run, and the runs before it."""
    epoch, first = saved.integer("epoch", high=_MAX_EPOCH), saved.integer("next")
    step = saved.integer("step", low=1)
    rest = []
    for item in saved.items("rest", kind=list) if saved.has("rest") else []:
        if len(item) != 4:
            raise saved.wrong("rest", "lists of epoch, start, stop and step", item)
        at, start, stop, by = (saved.integer_of(value, "rest") for value in item)
        run = range(start, stop, by or 1)
        if at > epoch or not by or (run and run[-1] >= length) or (rest and at < rest[-1][0]):
            raise saved.wrong("rest", f"ranges of {length} places of epochs up to {epoch}, ascending", item)
        rest.append((at, run))
    if first > length + step:
        raise saved.wrong("next", f"a place of {length}")
    if saved.has("check"):
        numbers = [[at, run.start, run.stop, run.step] for at, run in rest]
        expected = _check_sum({"epoch": epoch, "next": first, "step": step, "rest": numbers})
        if saved.text("check") != expected:
            raise saved.wrong("check", f"{expected!r}, by the epoch and the other numbers")
    return epoch, range(first, max(first, length), step), rest


def _check_sum(state: dict[str, Any]) -> str:
    numbers = [state["epoch"], state["next"], state["step"], state.get("rest", [])]
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:16]
