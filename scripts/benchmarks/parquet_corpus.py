"""Makes a dataset for the page benchmarks from texts in the Python installation and the system's documentation."""

import hashlib
import math
import random
import shutil
import site
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tplr.pages.build import write_dataset

CACHE = Path(tempfile.gettempdir()) / "templar-benchmarks" / "pages"
EOS = "<|endoftext|>"
CHARACTERS = 110_000_000
VOCABULARY = 32_000
TRAINED_ON = 16_000_000  # characters
_SUFFIXES = {".py", ".pyi", ".txt", ".md", ".rst", ".html", ".h", ".c", ".js", ".po"}
# Document lengths as on the web: log-normal, median 3,000 characters, mean about 4,700.
_MEDIAN, _SPREAD = 3000, 0.95


def prepared() -> Path:
    """Return the folder with ``dataset`` and ``tokenizer.json``. The first call creates it, in about a minute."""
    if not CACHE.exists():
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=CACHE.parent))
        try:
            rows = documents()
            with write_dataset(draft / "dataset", rows_per_shard=2000) as writer:
                writer.add("even", rows[::2])
                writer.add("odd", rows[1::2])
            _train(rows).save(str(draft / "tokenizer.json"))
            draft.rename(CACHE)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return CACHE


def documents() -> list[str]:
    """Return shuffled rows with about ``CHARACTERS`` characters; the same files give the same rows."""
    rng = random.Random(0)
    rows: list[str] = []
    characters = 0
    for text in _texts():
        start = 0
        while start < min(len(text), 60_000):
            row = text[start : start + max(100, int(rng.lognormvariate(math.log(_MEDIAN), _SPREAD)))]
            rows.append(row)
            start += len(row)
            characters += len(row)
        if characters > CHARACTERS:
            break
    rng.shuffle(rows)
    return rows


def _texts() -> Iterator[str]:
    roots = [Path(sys.prefix), Path(sys.base_prefix) / "lib", *map(Path, site.getsitepackages()), Path("/usr/share")]
    paths = {path for root in roots for path in root.rglob("*") if path.suffix in _SUFFIXES and path.is_file()}
    seen: set[bytes] = set()
    for path in sorted(paths, key=lambda path: hashlib.sha256(str(path).encode()).digest()):
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if len(text) > 200 and digest not in seen:
            seen.add(digest)
            yield text


def _train(rows: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    every = max(1, CHARACTERS // TRAINED_ON)
    tokenizer.train_from_iterator(rows[::every], trainer)
    return tokenizer
