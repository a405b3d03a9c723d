"""The corpus of a run: built once and kept between runs, put into the dataset bucket as its owner would."""

import hashlib
import inspect
import json
import shutil
import sys
import tempfile
from pathlib import Path

from tplr.data import build, texts
from tplr.data.publish import publish
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
    """Put the dataset into ``bucket``. Raises StoreError."""
    async with S3Connections(endpoint) as connections:
        done = await publish(prepared / "dataset", connections.store(bucket), SUBFOLDER)
    logger.info("dataset: %d files in bucket %s", done.sent, bucket.name)


def _fingerprint(source: Path | None, vocab_size: int) -> str:
    """Changes with the text, the vocabulary's size and the rules of building; cheap, so it looks at no content."""
    code = [Path(inspect.getfile(module)).read_bytes() for module in (corpus, build, texts)]
    rules = [hashlib.sha256(module).hexdigest() for module in code]
    if source is None:
        text: object = sys.version
    else:
        files = sorted(path for path in source.rglob("*") if path.is_file())
        text = [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps([rules, vocab_size, text]).encode()).hexdigest()[:32]
