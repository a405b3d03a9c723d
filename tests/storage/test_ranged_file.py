"""A file over ranges: each read requests only its bytes."""

import io

import pytest

from tplr.storage.ranged_file import RangedFile

DATA = bytes(range(100))


def opened() -> tuple[RangedFile, list[tuple[int, int]]]:
    asked = []

    def fetch(start: int, stop: int) -> bytes:
        asked.append((start, stop))
        return DATA[start:stop]

    return RangedFile(len(DATA), fetch), asked


def test_reads_are_ranges_within_the_file():
    file, asked = opened()
    assert (file.readable(), file.seekable()) == (True, True)
    assert file.read(3) == DATA[:3]
    assert file.seek(10) == 10
    assert file.read(5) == DATA[10:15]
    assert file.seek(-4, io.SEEK_END) == 96
    assert file.read(50) == DATA[96:]
    assert file.read(5) == file.read() == b""
    file.seek(-60, io.SEEK_CUR)
    assert file.readall() == DATA[40:]
    assert file.tell() == 100
    assert asked == [(0, 3), (10, 15), (96, 100), (40, 100)]


def test_a_buffered_reader_may_wrap_it():
    file, asked = opened()
    reader = io.BufferedReader(file, 64)
    assert reader.read(2) + reader.read(2) == DATA[:4]
    assert asked == [(0, 64)]


def test_a_failed_read_moves_nothing():
    def fetch(start: int, stop: int) -> bytes:
        raise OSError("gone")

    file = RangedFile(10, fetch)
    with pytest.raises(OSError, match="gone"):
        file.read(4)
    assert file.tell() == 0
