"""Byte-level BPE tokenizers trained on a little text."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = (
    "The quick brown fox's jumps, it's 12345 o'clock; we'll see:  def f(x_1):\n    return {'a': x**2}\n\n"
    "Größe ﬁne Привет, мир! 你好，世界。 안녕 नमस्ते 👩‍👩‍👧 naïve café — “quoted” … 1,000.50 € \t\r\n"
)


@pytest.fixture(scope="session")
def bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT, "'".join(TEXT.split()), *TEXT.split()] * 3, trainer)
    return tokenizer


@pytest.fixture
def wrapped(bpe):
    """Makes the tokenizer of ``transformers`` from a copy of ``bpe`` that was changed."""

    def wrap(change=lambda tokenizer: None, **options) -> PreTrainedTokenizerFast:
        copy = Tokenizer.from_str(bpe.to_str())
        change(copy)
        return PreTrainedTokenizerFast(tokenizer_object=copy, eos_token="<eos>", **options)

    return wrap
