"""CheckpointableDataset: pipelines of samples that resume exactly."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

from torch.utils.data import IterableDataset, get_worker_info

from tplr.concurrency.workers import ExecutorType, worker_count
from tplr.sharding import Share
from tplr.streams import state as envelope
from tplr.streams.combine import Concat, Interleave, StoppingStrategy
from tplr.streams.iterator import PipelineContext, StreamIterator, Transform
from tplr.streams.order import Order
from tplr.streams.resume import States, position_of
from tplr.streams.shard_by_rank import ShardByRank
from tplr.streams.sources.files import FromFiles
from tplr.streams.sources.iterable import FromIterable
from tplr.streams.sources.mosaicml import FromMosaicML
from tplr.streams.sources.records import FileFormat
from tplr.streams.sources.sequence import FromOrder, FromSequence
from tplr.streams.state import WHOLE
from tplr.streams.transforms.batch import Batch
from tplr.streams.transforms.bos_eos import BosEos, missing_bos_eos
from tplr.streams.transforms.cache import Cache
from tplr.streams.transforms.calls import Call
from tplr.streams.transforms.chunking import Chunking
from tplr.streams.transforms.counting import Enumerate, Stride, Take
from tplr.streams.transforms.pad import Pad
from tplr.streams.transforms.parallel import ParallelCall
from tplr.streams.transforms.shuffle import Shuffle
from tplr.streams.transforms.tokenize import Tokenize
from tplr.urls import Url

if TYPE_CHECKING:
    import torch

Sample = dict[str, Any]
StateDict = dict[str, Any]


class CheckpointableIterator(Iterator[Any], AbstractContextManager["CheckpointableIterator", None]):
    """One pass over a dataset. A context manager; ``close`` ends its threads, processes and connections.

    A state can be taken at any time, even before the first sample and after the last, and used any number of times.
    """

    def __init__(self, transform: Transform, share: Share | None = None, state_dict: States | None = None) -> None:
        self._transform, self._share = transform, share
        self._begin(*self._opened(state_dict))

    def _opened(self, state_dict: States | None) -> tuple[PipelineContext, StreamIterator[Any]]:
        position = None if state_dict is None else position_of(state_dict, self._transform, self._share or WHOLE)
        context = PipelineContext(self._share)
        try:
            return context, self._transform.open(context, position)
        except BaseException:
            context.close()
            raise

    def _begin(self, context: PipelineContext, iterator: StreamIterator[Any]) -> None:
        self._context, self._iterator = context, iterator
        self._samples = 0
        self._items = self._iterator.items()
        self._finalizer = weakref.finalize(self, _close, self._iterator, self._context)  # also without close()
        self._finalizer.atexit = False  # threads and processes are daemons: exit waits for none

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            sample = next(self._items)
        except StopIteration:
            raise
        except BaseException:
            self._items = self._iterator.items()  # an error ends generators: the next call continues with new ones
            raise
        self._samples += 1
        return sample

    def state_dict(self) -> StateDict:
        """Return the position as JSON values, and one tensor for each dtype under ``arrays``.

        ``tplr.data.save_state`` writes it to a file without pickle; ``torch.save`` works as well.

        Raises:
            StateError: a transform holds samples of a type that a state can't store.
        """
        sealed = envelope.seal(self._iterator.state(), self._transform.pipeline(), self._share or WHOLE)
        return {**sealed, "arrays": {name: _tensor(array) for name, array in sealed["arrays"].items()}}

    def load_state_dict(self, state_dict: States) -> None:
        """Continue at the position of ``state_dict``; torchdata's StatefulDataLoader calls it.

        Raises:
            StateError: as ``CheckpointableDataset.iter``; this iterator continues where it is.
        """
        opened = self._opened(state_dict)  # before the close, as the state may be refused
        self.close()
        self._begin(*opened)

    def report(self) -> dict[str, int]:
        """Return progress and counts, by name.

        ``samples`` and ``retries`` count from the start of this iterator. Other values continue after a resume:
        ``epoch``; ``files`` and ``files_ended`` of this epoch; ``bad_records``, ``dropped_tokens`` and
        ``dropped_samples``.
        """
        return {"samples": self._samples, "retries": self._context.retries(), **self._iterator.report()}

    def close(self) -> None:
        """End threads, processes and connections; idempotent."""
        self._finalizer()

    def __exit__(self, *_: object) -> None:
        self.close()


class CheckpointableDataset(IterableDataset[Any]):
    """An immutable pipeline: a source and transforms. Each method returns a new one; nothing is read before iteration.

    dataset = (
        CheckpointableDataset.from_files("s3://bucket/corpus/{00..99}.jsonl", repeat=True, shuffle_shards=True)
        .tokenize(tokenizer)
        .ensure_bos_eos(tokenizer)
        .concat_chunk(2048)
        .batch(8)
    )
    with dataset.iter(state_dict=saved) as batches:  # None: from the beginning
        for batch in batches:
            ...
            saved = batches.state_dict()
    """

    def __init__(self, transform: Transform) -> None:
        self.transform = transform

    def iter(self, state_dict: States | None = None) -> CheckpointableIterator:
        """Iterate from the beginning, or from a state, which is not changed.

        Args:
            state_dict: with ``shard_by_rank``, the state of this rank and worker, or a list of the states of all of
                them. The list also fits another number of ranks and workers, which divide the remaining samples.

        Raises:
            StateError: the state belongs to another pipeline (the message names the first difference) or another rank,
                or the list is incomplete.
            ConfigError: ``RANK`` and ``WORLD_SIZE`` can't be read.
            RuntimeError: called in one of several DataLoader workers, each of which would return every sample.
        """
        share, worker = self.transform.share(), get_worker_info()
        if worker is not None and worker.num_workers > 1:
            if share is None:
                raise RuntimeError(
                    f"{worker.num_workers} DataLoader workers would each return every sample: use shard_by_rank(), or "
                    f"num_workers=0 or 1 and parallel_map or tokenize for more threads or processes"
                )
            share = share.split(worker.id, worker.num_workers)
        return CheckpointableIterator(self.transform, share, state_dict)

    def __iter__(self) -> CheckpointableIterator:
        return self.iter()

    def resume(self, state_dict: States) -> "ResumedDataset":
        """Return a dataset that begins at a state, as ``iter`` does; for a DataLoader, whose workers iterate."""
        return ResumedDataset(self, state_dict)

    def __add__(self, other: "CheckpointableDataset") -> "CheckpointableDataset":  # pyright: ignore[reportIncompatibleMethodOverride]
        return concat_datasets([self, other])

    def __repr__(self) -> str:
        return f"CheckpointableDataset({' | '.join(self.transform.pipeline())})"

    # --- sources ---

    @staticmethod
    def from_sequence(
        sequence: Sequence[Any], repeat: bool = False, shuffle: bool = False, shuffle_seed: int = 42
    ) -> "CheckpointableDataset":
        """Items of anything with ``len`` and ``[i]``, such as a list or a map-style dataset. See ``FromSequence``."""
        return CheckpointableDataset(FromSequence(sequence, repeat, shuffle, shuffle_seed))

    @staticmethod
    def from_order(order: Order[Any]) -> "CheckpointableDataset":
        """Items of an ``Order``: permuted, shared between ranks and repeated in constant memory, resumed at once."""
        return CheckpointableDataset(FromOrder(order))

    @staticmethod
    def from_iterable(iterable: Iterable[Any], repeat: bool = False) -> "CheckpointableDataset":
        """Items of an iterable, such as a streamed dataset. See ``FromIterable``."""
        return CheckpointableDataset(FromIterable(iterable, repeat))

    @staticmethod
    def from_mosaicml(mosaicml_dataset: Any, repeat: bool = False) -> "CheckpointableDataset":
        """Samples of a ``streaming.StreamingDataset``. See ``FromMosaicML``."""
        return CheckpointableDataset(FromMosaicML(mosaicml_dataset, repeat))

    @staticmethod
    def from_pages(
        seed: int | str, n_pages: int, offset: int = 0, rows_per_page: int = 100, subfolder: str | None = None
    ) -> "CheckpointableDataset":
        """Rows of the pages that a seed draws from the dataset bucket. See ``FromPages``."""
        from tplr.streams.sources.pages import FromPages

        return CheckpointableDataset(FromPages(seed, n_pages, offset, rows_per_page, subfolder))

    @staticmethod
    def from_files(  # noqa: PLR0917 - the documented signature
        urls: Url | Sequence[Url],
        repeat: bool = False,
        shuffle_shards: bool = False,
        format: FileFormat = "auto",  # noqa: A002 - the documented name
        n_active_shards: int = 10,
        n_standby_shards: int = 2,
        timeout: float = 60.0,
        n_prefetch_samples: int = 10,
        seed: int = 42,
        max_bad_fraction: float = 1.0,
    ) -> "CheckpointableDataset":
        """Records of JSONL, JSON, CBOR or parquet files, compressed or not, from disk, S3, R2 or elsewhere.

        See ``FromFiles``.
        """
        return CheckpointableDataset(
            FromFiles(
                urls,
                repeat,
                shuffle_shards,
                format,
                n_active_shards,
                n_standby_shards,
                timeout,
                n_prefetch_samples,
                seed,
                max_bad_fraction,
            )
        )

    # --- samples ---

    def map(self, fn: Callable[[Any], Any]) -> "CheckpointableDataset":
        """Apply ``fn`` to each sample. Raises ValueError if it returns None."""
        return CheckpointableDataset(Call(self.transform, "map", fn))

    def filter(self, fn: Callable[[Any], bool]) -> "CheckpointableDataset":
        """Keep the samples for which ``fn`` is true."""
        return CheckpointableDataset(Call(self.transform, "filter", fn))

    def filter_map(self, fn: Callable[[Any], Any | None]) -> "CheckpointableDataset":
        """Apply ``fn`` to each sample, and drop results that are None."""
        return CheckpointableDataset(Call(self.transform, "filter_map", fn))

    def parallel_map(
        self,
        fn: Callable[[Any], Any],
        max_workers: int | None = None,
        prefetch_factor: int = 10,
        ordered: bool = True,
        executor_type: ExecutorType = "thread",
    ) -> "CheckpointableDataset":
        """``map`` in threads or processes. See ``ParallelCall``."""
        return CheckpointableDataset(
            ParallelCall(self.transform, "map", fn, max_workers, prefetch_factor, ordered, executor_type)
        )

    def parallel_filter(
        self,
        fn: Callable[[Any], bool],
        max_workers: int | None = None,
        prefetch_factor: int = 10,
        ordered: bool = True,
        executor_type: ExecutorType = "thread",
    ) -> "CheckpointableDataset":
        """``filter`` in threads or processes. See ``ParallelCall``."""
        return CheckpointableDataset(
            ParallelCall(self.transform, "filter", fn, max_workers, prefetch_factor, ordered, executor_type)
        )

    def parallel_filter_map(
        self,
        fn: Callable[[Any], Any | None],
        max_workers: int | None = None,
        prefetch_factor: int = 10,
        ordered: bool = True,
        executor_type: ExecutorType = "thread",
    ) -> "CheckpointableDataset":
        """``filter_map`` in threads or processes. See ``ParallelCall``."""
        return CheckpointableDataset(
            ParallelCall(self.transform, "filter_map", fn, max_workers, prefetch_factor, ordered, executor_type)
        )

    def shuffle(self, buffer_size: int, seed: int = 42) -> "CheckpointableDataset":
        """Draw samples at random from a buffer of ``buffer_size``. See ``Shuffle``."""
        return CheckpointableDataset(Shuffle(self.transform, buffer_size, seed))

    def take(self, max_count: int) -> "CheckpointableDataset":
        """Keep the first ``max_count`` samples."""
        return CheckpointableDataset(Take(self.transform, max_count))

    def enumerate(self, count_column: str = "step") -> "CheckpointableDataset":
        """Add the number of each sample, from 0, as a column."""
        return CheckpointableDataset(Enumerate(self.transform, count_column))

    def stride(self, interval: int, offset: int) -> "CheckpointableDataset":
        """Keep every ``interval``-th sample from ``offset`` on: the share of one rank. See ``Stride``."""
        return CheckpointableDataset(Stride(self.transform, interval, offset))

    def shard_by_rank(self, rank: int | None = None, world_size: int | None = None) -> "CheckpointableDataset":
        """Read only the share of this rank and DataLoader worker of the preceding files, row groups, pages or items.

        ``RANK`` and ``WORLD_SIZE`` determine the rank unless it is given. See ``ShardByRank``.
        """
        return CheckpointableDataset(ShardByRank(self.transform, rank, world_size))

    def batch(
        self, batch_size: int, collate_fn: Callable[[list[Any]], Any] | None = None, drop_last: bool = False
    ) -> "CheckpointableDataset":
        """Collate ``batch_size`` samples with ``collate_fn``; default ``torch.utils.data.default_collate``."""
        return CheckpointableDataset(Batch(self.transform, batch_size, collate_fn, drop_last))

    def cache(self) -> "CheckpointableDataset":
        """Keep all samples in memory for later passes. See ``Cache``."""
        return CheckpointableDataset(Cache(self.transform))

    # --- tokens ---

    def tokenize(  # noqa: PLR0917 - the documented signature
        self,
        tokenizer: Any,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        target_column: str = "text",
        parallel: bool = True,
        max_workers: int | None = 1,
        prefetch_factor: int = 10,
        ordered: bool = True,  # has no effect: the order is always kept
        executor_type: ExecutorType = "thread",
    ) -> "CheckpointableDataset":
        """Add the columns of ``tokenizer(sample[target_column], **tokenizer_kwargs)``. See ``Tokenize``."""
        workers = worker_count(max_workers, prefetch_factor, executor_type) if parallel else 0
        return CheckpointableDataset(
            Tokenize(
                self.transform, tokenizer, tokenizer_kwargs, target_column, workers, prefetch_factor, executor_type
            )
        )

    def ensure_bos_eos(self, tokenizer: Any, target_column: str = "input_ids") -> "CheckpointableDataset":
        """Add BOS before and EOS after each document, unless the tokenizer does. See ``missing_bos_eos``."""
        return self.add_bos_eos(*missing_bos_eos(tokenizer), target_column)

    def add_bos_eos(
        self, bos_token_id: int | None, eos_token_id: int | None, target_column: str = "input_ids"
    ) -> "CheckpointableDataset":
        """Add a token before and one after each document; None adds none."""
        return CheckpointableDataset(BosEos(self.transform, bos_token_id, eos_token_id, target_column))

    def chunk(
        self, chunk_length: int, target_columns: Sequence[str] = ("input_ids",), drop_remainder: bool = True
    ) -> "CheckpointableDataset":
        """Cut each document into chunks; a shorter tail is dropped, or kept."""
        return CheckpointableDataset(Chunking(self.transform, "chunk", chunk_length, target_columns, drop_remainder))

    def concat_chunk(
        self, chunk_length: int, target_columns: Sequence[str] = ("input_ids",)
    ) -> "CheckpointableDataset":
        """Join all documents and cut the stream into chunks; an incomplete last chunk is dropped."""
        return CheckpointableDataset(Chunking(self.transform, "concat_chunk", chunk_length, target_columns))

    def pack_chunk(
        self,
        chunk_length: int,
        target_columns: Sequence[str] = ("input_ids",),
        discard_long_samples: bool = False,
        document_ids: bool = False,
    ) -> "CheckpointableDataset":
        """Join whole documents while they fit; documents over ``chunk_length`` are truncated, or discarded.

        Args:
            document_ids: also return columns for attention within documents: ``document_ids``, the number of each
                token's document in its pack, and ``position_ids``, the token's position in its document. Both begin at
                0, are ``torch.long`` and have the shape ``(tokens,)`` of the other columns. See ``cu_seqlens``.
        """
        return CheckpointableDataset(
            Chunking(self.transform, "pack_chunk", chunk_length, target_columns, discard_long_samples, document_ids)
        )

    def pad(self, pad_values: Mapping[str, int], chunk_length: int) -> "CheckpointableDataset":
        """Fill token columns up to ``chunk_length``. See ``Pad``."""
        return CheckpointableDataset(Pad(self.transform, pad_values, chunk_length))


class ResumedDataset(IterableDataset[Any]):
    """A pipeline whose every iteration begins at a state."""

    def __init__(self, dataset: CheckpointableDataset, state_dict: States) -> None:
        self.dataset, self.state_dict = dataset, state_dict

    def __iter__(self) -> CheckpointableIterator:
        return self.dataset.iter(self.state_dict)


def interleave_datasets(
    sources: Sequence[CheckpointableDataset],
    weights: Sequence[float] | None = None,
    chunk_size: int = 1024,  # has no effect: the schedule is exact and needs no blocks
    stopping_strategy: StoppingStrategy = "first_exhausted",
) -> CheckpointableDataset:
    """Interleave datasets by deterministic weighted round-robin until one, or all, have ended. See ``Interleave``."""
    return CheckpointableDataset(Interleave([source.transform for source in sources], weights, stopping_strategy))


def concat_datasets(sources: Sequence[CheckpointableDataset]) -> CheckpointableDataset:
    """Concatenate datasets: all samples of the first one, then those of the next."""
    return CheckpointableDataset(Concat([source.transform for source in sources]))


def _close(iterator: StreamIterator[Any], context: PipelineContext) -> None:
    try:
        iterator.close()
    finally:
        context.close()


def _tensor(array: Any) -> "torch.Tensor":
    import torch

    return torch.from_numpy(array)
