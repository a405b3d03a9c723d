"""Token sequences for ``convergence.py``: of the localnet's corpus, or of all text below some folders."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from convergence_grid import Grid

from tplr.localnet.corpus import EOS, trained_tokenizer
from tplr.localnet.dataset import prepared_corpus
from tplr.pages.packing import batches
from tplr.pages.texts import text_files

CACHE = Path(__file__).parents[2] / ".cache" / "tplr"
TOKENIZER_CHARACTERS = 50_000_000
DOCUMENTS_AT_ONCE = 1000


def load_tokens(grid: Grid, text: Sequence[Path] = ()) -> np.ndarray:
    """Return (sequences, sequence) token ids, cut as nodes cut them; built once, cached for later runs.

    Args:
        text: folders of text files; empty for the localnet's corpus.
    """
    return batches(_folders(grid, text) if text else _localnet(grid), 1, grid.sequence)[:, 0]


def _localnet(grid: Grid) -> np.ndarray:
    """Rows of both configs of the localnet's corpus, in a fixed random order."""
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    folder = prepared_corpus(CACHE / "localnet", None, grid.vocab)
    cached = folder / "tokens.npy"
    if not cached.exists():
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        rows = [row for path in sorted(folder.rglob("*.parquet")) for row in pq.read_table(path)["text"].to_pylist()]
        ids = [np.array([*ids, tokenizer.eos_token_id], np.int64) for ids in tokenizer(rows)["input_ids"]]
        _save(cached, np.concatenate([ids[i] for i in np.random.default_rng(0).permutation(len(ids))]))
    return np.load(cached)


def _folders(grid: Grid, text: Sequence[Path]) -> np.ndarray:
    """Each different text once, in the order of the hashes, by a tokenizer that is trained on a part of them."""
    paths = [path for folder in text for path in text_files(folder)[0]]
    by_hash: dict[bytes, Path] = {}
    for path in paths:
        by_hash.setdefault(hashlib.sha256(path.read_bytes()).digest(), path)
    ordered = sorted(by_hash)
    name = hashlib.sha256(b"".join(ordered)).hexdigest()[:32]
    cached = CACHE / "convergence" / f"{name}-{grid.vocab}.npy"
    if cached.exists():
        return np.load(cached, mmap_mode="r")

    def document(digest: bytes) -> str:
        return by_hash[digest].read_text(encoding="utf-8", errors="ignore")

    whole = sum(path.stat().st_size for path in by_hash.values())
    part = ordered[:: max(1, whole // TOKENIZER_CHARACTERS)]
    tokenizer = trained_tokenizer(map(document, part), grid.vocab)
    end, ids = tokenizer.token_to_id(EOS), []
    for start in range(0, len(ordered), DOCUMENTS_AT_ONCE):
        some = [*map(document, ordered[start : start + DOCUMENTS_AT_ONCE])]
        ids += [np.array([*one.ids, end], np.int32) for one in tokenizer.encode_batch(some)]
    tokens = np.concatenate(ids)
    print(f"text: {len(ordered)} files, {whole / 1e6:.0f} MB, {len(tokens) / 1e6:.1f} million tokens", flush=True)
    cached.parent.mkdir(parents=True, exist_ok=True)
    _save(cached, tokens)
    return tokens


def _save(path: Path, tokens: np.ndarray) -> None:
    draft = path.with_name(f"{path.stem}.{os.getpid()}.npy")
    np.save(draft, tokens)
    draft.replace(path)
