"""tokenize: encodes texts in batches, while samples pass one by one."""

import copy
import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice, pairwise, repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from tplr.concurrency.read_ahead import ReadAhead
from tplr.concurrency.workers import ExecutorType, WorkerDied, Workers
from tplr.errors import DataError
from tplr.sharding import Share
from tplr.streams.iterator import PipelineContext, State, StreamIterator, Transform, divided_items
from tplr.streams.read_ahead import MAX_SKIPPED, ReadAheadBuffer, check_order
from tplr.streams.state import StateReader

if TYPE_CHECKING:
    from tplr.tokenize import Encoder

# Characters of a batch: enough for all cores, but few enough to finish soon. The first batches are smaller, so that the
# first sample is ready soon. Each text counts TEXT_WEIGHT characters more than it has.
FIRST_CHARACTERS, MAX_CHARACTERS, TEXT_WEIGHT = 2**14, 2**18, 2**9
# With any other argument a text's columns may depend on its batch, so each text is encoded alone.
_ALIKE_IN_BATCHES = {
    "add_special_tokens", "truncation", "max_length", "return_attention_mask", "return_token_type_ids"
}  # fmt: skip


class Encode:
    """Encodes each text to a dictionary of columns. Can be pickled.

    Attributes:
        arrays: columns are int64 arrays instead of lists.
    """

    def __init__(self, tokenizer: Any, kwargs: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._kwargs = kwargs
        columns = set(getattr(tokenizer, "model_input_names", ()))
        is_ours = type(tokenizer).__module__.startswith("transformers.")
        if is_ours:
            import tplr.tokenize  # noqa: F401 - now, because a process that is forked during an import never ends it
        self.arrays = is_ours and not kwargs and columns <= {"input_ids", "attention_mask"}
        self._mask = "attention_mask" in columns
        self._is_ours = is_ours
        self._encoder: Encoder | None = None  # created at the first text, as that takes part of a second
        self._private: Any = None  # likewise
        self._in_batches = is_ours and _ALIKE_IN_BATCHES.issuperset(kwargs)

    def __call__(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        if self.arrays:
            return self._fast(texts)
        if not texts:
            return []
        tokenizer = self._callable()
        if self._in_batches:
            columns = tokenizer(list(texts), **self._kwargs)
            return [{name: columns[name][i] for name in columns} for i in range(len(texts))]
        return [dict(tokenizer(text, **self._kwargs)) for text in texts]

    def describe(self) -> str:
        """Return the tokenizer's fingerprint and its arguments as text."""
        name = self._engine().fingerprint if self._is_ours else type(self._tokenizer).__qualname__
        return f"{name}, {json.dumps(self._kwargs, sort_keys=True, default=repr)}" if self._kwargs else name

    def _fast(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        ragged = self._engine().encode_batch(texts)
        ids, ends = ragged.ids.astype(np.int64), ragged.offsets.tolist()
        rows = [ids[start:end] for start, end in pairwise(ends)]
        if not self._mask:
            return [{"input_ids": row} for row in rows]
        ones = np.ones(max(map(len, rows), default=0), np.int64)
        return [{"input_ids": row, "attention_mask": ones[: len(row)]} for row in rows]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_encoder": None, "_private": None}

    def _callable(self) -> Any:
        """Return the tokenizer to call: a copy of one of ``transformers``, whose truncation and padding are state that
        each call sets. Calls by another pipeline or by the program would change them in the middle of this call."""
        if not any(base.__module__.startswith("transformers.") for base in type(self._tokenizer).__mro__):
            return self._tokenizer
        if self._private is None:
            self._private = copy.deepcopy(self._tokenizer)
        return self._private

    def _engine(self) -> "Encoder":
        if self._encoder is None:
            from tplr.tokenize import encoder

            self._encoder = encoder(self._tokenizer)
        return self._encoder


@dataclass
class _Batch:
    """Samples that are tokenized together.

    Attributes:
        position: the source's position before the first sample, or behind samples from a state.
        done: number of samples that were returned; their texts are not encoded.
        carried: whether the samples are from a state.
        columns: columns of each sample; None if the batch failed, so that each text is encoded alone.
    """

    position: State
    samples: list[Any]
    done: int
    carried: bool
    columns: list[Any] | None = None

    def left(self) -> Iterator[tuple[Any, Any]]:
        """Yield the samples that were not returned, with their columns."""
        return zip(self.samples[self.done :], islice(self.columns or repeat(None), self.done, None), strict=False)


class _TokenizeIterator(StreamIterator[dict[str, Any]]):
    def __init__(self, transform: "Tokenize", source: StreamIterator[Any], saved: StateReader | None) -> None:
        super().__init__(source)
        self._transform = transform
        self._fixed_order = transform.sources[0].has_fixed_order()
        self._buffer = ReadAheadBuffer(source, map(self._checked, source), fixed_order=self._fixed_order)
        self._ahead = self._read_ahead()
        # Samples that are read before the source, and number of samples that were returned before the state: they are
        # read, but not encoded.
        self._carried, self._skip = transform.held(saved) if saved else ([], 0)
        self._characters = FIRST_CHARACTERS
        self._batch: _Batch | None = None  # in use
        self._workers: Workers | None = None
        self._failed: WorkerDied | None = None

    def items(self) -> Iterator[dict[str, Any]]:
        column = self._transform.column
        to_lists = self._transform.encode.arrays and not self.arrays
        while batch := self._encoded_batch():
            for sample, columns in batch.left():
                batch.done += 1
                if batch.done == len(batch.samples):
                    self._batch = None
                if columns is None:
                    columns = self._encode_alone(sample[column])  # noqa: PLW2901
                if to_lists:
                    columns = {name: array.tolist() for name, array in columns.items()}  # noqa: PLW2901
                yield {**sample, **columns}

    def state(self) -> State:
        batches = [batch for batch, _ in self._ahead.pending]
        if self._batch:
            batches.insert(0, self._batch)
        if not self._fixed_order:
            left = [sample for batch in batches for sample in batch.samples[batch.done :]]
            carried = [*left, *self._carried, *self._buffer.held]
            return {"source": self.source.state(), "done": 0, "carried": carried}
        if not batches:
            return {"source": self._buffer.position(), "done": self._skip, "carried": self._carried}
        batch = batches[0]
        if batch.carried:
            return {"source": batch.position, "done": 0, "carried": batch.samples[batch.done :]}
        return {"source": batch.position, "done": batch.done, "carried": []}

    def copied_values(self) -> int:
        return 0  # it returns the position of a batch

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
        super().close()

    def _encoded_batch(self) -> _Batch | None:
        """The batch in use, or the next one; None at the end."""
        if self._failed:
            raise self._failed
        if self._batch:
            return self._batch
        for batch, future in self._ahead:
            self._batch = batch
            error = future.exception()
            if isinstance(error, WorkerDied):
                self._failed = error
                raise error
            if error is None:  # otherwise each text is encoded alone, which finds the one at fault
                batch.columns = future.result()
            return batch
        self._ahead = self._read_ahead()  # reads on if this end is an error
        self._buffer.raise_error()
        return None

    def _read_ahead(self) -> "ReadAhead[_Batch, list[Any]]":
        return ReadAhead(iter(self._next_batch, None), self._submit, self._transform.room, lazy=True)

    def _next_batch(self) -> _Batch | None:
        """The next samples; None at the end."""
        if self._workers is None and self._transform.workers:
            self._workers = Workers(self._transform.encode, self._transform.workers, self._transform.executor_type)
            self._workers.submit([])  # builds the encoder while the first texts are read
        if carried := self._carried:
            batch = _Batch(self._buffer.position(), [*map(self._checked, carried)], done=0, carried=True)
            self._carried = []
            return batch
        column = self._transform.column
        group = self._buffer.group(
            self._characters, at_least=self._skip + 1, weigh=lambda sample: len(sample[column]) + TEXT_WEIGHT
        )
        if group is None:
            return None
        self._characters = min(2 * self._characters, MAX_CHARACTERS)
        done, self._skip = self._skip, 0
        return _Batch(group.position, group.samples, done, carried=False)

    def _submit(self, batch: _Batch) -> "Future[list[Any]]":
        texts = [sample[self._transform.column] for sample in batch.samples]
        texts[: batch.done] = [""] * batch.done
        if self._workers is not None:
            return self._workers.submit(texts)
        future: Future[list[Any]] = Future()
        try:
            future.set_result(self._transform.encode(texts))
        except Exception as error:  # noqa: BLE001 - raised for its sample
            future.set_exception(error)
        return future

    def _encode_alone(self, text: str) -> Any:
        """Return the columns of a text whose batch failed."""
        try:
            return self._transform.encode([text])[0]
        except Exception as error:
            column = self._transform.column
            try:
                text.encode()
            except UnicodeEncodeError as half:
                raise DataError(
                    f"tokenize: column {column!r} holds a lone surrogate, which UTF-8 can't encode, at "
                    f"{half.start}: {text[max(0, half.start - 20) : half.start + 20]!r}"
                ) from error
            error.add_note(f"tokenize: column {column!r} of the sample is {reprlib.repr(text)}")
            raise

    def _checked(self, sample: Any) -> Any:
        text = sample.get(self._transform.column)
        if not isinstance(text, str):
            raise DataError(
                f"tokenize: column {self._transform.column!r} must hold a string, got {type(text).__name__}; "
                f"the sample has {sorted(map(str, sample))}"
            )
        return sample


class Tokenize(Transform):
    """Adds the columns of ``tokenizer(sample[column], **kwargs)`` to each sample, such as ``input_ids`` and
    ``attention_mask``; lists, unless ``kwargs`` ask for another type.

    Batches of texts are encoded in ``workers`` workers (0: in the caller's thread), at most ``prefetch_factor`` batches
    per worker at a time. Samples always keep their order.
    """

    iterator = _TokenizeIterator

    def __init__(  # noqa: PLR0917
        self,
        source: Transform,
        tokenizer: Any,
        kwargs: Mapping[str, Any] | None,
        column: str,
        workers: int,
        prefetch_factor: int,
        executor_type: ExecutorType,
    ) -> None:
        self.sources = (source,)
        self.encode = Encode(tokenizer, dict(kwargs or {}))
        self.column = column
        self.workers, self.room = workers, max(1, workers * prefetch_factor)
        self.executor_type: ExecutorType = executor_type

    def held(self, saved: StateReader) -> tuple[list[Any], int]:
        """Return the samples of a state that are left, and the number of samples of the source to skip."""
        done = saved.integer("done", high=MAX_SKIPPED)
        carried = saved.items("carried") if saved.has("carried") else []  # states of earlier versions lack it
        skip = max(0, done - len(carried))
        check_order(self.sources[0], skip, saved)
        return carried[done:], skip

    def without_read_ahead(self, context: PipelineContext, state: State) -> State:
        saved = StateReader(self.describe(pinned=False), state)
        carried, skip = self.held(saved)
        source = self.sources[0].open(context, saved.child())
        try:
            for _ in range(skip):
                next(source)
            position = source.state()
        except StopIteration:
            raise saved.wrong("done", "a number of samples that the source has") from None
        finally:
            source.close()
        return {"source": self.sources[0].without_read_ahead(context, position), "done": 0, "carried": carried}

    def divide_held(self, saved: list[StateReader], share: Share) -> State:
        return {"done": 0, "carried": divided_items(saved, "carried", share)}

    def describe(self, *, pinned: bool) -> str:
        return f"tokenize({self.column}, {self.encode.describe()})"
