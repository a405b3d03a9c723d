"""Files written past the page cache have the right bytes, also on disks that do not support it."""

import errno
import itertools
import os
from pathlib import Path

import pytest

from tplr.direct_io import BLOCK_BYTES, UncachedWriter


def write(path: Path, pieces: list[bytes]) -> bytes:
    with path.open("wb") as file:
        writer = UncachedWriter(file)
        for piece in pieces:
            writer.write(memoryview(piece))
        writer.finish()
    return path.read_bytes()


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 5])
def test_any_length_in_any_pieces(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    assert write(tmp_path / "whole", [data]) == data
    cuts = [0, size // 3, size // 3, size // 2 + 1, size]
    assert write(tmp_path / "pieces", [data[a:b] for a, b in itertools.pairwise(cuts)]) == data


def test_a_disk_that_refuses_gets_it_the_ordinary_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = os.write, []

    def refuse_direct(descriptor: int, data: memoryview) -> int:
        if not refused:
            refused.append(len(data))
            raise OSError(errno.EINVAL, "no direct writes")
        return real(descriptor, data[: len(data) // 2 + 1])  # and takes a part at a time

    monkeypatch.setattr(os, "write", refuse_direct)
    data = os.urandom(BLOCK_BYTES + 3)
    assert write(tmp_path / "file", [data]) == data
    assert refused == [BLOCK_BYTES]


def test_other_faults_are_told(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as file, pytest.raises(OSError, match="No space left"):
        UncachedWriter(file).write(bytes(BLOCK_BYTES))
