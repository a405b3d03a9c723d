"""The corpus of a run: built once, cached between runs, uploaded into the dataset bucket."""

import hashlib
import inspect
import json
import shutil
import sys
import tempfile
from pathlib import Path

from tplr.errors import ConfigError
from tplr.localnet import corpus
from tplr.localnet.plan import DataKind, NetworkPlan
from tplr.logging import logger
from tplr.pages import build, texts
from tplr.schemas import Bucket
from tplr.storage import S3Connections
from tplr.stores.detect import META
from tplr.stores.meta import read_meta
from tplr.stores.preprocess import PipelineConfig, prepare
from tplr.stores.publish import publish
from tplr.stores.sequences import KEY

SUBFOLDER = "localnet"
LEAST_UIDS = 16
MOST_SAMPLES = 200  # per window: about as many as in two pages of a hundred rows
STORE_CONFIG = {
    "input": {"sections": [{"field": "text"}]},
    "preprocessing": {"min_chars": 0, "append_eos": True},
    "output": {"position_ids_mode": "none"},
}


def prepared_corpus(cache: Path, source: Path | None, vocab_size: int) -> Path:
    """Return the folder in ``cache`` with ``dataset`` and ``tokenizer``; build it if absent. Blocks.

    Raises:
        ConfigError: as ``corpus.build_corpus``.
    """
    folder = cache / _fingerprint(source, vocab_size)
    if folder.exists():
        return folder
    logger.info("preparing corpus and tokenizer (cached for runs with the same text)")
    cache.mkdir(parents=True, exist_ok=True)
    # Built in a temporary folder and renamed, so that it is complete or absent.
    with tempfile.TemporaryDirectory(dir=cache, prefix="new-") as aside:
        draft = Path(aside) / "corpus"
        corpus.build_corpus(draft, source=source, vocab_size=vocab_size)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.exists():  # else another run with the same text has built it
                raise
    return folder


def prepared_store(prepared: Path) -> Path:
    """Return the prepared corpus as a token store, with EOS after each row; build it if absent. Blocks."""
    folder = prepared / "store"
    with tempfile.TemporaryDirectory(dir=prepared, prefix="new-") as aside:
        if not folder.exists():
            draft = Path(aside) / "store"
            rows = sorted((prepared / "dataset").rglob("*.parquet"))
            prepare(rows, draft, PipelineConfig.from_dict(STORE_CONFIG), prepared / "tokenizer")
            try:
                draft.rename(folder)
            except OSError:
                if not folder.exists():  # else another run has built it
                    raise
    return folder


def store_shares(prepared: Path, plan: NetworkPlan, sequence_length: int, batch_size: int) -> dict[str, int]:
    """Return the group ``store`` of hparams for the prepared store: about as many tokens per window as with pages.

    Raises:
        ConfigError: there is too little text.
    """
    tokens = sum(read_meta(meta.parent).keys[KEY].elements for meta in (prepared / "store").rglob(META))
    uids = max(LEAST_UIDS, plan.miners + 2)
    samples = min(MOST_SAMPLES, tokens // sequence_length // uids) // batch_size * batch_size
    if not samples:
        raise ConfigError(
            f"{tokens} tokens of text are too few for {uids} uids with a batch of {batch_size} sequences of "
            f"{sequence_length} tokens each; give more text with --corpus, or fewer --miners"
        )
    return {"samples_per_window": samples, "uids": uids}


def copy_tokenizer(prepared: Path, folder: Path) -> None:
    """Copy the tokenizer into a run's folder, so that the run does not depend on the cache."""
    shutil.copytree(prepared / "tokenizer", folder)


async def upload_dataset(prepared: Path, bucket: Bucket, endpoint: str, *, data: DataKind = "pages") -> None:
    """Upload the dataset or the token store into ``bucket``. Raises StoreError."""
    folder = prepared / ("dataset" if data == "pages" else "store")
    async with S3Connections(endpoint) as connections:
        done = await publish(folder, connections.store(bucket), SUBFOLDER)
    logger.info("dataset: %d files in bucket %s", done.sent, bucket.name)


def _fingerprint(source: Path | None, vocab_size: int) -> str:
    """Return a name that changes with the text, the vocabulary size and the code that builds the corpus.

    The text is identified by file sizes and times only.
    """
    code = [Path(inspect.getfile(module)).read_bytes() for module in (corpus, build, texts)]
    rules = [hashlib.sha256(module).hexdigest() for module in code]
    if source is None:
        text: object = sys.version
    else:
        files = sorted(path for path in source.rglob("*") if path.is_file())
        text = [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps([rules, vocab_size, text]).encode()).hexdigest()[:32]
