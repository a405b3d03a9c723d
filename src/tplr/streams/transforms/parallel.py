"""parallel_map, parallel_filter and parallel_filter_map: map and its kin in threads or processes."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tplr.concurrency.read_ahead import ReadAhead
from tplr.concurrency.workers import ExecutorType, Workers, worker_count
from tplr.streams.iterator import State, StreamIterator, Transform
from tplr.streams.read_ahead import ReadAheadBuffer
from tplr.streams.transforms.calls import CallKind, checked, outcome

_GROUP = 16  # samples per saved position of the source: a resume reads at most so many again, and computes none twice


class _ParallelIterator(StreamIterator[Any]):
    """Numbers samples from the beginning, or from the position that it resumed at."""

    def __init__(self, transform: "ParallelCall", source: StreamIterator[Any], state: State | None) -> None:
        super().__init__(source)
        self._transform = transform
        self._buffer = ReadAheadBuffer(source)
        self._ahead = ReadAhead(
            iter(self._next_sample, None), self._submit, transform.room, ordered=transform.ordered, lazy=True
        )
        self._workers: Workers | None = None
        self._first = state["done"] if state else 0  # all samples before it are returned
        self._also: set[int] = set(state["also"]) if state else set()  # returned before an earlier one
        self._groups: deque[tuple[int, State]] = deque()  # number of a group's first sample, position before it
        self._pulled = 0
        self._waiting: deque[tuple[int, Any]] = deque()  # of the group last read, not submitted yet

    def __next__(self) -> Any:
        for (number, sample), future in self._ahead:
            self._also.add(number)
            self._advance()
            answer = outcome(self._transform.kind, sample, checked(self._transform.kind, future.result))
            if answer is not None:
                return answer
        raise self._buffer.end()

    def state(self) -> State:
        # Drop the positions of groups whose samples are all returned.
        while len(self._groups) > 1 and self._groups[1][0] <= self._first:
            self._groups.popleft()
        start, position = self._groups[0] if self._groups else (0, self._buffer.position())
        return {
            "source": position,
            "done": self._first - start,
            "also": sorted(number - start for number in self._also),
        }

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
        super().close()

    def _submit(self, numbered: tuple[int, Any]) -> "Future[Any]":
        assert self._workers is not None
        return self._workers.submit(numbered[1])

    def _next_sample(self) -> tuple[int, Any] | None:
        """The next sample to be computed, with its number; None at the end."""
        while not self._waiting:
            group = self._buffer.group(_GROUP)
            if group is None:
                return None
            self._groups.append((self._pulled, group.position))
            for sample in group.samples:
                if self._pulled >= self._first and self._pulled not in self._also:
                    self._waiting.append((self._pulled, sample))
                self._pulled += 1
        if self._workers is None:
            self._workers = Workers(self._transform.function, self._transform.workers, self._transform.executor_type)
        return self._waiting.popleft()

    def _advance(self) -> None:
        while self._first in self._also:
            self._also.remove(self._first)
            self._first += 1


class ParallelCall(Transform):
    """Calls ``function`` in ``workers`` workers, on at most ``workers * prefetch_factor`` samples at a time.

    ``ordered`` returns results in the order of the samples; otherwise in order of completion, which differs from run to
    run. A state then lists which samples after its position were returned.
    """

    iterator = _ParallelIterator

    def __init__(  # noqa: PLR0917
        self,
        source: Transform,
        kind: CallKind,
        function: Callable[[Any], Any],
        max_workers: int | None,
        prefetch_factor: int,
        ordered: bool,
        executor_type: ExecutorType,
    ) -> None:
        self.sources = (source,)
        self.kind: CallKind = kind
        self.function = function
        self.workers = worker_count(max_workers, prefetch_factor, executor_type)
        self.room = self.workers * prefetch_factor
        self.ordered = ordered
        self.executor_type: ExecutorType = executor_type

    def describe(self, *, pinned: bool) -> str:
        return f"parallel_{self.kind}"  # a state fits any number of workers, either order
