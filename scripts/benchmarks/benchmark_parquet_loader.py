"""Measures the page loader, from an S3 server on this machine to batches, and tokenizing of the same texts in memory.

    python scripts/benchmarks/benchmark_parquet_loader.py [--full] [--out FOLDER] [--repetitions 3] [--part NAME ...]

Parts: ``speed`` (24 and 6 pages, from the bucket and from the token cache on disk, beside the limits), ``cut`` (cutting
and packing alone), ``grid`` (each of pages, batch size, sequence length, requests and pages ahead by itself, and pages
against requests; with ``--full`` the whole product), ``memory`` (1,000 pages in a process of its own) and ``equal``
(ids of 100 MB and of random Unicode texts, by ``tplr.tokenize`` and by the library).

The limits, which alternate with the loader in each repetition, encode texts held in memory: ``library`` is the
tokenizers library's batch encoding on all cores, ``tokenizer`` a call of the ``transformers`` tokenizer, ``encoder``
``tplr.tokenize``. The tokenizer is a byte-level BPE with 32,000 tokens; "library path" is the same one with a
normalizer, for which ``tplr.tokenize`` uses the library.

Writes ``parquet_loader.csv``, ``parquet_loader.png`` (bars, memory) and ``parquet_loader_grid.png`` (heat map) to
``docs/benchmarks``, and prints the medians.
"""

import argparse
import asyncio
import csv
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from parquet_corpus import EOS, prepared
from parquet_loader_report import Row, report
from pictures import redraw
from s3_process import start_server
from tokenizers import Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast

from tplr import config
from tplr.pages.packing import batches, packed, padded
from tplr.pages.page_draw import group_rows, shard_rows
from tplr.pages.reader import PageReader
from tplr.pages.token_cache import TokenCache
from tplr.r2_dataset import R2DatasetLoader
from tplr.schemas import PageRef
from tplr.storage import S3Connections
from tplr.tokenize import Ragged, encoder
from tplr.tokenize.encoder import _encoders
from tplr.tokenize.ragged import offsets_of

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
PARTS = ("speed", "cut", "grid", "memory", "equal")
SUBFOLDER = "pages"
KEY, SECRET = "a" * 32, "b" * 64
KEYS = {KEY: {"secret": SECRET, "buckets": {"books": "read-write"}}}
PAGES, BATCH, LENGTH = 24, 6, 2048
KNOWN_PAGES = 480
MEMORY_PAGES = 1000
GRID = {  # while one parameter varies, the others keep their first value
    "pages": (24, 6, 12, 48),
    "batch": (6, 1, 24),
    "length": (2048, 512, 1024),
    "requests": (8, 1, 2, 4),
    "ahead": (3, 1, 16),
}


# --- setup --------------------------------------------------------------------------------------------------------


def set_environment(endpoint: str, folder: Path) -> None:
    os.environ |= {
        "TPLR_S3_ENDPOINT": endpoint,
        "TPLR_DATASET_SUBFOLDER": SUBFOLDER,
        "TPLR_CACHE_FOLDER": str(folder / "cache"),
        "R2_DATASET_ACCOUNT_ID": "0" * 32,
        "R2_DATASET_BUCKET_NAME": "books",
        "R2_DATASET_READ_ACCESS_KEY_ID": KEY,
        "R2_DATASET_READ_SECRET_ACCESS_KEY": SECRET,
        "R2_DATASET_WRITE_ACCESS_KEY_ID": KEY,
        "R2_DATASET_WRITE_SECRET_ACCESS_KEY": SECRET,
    }


async def upload(dataset: Path) -> None:
    environment = config.Environment.read()
    async with S3Connections.of(environment) as connections:
        store = connections.store(environment.bucket("dataset", "write"))
        for path in await asyncio.to_thread(lambda: [*dataset.rglob("*.*")]):
            await store.put_file(f"{SUBFOLDER}/{path.relative_to(dataset).as_posix()}", path)


def tokenizers(path: Path) -> tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]:
    """Return one tokenizer that ``tplr.tokenize`` accelerates, and one that it delegates to the library."""
    plain, normalizing = Tokenizer.from_file(str(path)), Tokenizer.from_file(str(path))
    normalizing.normalizer = normalizers.NFC()
    fast, own = (PreTrainedTokenizerFast(tokenizer_object=one, eos_token=EOS) for one in (plain, normalizing))
    assert encoder(fast).fast
    assert not encoder(own).fast
    return fast, own


async def texts_of(pages: Sequence[PageRef]) -> list[str]:
    source = R2DatasetLoader._source()
    async with source.replicas() as replicas:
        reader = PageReader(await R2DatasetLoader._manifest(source), SUBFOLDER, replicas)
        return [text for page in pages for text in await reader.texts(page)]


async def bytes_needed(pages: Sequence[PageRef], dataset: Path) -> int:
    """Return the compressed bytes of the column chunks that hold the pages; a chunk counts once per page that needs
    it."""
    manifest = await R2DatasetLoader._manifest(R2DatasetLoader._source())
    needed = 0
    for page in pages:
        for rows in shard_rows(manifest, page):
            footer = pq.read_metadata(dataset / rows.shard.path)
            sizes = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
            for part in group_rows(rows, sizes, manifest.address):
                needed += footer.row_group(part.group).column(0).total_compressed_size
    return needed


# --- measurements -------------------------------------------------------------------------------------------------


async def load(tokenizer: Any, pages: Sequence[PageRef], *, batch: int = BATCH, length: int = LENGTH) -> Row:
    """Load all batches of ``pages`` with no cache but the manifest and ``token_cache``."""
    R2DatasetLoader._footers = {}
    Path("/proc/self/clear_refs").write_text("5")  # noqa: ASYNC240 - resets the peak
    began = time.perf_counter()
    async with await R2DatasetLoader.create(batch, length, pages, tokenizer) as loader:
        arrivals = [time.perf_counter() - began async for _ in loader]
    return {
        "seconds": arrivals[-1],
        "tokens": len(arrivals) * batch * length,
        "first": arrivals[0],
        "batch_seconds": statistics.median(np.diff(arrivals)) if len(arrivals) > 1 else arrivals[0],
        "fetched": loader.bytes_read.text + loader.bytes_read.footers,
        "peak": memory("VmHWM"),
    }


def timed(count: Callable[[], int]) -> Row:
    began = time.perf_counter()
    tokens = count()
    return {"seconds": time.perf_counter() - began, "tokens": tokens}


def memory(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    return 1024 * int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0])


def library(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> int:
    """Return the tokens of the library's batches, cut like those of the loader."""
    own = tokenizer.backend_tokenizer
    own.enable_truncation(LENGTH)
    return sum(len(row.ids) for row in own.encode_batch_fast(list(texts)))


def called(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> int:
    return sum(map(len, tokenizer(list(texts), truncation=True, max_length=LENGTH)["input_ids"]))


def speed(place: Path, fast: Any, own: Any, repetitions: int, scratch: Path) -> list[Row]:
    pages = asyncio.run(R2DatasetLoader.next_pages(0, PAGES, seed=1))
    texts = asyncio.run(texts_of(pages))
    needed = {count: asyncio.run(bytes_needed(pages[:count], place / "dataset")) for count in (6, PAGES)}
    encode, none = encoder(fast), TokenCache(memory_bytes=0)
    disk = TokenCache(memory_bytes=0, folder=scratch / "tokens")

    def loaded(tokenizer: Any, count: int, cache: TokenCache) -> Row:
        R2DatasetLoader.token_cache = cache
        return asyncio.run(load(tokenizer, pages[:count])) | {"pages": count, "needed": needed[count]}

    jobs: dict[str, Callable[[], Row]] = {
        "library": lambda: timed(lambda: library(fast, texts)),
        "loader": lambda: loaded(fast, PAGES, none),
        "encoder": lambda: timed(lambda: len(encode.encode_batch(texts, LENGTH).ids)),
        "loader, 6 pages": lambda: loaded(fast, 6, none),
        "from disk": lambda: loaded(fast, PAGES, disk),
        "tokenizer": lambda: timed(lambda: called(fast, texts)),
        "library path, library": lambda: timed(lambda: library(own, texts)),
        "library path, loader": lambda: loaded(own, PAGES, none),
    }
    for name in ("loader", "from disk", "encoder"):  # warms up; fills the disk
        jobs[name]()
    rows = []
    for repetition in range(repetitions):
        for name in rotated([*jobs], repetition):
            rows.append({"part": "speed", "what": name, "repetition": repetition} | jobs[name]())
            R2DatasetLoader.token_cache = none
    # These jobs come last, because the library is slower in this process after them.
    for read_before in range(KNOWN_PAGES // PAGES):
        asyncio.run(load(fast, asyncio.run(R2DatasetLoader.next_pages(0, PAGES, seed=5000 + read_before))))
    for repetition in range(repetitions):
        pages = asyncio.run(R2DatasetLoader.next_pages(0, PAGES, seed=100 + repetition))
        others = unseen(fast, pages, asyncio.run(texts_of(pages)))
        for name in rotated([*others], repetition):
            row = others[name]()
            rows.append({"part": "speed", "what": name, "repetition": repetition} | row)
    return rows


def unseen(tokenizer: Any, pages: Sequence[PageRef], texts: Sequence[str]) -> dict[str, Callable[[], Row]]:
    """Return jobs on pages that are new to the library and to both encoders: one has read ``KNOWN_PAGES`` other pages,
    as in a running node, the other none. The encoders share no table.
    """

    def new_encoder() -> Row:
        known = _encoders.copy()
        _encoders.clear()
        encoder(tokenizer)  # its tables are made at a node's start
        row = asyncio.run(load(tokenizer, pages))
        _encoders.clear()
        _encoders.update(known)
        return row

    return {
        "loader, new encoder": new_encoder,
        "loader, unseen pages": lambda: asyncio.run(load(tokenizer, pages)),
        "library, unseen pages": lambda: timed(lambda: library(tokenizer, texts)),
    }


def cut(repetitions: int) -> list[Row]:
    """Measure packing alone: tokenized pages of 100 rows with up to 2048 tokens to batches."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(6.6, 0.95, 100).astype(np.int64) + 1, LENGTH)
    page = Ragged(rng.integers(1, 32_000, lengths.sum()).astype(np.int32), offsets_of(lengths))

    def run(layout: Callable[[Any], Any]) -> int:
        for _ in range(200):
            batches(layout(packed(page, 0)), BATCH, LENGTH)
        return 200 * len(page.ids)

    jobs = {
        "packed": lambda: run(lambda stream: stream),
        "padded": lambda: run(lambda stream: padded(stream, LENGTH, 0)),
    }
    return [
        {"part": "cut", "what": name, "repetition": repetition} | timed(jobs[name])
        for repetition in range(max(5, repetitions))
        for name in rotated([*jobs], repetition)
    ]


def grid(place: Path, tokenizer: Any, repetitions: int, *, full: bool) -> list[Row]:
    first = {name: values[0] for name, values in GRID.items()}
    cells = [first | {name: value} for name, values in GRID.items() for value in values]
    cells += [first | {"pages": p, "requests": r} for p in GRID["pages"] for r in GRID["requests"]]
    if full:
        cells = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    cells = [dict(cell) for cell in dict.fromkeys(tuple(cell.items()) for cell in cells)]
    pages = asyncio.run(R2DatasetLoader.next_pages(0, max(GRID["pages"]), seed=2))
    needed = {count: asyncio.run(bytes_needed(pages[:count], place / "dataset")) for count in GRID["pages"]}
    R2DatasetLoader.token_cache = TokenCache(memory_bytes=0)
    rows = []
    for repetition in range(repetitions):
        for i, cell in enumerate(rotated(cells, repetition * 5)):
            R2DatasetLoader.MAX_CONCURRENT_REQUESTS, R2DatasetLoader.PREFETCH_SIZE = cell["requests"], cell["ahead"]
            row = asyncio.run(load(tokenizer, pages[: cell["pages"]], batch=cell["batch"], length=cell["length"]))
            row["needed"] = needed[cell["pages"]]
            rows.append({"part": "grid", "what": "loader", "repetition": repetition} | cell | row)
            say(f"grid {repetition + 1}/{repetitions}: {i + 1}/{len(cells)}")
    R2DatasetLoader.MAX_CONCURRENT_REQUESTS, R2DatasetLoader.PREFETCH_SIZE = first["requests"], first["ahead"]
    return rows


async def remember(tokenizer: Any, count: int) -> None:
    """Print resident bytes after each page of batches; runs in a process of its own."""
    pages = await R2DatasetLoader.next_pages(0, count, seed=3)
    async with await R2DatasetLoader.create(BATCH, LENGTH, pages, tokenizer) as loader:
        at = -1
        async for _ in loader:
            page = loader.state_dict()["page"]
            if page // 20 > at:
                at = page // 20
                print(json.dumps({"pages": page, "peak": memory("VmRSS")}), flush=True)


def flat(count: int) -> list[Row]:
    began = time.perf_counter()
    command = [sys.executable, __file__, "--remember", str(count)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [{"part": "memory", "what": "resident", "repetition": 0} | json.loads(line) for line in lines]
    rows[-1]["seconds"] = time.perf_counter() - began
    return rows


def equal(tokenizer: Any, texts: Sequence[str], megabytes: int) -> list[Row]:
    """Return the differences in ids between ``tplr.tokenize`` and the library."""
    encode, own = encoder(tokenizer), tokenizer.backend_tokenizer
    own.no_truncation()
    rows = []
    for what, some in (("text", texts), ("fuzzed", fuzzed(60_000))):
        done, tokens, differences = 0, 0, 0
        for i in range(0, len(some), 500):
            part = some[i : i + 500]
            ours = encode.encode_batch(part)
            theirs = own.encode_batch_fast(list(part))
            differences += sum(a.tolist() != b.ids for a, b in zip(ours.rows(), theirs, strict=True))
            tokens += len(ours.ids)
            done += sum(len(text.encode()) for text in part)
            say(f"equal: {what} {done / 1e6:.0f} MB, {differences} differences")
            if done > megabytes * 1_000_000:
                break
        rows.append(
            {"part": "equal", "what": what, "repetition": 0, "tokens": tokens, "needed": done, "fetched": differences}
        )
    return rows


def fuzzed(count: int) -> list[str]:
    rng = random.Random(0)
    alphabets = [
        range(0x80),
        range(0x250),
        range(0x3000),
        range(0x110000),
        "ab'  \n.1sretlmd",
        "\u00a0\u3000\x85 \t\n'a1",
    ]
    points = [[ord(c) if isinstance(c, str) else c for c in alphabet] for alphabet in alphabets]
    return [
        "".join(chr(p) for p in rng.choices(rng.choice(points), k=rng.randrange(80)) if not 0xD800 <= p < 0xE000)
        for _ in range(count)
    ]


def rotated(items: list[Any], by: int) -> list[Any]:
    by %= len(items)
    return items[by:] + items[:by]


def say(line: str) -> None:
    end = "\r" if sys.stderr.isatty() else "\n"
    if sys.stderr.isatty():
        print(f"\x1b[K{line}", end=end, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the whole product of the grid")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument(
        "--repetitions", type=int, default=3, help="of the grid; three times as many of the compared jobs"
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--memory-pages", type=int, default=MEMORY_PAGES)
    parser.add_argument("--megabytes", type=int, default=100, help="of text whose ids are compared")
    parser.add_argument("--remember", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    place = prepared()
    fast, own = tokenizers(place / "tokenizer.json")
    if args.remember:
        asyncio.run(remember(fast, args.remember))
        return
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        set_environment(start_server(folder, stack, KEYS), folder)
        asyncio.run(upload(place / "dataset"))
        rows: list[Row] = []
        if "speed" in args.part:
            rows += speed(place, fast, own, 3 * args.repetitions, folder)
        if "cut" in args.part:
            rows += cut(args.repetitions)
        if "grid" in args.part:
            rows += grid(place, fast, args.repetitions, full=args.full)
        if "memory" in args.part:
            rows += flat(args.memory_pages)
        if "equal" in args.part:
            shards = sorted((place / "dataset").rglob("*.parquet"))
            texts = [text for path in shards for text in pq.read_table(path)["text"].to_pylist()]
            rows += equal(fast, texts, args.megabytes)
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "parquet_loader.csv").open("w", newline="") as file:
        fields = dict.fromkeys(itertools.chain.from_iterable(rows))
        writer = csv.DictWriter(file, list(fields), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    report(rows)
    redraw("parquet_loader", args.out / "parquet_loader.csv")


if __name__ == "__main__":
    main()
