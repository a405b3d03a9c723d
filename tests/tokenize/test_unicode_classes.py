"""Characters on which the two regular expression engines disagree are found."""

from tplr.tokenize.byte_bpe import GPT2_PATTERN
from tplr.tokenize.unicode_classes import UnicodeClasses


def test_a_character_is_compared_with_each_class_of_the_pattern():
    classes = UnicodeClasses(GPT2_PATTERN)
    assert classes.agree_on("")
    assert classes.agree_on("The quick fox, 12 ½ Größe Привет 你好 \u00a0\u3000")
    assert not classes.agree_on("\ud800")


def test_a_difference_is_found_and_remembered(monkeypatch):
    classes = UnicodeClasses(r"\p{L}")
    [(tiktokens, _)] = classes._classes
    monkeypatch.setattr(classes, "_classes", [(tiktokens, UnicodeClasses(r"\p{N}")._classes[0][1])])
    assert not classes.agree_on("ab")
    monkeypatch.setattr(classes, "_classes", [])
    assert not classes.agree_on("b")
    assert classes.agree_on("c")
