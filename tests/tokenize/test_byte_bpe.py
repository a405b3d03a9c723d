"""Tokenizers that tiktoken can replace: each vocabulary here is one on which the two could differ."""

import json
import random

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tplr.tokenize import encoder


def changed_model(definition: str, change) -> str:
    parts = json.loads(definition)
    change(parts["model"])
    return json.dumps(parts)


def test_merges_that_tiktoken_would_do_otherwise(bpe, assert_equal_ids):
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
