"""The corpus of a run: built once and kept between runs, put into the dataset bucket as its owner would."""

import asyncio
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

from tplr.localnet import corpus
from tplr.logging import logger
from tplr.schemas import Bucket
from tplr.storage import S3Connections

SUBFOLDER = "localnet"


def prepared_corpus(cache: Path, source: Path | None, vocab_size: int) -> Path:
    """Folder holding ``dataset`` and ``tokenizer``; from ``cache``, or built there now. Blocks.

    Raises:
        ConfigError: as ``corpus.build_corpus``.
    """
    folder = cache / _fingerprint(source, vocab_size)
    if folder.exists():
        return folder
    logger.info("preparing the corpus and its tokenizer, once for all runs with the same text")
    cache.mkdir(parents=True, exist_ok=True)
    # Whole or absent: built aside, then renamed.
    with tempfile.TemporaryDirectory(dir=cache, prefix="new-") as aside:
        draft = Path(aside) / "corpus"
        corpus.build_corpus(draft, source=source, vocab_size=vocab_size)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.exists():  # else another run was first, with the same text
                raise
    return folder


def copy_tokenizer(prepared: Path, folder: Path) -> None:
    """Put the tokenizer into a run, so that the run's folder stays whole without the cache."""
    shutil.copytree(prepared / "tokenizer", folder)


async def upload_dataset(prepared: Path, bucket: Bucket, endpoint: str) -> None:
    """Put all files of the dataset into ``bucket``, the manifest last. Raises StoreError."""
    files = await asyncio.to_thread(corpus.dataset_files, prepared / "dataset", SUBFOLDER)
    async with S3Connections(endpoint) as connections:
        store = connections.store(bucket)
        for key, path in files:
            await store.put_file(key, path)
    logger.info("dataset: %d files in bucket %s", len(files), bucket.name)


def _fingerprint(source: Path | None, vocab_size: int) -> str:
    """Changes with the text, the vocabulary's size and the rules of building; cheap, so it looks at no content."""
    assert corpus.__file__ is not None
    rules = hashlib.sha256(Path(corpus.__file__).read_bytes()).hexdigest()
    if source is None:
        text: object = sys.version
    else:
        files = sorted(path for path in source.rglob("*") if path.is_file())
        text = [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps([rules, vocab_size, text]).encode()).hexdigest()[:32]
