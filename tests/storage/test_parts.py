"""Cutting objects into parts: R2's rules at every size, and S3's ETag."""

import hashlib

import pytest

from tplr.storage.parts import MAX_PARTS, MIB, cut, multipart_etag, part_bytes

TIB = 2**40


@pytest.mark.parametrize(
    "size", [1, 16 * MIB, 16 * MIB + 1, 100 * MIB - 7, 16 * MIB * MAX_PARTS, 16 * MIB * MAX_PARTS + 1, 5 * TIB]
)
def test_the_parts_are_what_r2_takes(size: int) -> None:
    parts = cut(size)
    lengths = [part.stop - part.start for part in parts]
    assert sum(lengths) == size
    assert [part.number for part in parts] == list(range(1, len(parts) + 1))
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert set(lengths[:-1]) <= {part_bytes(size)}
    assert 0 < lengths[-1] <= part_bytes(size) < 5 * 1024 * MIB - 5 * MIB
    assert len(parts) <= MAX_PARTS
    assert part_bytes(size) % MIB == 0


def test_nothing_has_no_parts() -> None:
    assert cut(0) == []


def test_the_etag_is_the_md5_of_the_md5s() -> None:
    md5s = [hashlib.md5(data) for data in (b"one", b"two")]
    joined = hashlib.md5(md5s[0].digest() + md5s[1].digest()).hexdigest()
    assert multipart_etag([md5.hexdigest() for md5 in md5s]) == f"{joined}-2"
