"""Keys and metadata that every store accepts."""

import pytest

from tplr.errors import StoreError
from tplr.storage.base import MAX_METADATA_BYTES, check_key, check_metadata


def test_a_key_is_measured_in_bytes() -> None:
    check_key("é" * 512)
    with pytest.raises(StoreError):
        check_key("é" * 512 + "a")


def test_metadata_is_measured_with_its_names() -> None:
    fits = {"a": "x" * (MAX_METADATA_BYTES - 2), "b": ""}
    assert check_metadata(fits) == fits
    with pytest.raises(StoreError, match=str(MAX_METADATA_BYTES)):
        check_metadata({**fits, "b": "x"})


def test_refused_metadata_is_not_quoted() -> None:
    with pytest.raises(StoreError) as caught:
        check_metadata({"a": "secret\n"})
    assert "secret" not in str(caught.value)
