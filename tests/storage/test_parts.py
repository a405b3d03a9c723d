"""Objects are cut into parts: R2's rules at every size, and S3's ETag."""

import hashlib

import pytest

from tplr.storage import parts as rule
from tplr.storage.parts import MAX_PARTS, MIB, PartHashes, count_parts, cut, multipart_etag, part_bytes

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
    assert len(parts) == count_parts(size) <= MAX_PARTS
    assert part_bytes(size) % MIB == 0


def test_nothing_has_no_parts() -> None:
    assert cut(0) == []
    assert count_parts(0) == 0


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 5432])
@pytest.mark.parametrize("piece", [1, 300, 1000, 2500, 10_000])
def test_each_part_is_hashed_alone(monkeypatch: pytest.MonkeyPatch, size: int, piece: int) -> None:
    monkeypatch.setattr(rule, "MIN_PART_BYTES", 1000)
    monkeypatch.setattr(rule, "MIB", 1000)
    body = bytes(i % 251 for i in range(size))
    hashes = PartHashes(size, hashlib.sha256)
    for start in range(0, size, piece):
        hashes.update(body[start : start + piece])
    assert hashes.hexdigests() == tuple(hashlib.sha256(body[one.start : one.stop]).hexdigest() for one in cut(size))


def test_the_etag_is_the_md5_of_the_md5s() -> None:
    md5s = [hashlib.md5(data) for data in (b"one", b"two")]
    joined = hashlib.md5(md5s[0].digest() + md5s[1].digest()).hexdigest()
    assert multipart_etag([md5.hexdigest() for md5 in md5s]) == f"{joined}-2"
