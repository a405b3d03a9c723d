"""Benchmark of stores, datasets, sampler and preparation against minimal implementations. One core.

    python scripts/benchmarks/stores.py

- fetch: ``MmapStore.fetch`` of random windows, against a slice of a plain ``np.memmap`` wrapped as a tensor.
- item: a ``seq`` item, against one slice of window + 1 tokens converted to int64 and wrapped once, and against two
  separate conversions.
- shuffle: memory of a sampler's epoch by number of windows, and indices per second, against ``torch.randperm``.
- prepare: raw JSON Lines to a finished store, in tokens per second, against encoding the same texts alone: with the
  tokenizer's own batches ("plain"), and with the engine that preparation uses ("engine").

A comparison alternates its sides in changing order; the result is the median of the paired ratios. Writes
``docs/benchmarks/stores.csv`` and ``stores.png``, prints the medians, and puts them into ``stores.md``.
"""

import csv
import json
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pictures import redraw
from transformers import AutoTokenizer

from tplr.localnet import corpus
from tplr.stores.datasets import SeqDataset
from tplr.stores.mmap import MmapStore
from tplr.stores.preprocess.config import PipelineConfig
from tplr.stores.preprocess.pipeline import BATCH_SIZE, prepare
from tplr.stores.sampler import ResumableDistributedSampler
from tplr.tokenize import encoder

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
TOKENS = 200_000_000
WINDOW = 2048
LOOKUPS = 20_000
REPETITIONS = 15
PREPARATIONS = 7
DOCUMENTS = 8_000
Row = dict[str, Any]


def private_memory() -> int:
    """Return the bytes of this process that are not pages of files."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition("RssAnon:")[2].split()[0])


def make_store(folder: Path) -> MmapStore:
    """Write a store of random tokens, in pieces."""
    rng = np.random.default_rng(0)
    with (folder / "sequence.bin").open("wb") as file:
        for _ in range(0, TOKENS, 1 << 22):
            rng.integers(0, 50_000, min(1 << 22, TOKENS - file.tell() // 4), np.int32).tofile(file)
    (folder / "meta.json").write_text(json.dumps({"sequence": {"shape": [TOKENS], "dtype": "int32"}}))
    store = MmapStore()
    store.load(folder)
    return store


def alternate(job: str, sides: dict[str, Callable[[], int]], repetitions: int) -> Iterator[Row]:
    """Yield each side's rate (its return value per second) in every repetition, after a warm-up."""
    names = list(sides)
    for repetition in range(repetitions + 1):
        for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
            began = time.perf_counter()
            done = sides[name]()
            rate = done / (time.perf_counter() - began)
            if repetition:
                yield {"job": job, "side": name, "repetition": repetition, "rate": rate}


def lookups(store: MmapStore, folder: Path) -> Iterator[Row]:
    plain = np.memmap(folder / "sequence.bin", np.int32, "r")
    dataset = SeqDataset(store, WINDOW)
    rng = random.Random(1)
    begins = [rng.randrange(TOKENS - WINDOW - 1) for _ in range(LOOKUPS)]
    items = [rng.randrange(len(dataset)) for _ in range(LOOKUPS)]

    def timed(work: Callable[[int], object], places: list[int]) -> Callable[[], int]:
        def run() -> int:
            for place in places:
                work(place)
            return len(places)

        return run

    def one_conversion(item: int) -> torch.Tensor:
        begin = item * WINDOW
        return torch.from_numpy(plain[begin : begin + WINDOW + 1].astype(np.int64))

    def two_conversions(item: int) -> dict[str, torch.Tensor]:
        begin = item * WINDOW
        return {
            "input_ids": store.fetch(begin, begin + WINDOW, "sequence").to(torch.long),
            "target_ids": store.fetch(begin + 1, begin + WINDOW + 1, "sequence").to(torch.long),
        }

    fetches = {
        "ours": timed(lambda begin: store.fetch(begin, begin + WINDOW, "sequence"), begins),
        "plain": timed(lambda begin: torch.from_numpy(plain[begin : begin + WINDOW]), begins),
    }
    yield from alternate("fetch", fetches, REPETITIONS)
    before = private_memory()
    for _ in range(10):
        fetches["ours"]()
    yield {"job": "fetch", "side": "memory of 200,000 more", "repetition": 0, "rate": private_memory() - before}
    sides = {
        "ours": timed(dataset.__getitem__, items),
        "plain": timed(one_conversion, items),
        "two conversions": timed(two_conversions, items),
    }
    yield from alternate("item", sides, REPETITIONS)


def shuffles() -> Iterator[Row]:
    taken = 10_000
    for number in (taken, 100_000, 1_000_000, 10_000_000):
        for side, order in (("ours", "portable"), ("torch", "torch")):
            sampler = ResumableDistributedSampler(range(number), rank=0, world_size=1, order=order)
            before, began = private_memory(), time.perf_counter()
            epoch = iter(sampler)
            for _ in islice(epoch, taken):
                pass
            seconds, held = time.perf_counter() - began, private_memory() - before
            epoch.close()
            yield {"job": f"shuffle {number}", "side": side, "repetition": 1, "rate": taken / seconds, "bytes": held}


def preparations(folder: Path) -> Iterator[Row]:
    corpus.build_corpus(folder / "corpus", vocab_size=4096)
    texts = [*islice(documents(), DOCUMENTS)]
    source = folder / "raw.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = PipelineConfig.from_dict({
        "input": {"sections": [{"field": "text"}]},
        "preprocessing": {"min_chars": 0, "max_seq_len": 1 << 16, "packing_strategy": "bfd_split"},
    })  # fmt: skip
    path = folder / "corpus" / "tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(path)
    fast = encoder(tokenizer)
    tokenizer.backend_tokenizer.no_truncation()
    chunks = [texts[i : i + BATCH_SIZE] for i in range(0, len(texts), BATCH_SIZE)]

    def engine() -> int:
        return sum(len(fast.encode_batch(chunk).ids) for chunk in chunks)

    def plain() -> int:
        # Much slower, so a part of the texts is enough for a rate.
        rows = (tokenizer.backend_tokenizer.encode_batch_fast(chunk) for chunk in chunks[::8])
        return sum(len(row.ids) for chunk in rows for row in chunk)

    def whole() -> int:
        shutil.rmtree(folder / "out", ignore_errors=True)
        return prepare([source], folder / "out", config, path).counts.tokens

    assert engine() == whole()
    yield from alternate("prepare", {"ours": whole, "plain": plain, "engine": engine}, PREPARATIONS)


def documents() -> Iterator[str]:
    """Yield Python's standard library, repeated, in documents of about 4,000 characters."""
    while True:
        for texts in corpus.standard_library().values():
            for text in texts:
                yield from (text[i : i + 4000] for i in range(0, len(text), 4000) if text[i : i + 4000].strip())


def summarise(rows: list[Row]) -> list[Row]:
    """Return the median rate of each side, and the ratios of ours to it within one repetition: median and quartiles."""
    summary = []
    rates = {(row["job"], row["side"], row["repetition"]): row["rate"] for row in rows}
    for job, side in dict.fromkeys((row["job"], row["side"]) for row in rows):
        mine = {key[2]: rate for key, rate in rates.items() if key[:2] == (job, side)}
        line: Row = {"job": job, "side": side, "rate": statistics.median(mine.values())}
        if len(mine) > 1 and side != "ours":
            ratios = [rates[job, "ours", repetition] / rate for repetition, rate in mine.items()]
            line["low"], line["ours/it"], line["high"] = statistics.quantiles(ratios, n=4)
        line["bytes"] = next(
            (row["bytes"] for row in rows if (row["job"], row["side"]) == (job, side) and "bytes" in row), None
        )
        summary.append(line)
    return summary


def main() -> None:
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # of a plain memmap
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [*shuffles(), *preparations(folder)]
        (folder / "store").mkdir()
        rows += lookups(make_store(folder / "store"), folder / "store")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "stores.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["job", "side", "repetition", "rate", "bytes"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    summary = summarise(rows)
    redraw("stores")
    table = "\n".join(map(line_of, summary))
    print(table)
    page = FOLDER / "stores.md"
    before, _, rest = page.read_text().partition("```\n")
    page.write_text(f"{before}```\n{table}\n```{rest.partition('```')[2]}")


def line_of(line: Row) -> str:
    ratio = f"  ours/it {line['ours/it']:.2f} ({line['low']:.2f} to {line['high']:.2f})" if "ours/it" in line else ""
    memory = f"  {line['bytes'] / 2**20:8.2f} MiB" if line["bytes"] is not None else ""
    return f"{line['job']:17} {line['side']:24} {line['rate']:14,.0f}{memory}{ratio}"


if __name__ == "__main__":
    main()
