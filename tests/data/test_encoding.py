"""Documents: each row alone, cut, ended once."""

import threading

from tplr.data.encoding import encode_rows


def test_each_row_is_cut_and_ended_once(tokenizer):
    eos = tokenizer.eos_token_id
    documents = encode_rows(tokenizer, ["abcdef", "", "ab", "ab<eos>", "<eos>", "a<eos>b"], 4)
    ids = {letter: tokenizer.convert_tokens_to_ids(letter) for letter in "abcd"}
    a, b, c, d = (ids[letter] for letter in "abcd")
    # The third row and the fourth end alike; the empty one is left out; a cut row gets its EOS beyond the limit.
    assert [document.tolist() for document in documents] == [
        [a, b, c, d, eos],
        [a, b, eos],
        [a, b, eos],
        [eos],
        [a, eos, b, eos],
    ]
    assert encode_rows(tokenizer, [], 4) == []


def test_threads_with_different_lengths_do_not_meet(tokenizer):
    wrong = []

    def encode(length: int) -> None:
        for _ in range(20):
            documents = encode_rows(tokenizer, ["x" * 300] * 20, length)
            wrong.extend(document for document in documents if len(document) != length + 1)

    threads = [threading.Thread(target=encode, args=(length,)) for length in (5, 50, 250)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
