"""parallel_map, parallel_filter and parallel_filter_map: the same functions, in threads or processes."""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple

from tplr.concurrency.workers import ExecutorType, Workers
from tplr.streams.iterator import Flow, Run, State, Step
from tplr.streams.read_ahead import ReadAheadBuffer
from tplr.streams.transforms.calls import CallKind, checked, outcome

_GROUP = 16  # samples between two positions of the source: that many at most are read again, not computed, at a resume


def worker_count(max_workers: int | None, prefetch_factor: int, executor_type: str) -> int:
    """``max_workers``, or this process's part of the machine's cores. Raises ValueError for what can't be meant."""
    if max_workers is None:
        max_workers = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if max_workers < 1 or prefetch_factor < 1:
        raise ValueError(f"expected max_workers and prefetch_factor above 0, got {max_workers} and {prefetch_factor}")
    if executor_type not in ("process", "thread"):
        raise ValueError(f'executor_type: expected "process" or "thread", got {executor_type!r}')
    return max_workers


class ParallelCall(Step):
    """Calls ``function`` in ``workers`` workers, on at most ``workers * prefetch_factor`` samples at a time.

    ``ordered`` gives results in the samples' order. Unordered they come as they are done, in an order that no two runs
    share; a state then says which of the samples after its position were handed on already.
    """

    def __init__(
        self,
        source: Step,
        kind: CallKind,
        function: Callable[[Any], Any],
        *,
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

    def open(self, run: Run, state: State | None = None) -> Flow[Any]:
        return _ParallelFlow(self, self.sources[0].open(run, state["source"] if state else None), state)

    def describe(self, *, pinned: bool) -> str:
        return f"parallel_{self.kind}"  # workers, room and order may change: what is done stays done


class _Task(NamedTuple):
    """A sample on its way. Samples are numbered from the beginning, or the position resumed at."""

    number: int
    sample: Any
    future: "Future[Any]"


class _ParallelFlow(Flow[Any]):
    def __init__(self, step: ParallelCall, source: Flow[Any], state: State | None) -> None:
        super().__init__()
        self.source = source
        self._step = step
        self._ahead = ReadAheadBuffer(source)
        self._workers: Workers | None = None
        self._first = state["done"] if state else 0  # all samples below it are done
        self._also: set[int] = set(state["also"]) if state else set()  # these are done, though an earlier one is not
        self._groups: deque[tuple[int, State]] = deque()  # number of a group's first sample, position before it
        self._pulled = 0
        self._waiting: deque[tuple[int, Any]] = deque()  # of the group last read, not submitted yet
        self._tasks: deque[_Task] = deque()  # ordered: all on their way
        self._done: SimpleQueue[_Task] = SimpleQueue()  # unordered: as they are done
        self._under_way = 0

    def __next__(self) -> Any:
        while True:
            self._submit()
            if not self._under_way:
                self._ahead.finish()
            task = self._wait()
            self._under_way -= 1
            self._also.add(task.number)
            self._advance()
            answer = outcome(self._step.kind, task.sample, checked(self._step.kind, task.future.result))
            if answer is not None:
                return answer

    def state(self) -> State:
        # Positions of groups that are done to the last sample are not needed any more.
        while len(self._groups) > 1 and self._groups[1][0] <= self._first:
            self._groups.popleft()
        start, position = self._groups[0] if self._groups else (0, self._ahead.position())
        return {
            "source": position,
            "done": self._first - start,
            "also": sorted(number - start for number in self._also),
        }

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
        super().close()

    def _submit(self) -> None:
        """One in for each one out, and more until the room is full or a result is there to be handed on."""
        one = True
        while self._under_way < self._step.room and (one or not self._has_result()):
            one = False
            if not self._waiting and not self._read():
                return
            if self._workers is None:
                self._workers = Workers(self._step.function, self._step.workers, self._step.executor_type)
            number, sample = self._waiting.popleft()
            task = _Task(number, sample, self._workers.submit(sample))
            self._under_way += 1
            if self._step.ordered:
                self._tasks.append(task)
            else:
                task.future.add_done_callback(lambda _, task=task, done=self._done: done.put(task))

    def _wait(self) -> _Task:
        """The next task that is done. An interrupt meanwhile leaves it where it is."""
        if not self._step.ordered:
            return self._done.get()
        self._tasks[0].future.exception()
        return self._tasks.popleft()

    def _has_result(self) -> bool:
        if self._step.ordered:
            return bool(self._tasks) and self._tasks[0].future.done()
        return not self._done.empty()

    def _read(self) -> bool:
        while not self._waiting:
            group = self._ahead.group(_GROUP)
            if group is None:
                return False
            self._groups.append((self._pulled, group.position))
            for sample in group.samples:
                if self._pulled >= self._first and self._pulled not in self._also:
                    self._waiting.append((self._pulled, sample))
                self._pulled += 1
        return True

    def _advance(self) -> None:
        while self._first in self._also:
            self._also.remove(self._first)
            self._first += 1
