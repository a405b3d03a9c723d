"""Pre-tokens equal those of the tokenizers library with GPT-2's pattern."""

from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from tplr.tokenize.byte_bpe import GPT2_PATTERN
from tplr.tokenize.pretokenize import GPT2PreTokenizer


def test_pre_tokens_are_those_of_the_pattern(texts):
    library, ours = Split(Regex(GPT2_PATTERN), "isolated"), GPT2PreTokenizer()
    some = texts(7, 400)
    for part in (some, [text for text in some if text.isascii()]):
        found = ours.split(part)
        pre_tokens = [found.data[start:end] for start, end in zip(found.starts, found.ends, strict=True)]
        expected = [piece.encode() for text in part for piece, _ in [*library.pre_tokenize_str(text), ("", None)]]
        assert [one.removesuffix(b"\xff") for one in pre_tokens] == expected
        assert [pre_tokens[i] for i in found.separators] == [b"\xff"] * len(part)


def test_a_lone_surrogate_is_not_accepted():
    assert GPT2PreTokenizer().accepts("fine \u00e9")
    assert not GPT2PreTokenizer().accepts("\ud800")
