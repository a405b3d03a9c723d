"""Streaming from S3 to batches of tokens, compared with epochraft, mosaicml-streaming, litdata and datasets.

One server process with R2's rules, and one process for each library, all over the same texts. In each repetition the
libraries do the same job one after the other, in a changing order. A ratio compares values of one repetition; the
result is the median over repetitions.

    python scripts/benchmarks/streaming.py [--repetitions 3] [--samples 1000000]

Each library has its own environment under ``.cache/streaming-benchmark``, created at the first run from
``streaming-requirements.txt``. A library that can't be installed is skipped and named. Writes
``docs/benchmarks/streaming.csv`` and ``streaming.png``, and prints the medians.
"""

import argparse
import contextlib
import copy
import csv
import itertools
import json
import os
import pickle
import random
import select
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from s3_process import start_server

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "benchmarks"
CACHE = ROOT / ".cache" / "streaming-benchmark"
KEY_ID, SECRET, BUCKET = "a" * 32, "b" * 64, "corpus"
KEYS = {KEY_ID: {"secret": SECRET, "buckets": {BUCKET: "read-write"}}}
SHARDS, LENGTH, BATCH = {"text": 8, "small": 1}, 2048, 8
RECORDS = 1_010_000  # of ``small``: more than a million, because the resume is measured after a million
SECONDS = 4.0  # duration of a pass
PATIENCE = 90.0  # seconds; timeout of a job
OURS = "tplr.data"


# --- a worker process: one library runs the jobs it is sent -------------------------------------------------------


class Job:
    """Parameters of a worker: folders of this run, the S3 endpoint, the tokenizer."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        self.endpoint = endpoint
        self.folder = folder
        self.tokenizer = tokenizer_of("tokenizer")
        self.fresh = (folder / f"local-{os.getpid()}-{n}" for n in itertools.count())

    def urls(self, corpus: str) -> list[str]:
        return [f"s3://{BUCKET}/{corpus}/{shard:02}.jsonl" for shard in range(SHARDS[corpus])]


class Ours:
    """``tplr.data`` with its fast engine."""

    def __init__(self, job: Job) -> None:
        from tplr.data import CheckpointableDataset

        self.job = job
        self.from_files = CheckpointableDataset.from_files

    def batches(self) -> Iterator[Any]:
        tokenizer = self.job.tokenizer
        dataset = self.from_files(self.job.urls("text"), repeat=True).tokenize(tokenizer).ensure_bos_eos(tokenizer)
        with dataset.concat_chunk(LENGTH).batch(BATCH).iter() as batches:
            yield from (batch["input_ids"] for batch in batches)

    def state_after(self, samples: int) -> Any:
        with self.from_files(self.job.urls("small"), repeat=True).iter() as iterator:
            for _ in itertools.islice(iterator, samples):
                pass
            return iterator.state_dict()

    def resume(self, state: Any) -> Any:
        with self.from_files(self.job.urls("small"), repeat=True).iter(state_dict=state) as iterator:
            return next(iterator)


class Epochraft(Ours):
    """The same interface. The library's pause of one second between two opened files is switched off."""

    def __init__(self, job: Job) -> None:
        os.environ["EPOCHRAFT_OPEN_DELAY_S3"] = "0"
        from epochraft import CheckpointableDataset

        self.job = job
        self.from_files = CheckpointableDataset.from_files

    def resume(self, state: Any) -> Any:
        return super().resume(copy.deepcopy(state))  # it modifies the state


class MosaicML:
    """The library's shards, in its order; tokenized like a typical user would."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def dataset(self, corpus: str) -> Any:
        from streaming import StreamingDataset

        return StreamingDataset(remote=f"s3://{BUCKET}/mds-{corpus}", local=str(next(self.job.fresh)), batch_size=1)

    def batches(self) -> Iterator[Any]:
        dataset = self.dataset("text")
        return cut((sample["text"] for _ in itertools.count() for sample in dataset), self.job.tokenizer)

    def state_after(self, samples: int) -> Any:
        dataset = self.dataset("small")
        for _ in itertools.islice(dataset, samples):
            pass
        return dataset.state_dict(samples, from_beginning=True)

    def resume(self, state: Any) -> Any:
        dataset = self.dataset("small")
        dataset.load_state_dict(state)
        return next(iter(dataset))


class LitData:
    """The library's chunks, in their order; tokenized like a typical user would."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def dataset(self, corpus: str) -> Any:
        from litdata import StreamingDataset

        # It resumes only with the cache named in the state, which holds the chunks.
        local = next(self.job.fresh) if corpus == "text" else self.job.folder / "lit-small"
        local.mkdir(parents=True, exist_ok=True)
        options = {"endpoint_url": self.job.endpoint, "aws_access_key_id": KEY_ID, "aws_secret_access_key": SECRET}
        return StreamingDataset(f"s3://{BUCKET}/lit-{corpus}", cache_dir=str(local), storage_options=options)

    def batches(self) -> Iterator[Any]:
        dataset = self.dataset("text")
        return cut((sample["text"] for _ in itertools.count() for sample in dataset), self.job.tokenizer)

    def state_after(self, samples: int) -> Any:
        dataset = self.dataset("small")
        for _ in itertools.islice(dataset, samples):
            pass
        return dataset.state_dict(num_samples_yielded=samples, num_workers=1, batch_size=1)

    def resume(self, state: Any) -> Any:
        dataset = self.dataset("small")
        dataset.load_state_dict(state)
        return next(iter(dataset))


class HuggingFace:
    """Streamed JSON files, tokenized in batches."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def dataset(self, corpus: str) -> Any:
        from datasets import load_dataset

        options = {"key": KEY_ID, "secret": SECRET, "client_kwargs": {"endpoint_url": self.job.endpoint}}
        files = self.job.urls(corpus)
        return load_dataset("json", data_files=files, streaming=True, split="train", storage_options=options)

    def batches(self) -> Iterator[Any]:
        def encode(samples: Any) -> Any:
            return {"input_ids": self.job.tokenizer(samples["text"])["input_ids"]}

        dataset = self.dataset("text").map(encode, batched=True, batch_size=64, remove_columns=["text"])
        rows = (sample["input_ids"] for _ in itertools.count() for sample in dataset)
        return cut_rows(rows, self.job.tokenizer.eos_token_id)

    def state_after(self, samples: int) -> Any:
        dataset = self.dataset("small")
        for _ in itertools.islice(dataset, samples):
            pass
        return dataset.state_dict()

    def resume(self, state: Any) -> Any:
        dataset = self.dataset("small")
        dataset.load_state_dict(state)
        return next(iter(dataset))


KINDS: dict[str, Any] = {
    OURS: Ours,
    "epochraft": Epochraft,
    "mosaicml-streaming": MosaicML,
    "litdata": LitData,
    "datasets": HuggingFace,
}


def cut(texts: Iterable[str], tokenizer: Any) -> Iterator[Any]:
    """Return batches; texts are encoded 64 at a time, so that the tokenizer uses all cores."""
    texts = iter(texts)
    groups = iter(lambda: list(itertools.islice(texts, 64)), [])
    return cut_rows((row for group in groups for row in tokenizer(group)["input_ids"]), tokenizer.eos_token_id)


def cut_rows(rows: Iterable[list[int]], eos: int) -> Iterator[Any]:
    import torch

    held: list[int] = []
    for row in rows:
        held += row
        held.append(eos)
        while len(held) >= LENGTH * BATCH:
            yield torch.tensor(held[: LENGTH * BATCH]).reshape(BATCH, LENGTH)
            del held[: LENGTH * BATCH]


def limit(tokenizer: Any) -> float:
    """Return tokens per second of the engine alone: texts in memory, in batches of the size that ``tokenize`` uses."""
    from tplr.tokenize import encoder

    engine = encoder(tokenizer)
    groups: list[list[str]] = [[]]
    for line in (CACHE / "corpus" / "text" / "00.jsonl").read_text().splitlines():
        groups[-1].append(json.loads(line)["text"])
        if sum(map(len, groups[-1])) >= 2**18:
            groups.append([])
    tokens, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < SECONDS:
        for group in groups:
            tokens += len(engine.encode_batch(group).ids)
    return tokens / took


def tokenizer_of(name: str) -> Any:
    """Return ``tokenizer``, or ``unigram``, which the fast engine does not support."""
    from transformers import PreTrainedTokenizerFast

    file = str(CACHE / "corpus" / name / "tokenizer.json")  # every release of transformers can read it
    return PreTrainedTokenizerFast(tokenizer_file=file, eos_token="<|endoftext|>")  # noqa: S106 - no password


def work(kind: str, endpoint: str, folder: Path) -> None:
    """Answer each job with its measurements."""
    job = Job(endpoint, folder)
    library = KINDS[kind](job)
    state: Any = None
    kept = folder / f"{kind}.state"

    def throughput(seconds: float) -> dict[str, float]:
        began = time.perf_counter()
        batches = library.batches()
        tokens, first, warm = 0, 0.0, 0.0
        for batch in batches:
            now = time.perf_counter() - began
            first = first or now
            if now < 1.0:  # connections, caches
                warm = now
                continue
            tokens += batch.numel()
            if now > seconds + 1.0:
                return {"tokens_per_s": tokens / (now - warm), "first_batch_s": first}
        raise RuntimeError("the corpus ended")

    def run(do: str, samples: int) -> dict[str, float]:
        nonlocal state
        if do in ("pass", "warm"):
            return throughput(SECONDS if do == "pass" else 0.5)
        if do == "limit":
            return {"tokens_per_s": limit(job.tokenizer)}
        if do == "limit-unigram":
            return {"tokens_per_s": limit(tokenizer_of("unigram"))}
        if do == "pass-unigram":
            bytes_tokenizer, job.tokenizer = job.tokenizer, tokenizer_of("unigram")
            try:
                return throughput(SECONDS)
            finally:
                job.tokenizer = bytes_tokenizer
        if do == "first-resume":
            return {"first_resume_s": resumed(pickle.loads(kept.read_bytes()))}  # noqa: S301 - our own
        if state is None:
            state = library.state_after(samples)
            kept.write_bytes(pickle.dumps(state))
        size = len(json.dumps(state, default=lambda array: array.tolist()).encode())
        return {"resume_s": resumed(state), "state_bytes": size}

    def resumed(state: Any) -> float:
        began = time.perf_counter()
        library.resume(state)
        return time.perf_counter() - began

    while line := sys.stdin.readline():
        try:
            answer = run(**json.loads(line))
        except Exception as error:  # noqa: BLE001 - the other jobs continue
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        OUT.write(json.dumps(answer) + "\n")
        OUT.flush()


def make_formats(kind: str) -> None:
    """Write the same texts as shards of the library's format, in ``CACHE/corpus``."""
    for corpus in ("text", "small"):
        sources = sorted((CACHE / "corpus" / corpus).glob("*.jsonl"))
        if kind == "mosaicml-streaming":
            from streaming import MDSWriter

            with MDSWriter(columns={"text": "str"}, out=str(CACHE / "corpus" / f"mds-{corpus}")) as writer:
                for source in sources:
                    for line in source.open():
                        writer.write(json.loads(line))
        if kind == "litdata":
            from litdata import optimize

            target = str(CACHE / "corpus" / f"lit-{corpus}")
            optimize(read_lines, [str(source) for source in sources], target, chunk_bytes="8MB", num_workers=1)


def read_lines(source: str) -> Iterator[Any]:
    yield from map(json.loads, Path(source).read_text().splitlines())


# --- the run ------------------------------------------------------------------------------------------------------


class Worker:
    """A library in its own process and environment."""

    def __init__(self, kind: str, endpoint: str, folder: Path) -> None:
        self.log = (folder / f"{kind}.log").open("w")
        self.process = subprocess.Popen(
            [python_of(kind), __file__, "--worker", kind, "--endpoint", endpoint, "--folder", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment(endpoint, folder),
        )

    def do(self, do: str, samples: int = 0) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"do": do, "samples": samples}) + "\n")
            self.process.stdin.flush()
            if not select.select([self.process.stdout], [], [], PATIENCE)[0]:
                self.process.kill()
                return {"error": f"no answer within {PATIENCE:g} s"}
            if answer := self.process.stdout.readline():
                return json.loads(answer)
        said = Path(self.log.name).read_text().strip().splitlines()[-1:]
        return {"error": f"its process ended: {' '.join(said)[:200]}"}

    def end(self) -> None:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()


def environment(endpoint: str, folder: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": endpoint,
        "S3_ENDPOINT_URL": endpoint,  # mosaicml-streaming's
        "AWS_DEFAULT_REGION": "auto",
        "AWS_REGION": "auto",
        "AWS_EC2_METADATA_DISABLED": "true",
        "HF_HUB_OFFLINE": "1",
    }


def python_of(kind: str) -> str:
    return sys.executable if kind == OURS else str(CACHE / "environments" / kind / "bin" / "python")


def install(problems: dict[str, str]) -> list[str]:
    """Install the libraries; return those that could be installed."""
    installed = [OURS]
    for line in Path(__file__).with_name("streaming-requirements.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        packages = line.split()
        kind = packages[0].split("==")[0]
        folder = CACHE / "environments" / kind
        done = folder / "installed"
        if not done.exists() or done.read_text() != line:
            print(f"installing {kind} ...", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            pip = [folder / "bin" / "python", "-m", "pip"]
            unwanted = [package[1:] for package in packages if package.startswith("!")]
            wanted = [package for package in packages if not package.startswith("!")]
            early = ["--pre"] if kind == "epochraft" else []  # it has no other releases
            answer = subprocess.run(
                [*pip, "install", "--quiet", *early, *wanted], capture_output=True, text=True, check=False
            )
            if answer.returncode:
                problems[kind] = "can't be installed: " + answer.stderr.strip().splitlines()[-1][:200]
                continue
            if unwanted:
                subprocess.run([*pip, "uninstall", "--quiet", "--yes", *unwanted], check=True)
            done.write_text(line)
        installed.append(kind)
    return installed


def make_corpus() -> None:
    """Write ``text`` (pieces of Python's standard library, 36 MB), ``small`` (a million short records) and two
    tokenizers."""
    folder = CACHE / "corpus"
    if (folder / "made").exists():
        return
    print("making the corpus ...", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if not {"site-packages", "test", "tests"} & set(path.parts):
            text = path.read_text(errors="ignore")
            texts += [text[i : i + 3000] for i in range(0, len(text), 3000)]
    make_tokenizers(texts, folder)
    random.Random(0).shuffle(texts)
    filler = " and some words to make it as long as short records are" * 5
    corpora = {"text": texts * 3, "small": [f"record {i} of a million" + filler for i in range(RECORDS)]}
    for name, corpus in corpora.items():
        (folder / name).mkdir(parents=True)
        for shard in range(SHARDS[name]):
            lines = (json.dumps({"text": text}) + "\n" for text in corpus[shard :: SHARDS[name]])
            (folder / name / f"{shard:02}.jsonl").write_text("".join(lines))
    (folder / "made").touch()


def make_tokenizers(texts: list[str], folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    sample, eos = texts[::4], "<|endoftext|>"
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=16_000, special_tokens=[eos], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(sample, trainer)
    unigram = Tokenizer(models.Unigram())
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=8000,
        special_tokens=[eos, "<unk>"],
        unk_token="<unk>",  # noqa: S106 - a token, not a password
        show_progress=False,
    )
    unigram.train_from_iterator(sample[:1000], trainer)
    for name, tokenizer in (("tokenizer", bpe), ("unigram", unigram)):
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos).save_pretrained(folder / name)


def fill(endpoint: str) -> None:
    """Put every file of the corpus on the server."""
    import asyncio

    from tplr.schemas import Bucket
    from tplr.storage import S3Connections, upload_file

    async def put() -> None:
        async with S3Connections(endpoint) as connections:
            bucket = Bucket(name=BUCKET, account_id="c" * 32, access_key_id=KEY_ID, secret_access_key=SECRET)
            store, corpus = connections.store(bucket), CACHE / "corpus"
            for path in sorted(path for path in corpus.rglob("*") if path.is_file()):
                await upload_file(store, str(path.relative_to(corpus)), path)

    asyncio.run(put())


def measure(repetitions: int, samples: int, folder: Path, problems: dict[str, str]) -> list[dict[str, Any]]:
    """Return one row for each library, measure and repetition."""
    rows: list[dict[str, Any]] = []
    kinds = install(problems)
    make_corpus()
    for kind, name in (("mosaicml-streaming", "mds-small"), ("litdata", "lit-small")):
        if kind in kinds and not (CACHE / "corpus" / name / "index.json").exists():
            print(f"making the corpus for {kind} ...", flush=True)
            for corpus in ("text", "small"):
                shutil.rmtree(CACHE / "corpus" / f"{name[:3]}-{corpus}", ignore_errors=True)
            made = subprocess.run(
                [python_of(kind), __file__, "--make", kind],
                capture_output=True, text=True, check=False, env=environment("", folder),
            )  # fmt: skip
            if made.returncode:
                problems[kind] = "can't make its shards: " + made.stderr.strip().splitlines()[-1][:200]
                kinds.remove(kind)

    def show(kind: str, job: str, answer: dict[str, Any]) -> None:
        print(f"{kind}, {job}: {answer}", file=sys.stderr, flush=True)

    def note(kind: str, job: str, repetition: int, answer: dict[str, Any]) -> None:
        show(kind, job, answer)
        if "error" in answer:
            problems[f"{kind}, {job}"] = answer["error"]
        for name, value in answer.items():
            if name != "error":
                row = {"library": kind, "job": job, "repetition": repetition, "measure": name, "value": value}
                rows.append(row)

    with ExitStack() as stack:
        endpoint = start_server(folder, stack, KEYS)
        fill(endpoint)
        workers = {kind: Worker(kind, endpoint, folder) for kind in kinds}
        for worker in workers.values():
            stack.callback(worker.end)
        for repetition in range(repetitions + 1):
            order = kinds[repetition % len(kinds) :] + kinds[: repetition % len(kinds)]
            if repetition == 0:  # imports, disk, allocators
                for kind in kinds:
                    show(kind, "warm", workers[kind].do("warm"))
                continue
            turns = [(kind, "pass") for kind in order]
            turns += [(OURS, job) for job in ("limit", "pass-unigram", "limit-unigram")]
            for kind, job in turns:
                note(kind, job, repetition, workers[kind].do(job))
        for repetition in range(repetitions):
            for kind in kinds:
                if f"{kind}, resume" in problems:
                    continue  # do not wait for its timeout again
                note(kind, "resume", repetition, workers[kind].do("resume", samples))
                new = Worker(kind, endpoint, folder)
                note(kind, "first-resume", repetition, new.do("first-resume"))
                new.end()
    return rows


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the median of each measure, and of the ratio to ours in the same repetition, with its quartiles."""
    values = {(r["library"], r["job"], r["measure"], r["repetition"]): r["value"] for r in rows}
    summary = []
    for library, job, name in dict.fromkeys((r["library"], r["job"], r["measure"]) for r in rows):
        mine = {key[3]: value for key, value in values.items() if key[:3] == (library, job, name)}
        base = "pass-unigram" if job == "limit-unigram" else "pass" if job == "limit" else job
        ratios = [
            values[OURS, base, name, repetition] / value
            for repetition, value in mine.items()
            if (OURS, base, name, repetition) in values
        ]
        low, middle, high = (
            statistics.quantiles(ratios, n=4, method="inclusive")
            if len(ratios) > 1
            else ratios * 3 or [float("nan")] * 3
        )
        median = statistics.median(mine.values())
        summary.append({"library": library, "job": job, "measure": name, "median": median,
                        "ours/it": middle, "low": low, "high": high})  # fmt: skip
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1_000_000, help="number of samples before the resume")
    parser.add_argument("--worker", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--make", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        make_formats(args.make)
        return
    if args.worker:
        work(args.worker, args.endpoint, args.folder)
        return
    problems: dict[str, str] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        rows = measure(args.repetitions, args.samples, Path(folder), problems)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "streaming.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    summary = summarise(rows)
    # In a separate process, because this process does not search this folder for modules.
    subprocess.run([sys.executable, Path(__file__).with_name("pictures.py"), "streaming"], check=True)
    for line in summary:
        print(
            f"{line['library']:20} {line['job']:14} {line['measure']:14} {line['median']:14.4f}  "
            f"ours/it {line['ours/it']:8.3f} ({line['low']:.3f} to {line['high']:.3f})"
        )
    for where, problem in problems.items():
        print(f"left out: {where}: {problem}")


if __name__ == "__main__":
    sys.path = [path for path in sys.path if Path(path) != Path(__file__).parent]  # MosaicML has a `streaming` too
    OUT = os.fdopen(os.dup(1), "w")  # libraries print to standard output
    if "--worker" in sys.argv:
        os.dup2(2, 1)
    main()
