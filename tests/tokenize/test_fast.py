"""The fast encoder compares itself with the library while it runs."""

from tplr.tokenize import encoder, fast


def test_a_difference_is_noticed_and_said_and_the_own_way_taken(wrapped, monkeypatch, caplog):
    tokenizer = wrapped(lambda t: t.add_tokens(["never met either"]))
    encode = encoder(tokenizer)
    bpe = encode._implementation._bpe
    encode.encode_batch(["fox"] * (fast.CHECK_EVERY - encode._implementation._seen % fast.CHECK_EVERY))
    wrong = WrongBPE(bpe)
    monkeypatch.setattr(encode._implementation, "_bpe", wrong)
    ours = encode.encode_batch(["the fox", "it's"])
    assert [row.tolist() for row in ours.rows()] == tokenizer(["the fox", "it's"])["input_ids"]
    assert "the tokenizers library is used from now on" in caplog.text
    wrong.calls = 0
    encode.encode_batch(["the fox"])
    assert wrong.calls == 0


class WrongBPE:
    """Gives ids that are one too high."""

    def __init__(self, bpe) -> None:
        self.bpe, self.calls = bpe, 0

    def accepts(self, text):
        return self.bpe.accepts(text)

    def encode_texts(self, some):
        self.calls += 1
        rows = self.bpe.encode_texts(some)
        return rows._replace(ids=rows.ids + 1)
