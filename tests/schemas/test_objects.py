"""Records refuse invalid values, and never show a secret."""

import pytest

from tplr.schemas import Bucket, Reason, UploadBounds

GOOD = {
    "name": "a" * 32,
    "account_id": "a" * 32,
    "access_key_id": "b" * 32,
    "secret_access_key": "c" * 64,
}


def test_bucket_shows_no_half_of_its_credential() -> None:
    text = repr(Bucket(**GOOD))
    assert "a" * 32 in text
    assert "b" * 32 not in text
    assert "c" * 64 not in text


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("account_id", "127.0.0.1:15098/aaaaaaaaaaaaaaaa"),
        ("account_id", "A" * 32),
        ("account_id", "a" * 31),
        ("account_id", "a" * 32 + "\n"),
        ("name", "host#" + "a" * 20),
        ("name", ".."),
        ("access_key_id", "g" * 32),
        ("secret_access_key", "c" * 63),
        ("jurisdiction", "evil.com"),
    ],
)
def test_bucket_refuses_foreign_alphabets_and_lengths(part: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"bucket {part}: expected") as caught:
        Bucket(**{**GOOD, part: value})
    if part == "secret_access_key":
        assert value not in str(caught.value)


def test_bounds_refuse_only_what_is_certainly_outside() -> None:
    bounds = UploadBounds(start=100.4, end=110.4)
    verdicts = {stamp: bounds.judge(stamp) for stamp in (99.0, 100.0, 110.0, 111.0)}
    assert verdicts == {99.0: Reason.TOO_EARLY, 100.0: None, 110.0: None, 111.0: Reason.TOO_LATE}
    exact = UploadBounds(start=100.4, end=110.4, resolution=0.001)
    assert exact.judge(100.399) is Reason.TOO_EARLY
    assert exact.judge(100.4) is None
    assert exact.judge(110.4) is None
    assert exact.judge(110.401) is Reason.TOO_LATE
