"""Where chunks are encoded: in this process, in several, or on Ray. The results come in the chunks' order."""

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Literal

from tplr.errors import ConfigError, DataError
from tplr.stores.preprocess.config import PipelineConfig
from tplr.stores.preprocess.encode import Encoded, RecordEncoder
from tplr.stores.preprocess.records import Chunk
from tplr.stores.preprocess.tokenizing import RecordTokenizer

EngineName = Literal["local", "ray"]
Results = Iterator[tuple[Chunk, Encoded]]
Engine = Callable[[Iterable[Chunk]], Results]

AHEAD = 3  # chunks under way for each worker


class Worker:
    """What every worker holds; made from texts, so that it can be made anywhere."""

    def __init__(self, config: str, tokenizer_path: str) -> None:
        self._encoder = RecordEncoder(PipelineConfig.model_validate_json(config), RecordTokenizer(tokenizer_path))

    def encode(self, chunk: Chunk) -> Encoded:
        """See ``RecordEncoder.encode``."""
        return self._encoder.encode(chunk)


@contextmanager
def open_engine(
    name: EngineName, config: PipelineConfig, tokenizer_path: str, workers: int | None, tokenizing: RecordTokenizer
) -> Iterator[Engine]:
    """An engine that ends its workers with the block.

    Args:
        tokenizing: the tokenizer at ``tokenizer_path``, for work in this process.
        workers: how many processes, or actors on Ray; default one process, or an actor for each of Ray's CPUs.

    Raises:
        ConfigError: Ray is asked for and not installed.
    """
    text = config.model_dump_json(exclude_unset=True)
    if name == "ray":
        with _ray(text, tokenizer_path, workers) as engine:
            yield engine
    elif workers is None or workers == 1:
        alone = RecordEncoder(config, tokenizing)
        yield lambda chunks: ((chunk, alone.encode(chunk)) for chunk in chunks)
    else:
        with _processes(text, tokenizer_path, workers) as engine:
            yield engine


@contextmanager
def _processes(config: str, tokenizer_path: str, workers: int) -> Iterator[Engine]:
    # Forked from a server without threads, which has imported what all need.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "transformers.models.auto.tokenization_auto"])
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(config, tokenizer_path))

    def encode(chunks: Iterable[Chunk]) -> Results:
        try:
            yield from _in_order(
                chunks, lambda chunk: pool.submit(_work, chunk), lambda future: future.result(), workers
            )
        except BrokenProcessPool as error:
            raise DataError("a worker process ended by itself: out of memory? Use fewer, or a smaller batch") from error

    try:
        yield encode
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _ray(config: str, tokenizer_path: str, workers: int | None) -> Iterator[Engine]:
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise ConfigError("--engine ray: Ray is not installed; pip install 'tplr[ray]'") from error
    began = not ray.is_initialized()
    if began:
        ray.init(log_to_driver=False, include_dashboard=False)
    try:
        count = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        actors = [ray.remote(Worker).options(num_cpus=1).remote(config, tokenizer_path) for _ in range(count)]
        turns = iter(range(2**62))

        def submit(chunk: Chunk) -> Any:
            return actors[next(turns) % count].encode.remote(chunk)

        yield lambda chunks: _in_order(chunks, submit, ray.get, count)
        for actor in actors:
            ray.kill(actor)
    finally:
        if began:
            ray.shutdown()


def _in_order(
    chunks: Iterable[Chunk], submit: Callable[[Chunk], Any], collect: Callable[[Any], Encoded], workers: int
) -> Results:
    """Results in the chunks' order, a bounded number of them under way."""
    pending: deque[tuple[Chunk, Any]] = deque()
    for chunk in chunks:
        pending.append((chunk, submit(chunk)))
        if len(pending) >= AHEAD * workers:
            first, coming = pending.popleft()
            yield first, collect(coming)
    for first, coming in pending:
        yield first, collect(coming)


_worker: Worker | None = None


def _start_worker(config: str, tokenizer_path: str) -> None:
    global _worker
    _worker = Worker(config, tokenizer_path)


def _work(chunk: Chunk) -> Encoded:
    assert _worker is not None
    return _worker.encode(chunk)
