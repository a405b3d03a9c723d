"""Byte-level BPE tokenizers trained on a little text, and texts on which tokenizers may differ."""

import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tplr.tokenize import encoder

TEXT = (
    "The quick brown fox's jumps, it's 12345 o'clock; we'll see:  def f(x_1):\n    return {'a': x**2}\n\n"
    "Größe ﬁne Привет, мир! 你好，世界。 안녕 नमस्ते 👩‍👩‍👧 naïve café — “quoted” … 1,000.50 € \t\r\n"
)

# Edges of pre-tokens: contractions, spaces of all kinds, scripts, numbers, marks, special tokens and halves of them,
# long runs.
ATOMS = [
    *("'s", "'S", "'re", "'ll", "'ve", "'m", "'d", "'t", "'", "''", "’s", "ſ", "K", "ß", "ﬁ", "İ"),
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\x85", "\x0b", "\x1c", "\u180e", "\u200b"),
    *("a", "fox", "The", "é", "e\u0301", "中", "Привет", "नमस्ते", "1", "12345", "½", "Ⅷ", "१", "👩‍👩‍👧", "🇩🇪"),
    *("<eos>", "<e", "eos>", "<", ".", "...", "_", "-" * 20, "x" * 20, "0" * 17, "\x00", "\xff", "\ufffd"),
    *("\U0010fffe", "\U0010ffff", "\ufeff"),
    *("\x00" * 8, "\x00" * 15, "\x00" * 16, "y" * 7, "y" * 8, "y" * 15),  # about as long as a table's keys
]  # fmt: skip


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
    """Makes the tokenizer of ``transformers`` from a changed copy of ``bpe``."""

    def wrap(change=lambda tokenizer: None, **options) -> PreTrainedTokenizerFast:
        copy = Tokenizer.from_str(bpe.to_str())
        change(copy)
        return PreTrainedTokenizerFast(tokenizer_object=copy, eos_token="<eos>", **options)

    return wrap


@pytest.fixture(scope="session")
def texts():
    """Makes texts: ``texts(seed, count)``."""

    def make(seed: int, count: int) -> list[str]:
        rng = random.Random(seed)
        made = ["", " ", "<eos>", "x" * 3000, " " * 3000 + "x", "a b " * 500]
        for _ in range(count):
            made.append("".join(rng.choices(ATOMS, k=rng.randrange(12))))
            made.append("".join(rng.choices("ab'  \n.1sretl", k=rng.randrange(40))))
            points = (rng.randrange(rng.choice([0x80, 0x3000, 0x110000])) for _ in range(rng.randrange(12)))
            made.append("".join(chr(point) for point in points if not 0xD800 <= point < 0xE000))
        return made

    return make


@pytest.fixture(scope="session")
def assert_equal_ids():
    """Compares the encoder's ids with those of the tokenizer's own calls."""

    def check(tokenizer, some: list[str]) -> None:
        for length, one_core in ((None, False), (3, False), (40, False), (40, True)):
            own = tokenizer(some, truncation=length is not None, max_length=length)["input_ids"]
            ours = encoder(tokenizer).encode_batch(some, length, one_core=one_core)
            assert len(ours.offsets) == len(some) + 1
            for text, a, b in zip(some, ours.rows(), own, strict=True):
                assert a.tolist() == b, (text, length)

    return check
