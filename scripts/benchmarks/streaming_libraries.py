"""The same small jobs with tplr.data, epochraft, datasets, torchdata, mosaicml-streaming and litdata, on local files.

It measures speed and behaviour: a process is killed and resumed from its last state, and each sample is counted; a
state of two ranks is resumed by four; compressed files are read. Each job runs in a separate process.

    python scripts/benchmarks/streaming_libraries.py [--repetitions 3] [--only LIBRARY ...] [--no-behaviour]

A run of only some libraries, or of only speed or only behaviour (``--repetitions 0``), replaces the rows of these. A
library that can't be imported is skipped and named; all are in the package index. Writes
``docs/benchmarks/streaming_libraries.csv`` and ``streaming_libraries.png``, and prints a table.
"""

import argparse
import bz2
import csv
import gzip
import importlib.metadata
import io
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
FILES, LENGTH, BUFFER = 4, 1024, 1000
RECORDS = {"large": 50_000, "small": 10_000}
SAVE_EVERY, KILL_AFTER = 100, 3_333
OLD_WORLD, NEW_WORLD, RANK_SAMPLES = 2, 4, 1_000
EOS = "<|endoftext|>"
SECONDS = 320.0  # timeout of a job
READ_SECONDS = 100  # of a compressed file

Samples = Iterator[dict[str, Any]]
KEYS = ("library", "job", "repetition", "measure")  # of a row
# The samples, and a function that returns the state after the last of them.
Opened = tuple[Samples, Callable[[], Any]]


class Library:
    """A worker's jobs with one library; the corpus is in ``folder``, as JSONL files and in the library's own format."""

    package: str

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.folder, self.rank, self.world = folder, rank, world

    def files(self, corpus: str) -> list[str]:
        return [str(self.folder / corpus / f"{number}.jsonl") for number in range(FILES)]

    def prepare(self, corpus: str) -> None:
        """Write the corpus in the format of the library."""

    def open(self, corpus: str, shuffle: bool, state: Any) -> Opened:
        raise NotImplementedError

    def state_of(self, states: list[Any]) -> Any:
        """Return the state for another number of ranks from the states of all former ranks; default: that of the first
        rank."""
        return states[0]

    def samples(self, corpus: str, shuffle: bool) -> Samples:
        """Return samples without a state."""
        return self.open(corpus, shuffle, None)[0]

    def sequences(self, corpus: str) -> Iterator[Any]:
        """Yield sequences of ``LENGTH`` tokens; by default with 64 texts in each call of the tokenizer, and a plain
        loop."""
        samples = self.samples(corpus, shuffle=False)
        tokenizer = self.tokenizer()
        held: list[int] = []
        for group in iter(lambda: [sample["text"] for sample in itertools.islice(samples, 64)], []):
            for row in tokenizer(group)["input_ids"]:
                held += [*row, tokenizer.eos_token_id]
            for start in range(0, len(held) - LENGTH + 1, LENGTH):
                yield held[start : start + LENGTH]
            del held[: len(held) // LENGTH * LENGTH]

    def read(self, path: str) -> Samples:
        """Read the records of one compressed JSONL file."""
        raise NotImplementedError(f"{self.package} has no reader for it")

    def tokenizer(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_file=str(self.folder / "tokenizer.json"), eos_token=EOS)


class Ours(Library):
    package = "tplr"

    def from_files(self, files: list[str]) -> Any:
        from tplr.data import CheckpointableDataset

        return CheckpointableDataset.from_files(files)

    def of_rank(self, dataset: Any) -> Any:
        return dataset.shard_by_rank(self.rank, self.world)

    def state_of(self, states: list[Any]) -> Any:
        return states if len(states) > 1 else states[0]

    def open(self, corpus: str, shuffle: bool, state: Any) -> Opened:
        dataset = self.from_files(self.files(corpus))
        dataset = dataset.shuffle(BUFFER) if shuffle else dataset
        iterator = (self.of_rank(dataset) if self.world > 1 else dataset).iter(state_dict=state)
        return iterator, iterator.state_dict

    def sequences(self, corpus: str) -> Iterator[Any]:
        tokenizer = self.tokenizer()
        dataset = self.from_files(self.files(corpus)).tokenize(tokenizer).ensure_bos_eos(tokenizer)
        return (sample["input_ids"] for sample in dataset.concat_chunk(LENGTH))

    def read(self, path: str) -> Samples:
        return iter(self.from_files([path]))


class Epochraft(Ours):
    package = "epochraft"

    def from_files(self, files: list[str]) -> Any:
        from epochraft import CheckpointableDataset  # pyright: ignore[reportMissingImports]

        return CheckpointableDataset.from_files(files, format="jsonl")

    def of_rank(self, dataset: Any) -> Any:
        return dataset.stride(self.world, self.rank)

    def state_of(self, states: list[Any]) -> Any:
        return states[0]


class HuggingFace(Library):
    package = "datasets"

    def dataset(self, files: list[str]) -> Any:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]

        return load_dataset("json", data_files=files, streaming=True, split="train")

    def open(self, corpus: str, shuffle: bool, state: Any) -> Opened:
        from datasets.distributed import split_dataset_by_node  # pyright: ignore[reportMissingImports]

        dataset = self.dataset(self.files(corpus))
        dataset = dataset.shuffle(seed=42, buffer_size=BUFFER) if shuffle else dataset
        dataset = split_dataset_by_node(dataset, self.rank, self.world) if self.world > 1 else dataset
        if state is not None:
            dataset.load_state_dict(state)
        return iter(dataset), dataset.state_dict

    def sequences(self, corpus: str) -> Iterator[Any]:
        tokenizer = self.tokenizer()

        def packed(samples: Any) -> Any:
            tokens = [
                token for row in tokenizer(samples["text"])["input_ids"] for token in (*row, tokenizer.eos_token_id)
            ]
            return {"input_ids": [tokens[i : i + LENGTH] for i in range(0, len(tokens), LENGTH)]}

        dataset = self.dataset(self.files(corpus))
        # As the library documents it: each batch of 1,000 texts is packed alone, with a shorter sequence at its end.
        dataset = dataset.map(packed, batched=True, batch_size=1000, remove_columns=["id", "text"])
        return (sample["input_ids"] for sample in dataset)

    def read(self, path: str) -> Samples:
        return iter(self.dataset([path]))


class TorchData(Library):
    """``torchdata.nodes`` has no reader: a loop reads the records, or they are in memory for its samplers."""

    package = "torchdata"

    def lines(self, corpus: str) -> Iterator[dict[str, Any]]:
        for file in self.files(corpus):
            yield from records_of_file(file)

    def open(self, corpus: str, shuffle: bool, state: Any) -> Opened:
        from torch.utils.data import DistributedSampler
        from torchdata.nodes import IterableWrapper, Loader, MapStyleWrapper

        if shuffle or self.world > 1:
            records = list(self.lines(corpus))
            sampler = DistributedSampler(records, self.world, self.rank, shuffle=shuffle, seed=42)  # pyright: ignore[reportArgumentType]
            node: Any = MapStyleWrapper(records, sampler)  # pyright: ignore[reportArgumentType]
        else:
            node = IterableWrapper(Lines(self, corpus))
        loader = Loader(node)
        if state is not None:
            loader.load_state_dict(state)
        return iter(loader), loader.state_dict


class Lines:
    """An iterable of records, without a state of its own."""

    def __init__(self, library: TorchData, corpus: str) -> None:
        self.library, self.corpus = library, corpus

    def __iter__(self) -> Samples:
        return self.library.lines(self.corpus)


class MosaicML(Library):
    package = "mosaicml-streaming"

    def prepare(self, corpus: str) -> None:
        from streaming import MDSWriter  # pyright: ignore[reportMissingImports]

        with MDSWriter(columns={"id": "int", "text": "str"}, out=str(self.folder / f"mds-{corpus}")) as writer:
            for file in self.files(corpus):
                for record in records_of_file(file):
                    writer.write(record)

    def dataset(self, corpus: str, shuffle: bool) -> Any:
        from streaming import StreamingDataset  # pyright: ignore[reportMissingImports]
        from streaming.base.util import clean_stale_shared_memory  # pyright: ignore[reportMissingImports]

        if not self.rank:
            clean_stale_shared_memory()  # left by a killed process; the next one would refuse to start
        if self.world > 1:
            join(self.rank, self.world)
        local = str(self.folder / f"mds-{corpus}")
        return StreamingDataset(local=local, shuffle=shuffle, shuffle_seed=42, batch_size=1)

    def samples(self, corpus: str, shuffle: bool) -> Samples:
        return iter(self.dataset(corpus, shuffle))

    def open(self, corpus: str, shuffle: bool, state: Any) -> Opened:
        from streaming import StreamingDataLoader  # pyright: ignore[reportMissingImports]

        loader = StreamingDataLoader(self.dataset(corpus, shuffle), batch_size=1)
        if state is not None:
            loader.load_state_dict(state)
        return ({name: column[0] for name, column in batch.items()} for batch in loader), loader.state_dict


class LitData(Library):
    package = "litdata"

    def prepare(self, corpus: str) -> None:
        from litdata import optimize  # pyright: ignore[reportMissingImports]

        target = str(self.folder / f"lit-{corpus}")
        optimize(records_of_file, self.files(corpus), target, chunk_bytes="1MB", num_workers=1)

    def dataset(self, corpus: str, shuffle: bool) -> Any:
        from litdata import StreamingDataset  # pyright: ignore[reportMissingImports]

        if self.world > 1:
            join(self.rank, self.world)
        return StreamingDataset(str(self.folder / f"lit-{corpus}"), shuffle=shuffle, seed=42, drop_last=False)

    def samples(self, corpus: str, shuffle: bool) -> Samples:
        # The library's iterator restarts if it is called after its end.
        return (sample for sample in self.dataset(corpus, shuffle))

    def open(self, corpus: str, shuffle: bool, state: Any) -> Opened:
        from litdata import StreamingDataLoader  # pyright: ignore[reportMissingImports]

        loader = StreamingDataLoader(self.dataset(corpus, shuffle), batch_size=1, num_workers=0)
        if state is not None:
            loader.load_state_dict(state)
        return ({name: column[0] for name, column in batch.items()} for batch in loader), loader.state_dict


LIBRARIES: dict[str, type[Library]] = {
    "tplr.data": Ours,
    "epochraft": Epochraft,
    "datasets": HuggingFace,
    "torchdata": TorchData,
    "mosaicml-streaming": MosaicML,
    "litdata": LitData,
}
MODULES = {"tplr.data": "tplr.data", "torchdata": "torchdata.nodes", "mosaicml-streaming": "streaming"}


def packed(state: Any) -> bytes:
    import torch

    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), weights_only=False)


def copied(state: Any) -> Any:
    return unpacked(packed(state))


def records_of_file(file: str) -> Samples:
    with Path(file).open() as lines:
        yield from map(json.loads, lines)


def join(rank: int, world: int) -> None:
    """Enter the process group, from which a library reads its rank."""
    from torch import distributed

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    distributed.init_process_group("gloo", rank=rank, world_size=world)


# --- a worker process ---------------------------------------------------------------------------------------------


def speed(library: Library) -> dict[str, dict[str, float]]:
    """Return samples per second of processor time, in order and shuffled; tokens per second of it; and a resume.

    Processor time is that of all threads; other load on the machine affects it least.
    """
    answers: dict[str, dict[str, float]] = {}
    for job, shuffle in (("read", False), ("shuffle", True)):
        samples = library.samples("large", shuffle)
        began = time.process_time()
        count = sum(1 for _ in samples)
        answers[job] = {"samples_per_cpu_s": count / (time.process_time() - began)}
    sequences = library.sequences("large")
    next(sequences)
    began = time.process_time()
    tokens = sum(len(sequence) for sequence in sequences)
    answers["pack"] = {"tokens_per_cpu_s": tokens / (time.process_time() - began)}
    answers["resume"] = {"resume_s": resume_seconds(library, RECORDS["large"] * 4 // 5)}
    return answers


def resume_seconds(library: Library, done: int) -> float:
    """Return the seconds to the next sample from a state after a number of samples, in the process that took it."""
    samples, state_of = library.open("large", False, None)
    for _ in itertools.islice(samples, done):
        pass
    state = copied(state_of())
    began = time.perf_counter()
    next(library.open("large", False, state)[0])
    return time.perf_counter() - began


def deliver(
    library: Library, *, out: str, shuffle: bool, states_in: list[str], state_out: str, stop: int, kill: bool
) -> dict[str, float]:
    """Write the number of each sample to ``out``, and a state after every ``SAVE_EVERY`` samples to ``state_out``."""
    states = [unpacked(Path(path).read_bytes()) for path in states_in]
    samples, state_of = library.open("small", shuffle, library.state_of(states) if states else None)
    with Path(out).open("w") as file:
        for count, sample in enumerate(samples, 1):
            file.write(f"{int(sample['id'])}\n")
            if state_out and count % SAVE_EVERY == 0:
                temporary = Path(f"{state_out}.tmp")
                temporary.write_bytes(packed(state_of()))
                temporary.replace(state_out)
            if count == stop:
                file.flush()
                if kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                break
    if library.world > 1:
        from torch import distributed

        if distributed.is_initialized():
            distributed.barrier()
    return {}


def compressed(library: Library) -> dict[str, Any]:
    """Return the number of samples in a compressed file, or the error, by suffix."""
    found: dict[str, Any] = {}
    signal.signal(signal.SIGALRM, late)
    for suffix in COMPRESSED:
        signal.alarm(READ_SECONDS)
        try:
            found[suffix] = sum(1 for _ in library.read(str(library.folder / f"packed.jsonl{suffix}")))
        except Exception as error:  # noqa: BLE001 - the result
            found[suffix] = f"{type(error).__name__}: {error}"[:200]
        signal.alarm(0)
    return found


def late(*_: object) -> None:
    raise TimeoutError(f"no end within {READ_SECONDS} s")


def prepare(library: Library) -> dict[str, int]:
    for corpus in RECORDS:
        library.prepare(corpus)
    return {}


WORK = {job.__name__: job for job in (speed, deliver, compressed, prepare)}


def work(name: str, job: str, folder: str, rank: str, world: str, arguments: str) -> None:  # noqa: PLR0917
    out = os.fdopen(os.dup(1), "w")  # libraries print to standard output
    os.dup2(2, 1)
    answer = WORK[job](LIBRARIES[name](Path(folder), int(rank), int(world)), **json.loads(arguments))
    print(json.dumps(answer), file=out, flush=True)
    os._exit(0)  # a library's threads or other ranks must not delay the end


# --- the run ------------------------------------------------------------------------------------------------------


class JobFailed(Exception):
    """A job failed; the message is the worker's last line of output."""


def start(name: str, job: str, folder: Path, *, rank: int = 0, world: int = 1, port: int = 0, **arguments: Any) -> Any:
    command = [sys.executable, __file__, "--work", name, job, str(folder), str(rank), str(world), json.dumps(arguments)]
    environment = {
        **os.environ,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: Any, killed: bool = False) -> dict[str, Any]:
    try:
        out, error = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise JobFailed(f"no end within {SECONDS:g} s") from None
    if killed and process.returncode == -signal.SIGKILL:
        return {}
    if process.returncode:
        lines = [line for line in error.strip().splitlines() if not line.startswith(("[W", "[rank"))]
        raise JobFailed(next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "failed"))
    return json.loads(out.strip().splitlines()[-1])


def run(name: str, job: str, folder: Path, **arguments: Any) -> dict[str, Any]:
    return finish(start(name, job, folder, **arguments))


def numbers(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()]


def accounted(before: list[int], after: list[int]) -> dict[str, Any]:
    """Return the samples that were never delivered, and those delivered twice."""
    found = before + after
    return {"lost": RECORDS["small"] - len(set(found)), "doubled": len(found) - len(set(found))}


def kill_and_resume(name: str, folder: Path, shuffle: bool) -> dict[str, Any]:
    """Kill a process at a sample; resume from its last state in a new one; count the samples of both."""
    whole, first_part, second, state = (folder / f"{name}-{what}" for what in ("whole", "first", "second", "state"))
    common = {"shuffle": shuffle, "states_in": [], "state_out": "", "stop": -1, "kill": False}
    run(name, "deliver", folder, **common | {"out": str(whole)})
    state.unlink(missing_ok=True)
    changes = {"out": str(first_part), "state_out": str(state), "stop": KILL_AFTER, "kill": True}
    finish(start(name, "deliver", folder, **common | changes), killed=True)
    run(name, "deliver", folder, **common | {"out": str(second), "states_in": [str(state)]})
    done = KILL_AFTER // SAVE_EVERY * SAVE_EVERY
    before, after = numbers(first_part)[:done], numbers(second)
    same = before + after == numbers(whole)
    return {**accounted(before, after), "same_order": int(same), "state_bytes": state.stat().st_size}


def change_world(name: str, folder: Path) -> dict[str, Any]:
    """Two ranks take ``RANK_SAMPLES`` each; four resume from ``Library.state_of``."""
    states = [folder / f"{name}-world-state-{rank}" for rank in range(OLD_WORLD)]
    for state in states:
        state.unlink(missing_ok=True)

    def ranks(world: int, part: str, **arguments: Any) -> list[int]:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        outs = [folder / f"{name}-{part}-{rank}" for rank in range(world)]
        processes = [
            start(name, "deliver", folder, rank=rank, world=world, port=port, out=str(out), shuffle=True, kill=False,
                  state_out=str(states[rank]) if part == "old" else "", **arguments)
            for rank, out in enumerate(outs)
        ]  # fmt: skip
        try:
            for process in processes:
                finish(process)
        finally:
            for process in processes:
                process.kill()
        return [number for out in outs for number in numbers(out)]

    before = ranks(OLD_WORLD, "old", states_in=[], stop=RANK_SAMPLES)
    return accounted(before, ranks(NEW_WORLD, "new", states_in=[*map(str, states)], stop=-1))


def make_corpus(folder: Path) -> None:
    import zstandard
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    words = Path(random.__file__).read_text().split()
    rng = random.Random(0)
    for corpus, count in RECORDS.items():
        (folder / corpus).mkdir(parents=True)
        for number in range(FILES):
            records = ({"id": i, "text": " ".join(rng.choices(words, k=40))} for i in range(number, count, FILES))
            lines = [json.dumps(record) + "\n" for record in records]
            (folder / corpus / f"{number}.jsonl").write_text("".join(lines))
    text = "".join(lines).encode()  # pyright: ignore[reportPossiblyUnboundVariable] - of the small corpus
    for suffix, pack in COMPRESSED.items():
        (folder / f"packed.jsonl{suffix}").write_bytes(pack(text) if suffix != ".zst" else zstandard.compress(text))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4000, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


COMPRESSED: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": bytes, ".bz2": bz2.compress}


def measure(names: list[str], repetitions: int, behaviour: bool, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield one row for each library, job, measure and repetition; a failed job has the measure ``error``."""
    make_corpus(folder)
    for name in names:
        run(name, "prepare", folder)
    for repetition in range(repetitions):
        turn = repetition % len(names)
        for name in names[turn:] + names[:turn]:
            for job, figures in answer_of(lambda name=name: run(name, "speed", folder), "speed").items():
                yield from rows_of(name, job, repetition, figures)
    jobs: dict[str, Callable[[str], dict[str, Any]]] = {
        "kill": lambda name: kill_and_resume(name, folder, shuffle=False),
        "kill, shuffled": lambda name: kill_and_resume(name, folder, shuffle=True),
        "2 ranks to 4": lambda name: change_world(name, folder),
        "compressed": lambda name: run(name, "compressed", folder),
    }
    for name, (job, call) in itertools.product(names if behaviour else [], jobs.items()):
        figures = answer_of(lambda name=name, job=job, call=call: {job: call(name)}, job)[job]
        yield from rows_of(name, job, 0, figures)


def answer_of(call: Callable[[], dict[str, Any]], job: str) -> dict[str, Any]:
    try:
        return call()
    except JobFailed as error:
        return {job: {"error": str(error)[:300]}}


def rows_of(name: str, job: str, repetition: int, figures: dict[str, Any]) -> Iterator[dict[str, Any]]:
    print(f"{name}, {job}: {figures}", file=sys.stderr, flush=True)
    version = importlib.metadata.version(LIBRARIES[name].package)
    for what, value in figures.items():
        row = {"library": name, "version": version, "job": job, "repetition": repetition}
        yield {**row, "measure": what, "value": value}


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table of medians: a row for each job, a column for each library."""
    names = list(dict.fromkeys((row["library"], row["version"]) for row in rows))
    yield f"| | {' | '.join(f'{name} {version}' for name, version in names)} |\n|---{'|---' * len(names)}|"
    for job in dict.fromkeys(row["job"] for row in rows):
        cells = []
        for name, _ in names:
            found: dict[str, list[Any]] = {}
            for row in rows:
                if (row["library"], row["job"]) == (name, job):
                    found.setdefault(row["measure"], []).append(row["value"])
            cells.append(", ".join(f"{what} {told(values)}" for what, values in found.items()))
        yield f"| {job} | {' | '.join(cells)} |"


def told(values: Iterable[Any]) -> str:
    values = list(values)
    try:
        return f"{statistics.median(map(float, values)):,.4g}"
    except ValueError:
        return str(values[0])


def available(name: str) -> bool:
    module = MODULES.get(name, name)
    found = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False)
    if found.returncode:
        print(f"left out: {name}: {found.stderr.strip().splitlines()[-1]}", file=sys.stderr)
    return not found.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=LIBRARIES, help="libraries (default: all)")
    parser.add_argument("--no-behaviour", dest="behaviour", action="store_false", help="speed only")
    parser.add_argument("--work", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(*args.work)
        return
    names = [name for name in args.only or LIBRARIES if available(name)]
    path = FOLDER / "streaming_libraries.csv"
    rows: list[dict[str, Any]] = []
    if path.exists() and (args.only or not args.behaviour or not args.repetitions):
        with path.open(newline="") as file:
            rows = [*csv.DictReader(file)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for row in measure(names, args.repetitions, args.behaviour, Path(folder)):
            rows = [other for other in rows if any(str(other[key]) != str(row[key]) for key in KEYS)] + [row]
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
    # In a separate process, because this process does not search this folder for modules. Drawing needs matplotlib.
    subprocess.run([sys.executable, Path(__file__).with_name("pictures.py"), "streaming_libraries"], check=False)
    print(*table(rows), sep="\n")


if __name__ == "__main__":
    sys.path = [path for path in sys.path if Path(path) != Path(__file__).parent]  # MosaicML has a `streaming` too
    main()
