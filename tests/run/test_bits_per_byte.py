"""Bits per byte against an explicit sum, and bytes of tokens against the decoded texts."""

import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tplr.hparams import HParams
from tplr.localnet.plan import scheme_constants
from tplr.run.bits_per_byte import held_out_loss, token_bytes
from tplr.training.model import build_model

TEXTS = ["def größe(x):\n    return x", "日本語のテキスト", "a   b\tc", "naïve café 👩‍👩‍👧‍👦"]


@pytest.fixture(scope="module")
def byte_level():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=300, special_tokens=["<e>"], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<e>")


@pytest.fixture(scope="module")
def sentence_piece():
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁a", "b", "c", "é"]
    vocab = {"<e>": 0} | {piece: 1 + i for i, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    spaces = decoders.Metaspace(prepend_scheme="never")
    made.decoder = decoders.Sequence([decoders.ByteFallback(), spaces, decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<e>")


def test_the_tokens_of_a_text_have_the_texts_bytes(byte_level, sentence_piece):
    sizes = token_bytes(byte_level, 310)
    assert (len(sizes), sizes[0], sizes[300:].sum()) == (310, 0, 0)
    for text in TEXTS:
        assert sizes[byte_level(text)["input_ids"]].sum() == len(text.encode())
    sizes = token_bytes(sentence_piece, len(sentence_piece))
    for text in ["b c", "é日 b\n", " c"]:
        assert sizes[sentence_piece(text)["input_ids"]].sum() == len(text.encode())


def test_bits_per_byte_are_the_nats_of_text_over_its_bytes(byte_level):
    raw = HParams.model_validate(scheme_constants("demo"))
    model = raw.model.model_copy(update={"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1})
    network = build_model(raw.model_copy(update={"model": model}))
    batches = np.random.default_rng(1).integers(0, 300, (3, 2, 16))
    batches[0, 0, 5] = 0  # the end of a text
    found = held_out_loss(network, byte_level, batches, pages="ab" * 32)
    ids = torch.from_numpy(batches.reshape(6, 16))
    with torch.no_grad():
        logits = network(ids).logits[:, :-1].double()
    nats = -torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0].numpy()
    sizes = token_bytes(byte_level, 300)[ids[:, 1:].numpy()]
    assert found.tokens == nats.size == 90
    assert found.bytes == sizes.sum()
    assert found.nats_per_token == pytest.approx(nats.mean(), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(nats[sizes > 0].sum() / sizes.sum() / math.log(2), rel=1e-5)


def test_no_batches_are_an_error(byte_level):
    with pytest.raises(ValueError, match="no text"):
        held_out_loss(None, byte_level, np.zeros((0, 2, 8), np.int64), pages="ab" * 32)  # type: ignore[arg-type]
