"""parallel_map, parallel_filter and parallel_filter_map: map and its kin in threads or processes."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tplr.concurrency.read_ahead import ReadAhead
from tplr.concurrency.workers import ExecutorType, Failed, Job, Portable, Workers, worker_count
from tplr.streams.iterator import State, StreamIterator, Transform
from tplr.streams.read_ahead import ReadAheadBuffer
from tplr.streams.transforms.calls import CallKind, fail, outcome

_BATCH_SECONDS = 0.01  # a batch of samples that takes longer is too large: the first of them waits for the last


class _EachSample:
    """The answers of ``function`` to a batch of samples; ``Failed`` where it raised."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, samples: Portable) -> Portable:
        return Portable(map(self._answer, samples))

    def __repr__(self) -> str:
        return repr(self._function)

    def _answer(self, sample: Any) -> Any:
        if isinstance(sample, Failed):  # it could not be sent
            return sample
        try:
            return self._function(sample)
        except Exception as error:  # noqa: BLE001 - raised in its turn
            return Failed(error)


@dataclass
class _Batch:
    """Samples that are sent to a worker together.

    Attributes:
        numbers: of the samples, from the position at which the pass began.
        done: number of samples that were returned, or filtered out.
        noted: number of ``done`` samples that the iterator's position includes.
    """

    numbers: list[int]
    samples: Portable
    job: Job = field(init=False)
    done: int = 0
    noted: int = 0


class _ParallelIterator(StreamIterator[Any]):
    """Numbers samples from the beginning, or from the position that it resumed at."""

    def __init__(self, transform: "ParallelCall", source: StreamIterator[Any], state: State | None) -> None:
        super().__init__(source)
        self._transform = transform
        self._buffer = ReadAheadBuffer(source)
        self._ahead = ReadAhead(
            iter(self._next_batch, None), self._submit, transform.room, ordered=transform.ordered, lazy=True
        )
        self._workers: Workers | None = None
        self._first = state["done"] if state else 0  # all samples before it are returned
        self._also: set[int] = set(state["also"]) if state else set()  # returned before an earlier one
        self._groups: deque[tuple[int, State]] = deque()  # number of a group's first sample, position before it
        self._pulled = 0
        self._size = 1  # samples of the next batch
        self._batch: _Batch | None = None  # in use
        self._failed: BaseException | None = None  # of a whole batch: a worker died

    def items(self) -> Iterator[Any]:
        kind = self._transform.kind
        while batch := self._computed_batch():
            answers = batch.job.result()
            for sample, answer in zip(batch.samples[batch.done :], answers[batch.done :], strict=True):
                batch.done += 1
                if isinstance(answer, Failed):
                    fail(kind, sample, answer.error)
                result = outcome(kind, sample, answer)
                if result is not None:
                    yield result

    def state(self) -> State:
        self._note()
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

    def _computed_batch(self) -> _Batch | None:
        """The batch in use, or the next one; None at the end."""
        if self._failed:
            raise self._failed
        if self._batch and self._batch.done < len(self._batch.samples):
            return self._batch
        self._note()
        self._batch = None
        for batch, _ in self._ahead:
            # Nobody knows which sample it is of: the position stays before the whole batch.
            if error := batch.job.exception():
                error.add_note(f"it had {len(batch.samples)} samples, of which the first is {batch.samples[0]!r:.200}")
                self._failed = error
                raise error
            self._resize(batch.job.seconds / len(batch.samples))
            self._batch = batch
            return batch
        if error := self._buffer.error:
            raise error
        return None

    def _resize(self, seconds: float) -> None:
        """Choose the size of the next batches, for samples that take so many seconds."""
        transform = self._transform
        self._size = max(1, min(int(_BATCH_SECONDS / seconds), 2 * self._size, transform.prefetch_factor))
        self._ahead.depth = max(transform.room // self._size, 2 * transform.workers)

    def _submit(self, batch: _Batch) -> Job:
        if self._workers is None:
            transform = self._transform
            self._workers = Workers(_EachSample(transform.function), transform.workers, transform.executor_type)
        batch.job = self._workers.submit(batch.samples)
        return batch.job

    def _next_batch(self) -> _Batch | None:
        """The next samples to be computed; None at the end."""
        while group := self._buffer.group(self._size):
            self._groups.append((self._pulled, group.position))
            batch = _Batch([], Portable())
            for number, sample in enumerate(group.samples, self._pulled):
                if number >= self._first and number not in self._also:
                    batch.numbers.append(number)
                    batch.samples.append(sample)
            self._pulled += len(group.samples)
            if batch.samples:
                return batch
        return None

    def _note(self) -> None:
        """Include what was returned of the batch in use in the position."""
        if batch := self._batch:
            self._also.update(batch.numbers[batch.noted : batch.done])
            batch.noted = batch.done
            while self._first in self._also:
                self._also.remove(self._first)
                self._first += 1


class ParallelCall(Transform):
    """Calls ``function`` in ``workers`` workers.

    Workers get batches, of as many samples as take about 10 ms, and at most ``prefetch_factor``. At most
    ``workers * prefetch_factor`` samples, or two batches for each worker, are computed at a time.

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
        self.prefetch_factor = prefetch_factor
        self.room = self.workers * prefetch_factor
        self.ordered = ordered
        self.executor_type: ExecutorType = executor_type

    def describe(self, *, pinned: bool) -> str:
        return f"parallel_{self.kind}"  # a state fits any number of workers, either order
