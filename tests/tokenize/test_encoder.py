"""Ids equal those of the tokenizer for any tokenizer and text; and the choice of engine for each tokenizer."""

import random

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tplr.tokenize import encoder, hf_batch
from tplr.tokenize.byte_bpe import PATTERNS
from tplr.tokenize.special_tokens import SpecialTokens


def use(**parts):
    def change(tokenizer):
        for name, part in parts.items():
            setattr(tokenizer, name, part)

    return change


def split(pattern: str):
    by_pattern = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([by_pattern, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def more_tokens(tokenizer) -> None:
    tokenizer.add_tokens(["fox jumps", "o'clock"])
    tokenizer.add_special_tokens(["<pad>", "[X]"])


BOTH_ENDS = TemplateProcessing(single="<eos> <eos> $A <eos>", special_tokens=[("<eos>", 0)])
FAST = {
    "plain": use(),
    "prefix space": use(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "special tokens": use(post_processor=BOTH_ENDS),
    "added tokens": more_tokens,
    **{f"pattern {i}": use(pre_tokenizer=split(pattern)) for i, pattern in enumerate(sorted(PATTERNS))},
}
OWN = {
    "normalizer": use(normalizer=normalizers.NFC()),
    "another pattern": use(pre_tokenizer=split(r"\w+|\W+")),
    "no pattern": use(pre_tokenizer=pre_tokenizers.ByteLevel(use_regex=False)),
    "digits": use(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])),
}


@pytest.mark.parametrize("kind", [*FAST, *OWN])
def test_ids_are_the_tokenizers_own(wrapped, kind, texts, assert_equal_ids):
    tokenizer = wrapped((FAST | OWN)[kind])
    assert encoder(tokenizer).fast == (kind in FAST)
    assert_equal_ids(tokenizer, texts(seed=len(kind), count=120))


def test_other_models(bpe, texts, assert_equal_ids):
    vocab = {token: i for i, token in enumerate(["<eos>", "<unk>", "fox", "the", "##s"])}
    words = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    left = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", truncation_side="left")
    for tokenizer in (PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>"), left):
        assert not encoder(tokenizer).fast
        assert_equal_ids(tokenizer, texts(seed=1, count=20))


class Letters:
    """A tokenizer that is not from a library."""

    eos_token_id = 0

    def __init__(self, first: int = 1) -> None:
        self.first = first

    def __call__(self, text, *, truncation=False, max_length=None, padding=False):
        assert isinstance(text, str)
        assert truncation == (max_length is not None)
        return {"input_ids": [self.first + ord(letter) % 100 for letter in text][:max_length]}


def test_any_callable():
    rows = encoder(Letters()).encode_batch(["abc", "", "abcdef"], 4)
    assert [row.tolist() for row in rows.rows()] == [[98, 99, 100], [], [98, 99, 100, 1]]
    assert not encoder(Letters()).fast
    assert encoder(Letters()).fingerprint == encoder(Letters()).fingerprint
    assert encoder(Letters(2)).fingerprint != encoder(Letters()).fingerprint
    assert encoder(Letters(2)).encode_batch(["a"]).ids.tolist() == [99]  # they share no encoder


@pytest.mark.parametrize("ids", [[3.7], [True], [2**31], [-1], np.array([2**40]), [[1, 2]], ["a"], 5], ids=str)
def test_a_callable_must_give_ids(ids):
    with pytest.raises(ValueError, match=r"the tokenizer gives .* for the text '': expected a row of integers below"):
        encoder(lambda text, **_: {"input_ids": ids})
    assert encoder(lambda text, **_: {"input_ids": []}).encode_batch(["a"]).ids.tolist() == []


WORDS = {token: i for i, token in enumerate(["<eos>", "<unk>", "fox", "the", "lazy", "##s"])}


def words(tokenizer) -> None:
    tokenizer.model = models.WordPiece(WORDS, unk_token="<unk>")
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()


def taking(**how):
    return lambda tokenizer: tokenizer.add_tokens([AddedToken("lazy", **how), AddedToken("<m>", **how)])


@pytest.mark.parametrize(
    ("change", "cut"),
    [
        (FAST["plain"], True),
        (FAST["pattern 2"], True),
        (words, True),
        (use(normalizer=normalizers.NFKC()), True),
        (use(normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])), True),
        (use(normalizer=normalizers.BertNormalizer()), True),
        (use(normalizer=normalizers.Replace(Regex("x .*"), "y")), False),
        (OWN["no pattern"], False),
        (more_tokens, False),
        (taking(rstrip=True), False),
        (taking(lstrip=True), False),
        (lambda tokenizer: tokenizer.add_tokens([AddedToken("<m>", lstrip=True, rstrip=True)]), True),
    ],
)
def test_of_long_texts_the_beginning_is_enough_where_the_end_can_not_change_it(
    wrapped, change, cut, monkeypatch, assert_equal_ids
):
    tokenizer = wrapped(change)
    seen = []
    encode_texts = hf_batch.HFBatchEncoder.encode_texts
    monkeypatch.setattr(
        hf_batch.HFBatchEncoder,
        "encode_texts",
        lambda self, some, **how: seen.extend(some) or encode_texts(self, some, **how),
    )
    rng = random.Random(5)
    atoms = ["the", "fox", "jumps", "lazy", "<m>", "s", "é", "e\u0301", "12", "x", "O", "it's"]
    long = [" ".join(rng.choices(atoms, k=200)) for _ in range(60)] + ["the fox jumps over a lazy " * 30, "a" * 900]
    assert_equal_ids(tokenizer, long)
    implementation = encoder(tokenizer)._implementation
    assert getattr(implementation, "_hf", implementation).can_truncate == cut
    seen.clear()
    hf_batch.HFBatchEncoder(tokenizer.backend_tokenizer.to_str(), SpecialTokens()).encode_batch(long, 40)
    assert (sum(map(len, seen)) < sum(map(len, long)) / 2) == cut


def test_a_tokenizer_with_a_mind_of_its_own_is_called_itself(wrapped, bpe, assert_equal_ids):
    class Lower(PreTrainedTokenizerFast):
        def __call__(self, text, **options):
            return super().__call__([row.lower() for row in text], **options)

    tokenizer = Lower(tokenizer_object=bpe, eos_token="<eos>")
    assert not encoder(tokenizer).fast
    assert_equal_ids(tokenizer, ["The FOX", "", "it's"])


def test_texts_that_are_none_fail_alike(wrapped):
    with pytest.raises(TypeError):
        encoder(wrapped()).encode_batch(["fine", "\ud800"])


def test_equal_tokenizers_share_an_encoder_and_changed_ones_do_not(wrapped, assert_equal_ids):
    tokenizer = wrapped()
    first = encoder(tokenizer)
    tokenizer(["text"], truncation=True, max_length=2)
    assert encoder(tokenizer) is encoder(wrapped()) is first
    tokenizer.add_tokens(["fox"])
    assert encoder(tokenizer).fingerprint != first.fingerprint
    assert_equal_ids(tokenizer, ["the fox", "foxes"])


def test_a_change_of_a_tokenizer_does_not_reach_its_encoder(bpe):
    def left():
        return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", truncation_side="left")

    tokenizer = left()
    first = encoder(tokenizer)
    before = first.encode_batch(["the fox jumps"], 2).ids.tolist()
    tokenizer.add_tokens(["fox jumps"])
    tokenizer.truncation_side = "right"
    assert encoder(left()) is first
    assert first.encode_batch(["the fox jumps"], 2).ids.tolist() == before == left()("the fox jumps")["input_ids"][-2:]


def test_a_long_text_is_not_tokenized_to_its_end(wrapped, monkeypatch):
    tokenizer = wrapped()
    encode = encoder(tokenizer)
    seen = []
    monkeypatch.setattr(encode._implementation, "_seen", 1)  # no text is checked
    monkeypatch.setattr(encode._implementation, "_bpe", SeenBPE(encode._implementation._bpe, seen))
    some = ["the quick fox " * 1000, "a " * 5000, "x" * 9000]
    ours = encode.encode_batch(some, 100)
    assert [row.tolist() for row in ours.rows()] == tokenizer(some, truncation=True, max_length=100)["input_ids"]
    assert max(len(text) for text in seen if "fox" in text) < 620


class SeenBPE:
    def __init__(self, bpe, seen) -> None:
        self.bpe, self.seen = bpe, seen

    def accepts(self, text):
        return self.bpe.accepts(text)

    def encode_texts(self, some):
        self.seen += some
        return self.bpe.encode_texts(some)


def test_no_texts(wrapped):
    empty = encoder(wrapped()).encode_batch([])
    assert (empty.ids.tolist(), empty.offsets.tolist()) == ([], [0])
    assert empty.ids.dtype == np.int32
