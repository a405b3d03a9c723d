"""The token cache: its entries, their lifetime, and no damaged entry returned."""

import threading

import numpy as np
import pytest

from tplr.pages.token_cache import TokenCache
from tplr.seeds import hash_parts

KEYS = [hash_parts("page", i) for i in range(40)]


def tokens(seed: int, size: int = 100) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**31, size).astype(np.int32)


def test_memory_keeps_what_was_asked_for_last():
    cache = TokenCache(memory_bytes=1200)
    for i in range(3):
        cache.put(KEYS[i], tokens(i))
    assert cache.get(KEYS[0]) is not None
    cache.put(KEYS[3], tokens(3))
    assert [cache.get(key) is not None for key in KEYS[:4]] == [True, False, True, True]
    assert np.array_equal(cache.get(KEYS[3]), tokens(3))
    with pytest.raises(ValueError, match="read-only"):
        cache.get(KEYS[3])[0] = 1
    assert TokenCache(memory_bytes=0).get(KEYS[0]) is None


def test_a_folder_is_shared_and_outlives_the_cache(tmp_path):
    TokenCache(folder=tmp_path).put(KEYS[0], tokens(0))
    TokenCache(folder=tmp_path).put(KEYS[1], tokens(1, size=0))
    other = TokenCache(folder=tmp_path)
    assert np.array_equal(other.get(KEYS[0]), tokens(0))
    assert other.get(KEYS[1]).shape == (0,)
    assert other.get(KEYS[2]) is None


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-4], lambda d: d[:-1] + bytes([d[-1] ^ 1]), lambda d: b"", lambda d: d[:7]]
)
def test_a_damaged_file_is_removed(tmp_path, damage, caplog):
    TokenCache(folder=tmp_path).put(KEYS[0], tokens(0))
    (file,) = tmp_path.glob("*/*")
    file.write_bytes(damage(file.read_bytes()))
    assert TokenCache(folder=tmp_path).get(KEYS[0]) is None
    assert "is damaged" in caplog.text
    assert not file.exists()


def test_files_are_bounded_and_the_oldest_go_first(tmp_path):
    cache = TokenCache(memory_bytes=0, folder=tmp_path, disk_bytes=8000)
    for i, key in enumerate(KEYS):
        cache.put(key, tokens(i))
    there = [cache.get(key) is not None for key in KEYS]
    assert sum(file.stat().st_size for file in tmp_path.glob("*/*")) <= 8000 + 8000 // 16
    assert there == sorted(there)
    assert any(there)


def test_a_disk_that_takes_nothing_costs_only_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache = TokenCache(folder=tmp_path / "file")
    cache.put(KEYS[0], tokens(0))
    assert np.array_equal(cache.get(KEYS[0]), tokens(0))
    assert "not cached" in caplog.text


def test_threads_share_one(tmp_path):
    cache = TokenCache(memory_bytes=4000, folder=tmp_path)
    wrong = []

    def work(start: int) -> None:
        for i in range(40):
            n = (start + i) % len(KEYS)
            found = cache.get(KEYS[n])
            if found is None:
                cache.put(KEYS[n], tokens(n))
            elif not np.array_equal(found, tokens(n)):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(i * 10,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cache._bytes == sum(kept.nbytes for kept in cache._kept.values()) <= 4000
