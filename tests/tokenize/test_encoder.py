"""Ids equal the tokenizer's own, whatever the tokenizer and whatever the text; and who goes which way."""

import json
import random
import threading

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tplr.tokenize import encoder, fast
from tplr.tokenize import hf_batch as own
from tplr.tokenize.byte_bpe import PATTERNS

# Where pieces begin and end: contractions, spaces of all kinds, scripts, numbers, marks, special tokens and halves of
# them, long runs.
ATOMS = [
    *("'s", "'S", "'re", "'ll", "'ve", "'m", "'d", "'t", "'", "''", "’s", "ſ", "K", "ß", "ﬁ", "İ"),
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\x85", "\x0b", "\x1c", "\u180e", "\u200b"),
    *("a", "fox", "The", "é", "e\u0301", "中", "Привет", "नमस्ते", "1", "12345", "½", "Ⅷ", "१", "👩‍👩‍👧", "🇩🇪"),
    *("<eos>", "<e", "eos>", "<", ".", "...", "_", "-" * 20, "x" * 20, "0" * 17, "\x00", "\xff", "\ufffd"),
    *("\U0010fffe", "\U0010ffff", "\ufeff"),
    *("\x00" * 8, "\x00" * 15, "\x00" * 16, "y" * 7, "y" * 8, "y" * 15),  # about as long as a table's keys
]  # fmt: skip


def texts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    made = ["", " ", "<eos>", "x" * 3000, " " * 3000 + "x", "a b " * 500]
    for _ in range(count):
        made.append("".join(rng.choices(ATOMS, k=rng.randrange(12))))
        made.append("".join(rng.choices("ab'  \n.1sretl", k=rng.randrange(40))))
        points = (rng.randrange(rng.choice([0x80, 0x3000, 0x110000])) for _ in range(rng.randrange(12)))
        made.append("".join(chr(point) for point in points if not 0xD800 <= point < 0xE000))
    return made


def assert_equal_ids(tokenizer, some: list[str]) -> None:
    for length, one_core in ((None, False), (3, False), (40, False), (40, True)):
        own = tokenizer(some, truncation=length is not None, max_length=length)["input_ids"]
        ours = encoder(tokenizer).encode_batch(some, length, one_core=one_core)
        assert len(ours.offsets) == len(some) + 1
        for text, a, b in zip(some, ours.rows(), own, strict=True):
            assert a.tolist() == b, (text, length)


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
def test_ids_are_the_tokenizers_own(wrapped, kind):
    tokenizer = wrapped((FAST | OWN)[kind])
    assert encoder(tokenizer).fast == (kind in FAST)
    assert_equal_ids(tokenizer, texts(seed=len(kind), count=120))


def test_other_models(bpe):
    vocab = {token: i for i, token in enumerate(["<eos>", "<unk>", "fox", "the", "##s"])}
    words = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    left = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", truncation_side="left")
    for tokenizer in (PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>"), left):
        assert not encoder(tokenizer).fast
        assert_equal_ids(tokenizer, texts(seed=1, count=20))


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
def test_of_long_texts_the_beginning_is_enough_where_the_end_can_not_change_it(wrapped, change, cut, monkeypatch):
    tokenizer = wrapped(change)
    seen = []
    bodies = own.OwnBatches.bodies
    monkeypatch.setattr(
        own.OwnBatches, "bodies", lambda self, some, **how: seen.extend(some) or bodies(self, some, **how)
    )
    rng = random.Random(5)
    atoms = ["the", "fox", "jumps", "lazy", "<m>", "s", "é", "e\u0301", "12", "x", "O", "it's"]
    long = [" ".join(rng.choices(atoms, k=200)) for _ in range(60)] + ["the fox jumps over a lazy " * 30, "a" * 900]
    assert_equal_ids(tokenizer, long)
    way = encoder(tokenizer)._batches
    assert getattr(way, "_own", way).may_be_cut == cut
    seen.clear()
    own.OwnBatches(tokenizer.backend_tokenizer.to_str()).encode_batch(long, 40)
    assert (sum(map(len, seen)) < sum(map(len, long)) / 2) == cut


def test_a_tokenizer_with_a_mind_of_its_own_is_called_itself(wrapped, bpe):
    class Lower(PreTrainedTokenizerFast):
        def __call__(self, text, **options):
            return super().__call__([row.lower() for row in text], **options)

    tokenizer = Lower(tokenizer_object=bpe, eos_token="<eos>")
    assert not encoder(tokenizer).fast
    assert_equal_ids(tokenizer, ["The FOX", "", "it's"])


def test_texts_that_are_none_fail_alike(wrapped):
    with pytest.raises(TypeError):
        encoder(wrapped()).encode_batch(["fine", "\ud800"])


def test_equal_tokenizers_share_an_encoder_and_changed_ones_do_not(wrapped):
    tokenizer = wrapped()
    first = encoder(tokenizer)
    tokenizer(["text"], truncation=True, max_length=2)
    assert encoder(tokenizer) is encoder(wrapped()) is first
    tokenizer.add_tokens(["fox"])
    assert encoder(tokenizer).fingerprint != first.fingerprint
    assert_equal_ids(tokenizer, ["the fox", "foxes"])


def test_many_threads_and_a_table_that_overflows(wrapped, monkeypatch):
    from tplr.tokenize import token_table as words

    monkeypatch.setattr(words, "SLOT_BITS", 6)
    monkeypatch.setattr(words, "_OTHERS_KEPT", 5)
    monkeypatch.setattr(words, "_POOL", 2**12 + 200)
    monkeypatch.setattr(fast, "_AT_ONCE", 300)
    tokenizer = wrapped(lambda t: t.add_tokens(["never met"]))  # a new encoder
    some = [text for text in texts(seed=3, count=60) if len(text) < 200]
    some += ["x" * 100 + str(i) for i in range(30)]
    own = tokenizer(some)["input_ids"]
    wrong = []

    def work(seed: int) -> None:
        order = random.Random(seed).sample(range(len(some)), len(some))
        rows = encoder(tokenizer).encode_batch([some[i] for i in order])
        wrong.extend(i for i, row in zip(order, rows.rows(), strict=True) if row.tolist() != own[i])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_difference_is_noticed_and_said_and_the_own_way_taken(wrapped, monkeypatch, caplog):
    tokenizer = wrapped(lambda t: t.add_tokens(["never met either"]))
    encode = encoder(tokenizer)
    way = encode._batches._way
    encode.encode_batch(["fox"] * (fast.CHECK_EVERY - encode._batches._seen % fast.CHECK_EVERY))
    wrong = Rows(way)
    monkeypatch.setattr(encode._batches, "_way", wrong)
    ours = encode.encode_batch(["the fox", "it's"])
    assert [row.tolist() for row in ours.rows()] == tokenizer(["the fox", "it's"])["input_ids"]
    assert "from here on the tokenizer's own way" in caplog.text
    wrong.calls = 0
    encode.encode_batch(["the fox"])
    assert wrong.calls == 0


class Rows:
    """A way whose ids are one too high."""

    def __init__(self, way) -> None:
        self.way, self.calls = way, 0

    def takes(self, text):
        return self.way.takes(text)

    def rows(self, some):
        self.calls += 1
        rows = self.way.rows(some)
        return rows._replace(ids=rows.ids + 1)


def test_a_long_text_is_not_tokenized_to_its_end(wrapped, monkeypatch):
    tokenizer = wrapped()
    encode = encoder(tokenizer)
    seen = []
    monkeypatch.setattr(encode._batches, "_seen", 1)  # none is checked
    monkeypatch.setattr(encode._batches, "_way", Seen(encode._batches._way, seen))
    some = ["the quick fox " * 1000, "a " * 5000, "x" * 9000]
    ours = encode.encode_batch(some, 100)
    assert [row.tolist() for row in ours.rows()] == tokenizer(some, truncation=True, max_length=100)["input_ids"]
    assert max(len(text) for text in seen if "fox" in text) < 620


class Seen:
    def __init__(self, way, seen) -> None:
        self.way, self.seen = way, seen

    def takes(self, text):
        return self.way.takes(text)

    def rows(self, some):
        self.seen += some
        return self.way.rows(some)


def changed_model(definition: str, change) -> str:
    parts = json.loads(definition)
    change(parts["model"])
    return json.dumps(parts)


def test_merges_that_tiktoken_would_do_otherwise(bpe):
    """Each vocabulary is one on which ids by tiktoken's rule would differ."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    cases = {
        # abc by a|bc only, but ab comes first: tiktoken would merge ab|c.
        "unreachable": (["ab", "bc", "abc"], [("a", "b"), ("b", "c"), ("a", "bc")], False, True),
        # A whole piece may be abc, but no merge makes it, and ab|c is no merge.
        "looked up": (["ab", "bc", "abc"], [("a", "b"), ("b", "c"), ("a", "bc")], True, False),
        "out of order": (["abc", "ab"], [("ab", "c"), ("a", "b")], False, False),
        "two ways": (["aa", "aaa"], [("a", "a"), ("a", "aa"), ("aa", "a")], False, True),
        "lacks merges": (["ab", "xyzabc"], [("a", "b")], True, True),
    }
    for name, (tokens, merges, whole, is_fast) in cases.items():
        vocab = {token: i for i, token in enumerate(["<eos>", *letters, *tokens])}
        tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=whole))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        wrapper = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
        assert encoder(wrapper).fast == is_fast, name
        rng = random.Random(0)
        assert_equal_ids(
            wrapper, ["".join(rng.choices("abcxyz ", k=12)) for _ in range(200)] + ["abc", "xyzabc", "aaaa"]
        )


def test_a_bpe_without_all_bytes_or_with_dropout_goes_its_own_way(bpe):
    def lacks_a_byte(model):
        del model["vocab"]["~"]
        model["merges"] = [pair for pair in model["merges"] if "~" not in "".join(pair)]

    for change in (lacks_a_byte, lambda model: model.update(dropout=0.1)):
        tokenizer = Tokenizer.from_str(changed_model(bpe.to_str(), change))
        assert not encoder(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")).fast


def test_no_texts(wrapped):
    empty = encoder(wrapped()).encode_batch([])
    assert (empty.ids.tolist(), empty.offsets.tolist()) == ([], [0])
    assert empty.ids.dtype == np.int32
