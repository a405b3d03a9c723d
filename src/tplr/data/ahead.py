"""Reading a source ahead in groups, so that a state still tells where the samples handed on ended."""

from collections.abc import Callable
from typing import Any, NamedTuple

from tplr.data.flow import Flow, State


class Group(NamedTuple):
    """Samples that follow a position of the source."""

    position: State
    samples: list[Any]


class Ahead:
    """Takes groups from a flow. A position between two groups is the source's own; within a group it is the group's
    and a number of samples, which a resume reads again and leaves out.

    Attributes:
        ended: the source gave all it has, or failed.
    """

    def __init__(self, source: Flow[Any], take: Callable[[], Any] | None = None) -> None:
        self._source = source
        self._take = take or source.__next__
        self._error: Exception | None = None
        self.ended = False

    def group(self, limit: int, *, at_least: int = 1, weigh: Callable[[Any], int] = lambda sample: 1) -> Group | None:
        """The next samples, until they weigh ``limit``; None at the end. An error of the source waits until
        ``finish``."""
        if self.ended:
            return None
        position = self._source.state()
        samples: list[Any] = []
        weight = 0
        try:
            while len(samples) < at_least or weight < limit:
                samples.append(self._take())
                weight += weigh(samples[-1])
        except StopIteration:
            self.ended = True
        except Exception as error:  # noqa: BLE001 - raised in its turn
            self.ended, self._error = True, error
        return Group(position, samples) if samples else None

    def finish(self) -> None:
        """What comes after the last sample: the source's error, or StopIteration."""
        if self._error is not None:
            raise self._error
        raise StopIteration
