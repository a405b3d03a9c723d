"""Measures loss on held-out pages, in nats per token and in bits per byte, which does not depend on the tokenizer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from tplr.schemas import HeldOutLoss
from tplr.tokenize.byte_bpe import byte_letters
from tplr.training.loss import Precision, token_losses

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

WORD_START = "\u2581"  # a space, in vocabularies of SentencePiece


def held_out_loss(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    batches: np.ndarray,
    *,
    pages: str,
    precision: Precision = "float32",
) -> HeldOutLoss:
    """Measure a model on batches of held-out pages. Blocks.

    ``bits_per_byte = sum(nats) / (ln 2 * bytes)`` over the predictions of text. Predictions of special tokens, which
    have no bytes, are excluded from both sums, but included in ``nats_per_token``.

    Args:
        batches: (batches, B, T) token ids; the first token of each sequence is not predicted.
        pages: digest of the page list.

    Raises:
        ValueError: no batches, or no text in them.
    """
    sizes = token_bytes(tokenizer, int(batches.max()) + 1) if len(batches) else np.zeros(0, np.int64)
    nats = text_nats = 0.0
    tokens = text_bytes = 0
    for batch in batches:
        losses = token_losses(model, batch, precision).double().cpu().numpy()
        predicted = sizes[batch[:, 1:]]
        nats, tokens = nats + float(losses.sum()), tokens + losses.size
        text_nats, text_bytes = text_nats + float(losses[predicted > 0].sum()), text_bytes + int(predicted.sum())
    if not text_bytes:
        raise ValueError("held_out_loss: no text; the pages contain less than one batch")
    return HeldOutLoss(
        pages=pages,
        nats_per_token=nats / tokens,
        bits_per_byte=text_nats / (math.log(2) * text_bytes),
        tokens=tokens,
        bytes=text_bytes,
    )


def token_bytes(tokenizer: PreTrainedTokenizerFast, count: int) -> np.ndarray:
    """Return the number of UTF-8 bytes of each of the first ``count`` token ids: int64 [count]; 0 for special tokens.

    Byte-level vocabularies write each byte as one letter. SentencePiece vocabularies write a space as U+2581, and
    single bytes as ``<0x0A>``.
    """
    special = set(tokenizer.all_special_ids)
    known = min(count, len(tokenizer))
    names = {i: name for i, name in enumerate(tokenizer.convert_ids_to_tokens(list(range(known)))) if i not in special}
    letters = byte_letters()
    byte_level = all(letter in letters for name in names.values() for letter in name)
    sizes = np.zeros(count, np.int64)
    for i, name in names.items():
        if byte_level:
            sizes[i] = len(name)
        elif len(name) == len("<0x0A>") and name.startswith("<0x") and name.endswith(">"):
            sizes[i] = 1
        else:
            sizes[i] = len(name.replace(WORD_START, " ").encode())
    return sizes
