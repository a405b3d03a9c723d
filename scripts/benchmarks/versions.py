"""Compares processor time of the data layer in two versions of the package, by public names only.

Each job runs in a separate process with one version's source tree, the versions in alternating order. A process repeats
its job and reports the least processor time of a pass, which other load on the machine affects least. A ratio is
``before / now`` within one round: above 1, this version takes less time.

    python scripts/benchmarks/versions.py --before DIRECTORY [--rounds 5]

``--before`` is the other version's ``src``. Writes ``docs/benchmarks/versions.csv`` and ``versions.png``, and prints
the medians. ``--only JOB ...`` replaces the rows of these jobs.
"""

import argparse
import asyncio
import csv
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
SOURCE = Path(__file__).parents[2] / "src"
PASSES = 5
DOCUMENTS = 6000
KEY_ID, SECRET = "a" * 32, "b" * 64
BUCKET = "pages"
EOS = "<eos>"


def cpu_seconds() -> float:
    """Return the processor time of this process and the children that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def drain(items: Iterable[Any]) -> None:
    for _ in items:
        pass


def stream(*steps: tuple[str, dict[str, Any]], files: str = "corpus.jsonl") -> Callable[[Path], Callable[[], None]]:
    """Return a job that reads a pipeline over ``files`` with the named methods of ``CheckpointableDataset``."""

    def setup(folder: Path) -> Callable[[], None]:
        from tplr.data import CheckpointableDataset

        dataset = CheckpointableDataset.from_files(str(folder / files))
        for name, arguments in steps:
            given = {key: tokenizer(folder) if value == "tokenizer" else value for key, value in arguments.items()}
            dataset = getattr(dataset, name)(**given)
        return lambda: drain(dataset)

    return setup


def tokenizer(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(folder / "tokenizer"))


def tokens(method: str, **arguments: Any) -> Callable[[Path], Callable[[], None]]:
    """Return a job that cuts a list of tokenized documents in memory."""

    def setup(folder: Path) -> Callable[[], None]:
        import numpy as np

        from tplr.data import CheckpointableDataset

        rng = np.random.default_rng(0)
        lengths = rng.lognormal(7, 1, 3000).astype(int) + 1
        documents = [{"input_ids": rng.integers(0, 32000, length).astype(np.int32)} for length in lengths]
        dataset = getattr(CheckpointableDataset.from_sequence(documents), method)(**arguments)
        return lambda: drain(dataset)

    return setup


def command(*words: str) -> Callable[[Path], Callable[[], None]]:
    """Return a job that runs a subcommand of ``tplr``; ``{}`` is the folder, ``{new}`` a folder that does not exist."""

    def setup(folder: Path) -> Callable[[], None]:
        from tplr.cli import main

        def run() -> None:
            new = tempfile.mkdtemp(dir=folder)
            status = main([word.replace("{new}", f"{new}/out").replace("{}", str(folder)) for word in words])
            if status:
                raise RuntimeError(f"tplr {' '.join(words)} returned {status}")

        return run

    return setup


def windows(folder: Path) -> Callable[[], None]:
    from tplr.data import DatasetFactory

    dataset = DatasetFactory.load("seq", str(folder / "store"), window_size=1024)
    return lambda: drain(dataset[i] for i in range(len(dataset)))


def pages(folder: Path) -> Callable[[], None]:
    from tplr.r2_dataset import R2DatasetLoader

    chosen = asyncio.run(R2DatasetLoader.next_pages(offset=0, n_pages=24, seed=7))

    async def load() -> None:
        R2DatasetLoader.token_cache = type(R2DatasetLoader.token_cache)()  # empty
        loader = await R2DatasetLoader.create(4, 1024, pages_info=chosen, tokenizer=tokenizer(folder))
        drain(loader)
        loader.close()

    return lambda: asyncio.run(load())


TOKENIZE = ("tokenize", {"tokenizer": "tokenizer"})
JOBS: dict[str, Callable[[Path], Callable[[], None]]] = {
    "read JSON Lines": stream(),
    "read parquet": stream(files="corpus.parquet"),
    "tokenize, concat, batch": stream(TOKENIZE, ("concat_chunk", {"chunk_length": 1024}), ("batch", {"batch_size": 8})),
    "shuffle": stream(("shuffle", {"buffer_size": 1000})),
    "chunk": tokens("chunk", chunk_length=1024),
    "concat_chunk": tokens("concat_chunk", chunk_length=1024),
    "pack_chunk": tokens("pack_chunk", chunk_length=1024),
    "prepare a store": command(
        "data", "prepare", "{}/corpus.jsonl", "-o", "{new}", "-c", "{}/config.json", "--tokenizer", "{}/tokenizer"
    ),
    "make pages, JSON Lines": command("data", "make", "{new}", "{}/corpus.jsonl"),
    "make pages, parquet": command("data", "make", "{new}", "{}/corpus.parquet"),
    "windows of a store": windows,
    "page loader": pages,
}


def work(name: str, folder: Path) -> None:
    """Run one job and print the least processor seconds of a pass."""
    run = JOBS[name](folder)
    run()
    found = []
    for _ in range(PASSES):
        before = cpu_seconds()
        run()
        found.append(cpu_seconds() - before)
    print(json.dumps(min(found)), flush=True)
    os._exit(0)  # the exit of a process that holds both torch and pyarrow may abort, in versions before this one


def make_inputs(folder: Path) -> None:
    """Write a corpus as JSON Lines and parquet, a tokenizer, a store and a dataset of pages."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from parquet_corpus import _texts
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    texts = [text[:4000] for text, _ in zip(_texts(), range(DOCUMENTS), strict=False)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pq.write_table(pa.table({"text": texts}), folder / "corpus.parquet", row_group_size=500)
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(texts[::10], trainer)
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=EOS).save_pretrained(folder / "tokenizer")
    config = {"input": {"sections": [{"field": "text", "action": "train"}]}, "preprocessing": {"max_seq_len": 1024}}
    (folder / "config.json").write_text(json.dumps(config))
    for words in (
        ("prepare", "corpus.jsonl", "-o", "store", "-c", "config.json", "--tokenizer", "tokenizer"),
        ("make", "dataset", "corpus.jsonl"),
    ):
        subprocess.run([sys.executable, "-m", "tplr.cli", "data", *words], cwd=folder, check=True)


async def measure(before: Path, rounds: int, names: list[str]) -> list[dict[str, Any]]:
    from tplr.schemas import Bucket
    from tplr.storage import S3Connections
    from tplr.stores.publish import publish
    from tplr.testing.s3server import serve

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        await asyncio.to_thread(make_inputs, folder)
        keys = {KEY_ID: {"secret": SECRET, "buckets": {BUCKET: "read-write"}}}
        async with serve(folder / "s3", keys) as server, S3Connections(server.endpoint) as connections:
            bucket = Bucket(name=BUCKET, account_id="c" * 32, access_key_id=KEY_ID, secret_access_key=SECRET)
            await publish(folder / "dataset", connections.store(bucket), "dataset")
            settings = {
                "ACCOUNT_ID": bucket.account_id,
                "BUCKET_NAME": BUCKET,
                "READ_ACCESS_KEY_ID": KEY_ID,
                "READ_SECRET_ACCESS_KEY": SECRET,
            }
            environment = {
                **os.environ,
                **{f"R2_DATASET_{name}": value for name, value in settings.items()},
                "TPLR_S3_ENDPOINT": server.endpoint,
                "TPLR_DATASET_SUBFOLDER": "dataset",
                "OMP_NUM_THREADS": "1",
            }
            for number in range(rounds):
                sides = [("before", before), ("now", SOURCE)]
                for name in names:
                    for side, source in sides if number % 2 else reversed(sides):
                        own = {"PYTHONPATH": str(source), "TPLR_CACHE_FOLDER": str(folder / f"cache-{side}")}
                        process = await asyncio.create_subprocess_exec(
                            sys.executable,
                            __file__,
                            "--job",
                            name,
                            str(folder),
                            env={**environment, **own},
                            stdout=subprocess.PIPE,
                            cwd=folder,
                        )
                        output, _ = await process.communicate()
                        if process.returncode:
                            raise RuntimeError(f"{name}, {side}: exit status {process.returncode}")
                        seconds = json.loads(output.decode().splitlines()[-1])
                        rows.append({"job": name, "version": side, "round": number, "cpu_seconds": seconds})
                    print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
    return rows


def ratios(rows: list[dict[str, Any]], job: str) -> list[float]:
    """Return ``before / now`` by round."""
    found = {(row["version"], row["round"]): float(row["cpu_seconds"]) for row in rows if row["job"] == job}
    return [found["before", number] / found["now", number] for number in sorted({number for _, number in found})]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="src of the other version")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=JOBS, help="jobs (default: all)")
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        work(args.job[0], Path(args.job[1]))
        return
    from pictures import redraw

    jobs, path = args.only or list(JOBS), FOLDER / "versions.csv"
    with path.open(newline="") as file:
        kept = [row for row in csv.DictReader(file) if row["job"] in JOBS and row["job"] not in jobs]
    measured = asyncio.run(measure(args.before, args.rounds, jobs))
    rows = sorted([*kept, *measured], key=lambda row: [*JOBS].index(row["job"]))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print("| job | before, s | now, s | before / now |\n|---|---|---|---|")
    for job in dict.fromkeys(row["job"] for row in rows):
        sides = [
            statistics.median(float(row["cpu_seconds"]) for row in rows if (row["job"], row["version"]) == (job, side))
            for side in ("before", "now")
        ]
        found = sorted(ratios(rows, job))
        print(
            f"| {job} | {sides[0]:.3f} | {sides[1]:.3f} | {statistics.median(found):.2f} "
            f"({found[0]:.2f} to {found[-1]:.2f}) |"
        )
    redraw("versions")


if __name__ == "__main__":
    main()
