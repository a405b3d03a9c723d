"""Builds a localnet's corpus: parquet pages with their manifest, and a tokenizer trained on them.

The default text is Python's standard library: its sources are one config, its documentation the other. A folder of text
can replace it.
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

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tplr.errors import ConfigError
from tplr.files import atomic_write
from tplr.pages.build import write_dataset
from tplr.pages.page_draw import ROWS_PER_PAGE
from tplr.pages.texts import Documents, split_rows, text_files

EOS = "<|endoftext|>"
PIECE_CHARACTERS = 480  # about 128 tokens: one sequence of localnet
MOST_CHARACTERS = 6_000_000  # of each config
TOKENIZER_CHARACTERS = 2_500_000  # more text hardly changes the merges
SHARDS_PER_CONFIG = 2  # at least, so that some pages cross a shard's end
ROWS_PER_GROUP = 384

# Excluded, because tests, tables of numbers and generated files contain little text.
_SKIPPED = re.compile(
    r"(^|/)(tests?|idle_test|site-packages|dist-packages|encodings|pydoc_data|lib2to3|lib-dynload|config-[^/]*)/|"
    r"(^|/)_sysconfigdata"
)
_DOCSTRING = re.compile(r'"""(.{200,}?)"""', re.DOTALL)


@dataclass(frozen=True)
class Corpus:
    """A built corpus. ``dataset`` and ``tokenizer`` are folders; ``rows`` counts by config."""

    dataset: Path
    tokenizer: Path
    rows: dict[str, int]


def build_corpus(folder: Path, *, source: Path | None = None, vocab_size: int = 4096) -> Corpus:
    """Write ``folder/dataset`` and ``folder/tokenizer``; the same text gives the same bytes. Takes seconds; blocks.

    Args:
        source: a folder of text (.txt, .md, .rst, .py), JSON lines or parquet files (with a column ``text``); default
            is Python's standard library.
        vocab_size: the tokenizer's, at least 257: all bytes and the end-of-text token.

    Raises:
        ConfigError: there is no or too little text, or a file can't be read.
    """
    if vocab_size < 257:
        raise ConfigError(f"vocab_size is {vocab_size}: a byte-level tokenizer has at least 257 tokens")
    documents = standard_library() if source is None else folder_texts(source)
    most = MOST_CHARACTERS // PIECE_CHARACTERS
    configs = {name: [*islice(split_rows(texts, PIECE_CHARACTERS), most)] for name, texts in documents.items()}
    least = SHARDS_PER_CONFIG * (ROWS_PER_PAGE + 2)
    for name, rows in configs.items():
        if len(rows) < least:
            raise ConfigError(
                f"corpus {source or 'of the standard library'}: config {name!r} has {len(rows)} rows of "
                f"{PIECE_CHARACTERS} characters, at least {least} are needed; give more text with --corpus"
            )
    configs = {name: shuffled(rows) for name, rows in configs.items()}
    half = min(map(len, configs.values())) // SHARDS_PER_CONFIG
    group = min(ROWS_PER_GROUP, half)
    with write_dataset(folder / "dataset", rows_per_group=group, rows_per_shard=half // group * group) as writer:
        for name, rows in configs.items():
            writer.add(name, rows)
    _train_tokenizer(folder / "tokenizer", configs, vocab_size)
    return Corpus(folder / "dataset", folder / "tokenizer", {name: len(rows) for name, rows in configs.items()})


def standard_library() -> dict[str, Iterator[str]]:
    """Texts of the configs ``code`` and ``docs``."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in root.rglob("*.py") if not _SKIPPED.search(path.relative_to(root).as_posix()))
    sources = [path.read_text(encoding="utf-8", errors="ignore") for path in paths]
    return {"code": iter(sources), "docs": _documentation(sources)}


def _documentation(sources: Iterable[str]) -> Iterator[str]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions package it separately
        topics = {}
    yield from (topics[name] for name in sorted(topics))
    for source in sources:
        yield from (dedent(match[1]) for match in _DOCSTRING.finditer(source))


def folder_texts(source: Path) -> dict[str, Iterator[str]]:
    """The folder's texts, alternating between the configs ``part-0`` and ``part-1``. Raises as ``Documents``."""
    paths, _ = text_files(source)
    texts = [*Documents(paths)]
    if not texts:
        raise ConfigError(f"{source}: its files hold no text")
    if len(texts) == 1:  # split a single text into two halves
        middle = len(texts[0]) // 2
        texts = [texts[0][:middle], texts[0][middle:]]
    return {"part-0": iter(texts[::2]), "part-1": iter(texts[1::2])}


def shuffled(rows: list[str]) -> list[str]:
    """Rows in the order of their SHA-256, so that a page mixes many files, as in large corpora."""
    return sorted(rows, key=lambda row: hashlib.sha256(row.encode()).digest())


def _train_tokenizer(folder: Path, configs: dict[str, list[str]], vocab_size: int) -> None:
    rows = [row for rows in configs.values() for row in rows]
    every = -(-len(rows) * PIECE_CHARACTERS // TOKENIZER_CHARACTERS)
    tokenizer = trained_tokenizer(rows[::every], vocab_size)
    atomic_write(folder / "tokenizer.json", tokenizer.to_str().encode())
    # As PreTrainedTokenizerFast.save_pretrained writes it, without importing transformers.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "clean_up_tokenization_spaces": False}
    atomic_write(folder / "tokenizer_config.json", json.dumps(settings, indent=1).encode())


def trained_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer trained on ``texts``, with the end-of-text token ``EOS``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
