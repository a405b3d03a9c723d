"""parallel_map, parallel_filter and parallel_filter_map: map, filter and filter_map in threads or processes."""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tplr.concurrency.read_ahead import ReadAhead
from tplr.concurrency.workers import ExecutorType, Failed, Job, Portable, Workers, worker_count
from tplr.sharding import Share
from tplr.streams.iterator import PipelineContext, State, StreamIterator, Transform, divided_items
from tplr.streams.read_ahead import MAX_SKIPPED, ReadAheadBuffer, SampleGroup, check_order
from tplr.streams.state import StateReader
from tplr.streams.transforms.calls import CallKind, fail, outcome

_BATCH_SECONDS = 0.01  # a batch that takes longer is too large, because its first sample waits for its last
_PROCESS_BATCH = 64  # samples, enough to make the overhead of a batch's transfer small


class _EachSample:
    """Returns the results of ``function`` for a batch of samples; ``Failed`` for samples for which it raised."""

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
            return self._function(copy.copy(sample))  # a state may hold the sample, to be computed again
        except Exception as error:  # noqa: BLE001 - raised in its turn
            return Failed(error)


@dataclass
class _Batch:
    """Samples that are sent to a worker together.

    Attributes:
        numbers: numbers of the samples, counted from the position at which the pass began.
        done: number of samples that were returned, or filtered out.
        noted: number of ``done`` samples that the iterator's position includes.
    """

    numbers: list[int]
    samples: Portable
    job: Job = field(init=False)
    done: int = 0
    noted: int = 0


class _Place(NamedTuple):
    """Number of a sample, the source's position before it, and the samples from it on that are from a state."""

    first: int
    position: State
    carried: list[Any]


class _Held(NamedTuple):
    """What a state says of samples behind its position in the source.

    Attributes:
        done: number of samples that were all returned.
        also: numbers of later samples that were returned.
        carried: the first samples; the others are read from the source.
    """

    done: int
    also: set[int]
    carried: list[Any]

    @classmethod
    def read(cls, saved: StateReader) -> "_Held":
        return cls(saved.integer("done", high=MAX_SKIPPED), set(saved.integers("also")), saved.items("carried"))

    def skipped(self) -> int:
        """Return how many samples of the source a resume reads until it has passed all that were returned."""
        return max(0, max(self.also, default=self.done - 1) + 1 - len(self.carried))

    def left(self) -> list[Any]:
        """Return the carried samples that were not returned."""
        return [sample for number, sample in enumerate(self.carried) if number >= self.done and number not in self.also]


class _ParallelIterator(StreamIterator[Any]):
    """Numbers samples from the beginning, or from the position at which it resumed. If the source has no fixed order,
    a state has no such numbers: it carries the samples that were read and not returned."""

    def __init__(self, transform: "ParallelCall", source: StreamIterator[Any], saved: StateReader | None) -> None:
        super().__init__(source)
        self._transform = transform
        self._fixed_order = transform.sources[0].has_fixed_order()
        held = _Held.read(saved) if saved else _Held(0, set(), [])
        if saved and not self._fixed_order:
            check_order(transform.sources[0], held.skipped(), saved)
            held = _Held(0, set(), held.left())
        self._buffer = ReadAheadBuffer(source, fixed_order=self._fixed_order, spaced=True)
        self._ahead = self._read_ahead(transform.room)
        self._workers: Workers | None = None
        self._first = held.done  # all samples before it are returned
        self._also = held.also  # returned before an earlier one
        self._places: deque[_Place] = deque()
        self._pulled = 0
        self._size = 1  # samples of the next batch
        self._batch: _Batch | None = None  # in use
        self._failed: BaseException | None = None  # error of a whole batch, because a worker died
        self._carried = held.carried  # read before the source

    def items(self) -> Iterator[Any]:
        kind = self._transform.kind
        while batch := self._computed_batch():
            answers = batch.job.result()
            for sample, answer in zip(batch.samples[batch.done :], answers[batch.done :], strict=True):
                batch.done += 1
                if isinstance(answer, Failed):
                    fail(kind, sample, answer.error)
                # A filter returns the samples themselves, and the caller may change them.
                result = outcome(kind, copy.copy(sample) if kind == "filter" else sample, answer)
                if result is not None:
                    yield result

    def state(self) -> State:
        if not self._fixed_order:
            batches = [*([self._batch] if self._batch else []), *(batch for batch, _ in self._ahead.pending)]
            left = [sample for batch in batches for sample in batch.samples[batch.done :]]
            carried = [*left, *self._carried, *self._buffer.held]
            return {"source": self.source.state(), "done": 0, "also": [], "carried": carried}
        self._note()
        place = self._places[0] if self._places else _Place(0, self._buffer.position(), self._carried)
        return {
            "source": place.position,
            "done": self._first - place.first,
            "also": sorted(number - place.first for number in self._also),
            "carried": place.carried,
        }

    def copied_values(self) -> int:
        return len(self._also)  # it returns the position of a place

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
            # The sample at fault is unknown, so the position stays before the whole batch.
            if error := batch.job.exception():
                error.add_note(f"it had {len(batch.samples)} samples, of which the first is {batch.samples[0]!r:.200}")
                self._batch, self._failed = batch, error
                raise error
            self._resize(batch.job.seconds / len(batch.samples))
            self._batch = batch
            return batch
        self._ahead = self._read_ahead(self._ahead.depth)  # reads on if this end is an error
        self._buffer.raise_error()
        return None

    def _read_ahead(self, depth: int) -> "ReadAhead[_Batch, Any]":
        ordered = self._transform.ordered
        return ReadAhead(iter(self._next_batch, None), self._submit, depth, ordered=ordered, lazy=True)

    def _resize(self, seconds: float) -> None:
        """Choose the size of the next batches for samples that take ``seconds`` each."""
        transform = self._transform
        self._size = max(1, min(int(_BATCH_SECONDS / seconds), 2 * self._size, transform.largest_batch))
        self._ahead.depth = max(transform.room // self._size, 2 * transform.workers)

    def _submit(self, batch: _Batch) -> Job:
        if self._workers is None:
            transform = self._transform
            self._workers = Workers(_EachSample(transform.function), transform.workers, transform.executor_type)
        batch.job = self._workers.submit(batch.samples)
        return batch.job

    def _next_batch(self) -> _Batch | None:
        """The next samples to be computed; None at the end."""
        while group := self._next_group():
            batch = _Batch([], Portable())
            for number, sample in enumerate(group.samples, self._pulled):
                if number >= self._first and number not in self._also:
                    batch.numbers.append(number)
                    batch.samples.append(sample)
            self._pulled += len(group.samples)
            if batch.samples:
                return batch
        return None

    def _next_group(self) -> SampleGroup | None:
        carried, self._carried = self._carried, []
        group = SampleGroup(self._buffer.position(), 0, carried) if carried else self._buffer.group(self._size)
        if group and not group.before and self._fixed_order:
            self._places.append(_Place(self._pulled, group.position, carried))
        return group

    def _note(self) -> None:
        """Update the position with the returned samples of the batch in use; without a fixed order there is none."""
        if self._fixed_order and (batch := self._batch):
            self._also.update(batch.numbers[batch.noted : batch.done])
            batch.noted = batch.done
            while self._first in self._also:
                self._also.remove(self._first)
                self._first += 1
            # Drop the places before which all samples are returned, but the last one.
            while len(self._places) > 1 and self._places[1].first <= self._first:
                self._places.popleft()


class ParallelCall(Transform):
    """Calls ``function`` in ``workers`` workers.

    Workers get batches of samples that take about 10 ms including the transfer to a process, with at most
    ``largest_batch`` samples. At most ``workers * prefetch_factor`` samples, or two batches per worker, are computed at
    a time.

    ``ordered`` returns results in the order of the samples; otherwise in order of completion, which differs between
    runs. A state then lists the samples after its position that were returned.
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
        self.largest_batch = prefetch_factor if executor_type == "thread" else max(prefetch_factor, _PROCESS_BATCH)
        self.room = self.workers * prefetch_factor
        self.ordered = ordered
        self.executor_type: ExecutorType = executor_type

    def without_read_ahead(self, context: PipelineContext, state: State) -> State:
        """See ``Transform``. The state carries the samples that were not returned although later ones were."""
        saved = StateReader(self.describe(pinned=False), state)
        held = _Held.read(saved)
        check_order(self.sources[0], held.skipped(), saved)
        source = self.sources[0].open(context, saved.child())
        try:
            for _ in range(held.skipped()):
                held.carried.append(next(source))
            position = source.state()
        except StopIteration:
            raise saved.wrong("done", "a number of samples that the source has") from None
        finally:
            source.close()
        position = self.sources[0].without_read_ahead(context, position)
        return {"source": position, "done": 0, "also": [], "carried": held.left()}

    def divide_held(self, saved: list[StateReader], share: Share) -> State:
        return {"done": 0, "also": [], "carried": divided_items(saved, "carried", share)}

    def has_fixed_order(self) -> bool:
        return self.ordered and super().has_fixed_order()

    def describe(self, *, pinned: bool) -> str:
        return f"parallel_{self.kind}"  # a state fits any number of workers, and either order
