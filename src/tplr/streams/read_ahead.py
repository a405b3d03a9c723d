"""Groups of samples read ahead from an iterator, each with the source's position before it."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tplr.streams.iterator import State, StreamIterator

MAX_GROUP = 1 << 20  # samples, far above the size of any group


class SampleGroup(NamedTuple):
    """Samples, and the position of the source before the first."""

    position: State
    samples: list[Any]


class ReadAheadBuffer:
    """Takes groups from an iterator. A position between two groups is the source's position. Within a group it is the
    group's position and a number of samples, which a resume reads again and skips.

    ``ReadAhead`` runs the work on these groups. It has no positions, because only a resumable source has them.

    Args:
        samples: reads them from ``source``; an error does not end it.
    """

    def __init__(self, source: StreamIterator[Any], samples: Iterator[Any] | None = None) -> None:
        self._error: Exception | None = None
        self._source = source
        self._items = samples or source
        self._position: State | None = None  # before the group that is being read
        self._samples: list[Any] = []
        self._ended = False

    def group(
        self, limit: int, *, at_least: int = 1, weigh: Callable[[Any], int] = lambda sample: 1
    ) -> SampleGroup | None:
        """Return the next samples, up to a total weight of ``limit``; None if the source ended, or failed, before
        ``at_least`` samples. After an error there is no further group until ``raise_error`` raised it. After an
        interrupt the next call continues."""
        if self._position is None:
            self._position = self._source.state()
        weight = sum(map(weigh, self._samples))
        try:
            while not self._ended and (len(self._samples) < at_least or weight < limit):
                self._samples.append(next(self._items))
                weight += weigh(self._samples[-1])
        except StopIteration:
            self._ended = True
        except Exception as error:  # noqa: BLE001 - raised in its turn
            self._ended, self._error = True, error
        if len(self._samples) < at_least:
            return None
        group = SampleGroup(self._position, self._samples)
        self._position, self._samples = None, []
        return group

    def raise_error(self) -> None:
        """Raise the error of the source, if it failed; ``group`` then tries again."""
        error, self._error = self._error, None
        if error:
            self._ended = False
            if not self._samples:
                self._position = None  # the source may have gone past the item at fault
            raise error

    def position(self) -> State:
        """The source's position at the beginning of the next group."""
        return self._source.state() if self._position is None else self._position
