"""A bucket is encoded as 128 characters and decoded again; any other text is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tplr.chain.commitment import decode_commitment, encode_commitment
from tplr.schemas import Bucket

ACCOUNT, KEY, SECRET = "a1" * 16, "b2" * 16, "c3" * 32


def bucket(**changes):
    parts = {"name": ACCOUNT, "account_id": ACCOUNT, "access_key_id": KEY, "secret_access_key": SECRET}
    return Bucket(**(parts | changes))


def test_the_layout_is_account_key_secret():
    assert encode_commitment(bucket()) == ACCOUNT + KEY + SECRET
    assert decode_commitment(ACCOUNT + KEY + SECRET) == bucket()


@settings(max_examples=50)
@given(st.binary(min_size=64, max_size=64).map(bytes.hex))
def test_every_text_of_the_alphabet_comes_back(text):
    assert encode_commitment(decode_commitment(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a" * 127,
        "a" * 129,
        "A" * 128,
        "g" * 128,
        "127.0.0.1:80/".ljust(32, "a") + "a" * 96,
        "a" * 127 + "\n",
        "\u0661" * 128,  # a digit, but not ASCII
        "é" * 64,
    ],
)
def test_anything_else_is_refused_without_repeating_it(text):
    with pytest.raises(ValueError, match=r"commitment|bucket") as refused:
        decode_commitment(text)
    assert len(text) < 100 or text[:20] not in str(refused.value)


def test_a_bucket_must_be_named_like_its_account():
    with pytest.raises(ValueError, match="named like its account id") as refused:
        encode_commitment(bucket(name="my-gradients"))
    assert SECRET not in str(refused.value)


def test_a_jurisdiction_has_no_place():
    with pytest.raises(ValueError, match="jurisdiction 'eu'"):
        encode_commitment(bucket(jurisdiction="eu"))
