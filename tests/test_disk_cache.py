"""The checked disk cache: damaged entries are not returned, its size is bounded, the least recently used go first."""

import errno
import os
import threading
from pathlib import Path

import pytest

from tplr import disk_cache
from tplr.disk_cache import DiskCache
from tplr.seeds import hash_parts

KEYS = [hash_parts("key", i) for i in range(40)]


def content(i: int, size: int = 400) -> bytes:
    return bytes([i]) * size


def cached(folder: Path, max_bytes: int = 1 << 20) -> DiskCache:
    return DiskCache(folder, max_bytes=max_bytes)


def test_a_folder_is_shared_and_outlives_the_cache(tmp_path):
    cached(tmp_path).write(KEYS[0], content(0))
    cached(tmp_path).write(KEYS[1], b"")
    other = cached(tmp_path)
    assert other.read(KEYS[0]) == content(0)
    assert other.read(KEYS[1]) == b""
    assert other.read(KEYS[2]) is None
    other.write(KEYS[0], b"newer")
    assert cached(tmp_path).read(KEYS[0]) == b"newer"


def test_ranges(tmp_path):
    cached(tmp_path).write(KEYS[0], bytes(range(100)))
    cache = cached(tmp_path)
    for start, stop in ((0, 0), (3, 5), (90, 100), (0, 100)):  # the first read checks the file
        assert cache.read(KEYS[0], start, stop) == bytes(range(start, stop))
    assert cached(tmp_path).read(KEYS[0], 3, 5) == bytes(range(3, 5))


@pytest.mark.parametrize(
    "damage",
    [lambda d: d[:-4], lambda d: d[:-1] + bytes([d[-1] ^ 1]), lambda d: b"", lambda d: d[:7], lambda d: d[32:]],
)
@pytest.mark.parametrize("stop", [None, 5])
def test_a_damaged_file_is_removed(tmp_path, damage, stop, caplog):
    cached(tmp_path).write(KEYS[0], content(0))
    file = cached(tmp_path).path(KEYS[0])
    file.write_bytes(damage(file.read_bytes()))
    assert cached(tmp_path).read(KEYS[0], 0, stop) is None
    assert "is damaged" in caplog.text
    assert not file.exists()


def test_a_whole_read_is_checked_every_time(tmp_path):
    cache = cached(tmp_path)
    cache.write(KEYS[0], content(0))
    cache.path(KEYS[0]).write_bytes(b"other")
    assert cache.read(KEYS[0]) is None


def test_a_file_that_was_cut_off_later_is_removed(tmp_path, caplog):
    cache = cached(tmp_path)
    cache.write(KEYS[0], content(0))
    assert cache.read(KEYS[0], 0, 200) == content(0, 200)
    os.truncate(cache.path(KEYS[0]), 150)
    assert cache.read(KEYS[0], 50, 200) is None
    assert "is damaged" in caplog.text
    assert not cache.path(KEYS[0]).exists()


def test_the_file_of_another_key_is_not_taken(tmp_path):
    cache = cached(tmp_path)
    cache.write(KEYS[0], content(0))
    cache.write(KEYS[1], content(1))
    cache.path(KEYS[1]).write_bytes(cache.path(KEYS[0]).read_bytes())
    assert cached(tmp_path).read(KEYS[1]) is None


def test_the_least_recently_used_go_first(tmp_path):
    cache = cached(tmp_path, max_bytes=4000)
    for i in range(30):
        cache.write(KEYS[i], content(i))
        if cache.path(KEYS[i]).exists():
            os.utime(cache.path(KEYS[i]), (i, i))
        if cache.read(KEYS[0], 0, 400):
            os.utime(cache.path(KEYS[0]), (i + 0.5, i + 0.5))
    held = [i for i in range(30) if cache.read(KEYS[i], 3, 5) == content(i)[3:5]]
    assert 0 in held
    assert held[-1] == 29
    assert 8 <= len(held) <= 10
    assert held[1:] == [*range(held[1], 30)]


def test_files_of_other_formats_and_old_drafts_are_trimmed_too(tmp_path):
    cache = cached(tmp_path, max_bytes=4000)
    old, draft, fresh = (cache.path(KEYS[0]).with_suffix(suffix) for suffix in (".tokens", ".old.tmp", ".new.tmp"))
    old.parent.mkdir(parents=True)
    for file in (old, draft, fresh):
        file.write_bytes(bytes(5000))
    for file in (old, draft):
        os.utime(file, (1, 1))
    cache.write(KEYS[1], content(1))
    assert [file.exists() for file in (old, draft, fresh)] == [False, False, True]
    assert cache.read(KEYS[1]) == content(1)


def test_a_disk_that_takes_nothing_costs_only_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache = cached(tmp_path / "file")
    cache.write(KEYS[0], content(0))
    assert "not cached" in caplog.text
    assert cache.read(KEYS[0]) is None


def test_threads_share_one(tmp_path):
    cache = cached(tmp_path, max_bytes=8000)
    wrong = []

    def work(start: int) -> None:
        for i in range(40):
            n = (start + i) % len(KEYS)
            found = cache.read(KEYS[n])
            if found is None:
                cache.write(KEYS[n], content(n))
            elif found != content(n):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(i * 10,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(file.stat().st_size - 32 for file in tmp_path.glob("*/*.bin")) <= 8000 + 4 * 400


def test_a_file_that_is_removed_while_it_is_read_is_read(tmp_path, monkeypatch):
    cache = cached(tmp_path)
    cache.write(KEYS[0], content(0))
    digest = disk_cache._digest

    def removed(key: str, found: bytes) -> bytes:
        cache.path(KEYS[0]).unlink()
        return digest(key, found)

    monkeypatch.setattr(disk_cache, "_digest", removed)
    assert cache.read(KEYS[0]) == content(0)
    assert cache.read(KEYS[0]) is None


def test_a_folder_that_can_only_be_read_is_used(tmp_path, monkeypatch, caplog):
    """Files of another account, or on a file system that is mounted read-only: their times can't be set."""
    cached(tmp_path).write(KEYS[0], content(0))

    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refused)
    cache = cached(tmp_path)
    assert cache.read(KEYS[0]) == content(0)
    assert cache.read(KEYS[0], 3, 5) == content(0)[3:5]
    assert not caplog.messages


def test_what_can_not_be_removed_costs_only_room(tmp_path):
    cache = cached(tmp_path, max_bytes=40_000)
    strange = (cache.path(KEYS[0]), cache.path(KEYS[1]).with_suffix(".old.tmp"))
    for path in strange:
        (path / "inside").mkdir(parents=True)
        os.utime(path, (1, 1))
    for i in range(2, 30):
        cache.write(KEYS[i], content(i, 4000))
    assert all(path.exists() for path in strange)
    assert cache.read(KEYS[29]) == content(29, 4000)
    assert cache.read(KEYS[2]) is None
