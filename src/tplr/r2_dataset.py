"""``R2DatasetLoader``: batches of seeded pages, from the dataset bucket of the environment.

It is a facade over ``tplr.pages``. Nodes use ``PageDataset``, which does not read the environment.
"""

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import s3fs

from tplr import config
from tplr.concurrency.load_ahead import LoadAhead
from tplr.errors import StateError
from tplr.logging import logger
from tplr.pages.dataset import PageDataset
from tplr.pages.fetch_manifest import fetch_manifest
from tplr.pages.manifest import DatasetManifest
from tplr.pages.manifest_cache import ManifestCache, dataset_place
from tplr.pages.page_draw import ROWS_PER_PAGE, next_pages, pages_digest, shard_rows
from tplr.pages.reader import REQUEST_BYTES, BytesRead, Footers, PageReader
from tplr.pages.token_cache import TokenCache
from tplr.resources import LocalMachine, Resources
from tplr.schemas import Bucket, PageRef
from tplr.seeds import hash_parts
from tplr.storage.replicas import Replicas
from tplr.storage.s3 import S3Connections, endpoint_url
from tplr.token_buffer import TokenBuffer, Tokens
from tplr.tokenize import Encoder, encoder
from tplr.tokenize.ragged import Ids

STATE_VERSION = 1
_STATE_FIELDS = {"version", "of", "page", "token"}


@dataclass(frozen=True)
class _Source:
    """The location of the dataset by the environment, and the limits on concurrency."""

    environment: config.Environment
    buckets: config.DatasetBuckets
    region: str
    resources: Resources

    @property
    def place(self) -> tuple[str, ...]:
        return dataset_place(self.buckets.replicas, self.buckets.subfolder, self.environment.endpoint)

    @contextlib.asynccontextmanager
    async def replicas(self, first: int = 0) -> AsyncIterator[Replicas]:
        async with S3Connections.of(self.environment, region=self.region) as connections:
            stores = [connections.store(bucket) for bucket in self.buckets.replicas]
            yield Replicas(stores, concurrency=self.resources.transfers, first=first)


class R2DatasetLoader(contextlib.AbstractAsyncContextManager["R2DatasetLoader", None]):
    """Batches of a list of pages. Each iteration starts with the first page.

        pages = await R2DatasetLoader.next_pages(offset=window * 6, n_pages=6, seed=uid)
        async with await R2DatasetLoader.create(6, 2048, pages, tokenizer) as loader:
            async for batch in loader: ...    # (batch_size, sequence_length) int64

    ``for`` also works, with or without the context manager, and blocks until the next page is loaded. A thread loads
    the next pages. It ends after the last page, at ``close``, and when the loader is garbage collected. Loaders share
    only bounded caches (manifest, footers, tokens), which closing a loader does not affect.

    The tokenizer is any callable with ``eos_token_id``: ``tokenizer(text, truncation=True, max_length=n,
    padding=False)["input_ids"]``. Those of ``transformers`` are called in batches or replaced by ``tplr.tokenize``.

    Credentials come from ``tplr.config.BUCKET_SECRETS["dataset"]``. A page that can't be fetched or contradicts the
    manifest raises ``StoreError`` or ``DataError`` (a ValueError): in ``create`` for the first page, in the iteration
    for the others.
    """

    DATASET_SUBFOLDER: ClassVar[str] = config.DATASET_SUBFOLDER
    """Prefix of the dataset's keys; ``TPLR_DATASET_SUBFOLDER`` overrides it."""
    CF_REGION_NAME: ClassVar[str] = "enam"
    """Region of signed requests; ``TPLR_S3_REGION`` overrides it. R2 accepts ``auto`` and its location hints."""
    MAX_CONCURRENT_REQUESTS: ClassVar[int] = Resources.of(LocalMachine.here()).transfers
    """Number of pages fetched concurrently: 8, more on over two cores; ``TPLR_TRANSFERS`` overrides it."""
    PREFETCH_SIZE: ClassVar[int] = 3
    """Number of fetched pages to buffer, in addition to those being fetched."""
    READ_BUFFER_SIZE: ClassVar[int] = REQUEST_BYTES
    """Maximum number of bytes of a request. Longer parts of a page are fetched by several concurrent requests."""
    BATCH_SIZE: ClassVar[int] = 128
    """The default batch size."""

    token_cache: ClassVar[TokenCache] = TokenCache()
    """Cache of pages' tokens; assign ``TokenCache(folder=...)`` to also cache on disk."""

    # A manifest is fetched once per location, so that a run uses the same one from beginning to end.
    _manifests: ClassVar[dict[tuple[str, ...], DatasetManifest]] = {}
    _footers: ClassVar[dict[tuple[str, ...], Footers]] = {}
    _filesystems: ClassVar[dict[tuple[Bucket, str, str], s3fs.S3FileSystem]] = {}
    _round_robin_index: ClassVar[int] = 0
    _fs_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        batch_size: int | None = None,
        sequence_length: int | None = None,
        num_pages: int | None = None,
        tokenizer: Any = None,
        pack_samples: bool = True,
    ) -> None:
        self.batch_size = self.BATCH_SIZE if batch_size is None else batch_size
        self.sequence_length = sequence_length
        _check_counts(batch_size=self.batch_size, sequence_length=sequence_length)
        self._batch_tokens = self.batch_size * (sequence_length or 1)
        self.num_pages = num_pages
        self.tokenizer = tokenizer
        self.pack_samples = pack_samples
        self.num_rows_per_page = ROWS_PER_PAGE
        self.pages: tuple[PageRef, ...] = ()
        self.bytes_read = BytesRead()
        self._buffer = TokenBuffer()  # holds the streams of pages ``[_first_page, _next_page)``
        self._first_page = self._next_page = 0
        self._resumes = False  # the next iteration begins at the buffer's position
        self._ahead: LoadAhead[PageRef, Ids] | None = None
        self._ending: list[LoadAhead[PageRef, Ids]] = []  # of earlier iterations
        self._open_streams: _OpenStreams | None = None
        self._resources = Resources(1, 1, 1, 1, 1)
        self._identity = ""

    @classmethod
    async def next_pages(
        cls, offset: int, n_pages: int, seed: int | str, num_rows_per_page: int = ROWS_PER_PAGE
    ) -> list[PageRef]:
        """Return the pages ``(config, row, split)`` of ``seed`` from ``offset`` on, as ``page_draw.next_pages``."""
        configs = (await cls._manifest(cls._source())).configs.values()
        return [*next_pages(configs, offset=offset, n_pages=n_pages, seed=seed, rows_per_page=num_rows_per_page)]

    @classmethod
    async def create(
        cls,
        batch_size: int | None,
        sequence_length: int,
        pages_info: Iterable[tuple[str, int, str]],
        tokenizer: Any,
        pack_samples: bool = True,
    ) -> Self:
        """Create a loader of the pages; returns when the first page is loaded.

        Raises:
            ValueError: a size is below 1, or the tokenizer has no EOS token.
        """
        loader = cls(batch_size, sequence_length, None, tokenizer, pack_samples)
        eos = getattr(tokenizer, "eos_token_id", None)
        if eos is None:
            raise ValueError("the tokenizer has no eos_token_id; rows of pages end with that token: set eos_token")
        _check_counts(MAX_CONCURRENT_REQUESTS=cls.MAX_CONCURRENT_REQUESTS, READ_BUFFER_SIZE=cls.READ_BUFFER_SIZE)
        loader.pages = tuple(PageRef(*page) for page in pages_info)
        loader.num_pages = len(loader.pages)
        source = cls._source()
        manifest = await cls._manifest(source)
        for page in loader.pages:
            shard_rows(manifest, page, loader.num_rows_per_page)
        encode = await asyncio.to_thread(encoder, tokenizer)
        loader._identity = hash_parts(
            pages_digest(loader.pages, manifest.sha256), loader.num_rows_per_page, encode.fingerprint, eos,
            loader.batch_size, sequence_length, pack_samples,
        )  # fmt: skip
        loader._resources = source.resources
        loader._open_streams = functools.partial(
            cls._streams,
            source,
            manifest,
            rows_per_page=loader.num_rows_per_page,
            encode=encode,
            eos=eos,
            sequence_length=sequence_length,
            pack_samples=pack_samples,
            bytes_read=loader.bytes_read,
        )
        try:
            await loader._loading().wait()
        except BaseException:
            await loader.aclose()
            raise
        return loader

    def __iter__(self) -> Iterator[Tokens]:
        self._begin()
        return self

    def __next__(self) -> Tokens:
        while self._buffer.length < self._batch_tokens:
            if self._next_page >= len(self.pages):
                raise StopIteration
            self._add(self._loading().take())
        return self._cut()

    def __aiter__(self) -> AsyncIterator[Tokens]:
        self._begin()
        return self

    async def __anext__(self) -> Tokens:
        while self._buffer.length < self._batch_tokens:
            if self._next_page >= len(self.pages):
                raise StopAsyncIteration
            self._add(await self._loading().take_async())
        return self._cut()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch, as plain values, for a loader with the same arguments."""
        page, token = self._position
        return {"version": STATE_VERSION, "of": self._identity, "page": page, "token": token}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next iteration where ``state`` was taken. It loads no earlier page.

        Raises:
            StateError: it is not a state, or the state of a loader with other arguments.
        """
        self._rewind(*_checked_position(state, self._identity, len(self.pages)))
        self._resumes = True

    def close(self) -> None:
        """End the thread and its connections. The loader can be used again, from the same position. Blocks briefly."""
        self._rewind(*self._position)
        for ahead in self._ending:
            ahead.close()
        self._ending = []

    async def aclose(self) -> None:
        """As ``close``, without blocking the event loop."""
        await asyncio.to_thread(self.close)

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _begin(self) -> None:
        if not self._resumes and self._position != (0, 0):
            self._rewind(0, 0)
        self._resumes = False

    def _rewind(self, page: int, token: int) -> None:
        ahead, self._ahead = self._ahead, None
        self._ending = [one for one in self._ending if one.running]
        if ahead:
            ahead.stop()  # does not block; ``close`` waits for its end
            self._ending.append(ahead)
        self._first_page = self._next_page = page
        self._buffer = TokenBuffer(skip=token)

    @property
    def _position(self) -> tuple[int, int]:
        """The index of the page in which the next batch begins, and the number of used tokens of its stream."""
        return self._first_page + self._buffer.finished, self._buffer.offset

    def _add(self, stream: Ids) -> None:
        self._buffer.put(stream)
        self._next_page += 1

    def _cut(self) -> Tokens:
        return self._buffer.take(self._batch_tokens).reshape(self.batch_size, -1)

    def _loading(self) -> LoadAhead[PageRef, Ids]:
        if self._ahead is None:
            assert self._open_streams is not None
            depth, threads = self._resources.transfers + self.PREFETCH_SIZE, self._resources.data_threads
            self._ahead = LoadAhead(self._open_streams, self.pages[self._next_page :], depth, threads)
        return self._ahead

    async def _process_page(self, page: tuple[str, int, str], sem: asyncio.Semaphore) -> list[int]:
        """Load the token stream of one page when ``sem`` allows it."""
        assert self._open_streams is not None
        async with sem, self._open_streams() as load:
            return (await load(PageRef(*page))).tolist()

    def get_page_names(self) -> list[str]:
        """Return ``config_row_split`` of each page."""
        return [f"{page.config}_{page.row}_{page.split}" for page in self.pages]

    @classmethod
    async def fetch_dataset_configs(cls) -> dict[str, dict[str, Any]]:
        """Return ``{"num_rows", "split", "shards": [{"path", "num_rows", ...}]}`` by config name, in manifest order."""
        sizes, _ = await cls._load_r2_metadata()
        return {
            name: {"num_rows": entry["total_rows"], "split": entry["split"], "shards": entry["shards"]}
            for name, entry in sizes.items()
        }

    @classmethod
    async def _load_r2_metadata(cls) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return shard sizes and metadata in the form of the two manifest objects.

        Each path begins with the bucket's name, as ``_get_fs().open`` expects it.
        """
        source = cls._source()
        manifest = await cls._manifest(source)
        root = f"{source.buckets.replicas[0].name}/{source.buckets.subfolder}"
        sizes = {
            name: {
                "split": entry.split,
                "total_rows": entry.num_rows,
                "shards": [
                    {
                        "path": f"{root}/{shard.path}",
                        "num_rows": shard.num_rows,
                        "byte_size": shard.byte_size,
                        "sha256": shard.sha256,
                    }
                    for shard in entry.shards
                ],
            }
            for name, entry in manifest.configs.items()
        }
        return sizes, {"configs": [{"config_name": name} for name in sizes], "address": manifest.address}

    @classmethod
    def _get_fs(cls) -> s3fs.S3FileSystem:
        """Return a file system over the dataset's bucket, at each call over the next replica.

        It is for programs that read shards themselves; pages are read without it.
        """
        source = cls._source()
        bucket = source.buckets.replicas[cls._next_turn() % len(source.buckets.replicas)]
        url = endpoint_url(bucket, source.environment.endpoint)
        with cls._fs_lock:
            place = (bucket, url, source.region)
            if place not in cls._filesystems:
                cls._filesystems[place] = cls._new_fs(*place)
            return cls._filesystems[place]

    @classmethod
    def _next_turn(cls) -> int:
        """Return the number of the replica to begin with, in round-robin order over all loaders."""
        with cls._fs_lock:
            cls._round_robin_index += 1
            return cls._round_robin_index - 1

    @classmethod
    def _new_fs(cls, bucket: Bucket, url: str, region: str) -> s3fs.S3FileSystem:
        return s3fs.S3FileSystem(
            key=bucket.access_key_id,
            secret=bucket.secret_access_key,
            endpoint_url=url,
            client_kwargs={"region_name": region},
            default_block_size=cls.READ_BUFFER_SIZE,
            # With s3fs's own read-ahead a row group costs up to 292 times its bytes.
            default_cache_type="none",
            config_kwargs={
                "signature_version": "s3v4",
                "s3": {"addressing_style": "path"},
                "max_pool_connections": 50,
                "connect_timeout": 5,
                "read_timeout": 10,
                "tcp_keepalive": True,
                "retries": {"max_attempts": 3},
                # R2 refuses the checksums that newer SDKs send.
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
            skip_instance_cache=True,
        )

    @classmethod
    def _source(cls) -> _Source:
        """Read the environment. Raises ConfigError."""
        environment, machine = config.Environment.read(), LocalMachine.here()
        resources = Resources.choose(machine, environment.variables, transfers=cls.MAX_CONCURRENT_REQUESTS)
        _log_once(f"page loader: {resources.describe(machine)}")
        buckets = environment.dataset(default=cls.DATASET_SUBFOLDER)
        region = environment.region if environment.variables.get("TPLR_S3_REGION") else cls.CF_REGION_NAME
        return _Source(environment, buckets, region, resources)

    @classmethod
    async def _manifest(cls, source: _Source) -> DatasetManifest:
        if source.place not in cls._manifests:
            cache = ManifestCache(source.environment.cache_folder, source.place)
            async with source.replicas() as replicas:
                manifest = await fetch_manifest(replicas, source.buckets.subfolder, cache)
            cls._manifests.setdefault(source.place, manifest)  # of two concurrent fetches the first result is kept
        return cls._manifests[source.place]

    @classmethod
    @contextlib.asynccontextmanager
    async def _streams(
        cls,
        source: _Source,
        manifest: DatasetManifest,
        *,
        rows_per_page: int,
        encode: Encoder,
        eos: int,
        sequence_length: int,
        pack_samples: bool,
        bytes_read: BytesRead,
    ) -> AsyncIterator[Callable[[PageRef], Awaitable[Ids]]]:
        """Yield the function that loads a page's token stream; it holds no reference to a loader."""
        async with source.replicas(cls._next_turn()) as replicas:
            reader = PageReader(
                manifest,
                source.buckets.subfolder,
                replicas,
                rows_per_page,
                request_bytes=cls.READ_BUFFER_SIZE,
                footers=cls._footers.setdefault((manifest.sha256, *source.place), Footers()),
                bytes_read=bytes_read,
            )
            threads = source.resources.data_threads
            dataset = PageDataset(
                reader, encode, eos, pack_samples=pack_samples, token_cache=cls.token_cache, threads=threads
            )
            yield functools.partial(dataset.stream, sequence_length=sequence_length)


_OpenStreams = Callable[[], contextlib.AbstractAsyncContextManager[Callable[[PageRef], Awaitable[Ids]]]]


@functools.cache
def _log_once(line: str) -> None:
    logger.info(line)


def _check_counts(**counts: int | None) -> None:
    """Raise ValueError for counts below 1."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name}: expected 1 or more, got {count!r}")


def _checked_position(state: Mapping[str, Any], of: str, pages: int) -> tuple[int, int]:
    """Return page and token of a saved state.

    Raises:
        StateError: it is not a saved state, or the state of other batches.
    """
    if not isinstance(state, Mapping) or set(state) != _STATE_FIELDS or state["version"] != STATE_VERSION:
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise StateError(f"a loader's state has {sorted(_STATE_FIELDS)} and version {STATE_VERSION}; got {found}")
    if state["of"] != of:
        raise StateError(
            "the state is of other batches: another dataset, page list, tokenizer, batch size, sequence length or "
            "packing; create the loader with the same arguments"
        )
    page, token = state["page"], state["token"]
    if type(page) is not int or type(token) is not int or not 0 <= page <= pages or token < 0:
        raise StateError(f"a loader's state: page {page!r}, token {token!r} of {pages} pages is not a position")
    return page, token
