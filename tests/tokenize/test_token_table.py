"""The table under several threads, when it is full and when it is cleared; and its keys."""

import random
import threading

import numpy as np

from tplr.tokenize import encoder, fast, token_table
from tplr.tokenize.pretokenize import GPT2PreTokenizer
from tplr.tokenize.token_table import TokenTable


def test_many_threads_and_a_table_that_overflows(wrapped, monkeypatch, texts):
    monkeypatch.setattr(token_table, "SLOT_BITS", 6)
    monkeypatch.setattr(token_table, "_OTHERS_KEPT", 5)
    monkeypatch.setattr(token_table, "_POOL", 2**12 + 200)
    monkeypatch.setattr(fast, "_GROUP_CHARACTERS", 300)
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


def test_each_pre_token_is_encoded_once():
    asked = []

    def encode_one(pre_token: bytes) -> list[int]:
        asked.append(pre_token)
        return list(pre_token)

    table = TokenTable(encode_one, [b"known"], [999])
    some = ["known words known", "", "x" * 7 + " " + "x" * 8 + " " + "x" * 15 + " " + "x" * 16, "\x00 known words"]
    for _ in range(2):
        rows = table.encode(GPT2PreTokenizer().split(some))
        expected = [text.replace("known", "\uffff", 1) if text.startswith("known") else text for text in some]
        assert [row.tolist() for row in rows.rows()] == [
            [999 if character == "\uffff" else ord(character) for character in text] for text in expected
        ]
    assert len(asked) == len({*asked}) == 7
    assert rows.ids.dtype == np.int32
