"""Groups of samples read ahead from an iterator, each with the source's position before it."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tplr.errors import StateError
from tplr.streams.iterator import State, StreamIterator, Transform
from tplr.streams.state import StateReader

MAX_SKIPPED = 1 << 20  # samples that a resume skips, far above the size of any group
# A position is taken after a thirty-second of the values that it copies, about 4 ns each: so it takes about 0.1 µs a
# sample, and the samples that a resume reads again are few beside those that filled a shuffle's buffer.
_COPIED_PER_SAMPLE = 32


class SampleGroup(NamedTuple):
    """Samples, a position of the source, and the number of samples that it returns from there before the first one."""

    position: State
    before: int
    samples: list[Any]


def check_order(source: Transform, skipped: int, saved: StateReader) -> None:
    """Raise StateError if a resume would skip other samples than those that were read before, because ``source`` has
    no fixed order and had one when the state was saved."""
    if skipped and not source.has_fixed_order():
        raise StateError(
            f"the state of {saved.stage} counts {skipped} samples of steps with ordered=True before it: use "
            "ordered=True there, as when it was saved"
        )


class ReadAheadBuffer:
    """Takes groups from an iterator. A position in a group is an earlier position of the source, and a number of
    samples, which a resume reads again and skips. A source without a fixed order would return other samples then, so
    its groups have no positions: a state holds their samples, those ``held`` here, and the source's position behind
    them.

    ``ReadAhead`` runs the work on these groups. It has no positions, because only a resumable source has them.

    Args:
        samples: reads them from ``source``; an error does not end it.
        fixed_order: whether the source has a fixed order (``Transform.has_fixed_order``).
        spaced: a group has its own position only if the samples since the last one make up for its cost
            (``StreamIterator.copied_values``); otherwise each group has one. The first group, and the first one after
            an error, have their own in either case.

    Attributes:
        held: samples of an incomplete group.
    """

    def __init__(
        self,
        source: StreamIterator[Any],
        samples: Iterator[Any] | None = None,
        *,
        fixed_order: bool,
        spaced: bool = False,
    ) -> None:
        self._error: Exception | None = None
        self._source = source
        self._items = samples or source
        self._fixed_order, self._spaced = fixed_order, spaced
        self._position: State | None = None  # at or before the group that is being read; None: it gets its own
        self._before = 0  # samples between the two
        self._spacing = 0  # samples after which a group gets its own position
        self.held: list[Any] = []
        self._ended = False

    def group(
        self, limit: int, *, at_least: int = 1, weigh: Callable[[Any], int] = lambda sample: 1
    ) -> SampleGroup | None:
        """Return the next samples, up to a total weight of ``limit``; None if the source ended, or failed, before
        ``at_least`` samples. After an error there is no further group until ``raise_error`` raised it. After an
        interrupt the next call continues."""
        if self._position is None:
            self._position = self.position()
            if self._fixed_order and self._spaced:
                self._spacing = min(self._source.copied_values() // _COPIED_PER_SAMPLE, MAX_SKIPPED // 2)
        weight = sum(map(weigh, self.held))
        try:
            while not self._ended and (len(self.held) < at_least or weight < limit):
                self.held.append(next(self._items))
                weight += weigh(self.held[-1])
        except StopIteration:
            self._ended = True
        except Exception as error:  # noqa: BLE001 - raised in its turn
            self._ended, self._error = True, error
        if len(self.held) < at_least:
            return None
        group = SampleGroup(self._position, self._before, self.held)
        self.held = []
        self._before += len(group.samples)
        if self._before >= self._spacing:
            self._forget_position()
        return group

    def raise_error(self) -> None:
        """Raise the error of the source, if it failed; ``group`` then tries again."""
        error, self._error = self._error, None
        if error:
            self._ended = False
            if not self.held:
                self._forget_position()  # the source may have gone past the item at fault
            raise error

    def position(self) -> State:
        """The source's position at the beginning of the next group, if that one is to have its own; empty without a
        fixed order."""
        if not self._fixed_order:
            return {}
        return self._source.state() if self._position is None else self._position

    def _forget_position(self) -> None:
        self._position, self._before = None, 0
