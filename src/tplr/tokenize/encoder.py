"""Chooses, for a tokenizer, the fastest encoder that gives the tokenizer's own ids."""

import copy
import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Tokenizer

from tplr.logging import logger
from tplr.tokenize.byte_bpe import NotByteBPE, byte_bpe
from tplr.tokenize.fast import FastEncoder
from tplr.tokenize.hf_batch import CallableEncoder, HFBatchEncoder, HFCallEncoder
from tplr.tokenize.ragged import Ragged
from tplr.tokenize.special_tokens import SpecialTokens

ENCODERS_KEPT = 4
_PROBED_TOKENS = 256

# Texts with known differences between tokenizer implementations: spaces, line ends, contractions, digits, scripts, case
# folding, emoji of several characters, and text that looks like a special token.
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
    """Encodes texts to the tokenizer's own ids. Threads may share one; most of the work runs without the GIL.

    Attributes:
        fingerprint: hex SHA-256 of everything that determines the ids.
        fast: whether it uses ``FastEncoder``, not the libraries.
    """

    def __init__(
        self, implementation: FastEncoder | HFBatchEncoder | HFCallEncoder | CallableEncoder, fingerprint: str
    ) -> None:
        self._implementation = implementation
        self.fingerprint = fingerprint
        self.fast = isinstance(implementation, FastEncoder)

    def encode_batch(self, texts: Sequence[str], max_length: int | None = None, *, one_core: bool = False) -> Ragged:
        """The ids of ``tokenizer(text, truncation=True, max_length=max_length)``, with special tokens, for each text.

        Blocks. Uses all cores for large batches.

        Args:
            max_length: in tokens; None truncates nothing.
            one_core: use the calling thread only, for callers with one thread for each core.
        """
        return self._implementation.encode_batch(texts, max_length, one_core=one_core) if texts else Ragged.of([])


_encoders: OrderedDict[str, Encoder] = OrderedDict()
_lock = threading.Lock()
# A fork waits until no encoder is being built. Otherwise the forked process would get locks of an import or of the
# tokenizers library that a thread of the parent holds, and would wait for them for ever.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def encoder(tokenizer: Any) -> Encoder:
    """The encoder of a ``transformers`` tokenizer as it is now; later changes to the tokenizer do not reach it.

    Equal tokenizers share one encoder; the last ``ENCODERS_KEPT`` are kept. Blocks, up to half a second for a new one.

    Any other callable is called for each text, as ``tokenizer(text, truncation=True, max_length=n,
    padding=False)["input_ids"]``. Its type and its ids of ``PROBES`` are its fingerprint, for want of a definition.
    """
    if not any(base.__module__.startswith("transformers.") for base in type(tokenizer).__mro__):
        calls = CallableEncoder(tokenizer)
        probed = [row.tolist() for row in calls.encode_batch(PROBES, _PROBED_TOKENS).rows()]
        return Encoder(calls, _sha256(json.dumps([_kind(tokenizer), probed])))
    with _lock:
        definition = _definition(tokenizer)
        fingerprint = _fingerprint(tokenizer, definition)
        if fingerprint not in _encoders:
            _encoders[fingerprint] = Encoder(_implementation(tokenizer, definition), fingerprint)
        _encoders.move_to_end(fingerprint)
        while len(_encoders) > ENCODERS_KEPT:
            _encoders.popitem(last=False)
        return _encoders[fingerprint]


def _definition(tokenizer: Any) -> str | None:
    """JSON of the ``tokenizers`` object behind a tokenizer, or None if that object alone may not determine the ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    plain = (
        type(tokenizer).__module__.startswith("transformers.")
        and tokenizer.truncation_side == "right"
        and not getattr(tokenizer, "split_special_tokens", False)
    )
    return backend.to_str() if plain and isinstance(backend, Tokenizer) else None


def _fingerprint(tokenizer: Any, definition: str | None) -> str:
    if definition is None:
        settings = {**getattr(tokenizer, "init_kwargs", {}), "truncation_side": tokenizer.truncation_side}
        definition = json.dumps([_kind(tokenizer), settings, tokenizer.get_vocab()], sort_keys=True, default=str)
    else:  # the JSON before that holds truncation and padding of the last call
        definition = definition[definition.index('"added_tokens"') :]
    return _sha256(definition)


def _kind(tokenizer: Any) -> str:
    return f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"


def _sha256(definition: str) -> str:
    return hashlib.sha256(f"{tokenizers.__version__}\n{definition}".encode()).hexdigest()


def _implementation(tokenizer: Any, definition: str | None) -> FastEncoder | HFBatchEncoder | HFCallEncoder:
    """The fastest implementation whose ids for ``PROBES`` equal those of calls of the tokenizer."""
    calls = HFCallEncoder(tokenizer)
    if definition is None:
        return HFCallEncoder(copy.deepcopy(tokenizer))  # later changes to the tokenizer do not reach the encoder
    special_tokens = _special_tokens(calls, HFBatchEncoder(definition, SpecialTokens()))
    hf = HFBatchEncoder(definition, special_tokens)
    if not _agree(calls, hf):
        return HFCallEncoder(copy.deepcopy(tokenizer))
    try:
        fast = FastEncoder(byte_bpe(definition), hf, special_tokens)
    except NotByteBPE as reason:
        logger.info("tokenizing with the tokenizers library: %s", reason)
        return hf
    if not _agree(calls, fast):
        logger.warning("tokenizing with the tokenizers library: fast tokenizing gave other ids for a probe text")
        return hf
    return fast


def _special_tokens(calls: HFCallEncoder, bare: HFBatchEncoder) -> SpecialTokens:
    """The special tokens around one text; ``_agree`` confirms them for others."""
    whole, body = calls.encode_batch(["a"]).ids, bare.encode_batch(["a"]).ids
    first = next((i for i in range(len(whole)) if np.array_equal(whole[i : i + len(body)], body)), 0)
    return SpecialTokens(whole[:first], whole[first + len(body) :])


def _agree(calls: HFCallEncoder, other: FastEncoder | HFBatchEncoder) -> bool:
    pairs = ((calls.encode_batch(PROBES, length), other.encode_batch(PROBES, length)) for length in (None, 7))
    return all(np.array_equal(a.ids, b.ids) and np.array_equal(a.offsets, b.offsets) for a, b in pairs)
