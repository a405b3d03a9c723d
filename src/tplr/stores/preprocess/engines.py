"""Engines that encode chunks: in this process, in several processes, or on Ray. Results are in chunk order."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from functools import cached_property
from importlib import import_module
from typing import Any, Literal

from tplr.concurrency.read_ahead import ReadAhead
from tplr.concurrency.workers import WorkerDied, Workers
from tplr.errors import ConfigError, DataError
from tplr.stores.preprocess.config import PipelineConfig
from tplr.stores.preprocess.encode import Encoded, RecordEncoder
from tplr.stores.preprocess.records import Chunk
from tplr.stores.preprocess.tokenizing import RecordTokenizer

EngineName = Literal["local", "ray"]
Results = Iterator[tuple[Chunk, Encoded]]
Engine = Callable[[Iterable[Chunk]], Results]

AHEAD = 3  # chunks in progress for each worker


class Worker:
    """Encodes chunks. It is sent to its process as text, and loads the tokenizer there for the first chunk."""

    def __init__(self, config: str, tokenizer_path: str) -> None:
        self._config, self._tokenizer_path = config, tokenizer_path

    @cached_property
    def _encoder(self) -> RecordEncoder:
        return RecordEncoder(PipelineConfig.model_validate_json(self._config), RecordTokenizer(self._tokenizer_path))

    def encode(self, chunk: Chunk) -> Encoded:
        """See ``RecordEncoder.encode``."""
        return self._encoder.encode(chunk)


@contextmanager
def open_engine(
    name: EngineName, config: PipelineConfig, tokenizer_path: str, workers: int | None, tokenizing: RecordTokenizer
) -> Iterator[Engine]:
    """Open an engine whose workers end with the block.

    Args:
        tokenizing: the tokenizer at ``tokenizer_path``, for work in this process.
        workers: number of processes, or of actors on Ray; default: one process, or one actor per CPU of Ray.

    Raises:
        ConfigError: Ray is requested but not installed.
        DataError: a worker process died; raised by the engine.
    """
    text = config.model_dump_json(exclude_unset=True)
    if name == "ray":
        with _ray(text, tokenizer_path, workers) as (submit, count):
            yield lambda chunks: _results(chunks, submit, count)
    elif workers is None or workers == 1:
        alone = RecordEncoder(config, tokenizing)
        yield lambda chunks: ((chunk, alone.encode(chunk)) for chunk in chunks)
    else:
        preload = [__name__, "transformers.models.auto.tokenization_auto"]
        encode = Worker(text, tokenizer_path).encode
        with closing(Workers(encode, workers, "process", preload=preload)) as pool:
            yield lambda chunks: _results(chunks, pool.submit, workers)


def _results(chunks: Iterable[Chunk], submit: Callable[[Chunk], "Future[Encoded]"], workers: int) -> Results:
    try:
        for chunk, future in ReadAhead(chunks, submit, AHEAD * workers):
            yield chunk, future.result()
    except WorkerDied as error:
        raise DataError(f"{error}: out of memory? Use fewer workers or a smaller batch") from error


@contextmanager
def _ray(
    config: str, tokenizer_path: str, workers: int | None
) -> Iterator[tuple[Callable[[Chunk], "Future[Encoded]"], int]]:
    """A function that submits a chunk to the next actor, and the number of actors."""
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise ConfigError("--engine ray needs the extra: .venv/bin/pip install -e '.[ray]'") from error
    began = not ray.is_initialized()
    if began:
        ray.init(log_to_driver=False, include_dashboard=False)
    try:
        count = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        actors = [ray.remote(Worker).options(num_cpus=1).remote(config, tokenizer_path) for _ in range(count)]
        turns = itertools.cycle(actors)
        yield lambda chunk: next(turns).encode.remote(chunk).future(), count
        for actor in actors:
            ray.kill(actor)
    finally:
        if began:
            ray.shutdown()
