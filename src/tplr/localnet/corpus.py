"""A small real corpus for a local network: parquet pages with their manifest, and a tokenizer trained on them.

The text is Python's own standard library, which every machine here has: its sources make one config, its
documentation the other. Or it is a folder of the operator's own text.
"""

import hashlib
import importlib
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from textwrap import dedent

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tplr.data.pages import ROWS_PER_PAGE
from tplr.data.shards import METADATA, SHARD_SIZES
from tplr.errors import ConfigError
from tplr.files import atomic_write

EOS = "<|endoftext|>"
PIECE_CHARACTERS = 480  # about 128 tokens: one sequence of localnet
MOST_CHARACTERS = 6_000_000  # of each config
TOKENIZER_CHARACTERS = 2_500_000  # merges of a vocabulary of thousands hardly change beyond
SHARDS_PER_CONFIG = 2
ROWS_PER_GROUP = 384  # no divisor of most shards: their last group is shorter

# Tests, tables of numbers, generated files: hardly text.
_SKIPPED = re.compile(
    r"(^|/)(tests?|idle_test|site-packages|dist-packages|encodings|pydoc_data|lib2to3|lib-dynload|config-[^/]*)/|"
    r"(^|/)_sysconfigdata"
)
_DOCSTRING = re.compile(r'"""(.{200,}?)"""', re.DOTALL)
_TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py", ".text"}


@dataclass(frozen=True)
class Corpus:
    """What was built. ``dataset`` and ``tokenizer`` are folders; ``rows`` counts by config."""

    dataset: Path
    tokenizer: Path
    rows: dict[str, int]


def build_corpus(folder: Path, *, source: Path | None = None, vocab_size: int = 4096) -> Corpus:
    """Write ``folder/dataset`` and ``folder/tokenizer``; the same text gives the same bytes. Takes seconds; blocks.

    Args:
        source: a folder of text (.txt, .md, .rst, .py), JSON lines or parquet files (with a column ``text``); default
            is Python's standard library.
        vocab_size: of the tokenizer, at least 257: all bytes and the end of a text.

    Raises:
        ConfigError: there is no text, too little of it, or a file that can't be read.
    """
    if vocab_size < 257:
        raise ConfigError(f"vocab_size is {vocab_size}: a byte-level tokenizer has at least 257 tokens")
    documents = standard_library() if source is None else folder_texts(source)
    configs = {name: [*islice(pieces(texts), _most_rows())] for name, texts in documents.items()}
    least = SHARDS_PER_CONFIG * (ROWS_PER_PAGE + 2)
    for name, rows in configs.items():
        if len(rows) < least:
            raise ConfigError(
                f"corpus {source or 'of the standard library'}: config {name!r} has {len(rows)} rows of "
                f"{PIECE_CHARACTERS} characters, at least {least} are needed; give more text with --corpus"
            )
    configs = {name: shuffled(rows) for name, rows in configs.items()}
    _write_dataset(folder / "dataset", configs)
    _train_tokenizer(folder / "tokenizer", configs, vocab_size)
    return Corpus(folder / "dataset", folder / "tokenizer", {name: len(rows) for name, rows in configs.items()})


def dataset_files(dataset: Path, subfolder: str) -> list[tuple[str, Path]]:
    """Object key and file of everything in a dataset's folder; the manifest comes last, when its shards are there."""
    files = sorted(path for path in dataset.rglob("*") if path.is_file())
    files.sort(key=lambda path: path.name in (METADATA, SHARD_SIZES))
    return [(f"{subfolder}/{path.relative_to(dataset).as_posix()}", path) for path in files]


def standard_library() -> dict[str, Iterator[str]]:
    """Texts of the configs ``code`` and ``docs``."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in root.rglob("*.py") if not _SKIPPED.search(path.relative_to(root).as_posix()))
    sources = [_read_text(path) for path in paths]
    return {"code": iter(sources), "docs": _documentation(sources)}


def _documentation(sources: Iterable[str]) -> Iterator[str]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions package it apart
        topics = {}
    yield from (topics[name] for name in sorted(topics))
    for source in sources:
        yield from (dedent(match[1]) for match in _DOCSTRING.finditer(source))


def folder_texts(source: Path) -> dict[str, Iterator[str]]:
    """Texts of the configs ``part-0`` and ``part-1``: every other one of the folder's."""
    if not source.is_dir():
        raise ConfigError(f"corpus {source}: no such folder")
    paths = sorted(path for path in source.rglob("*") if path.suffix in {*_TEXT_SUFFIXES, ".jsonl", ".parquet"})
    texts = [text for path in paths if path.is_file() for text in _texts_of(path)]
    if not any(texts):
        known = ", ".join(sorted(_TEXT_SUFFIXES))
        raise ConfigError(f"corpus {source}: no text in it; expected files of {known}, .jsonl or .parquet")
    if len(texts) == 1:  # one long text: its two halves
        middle = len(texts[0]) // 2
        texts = [texts[0][:middle], texts[0][middle:]]
    return {"part-0": iter(texts[::2]), "part-1": iter(texts[1::2])}


def pieces(texts: Iterable[str]) -> Iterator[str]:
    """Texts cut at line ends into rows of at most ``PIECE_CHARACTERS``; longer lines are cut anywhere."""
    for text in texts:
        piece = ""
        for line in text.splitlines(keepends=True):
            if len(piece) + len(line) > PIECE_CHARACTERS:
                if piece.strip():
                    yield piece.rstrip()
                piece = ""
            while len(line) > PIECE_CHARACTERS:
                yield line[:PIECE_CHARACTERS]
                line = line[PIECE_CHARACTERS:]  # noqa: PLW2901
            piece += line
        if piece.strip():
            yield piece.rstrip()


def shuffled(rows: list[str]) -> list[str]:
    """Rows by their SHA-256: neighbours of one file make a page that is like no other; large corpora come mixed."""
    return sorted(rows, key=lambda row: hashlib.sha256(row.encode()).digest())


def _most_rows() -> int:
    return MOST_CHARACTERS // PIECE_CHARACTERS


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="ignore")


def _texts_of(path: Path) -> list[str]:
    if path.suffix == ".jsonl":
        return [
            _json_text(path, number, line)
            for number, line in enumerate(_read_text(path).split("\n"), 1)
            if line.strip()
        ]
    if path.suffix == ".parquet":
        try:
            column = pq.read_table(path, columns=["text"]).column("text")
        except (pa.ArrowException, KeyError, OSError) as error:
            raise ConfigError(f"corpus {path}: no parquet file with a column 'text' ({error})") from error
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            raise ConfigError(f"corpus {path}: column 'text' holds {column.type}, expected text")
        return [text or "" for text in column.to_pylist()]
    return [_read_text(path)]


def _json_text(path: Path, number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"corpus {path} line {number}: expected a JSON object with a field 'text'") from error
    if not isinstance(text, str):
        raise ConfigError(f"corpus {path} line {number}: 'text' is {type(text).__name__}, expected text")
    return text


def _write_dataset(dataset: Path, configs: dict[str, list[str]]) -> None:
    sizes = {}
    for name, rows in configs.items():
        shards = []
        for i in range(SHARDS_PER_CONFIG):
            part = rows[i * len(rows) // SHARDS_PER_CONFIG : (i + 1) * len(rows) // SHARDS_PER_CONFIG]
            path = f"{name}/train-{i:05d}-of-{SHARDS_PER_CONFIG:05d}.parquet"
            data = _parquet(part)
            atomic_write(dataset / path, data)
            digest = hashlib.sha256(data).hexdigest()
            shards.append({"path": path, "num_rows": len(part), "byte_size": len(data), "sha256": digest})
        sizes[name] = {"split": "train", "total_rows": len(rows), "shards": shards}
    metadata = {"configs": [{"config_name": name} for name in configs], "address": "exact"}
    atomic_write(dataset / METADATA, yaml.safe_dump(metadata, sort_keys=False).encode())
    atomic_write(dataset / SHARD_SIZES, json.dumps(sizes, indent=1).encode())


def _parquet(rows: list[str]) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.table({"text": pa.array(rows, pa.string())})
    # Checksums: a byte damaged on the way is noticed when the page is read.
    pq.write_table(table, sink, row_group_size=ROWS_PER_GROUP, compression="zstd", write_page_checksum=True)
    return sink.getvalue().to_pybytes()


def _train_tokenizer(folder: Path, configs: dict[str, list[str]], vocab_size: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rows = [row for rows in configs.values() for row in rows]
    every = -(-len(rows) * PIECE_CHARACTERS // TOKENIZER_CHARACTERS)
    tokenizer.train_from_iterator(rows[::every], trainer)
    atomic_write(folder / "tokenizer.json", tokenizer.to_str().encode())
    # What PreTrainedTokenizerFast.save_pretrained writes, without importing transformers for it.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "clean_up_tokenization_spaces": False}
    atomic_write(folder / "tokenizer_config.json", json.dumps(settings, indent=1).encode())
