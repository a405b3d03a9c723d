"""``prepare`` converts raw records to a token store.

    records ─► chunks ─► [workers: encode] ─► documents by domain ─► packed, cut into shards ─► folders

Workers run only the step in brackets. The rest is one loop over the results in the order of the records, so the output
depends neither on the number of workers nor on interruptions.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from tplr.config import Environment
from tplr.errors import DataError
from tplr.folder_lock import sole_user
from tplr.logging import logger
from tplr.stores.detect import REPORT, import_h5py
from tplr.stores.prepared import check_shards
from tplr.stores.preprocess.columns import join, take
from tplr.stores.preprocess.config import PipelineConfig
from tplr.stores.preprocess.encode import Encoded
from tplr.stores.preprocess.engines import Engine, EngineName, open_engine
from tplr.stores.preprocess.journal import LOCK, Counts, Journal, Progress
from tplr.stores.preprocess.records import Chunk, chunks, input_files
from tplr.stores.preprocess.shards import shard_columns
from tplr.stores.preprocess.sources import Sources
from tplr.stores.preprocess.tokenizing import RecordTokenizer
from tplr.stores.writer import Column, write_shard
from tplr.streams.iterator import PipelineContext
from tplr.streams.sources.source_file import SourceFile
from tplr.urls import Url

BATCH_SIZE = 256  # records of a chunk
MAX_LOGGED_SKIPS = 3  # of each reason

OnProgress = Callable[[int, int, Counts], None]


@dataclass(frozen=True)
class Prepared:
    """The finished store.

    Attributes:
        shards: by path in the folder: records, tokens, and the SHA-256 of its ``meta.json``.
    """

    folder: Path
    counts: Counts
    shards: dict[str, dict[str, Any]]


def prepare(
    inputs: Iterable[Url],
    out: str | Path,
    config: PipelineConfig,
    tokenizer_path: str | Path,
    *,
    engine: EngineName = "local",
    workers: int | None = None,
    batch_size: int = BATCH_SIZE,
    on_progress: OnProgress | None = None,
) -> Prepared:
    """Write a token store to ``out/<domain>/shard_0000`` and so on. Blocks.

    The same inputs, config and tokenizer give the same bytes with every engine. A call with the same arguments resumes
    an interrupted one, and does nothing after a finished one. One process at a time writes ``out``. Unusable records
    are counted by reason; the log names the first of each reason.

    Args:
        inputs: paths and URLs of files that streams can read (see ``FromFiles``), with braces and patterns, or of
            folders of such files.
        workers: see ``engines.open_engine``.
        batch_size: records that a worker gets at a time.
        on_progress: called with bytes read, total bytes, and the counts.

    Raises:
        ConfigError: the arguments are invalid, ``out`` holds something else or is being written by another process, or
            h5py is missing for format ``h5``.
        DataError: an input can't be read, no record is usable, an input changes meanwhile, or a written shard is
            missing.
    """
    if config.output.storage_format == "h5":
        import_h5py()  # fails now instead of at the first shard
    folder = Path(out)
    with closing(PipelineContext()) as context:
        files = [SourceFile(context, url) for url in input_files(inputs, context)]
        tokenizing = RecordTokenizer(tokenizer_path)
        tokenizing.check(config)
        sources = Sources(files, Environment.read().cache_folder)
        identity = {"config": config.to_dict(), "tokenizer": tokenizing.fingerprint, "sources": sources.identity}
        journal = Journal(folder, identity)
        if progress := journal.finished():
            logger.info("%s is already prepared", folder)
            check_shards(folder, progress.shards)
            return Prepared(folder, progress.counts, progress.shards)
        with sole_user(folder, LOCK, what="output", remedy="wait until it ends, or choose another folder"):
            progress = journal.finished() or journal.begin()
            check_shards(folder, progress.shards)
            run = _Run(folder, config, journal, progress)
            with open_engine(engine, config, str(tokenizer_path), workers, tokenizing) as encode:
                run.write(sources, encode, batch_size, on_progress)
            sources.check_unchanged()
            check_shards(folder, progress.shards)
            journal.finish(progress)
    return Prepared(folder, progress.counts, progress.shards)


class _Run:
    """Holds the documents that are not written yet, by domain, and writes shards."""

    def __init__(self, folder: Path, config: PipelineConfig, journal: Journal, progress: Progress) -> None:
        self._folder = folder
        self._config = config
        self._journal = journal
        self._progress = progress
        self._waiting: dict[str, dict[str, list[Column]]] = {}
        self._waiting_tokens = 0
        self._named = Counter[str]()

    def write(self, sources: Sources, encode: Engine, batch_size: int, on_progress: OnProgress | None) -> None:
        """Encode and write all records that are not written yet. Raises DataError if no record is usable."""
        progress, sizes = self._progress, sources.sizes
        if progress.shards:
            logger.info("resuming after %d shards, %d records", len(progress.shards), progress.counts.read)
        elif 0 in sizes:
            progress.counts.skipped["empty file"] = sizes.count(0)
        starts = [*accumulate(sizes, initial=0)]
        for chunk, encoded in encode(chunks(sources, progress.place, batch_size)):
            self.add(chunk, encoded)
            if on_progress:
                size = sizes[chunk.file]
                read = size if chunk.bytes_read is None else min(chunk.bytes_read, size)
                on_progress(starts[chunk.file] + read, starts[-1], progress.counts)
            if self.full:
                break
        self.flush()
        if not progress.counts.used:
            raise DataError(f"none of {progress.counts.read} records is usable: {_most(progress.counts.skipped)}")

    @property
    def full(self) -> bool:
        """Whether ``max_items`` records are used."""
        wanted = self._config.preprocessing.max_items
        return wanted is not None and self._progress.counts.used >= wanted

    def add(self, chunk: Chunk, encoded: Encoded) -> None:
        """Add the usable records of a chunk; write shards whenever enough tokens are held."""
        limit, wanted = self._config.output.max_tokens_per_shard, self._config.preprocessing.max_items
        totals = np.concatenate([[0], np.cumsum(encoded.tokens)])
        count = len(encoded.places)
        if wanted is not None:
            count = min(count, wanted - self._progress.counts.used)
        begin = raw = 0
        while begin < count:
            # Only up to the record that fills the shard, so that the output does not depend on chunks.
            end = min(count, int(np.searchsorted(totals[1:], totals[begin] + limit - self._waiting_tokens)) + 1)
            self._take(encoded, np.arange(begin, end))
            raw = self._pass(chunk, encoded, raw, int(encoded.places[end - 1]) + 1)
            begin = end
            if self._waiting_tokens >= limit:
                self.flush()
        if not self.full:
            self._pass(chunk, encoded, raw, len(chunk.bodies))

    def _take(self, encoded: Encoded, records: "np.ndarray[Any, Any]") -> None:
        by_domain: defaultdict[str, list[int]] = defaultdict(list)
        for record in records.tolist():
            by_domain[encoded.domains[record]].append(record)
        for domain, members in by_domain.items():
            waiting = self._waiting.setdefault(domain, {})
            whole = len(members) == len(encoded.domains)
            for key, column in encoded.columns.items():
                part = column if whole else take(column, np.array(members))
                waiting.setdefault(key, []).append(part)
        counts = self._progress.counts
        counts.used += len(records)
        counts.cut_tokens += int(encoded.cut[records].sum())
        self._waiting_tokens += int(encoded.tokens[records].sum())

    def _pass(self, chunk: Chunk, encoded: Encoded, begin: int, end: int) -> int:
        """Count the raw records ``[begin, end)`` of a chunk as done; returns ``end``."""
        counts = self._progress.counts
        counts.read += end - begin
        for index, reason, detail in encoded.skipped:
            if begin <= index < end:
                counts.skipped[reason] += 1
                self._named[reason] += 1
                if self._named[reason] <= MAX_LOGGED_SKIPS:
                    logger.warning("%s is left out: %s", chunk.where(index), detail)
        if end > 0:
            self._progress.place = chunk.after(end - 1)
        return end

    def flush(self) -> None:
        """Write all held documents, a shard for each domain, and save the progress."""
        if not self._waiting:
            return
        counts = self._progress.counts
        for domain, waiting in self._waiting.items():
            columns, cut = shard_columns({key: join(parts) for key, parts in waiting.items()}, self._config)
            name = folder_name(domain)
            number = sum(path.rpartition("/")[0] == name for path in self._progress.shards)
            tokens = sum(len(columns[key].values) for key in token_keys(self._config))
            path = f"{name}/shard_{number:04d}"
            meta = write_shard(
                self._folder / path, columns, self._config.output.storage_format, number=number, tokens=tokens
            )
            assert meta.shard is not None
            counts.tokens += tokens
            counts.cut_tokens += cut
            self._progress.shards[path] = {
                "records": meta.shard.records,
                "tokens": tokens,
                "meta_sha256": hashlib.sha256(meta.to_json()).hexdigest(),
            }
        self._waiting, self._waiting_tokens = {}, 0
        self._journal.save(self._progress)


def token_keys(config: PipelineConfig) -> list[str]:
    """The keys that hold tokens: neither masks nor positions nor values."""
    if config.input.sources is None:
        return ["sequence"]
    return [key for key, source in config.input.sources.items() if not source.is_value]


def folder_name(domain: str) -> str:
    """A domain as the name of a folder: percent-encoded, never hidden or the report's name, never too long."""
    name = quote(domain, safe=" ")
    name = f"%{ord(name[0]):02X}{name[1:]}" if name.startswith(".") or name == REPORT else name
    return name if len(name) <= 200 else f"{name[:150]}-{hashlib.sha256(domain.encode()).hexdigest()[:32]}"


def _most(skipped: Counter[str]) -> str:
    return ", ".join(f"{reason} ({count})" for reason, count in skipped.most_common(3)) or "there are none"
