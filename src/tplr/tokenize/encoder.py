"""From a tokenizer to the fastest encoder that gives its ids."""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Tokenizer

from tplr.logging import logger
from tplr.tokenize.byte_bpe import NotByteBPE, byte_bpe
from tplr.tokenize.fast import FastBatches
from tplr.tokenize.hf_batch import OneCallAtATime, OwnBatches
from tplr.tokenize.ragged import Ids, Ragged

ENCODERS_KEPT = 4

# Everything that ways to tokenize are known to differ in: spaces, line ends, contractions, digits, scripts, cases that
# fold, emoji of several characters, what looks like a special token.
PROBES = (
    "",
    " ",
    "a",
    "Hello world, it's 1234567 o'clock;  I'LL\tgo.\r\n\r\n  Then  we’ll see\n\n\n",
    "   leading and trailing   ",
    "def f(x_1):\n    return {'a': [x_1**2, 0.5e-3]}  # <s> </s> <|x|>\n",
    "Größe ÉCOLE ſtraße İstanbul ﬁne",
    "Привет, мир! こんにちは世界 你好，世界。 안녕하세요 שלום مرحبا नमस्ते १२३ Ⅷ ½",
    "\u00a0\u2003x\u3000y\u200bz\u0085w\u180e\x0b\x0c\x1c",
    "👩‍👩‍👧‍👦 🇩🇪 ✈️ e\u0301 \U0001f9ff \ufeff\ufffd\x00",
)


class Encoder:
    """Texts to ids, exactly as the tokenizer itself gives them. Threads may share one; most of it runs outside the GIL.

    Attributes:
        fingerprint: hex SHA-256 of all that decides the ids.
        fast: whether it is other than the tokenizer's own batch encoding.
    """

    def __init__(self, batches: FastBatches | OwnBatches | OneCallAtATime, fingerprint: str) -> None:
        self._batches = batches
        self.fingerprint = fingerprint
        self.fast = isinstance(batches, FastBatches)

    def encode_batch(self, texts: Sequence[str], max_length: int | None = None, *, one_core: bool = False) -> Ragged:
        """Row by row the ids that ``tokenizer(text, truncation=True, max_length=max_length)`` gives, special tokens
        included; uncut without ``max_length``. Blocks. Uses all cores if there is much to do, but with ``one_core``,
        for who calls it from as many threads as there are cores."""
        return self._batches.encode_batch(texts, max_length, one_core=one_core) if texts else Ragged.of([])


_encoders: OrderedDict[str, Encoder] = OrderedDict()
_lock = threading.Lock()


def encoder(tokenizer: Any) -> Encoder:
    """The encoder of a tokenizer as it is now: later changes to the tokenizer are not its own. Blocks, for part of a
    second; tokenizers that are equal share one.

    Args:
        tokenizer: of ``transformers``.
    """
    definition = _definition(tokenizer)
    fingerprint = _fingerprint(tokenizer, definition)
    with _lock:
        if fingerprint not in _encoders:
            _encoders[fingerprint] = Encoder(_batches(tokenizer, definition), fingerprint)
        _encoders.move_to_end(fingerprint)
        while len(_encoders) > ENCODERS_KEPT:
            _encoders.popitem(last=False)
        return _encoders[fingerprint]


def _definition(tokenizer: Any) -> str | None:
    """JSON of the tokenizers library's object that does the work, or None if something else may have a hand in it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    plain = (
        type(tokenizer).__module__.startswith("transformers.")
        and tokenizer.truncation_side == "right"
        and not getattr(tokenizer, "split_special_tokens", False)
    )
    return backend.to_str() if plain and isinstance(backend, Tokenizer) else None


def _fingerprint(tokenizer: Any, definition: str | None) -> str:
    if definition is None:
        kind = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
        settings = {**getattr(tokenizer, "init_kwargs", {}), "truncation_side": tokenizer.truncation_side}
        definition = json.dumps([kind, settings, tokenizer.get_vocab()], sort_keys=True, default=str)
    else:  # before them: how the last call cut and padded, which is no part of a tokenizer
        definition = definition[definition.index('"added_tokens"') :]
    return hashlib.sha256(f"{tokenizers.__version__}\n{definition}".encode()).hexdigest()


def _batches(tokenizer: Any, definition: str | None) -> FastBatches | OwnBatches | OneCallAtATime:
    """The fastest way that gives the ids of the tokenizer's own calls for the probes."""
    calls = OneCallAtATime(tokenizer)
    if definition is None:
        return calls
    before, after = _special_tokens(calls, OwnBatches(definition))
    own = OwnBatches(definition, before, after)
    if not _agree(calls, own):
        return calls
    try:
        fast = FastBatches(byte_bpe(definition), own, before, after)
    except NotByteBPE as reason:
        logger.info("tokenizing by the tokenizer's own batches: %s", reason)
        return own
    if not _agree(calls, fast):
        logger.warning("tokenizing by the tokenizer's own batches: fast ones gave other ids for a probe")
        return own
    return fast


def _special_tokens(calls: OneCallAtATime, bare: OwnBatches) -> tuple[Ids, Ids]:
    """What each row begins and ends with; to be confirmed by other rows."""
    whole, body = calls.encode_batch(["a"]).ids, bare.encode_batch(["a"]).ids
    first = next((i for i in range(len(whole)) if np.array_equal(whole[i : i + len(body)], body)), 0)
    return whole[:first], whole[first + len(body) :]


def _agree(calls: OneCallAtATime, other: FastBatches | OwnBatches) -> bool:
    pairs = ((calls.encode_batch(PROBES, length), other.encode_batch(PROBES, length)) for length in (None, 7))
    return all(np.array_equal(a.ids, b.ids) and np.array_equal(a.offsets, b.offsets) for a, b in pairs)
