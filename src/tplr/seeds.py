"""Seed rules: the derivation of every random choice of the network.

A seed is the first 8 bytes, big-endian, of the SHA-256 of its parts, joined as ``len:part`` (``hash_parts``). The first
part names the rule. Anyone can recompute every seed.

Rules in profile ``hardened``, by name:

=====================  ==========================================================================================
``pages``              hash of the first block of the previous window, and the uid: known one window ahead, so that
                       the next window's pages can be loaded while this one trains, but not earlier
``random-pages``       held-out pages. Hash of the first block after the window, and the validator's hotkey: unknown
                       until all updates are committed
``samples``            of a token store: hash of the first block of the previous window, as for pages; one seed
                       assigns the window's pool to all uids (``stores/sequences.py``)
``random-samples``     held-out samples, as ``random-pages``
``evaluated-uids``     as ``random-pages``; this seed is called E below
``evaluated-by-loss``  evaluated uids whose losses are measured, too: E, and the uid
``batch``              batches of held-out and assigned pages that are measured: E, and the digest of the pages
``aligned-chunks``     chunks that inner products read: E, and the name of the tensor
``compared-chunks``    where a validator looks for copies (profile ``documented``): E
``overdue``            order of uids that have waited equally long (profile ``documented``): E, and the uid
``fingerprint``        hash of the first block after the window
``proof``              of sync: as the fingerprint, and the uid, so that one node's proof is useless to another
``position``           of an entry in a fingerprint or a proof: its seed, and the entry's number; in an outer
                       fingerprint also the name of the tensor
``sync-proofs``        order in which a validator reads proofs: hash of the first block after the window, and the uid
``peer``               order of equal merits on a peer list: the window, and the uid; equal for all electors
``probation``          who is measured on probation: the turn, and the uid; equal for all electors
``window``             ``window_to_seed``: hash of the window's first block
``cancelled``          below which an entry of DeMo's sum counts as zero: the hashes of all updates, in uid order
``first weights``      ``init_seed`` of hparams and the name of the module that they belong to; of a PCG64 stream
``rounding``           uid, window and tensor, so that a repeated window gives the same bytes
``permutation``        order of a token store's sequences and of items of streams: their number, a seed (``samples``,
                       the hash of the store, or the user's), epoch and round
``author``             delay of a block of a local chain; like ``skipped-slot`` and ``stale-head`` from the chain's
                       own seed
``skipped-slot``       whether a local chain skips a slot
``stale-head``         whether a local chain shows the block before the newest
=====================  ==========================================================================================

In profile ``documented`` a uid's pages depend only on the uid and the window: offset = window * pages per window,
seed = uid.
"""

import hashlib
from typing import Literal, NamedTuple

Profile = Literal["documented", "hardened"]


class PageDraw(NamedTuple):
    """Arguments of ``next_pages``: the seed of a random stream, and the word at which a page list starts in it."""

    offset: int
    seed: int


def hash_parts(*parts: object) -> str:
    """Return the hex SHA-256 of ``str`` of each part joined as ``len:part``; ``len`` counts characters.

    Seeds, page digests, cache keys and saved loader states depend on these bytes, so they must never change. A part and
    its text are equal (``1`` and ``"1"``); lists of different texts never have the same joined text.
    """
    text = "".join(f"{len(part)}:{part}" for part in map(str, parts))
    return hashlib.sha256(text.encode()).hexdigest()


def derive(*parts: str | int) -> int:
    """Return the 64-bit seed of a list of texts and integers, equal on every machine."""
    return int(hash_parts(*parts)[:16], 16)


def seed_window(window: int) -> int:
    """Return the window whose first block's hash seeds the pages of ``window``."""
    return window - 1


def page_draw(profile: Profile, *, uid: int, window: int, pages_per_window: int, block_hash: str) -> PageDraw:
    """Return the draw of ``uid``'s pages in ``window``; ``block_hash``: of ``seed_window(window)``'s first block."""
    if profile == "documented":
        return PageDraw(offset=window * pages_per_window, seed=uid)
    return PageDraw(offset=0, seed=derive("pages", uid, block_hash))


def held_out_page_draw(*, hotkey: str, block_hash: str) -> PageDraw:
    """Return the draw of a validator's held-out pages; ``block_hash``: of the first block after the window."""
    return PageDraw(offset=0, seed=derive("random-pages", hotkey, block_hash))


def samples_seed(profile: Profile, *, window: int, block_hash: str) -> int:
    """Return the seed that assigns a window's sequences to uids.

    ``block_hash`` is that of ``seed_window(window)``'s first block. Profile ``documented`` ignores it.
    """
    return derive("samples", window, block_hash if profile == "hardened" else "")


def held_out_samples_seed(*, hotkey: str, block_hash: str) -> int:
    """Return the seed of a validator's held-out sequences; ``block_hash``: of the first block after the window."""
    return derive("random-samples", hotkey, block_hash)


def evaluation_seed(*, hotkey: str, block_hash: str) -> int:
    """Return the seed with which a validator chooses the uids that it evaluates."""
    return derive("evaluated-uids", hotkey, block_hash)


def rounding_seed(*, window: int, uid: int, name: str) -> int:
    """Return the seed with which a miner rounds one tensor's values, if rounding is stochastic."""
    return derive("rounding", window, uid, name)


def fingerprint_seed(*, window: int, block_hash: str) -> int:
    """Return the seed of the fingerprint's positions; ``block_hash``: of the first block after the window."""
    return derive("fingerprint", window, block_hash)


def proof_seed(*, uid: int, window: int, block_hash: str) -> int:
    """Return the seed of the positions at which ``uid`` proves its weights; ``block_hash`` as for the fingerprint."""
    return derive("proof", uid, window, block_hash)
