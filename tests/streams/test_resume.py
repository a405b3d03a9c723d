"""Every step against plain Python, resumed at every sample: in this process, and all steps in another process."""

import bz2
import functools
import gzip
import json
import lzma
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tplr.data import CheckpointableDataset, Order, concat_datasets, interleave_datasets
from tplr.streams.testing import check_resume, same

DOCUMENTS = [{"text": "abcdefgh"[: 7 * i % 9], "id": i} for i in range(11)]
LONG = lambda tokens: torch.tensor(tokens, dtype=torch.long)  # noqa: E731
SOURCE = CheckpointableDataset.from_sequence(DOCUMENTS)


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


TOKENIZER = bytes_tokenizer()
ENCODED = [{**d, **{k: list(v) for k, v in TOKENIZER(d["text"]).items()}} for d in DOCUMENTS]
IDS = [d["input_ids"] for d in ENCODED]
TOKENS = CheckpointableDataset.from_sequence([{"input_ids": ids, "mask": [1] * len(ids)} for ids in IDS])


def odd(sample: Any) -> bool:
    return sample["id"] % 2 == 1


def doubled(sample: Any) -> Any:
    return {**sample, "id": 2 * sample["id"]}


def doubled_odd(sample: Any) -> Any:
    return doubled(sample) if odd(sample) else None


def cut(tokens: list[int], length: int) -> list[list[int]]:
    return [tokens[i : i + length] for i in range(0, len(tokens), length)]


def shuffled(items: Iterable[Any], size: int, seed: int) -> list[Any]:
    rng, buffer, out = random.Random(seed), [], []
    source = iter(items)
    buffer += islice(source, size)
    while buffer:
        i = rng.randrange(len(buffer))
        buffer[i], buffer[-1] = buffer[-1], buffer[i]
        out.append(buffer.pop())
        buffer += islice(source, 1)
    return out


def packed(documents: list[list[int]], length: int, discard: bool) -> list[list[int]]:
    packs: list[list[int]] = [[]]
    for ids in documents:
        if len(ids) > length and discard:
            continue
        if len(packs[-1]) + len(ids[:length]) > length:
            packs.append([])
        packs[-1] += ids[:length]
    return [pack for pack in packs if pack]


def muxed(shards: list[list[Any]], n_active: int) -> list[Any]:
    out, waiting = [], [list(shard) for shard in shards]
    active = [waiting.pop(0) for _ in range(min(n_active, len(waiting)))]
    while active:
        shard = active.pop(0)
        if shard:
            out.append(shard.pop(0))
            active.append(shard)
        elif waiting:
            active.append(waiting.pop(0))
    return out


def turned(turns: str, lists: list[list[Any]]) -> list[Any]:
    """Items in the order of endless ``turns``; a list that ends is repeated until all have ended."""
    out, sources, ended = [], [iter(one) for one in lists], set()
    for turn in cycle(map(int, turns)):
        item = next(sources[turn], None)
        if item is None:
            ended.add(turn)
            if len(ended) == len(lists):
                return out
            sources[turn] = iter(lists[turn])
            item = next(sources[turn])
        out.append(item)
    raise AssertionError


# --- files: the same records in every form ---

RECORDS = [[{"id": 10 * i + j, "text": "ab\n é€"[: j % 7]} for j in range(size)] for i, size in enumerate((3, 0, 5, 1))]
PACKERS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
           ".zst": zstandard.ZstdCompressor().compress}  # fmt: skip


def written(records: list[Any], kind: str) -> bytes:
    if kind == "jsonl":
        return b"".join(json.dumps(r, ensure_ascii=r["id"] % 2 == 0).encode() + b"\n" * (1 + i % 2)
                        for i, r in enumerate(records))  # fmt: skip
    if kind == "cbor":
        return b"".join(map(cbor2.dumps, records))
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist(records, schema=pa.schema([("id", pa.int64()), ("text", pa.string())]))
    pq.write_table(table, sink, row_group_size=2)
    return sink.getvalue().to_pybytes()


def make_files(folder: Path) -> None:
    for kind in ("jsonl", "cbor", "parquet"):
        for suffix, pack in PACKERS.items():
            for i, records in enumerate(RECORDS):
                (folder / f"{i}.{kind}{suffix}").write_bytes(pack(written(records, kind)))


Case = tuple[CheckpointableDataset, list[Any]]


@functools.cache
def cases(files: Path) -> dict[str, Case]:
    """Return name → a pipeline, and its samples by plain Python (of endless pipelines, the first 30)."""
    columns = ("input_ids", "mask")
    stream = [token for ids in IDS for token in ids]
    rng, order, epochs = random.Random(1), list(range(11)), []
    for _ in range(3):
        rng.shuffle(order)
        epochs += [DOCUMENTS[i] for i in order]
    abc = [SOURCE, SOURCE.take(4), SOURCE.filter(odd)]
    mixed, sources = [], [iter(DOCUMENTS), iter(DOCUMENTS[:4]), iter(DOCUMENTS[1::2])]
    for turn in "0120010210" * 2:
        if (sample := next(sources[int(turn)], None)) is None:
            break
        mixed.append(sample)
    rng2, shard_order, two_epochs = random.Random(5), [0, 1, 2, 3], []
    for _ in range(3):
        rng2.shuffle(shard_order)
        two_epochs += muxed([RECORDS[i] for i in shard_order], 2)
    out: dict[str, Case] = {
        "from_sequence": (SOURCE, DOCUMENTS),
        "from_sequence empty": (CheckpointableDataset.from_sequence([]), []),
        "from_sequence repeat": (CheckpointableDataset.from_sequence(DOCUMENTS, repeat=True), DOCUMENTS * 3),
        "from_sequence shuffle": (CheckpointableDataset.from_sequence(DOCUMENTS, True, True, 1), epochs),
        "from_iterable": (CheckpointableDataset.from_iterable(DOCUMENTS), DOCUMENTS),
        "from_iterable repeat": (CheckpointableDataset.from_iterable(DOCUMENTS, repeat=True), DOCUMENTS * 3),
        "from_order": (CheckpointableDataset.from_order(Order.of(DOCUMENTS).share(1, 2)), DOCUMENTS[1::2]),
        "map": (SOURCE.map(doubled), [doubled(d) for d in DOCUMENTS]),
        "filter": (SOURCE.filter(odd), [d for d in DOCUMENTS if odd(d)]),
        "filter_map": (SOURCE.filter_map(doubled_odd), [doubled(d) for d in DOCUMENTS if odd(d)]),
        "parallel_map": (SOURCE.parallel_map(doubled, 3, 2), [doubled(d) for d in DOCUMENTS]),
        "parallel_filter": (SOURCE.parallel_filter(odd, 2), [d for d in DOCUMENTS if odd(d)]),
        "parallel_filter_map": (SOURCE.parallel_filter_map(doubled_odd, 2, 1), [doubled(d) for d in DOCUMENTS[1::2]]),
        "tokenize": (SOURCE.tokenize(TOKENIZER), ENCODED),
        "tokenize serial": (SOURCE.tokenize(TOKENIZER, parallel=False), ENCODED),
        "tokenize cut": (SOURCE.tokenize(TOKENIZER, {"truncation": True, "max_length": 3}, max_workers=2),
                         [{**e, "input_ids": e["input_ids"][:3], "attention_mask": e["attention_mask"][:3]}
                          for e in ENCODED]),
        "ensure_bos_eos": (SOURCE.tokenize(TOKENIZER).ensure_bos_eos(TOKENIZER),
                           [{**e, "input_ids": LONG([0, *e["input_ids"], 1])} for e in ENCODED]),
        "add_bos_eos": (TOKENS.add_bos_eos(None, 9, "mask"),
                        [{"input_ids": ids, "mask": LONG([1] * len(ids) + [9])} for ids in IDS]),
        "chunk": (TOKENS.chunk(3), [{"input_ids": LONG(c)} for ids in IDS for c in cut(ids, 3) if len(c) == 3]),
        "chunk tails": (TOKENS.chunk(3, columns, drop_remainder=False),
                        [{"input_ids": LONG(c), "mask": LONG([1] * len(c))} for ids in IDS for c in cut(ids, 3)]),
        "concat_chunk": (TOKENS.concat_chunk(4), [{"input_ids": LONG(c)} for c in cut(stream, 4) if len(c) == 4]),
        "concat_chunk long": (TOKENS.concat_chunk(100), []),
        "pack_chunk": (TOKENS.pack_chunk(6, columns), [{"input_ids": LONG(p), "mask": LONG([1] * len(p))}
                                                      for p in packed(IDS, 6, False)]),
        "pack_chunk discard": (TOKENS.pack_chunk(6, discard_long_samples=True),
                               [{"input_ids": LONG(p)} for p in packed(IDS, 6, True)]),
        "pad": (TOKENS.pad({"input_ids": 7}, 9),
                [{"input_ids": LONG(ids + [7] * (9 - len(ids))), "mask": [1] * len(ids)} for ids in IDS]),
        "batch": (TOKENS.concat_chunk(4).batch(2), [{"input_ids": LONG(c[: len(c) // 4 * 4]).reshape(-1, 4)}
                                                   for c in cut(stream, 8) if len(c) >= 4]),
        "batch collate": (SOURCE.batch(4, list, drop_last=True), [DOCUMENTS[:4], DOCUMENTS[4:8]]),
        "shuffle": (SOURCE.shuffle(4, 1), shuffled(DOCUMENTS, 4, 1)),
        "shuffle tensors": (TOKENS.chunk(3).shuffle(5), shuffled(
            [{"input_ids": LONG(c)} for ids in IDS for c in cut(ids, 3) if len(c) == 3], 5, 42)),
        "take": (SOURCE.take(4), DOCUMENTS[:4]),
        "take more": (SOURCE.take(40), DOCUMENTS),
        "enumerate": (SOURCE.enumerate(), [{**d, "step": i} for i, d in enumerate(DOCUMENTS)]),
        "stride": (SOURCE.stride(3, 1), DOCUMENTS[1::3]),
        "stride more": (SOURCE.stride(13, 12), []),
        "cache": (SOURCE.cache(), DOCUMENTS),
        "concat": (SOURCE + SOURCE.take(3), DOCUMENTS + DOCUMENTS[:3]),
        "concat_datasets": (concat_datasets([SOURCE.take(0), SOURCE.take(2), SOURCE.take(0)]), DOCUMENTS[:2]),
        "interleave": (interleave_datasets(abc, [0.5, 0.3, 0.2]), mixed),
        "interleave alike": (interleave_datasets([SOURCE, SOURCE.take(2)]), [DOCUMENTS[0]] * 2 + [DOCUMENTS[1]] * 2
                             + [DOCUMENTS[2]]),
        "interleave repeated": (interleave_datasets(abc, [0.5, 0.3, 0.2], stopping_strategy="all_exhausted"),
                                turned("0120010210", [DOCUMENTS, DOCUMENTS[:4], DOCUMENTS[1::2]])),
        "interleave all": (
            interleave_datasets(abc, [2, 1, 1], stopping_strategy="all_exhausted_without_replacement"),
            # Weights 2, 1, 1 until the second ends; then 2, 1 until the third ends.
            [DOCUMENTS[i] for i in (0, 0, 1, 1, 2, 1, 3, 3, 4, 2, 5, 5, 6, 3, 7, 7)]
            + [DOCUMENTS[i] for i in (8, 9, 9, 10)]),
        "from_files epochs": (CheckpointableDataset.from_files(
            f"{files}/{{0..3}}.jsonl", repeat=True, shuffle_shards=True, n_active_shards=2, seed=5), two_epochs),
        "from_files glob": (CheckpointableDataset.from_files(f"{files}/*.cbor"), muxed(RECORDS, 10)),
    }  # fmt: skip
    for kind in ("jsonl", "cbor", "parquet"):
        for suffix in PACKERS:
            ds = CheckpointableDataset.from_files(f"{files}/{{0..3}}.{kind}{suffix}", n_active_shards=2)
            out[f"from_files {kind}{suffix}"] = (ds, muxed(RECORDS, 2))
    return out


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    make_files(folder)
    return folder


NAMES = list(cases(Path("/nowhere")))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_does_what_plain_python_does_and_resumes_everywhere(name, files):
    dataset, expected = cases(files)[name]
    endless = any(word in name for word in ("repeat", "shuffle", "epochs")) and len(expected) > 20
    found = check_resume(dataset, limit=min(len(expected), 25) if endless else 200)
    assert same(found, expected[: len(found)])
    assert endless or len(found) == len(expected)


def test_resumed_in_a_new_process(files, tmp_path):
    """For all steps, after a third of the samples: their states are on disk, without pickle, and are read by one new
    process."""
    from tplr.streams.state import save_state

    for i, (dataset, expected) in enumerate(cases(files).values()):
        with dataset.iter() as samples:
            for _ in islice(samples, len(expected) // 3):
                pass
            save_state(tmp_path / f"{i}.state", samples.state_dict())
    answer = subprocess.run(
        [sys.executable, __file__, str(files), str(tmp_path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert answer.stdout == f"{len(NAMES)} cases\n"


def child(files: Path, states: Path) -> None:
    from tplr.streams.state import load_state

    for i, (name, (dataset, expected)) in enumerate(cases(files).items()):
        done = len(expected) // 3
        with dataset.iter(state_dict=load_state(states / f"{i}.state")) as samples:
            found = list(islice(samples, len(expected) - done))
        assert same(found, expected[done:]), (name, found, expected[done:])
    sys.stdout.write(f"{len(NAMES)} cases\n")
    leave_unclosed()


def sleepy(sample: Any) -> Any:
    time.sleep(1000)


def leave_unclosed() -> None:
    """Leaves long-running threads and a process, for which nothing waits."""
    endless = CheckpointableDataset.from_sequence(DOCUMENTS, repeat=True)
    for kind in ("thread", "process"):
        samples = (endless.take(1) + endless.parallel_map(sleepy, 1, executor_type=kind)).iter()
        next(samples)
        threading.Thread(target=lambda samples=samples: next(samples), daemon=True).start()
        LEFT.append(samples)
    time.sleep(0.2)


LEFT: list[Any] = []


# --- random chains of four ---

Step = tuple[Callable[[CheckpointableDataset], CheckpointableDataset], Callable[[list[Any]], list[Any]]]


def ids_of(sample: Any) -> list[int]:
    value = sample["input_ids"]
    return value.tolist() if isinstance(value, torch.Tensor) else list(value)


def chain_steps() -> dict[str, Step]:
    def chunked(items: list[Any]) -> list[Any]:
        return [{"input_ids": LONG(c)} for s in items for c in cut(ids_of(s), 3)]

    def concatenated(items: list[Any]) -> list[Any]:
        stream = [token for s in items for token in ids_of(s)]
        return [{"input_ids": LONG(c)} for c in cut(stream, 4) if len(c) == 4]

    def is_long(sample: Any) -> bool:
        return len(sample["input_ids"]) > 2

    def reverse(sample: Any) -> Any:
        return {**sample, "input_ids": LONG(ids_of(sample)[::-1])}

    return {
        "map": (lambda d: d.map(reverse), lambda items: [reverse(s) for s in items]),
        "filter": (lambda d: d.filter(is_long), lambda items: [s for s in items if is_long(s)]),
        "parallel": (lambda d: d.parallel_map(reverse, 2, 2), lambda items: [reverse(s) for s in items]),
        "chunk": (lambda d: d.chunk(3, drop_remainder=False), chunked),
        "concat": (lambda d: d.concat_chunk(4), concatenated),
        "pack": (lambda d: d.pack_chunk(5), lambda items: [
            {"input_ids": LONG(p)} for p in packed([ids_of(s) for s in items], 5, False)]),
        "bos": (lambda d: d.add_bos_eos(0, None), lambda items: [
            {**s, "input_ids": LONG([0, *ids_of(s)])} for s in items]),
        "shuffle": (lambda d: d.shuffle(3, 2), lambda items: shuffled(items, 3, 2)),
        "take": (lambda d: d.take(9), lambda items: items[:9]),
        "stride": (lambda d: d.stride(2, 1), lambda items: items[1::2]),
        "cache": (lambda d: d.cache(), list),
        "plus": (lambda d: d + d, lambda items: items * 2),
        "interleave": (lambda d: interleave_datasets([d, d], [2, 1]),
                       two_of_three),
    }  # fmt: skip


def two_of_three(items: list[Any]) -> list[Any]:
    """The items mixed with themselves, in the order 0, 1, 0 and so on, until one of the two ends."""
    out, sources = [], (iter(items), iter(items))
    for turn in cycle((0, 1, 0)):
        if (item := next(sources[turn], None)) is None:
            return out
        out.append(item)
    raise AssertionError


CHAIN = chain_steps()


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(
    names=st.lists(st.sampled_from(sorted(CHAIN)), min_size=4, max_size=4),
    sizes=st.lists(st.integers(0, 9), max_size=9),
    data=st.data(),
)
def test_random_chains_of_four(names, sizes, data):
    rng = np.random.default_rng(len(sizes))
    dataset = CheckpointableDataset.from_sequence([{"input_ids": rng.integers(0, 99, n).tolist()} for n in sizes])
    expected = list(dataset)
    for name in names:
        forward, oracle = CHAIN[name]
        dataset, expected = forward(dataset), oracle(expected)
    places = {0, len(expected), data.draw(st.integers(0, len(expected)))}
    assert same(check_resume(dataset, places=places, limit=1000), expected)


if __name__ == "__main__":
    child(Path(sys.argv[1]), Path(sys.argv[2]))
