"""Page arithmetic against numpy and vectors of documented networks; addresses against brute force."""

import hashlib
import os
import subprocess
import sys
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tplr.errors import DataError
from tplr.pages.manifest import DatasetConfig, DatasetManifest, ParquetShard
from tplr.pages.page_draw import group_rows, next_pages, pages_digest, shard_rows, stream_seed
from tplr.schemas import PageRef


def configs(**rows: int) -> list[DatasetConfig]:
    return [DatasetConfig(name, "train", count, (ParquetShard(f"{name}/0", count),)) for name, count in rows.items()]


def manifest(address: str, *shard_sizes: int) -> DatasetManifest:
    shards = tuple(ParquetShard(f"shard-{i}", size) for i, size in enumerate(shard_sizes))
    return DatasetManifest({"c": DatasetConfig("c", "train", sum(shard_sizes), shards)}, address, "")


TWO = configs(config2=5000, config1=5000)


@pytest.mark.parametrize(
    ("offset", "n_pages", "seed", "expected"),
    [
        (0, 2, 42, [("config1", 3791), ("config2", 2150)]),
        (1000, 2, 42, [("config2", 304), ("config1", 2245)]),
        (1000, 2, 43, [("config1", 531), ("config1", 3581)]),
        (0, 3, 0, [("config2", 3120), ("config2", 1321), ("config1", 200)]),
    ],
)
def test_vectors_of_documented_networks(offset, n_pages, seed, expected):
    pages = next_pages(TWO, offset=offset, n_pages=n_pages, seed=seed)
    assert [(page.config, page.row) for page in pages] == expected
    assert {page.split for page in pages} == {"train"}


def documented(
    sizes: dict[str, int], offset: int, n_pages: int, seed: int, rows_per_page: int
) -> list[tuple[str, int]]:
    """The documented rule, written with numpy and CPython."""
    generator = np.random.default_rng(hash(seed) & 0xFFFFFFFF)
    generator.bit_generator.advance(offset)
    pages = []
    for _ in range(n_pages):
        name = str(generator.choice(sorted(sizes)))
        pages.append((name, int(generator.integers(0, sizes[name] - 1 - rows_per_page))))
    return pages


@settings(max_examples=150)
@given(
    sizes=st.dictionaries(
        st.sampled_from("abcdefg"), st.sampled_from([102, 103, 5000, 2**31 + 102, 2**33]), min_size=1
    ),
    offset=st.integers(0, 2**70),
    seed=st.integers(-(2**70), 2**70) | st.sampled_from([-1, -2, 0, 2**61 - 1, 2**61 - 2, 2**32, 1 - 2**61]),
)
def test_draws_equal_numpys(sizes, offset, seed):
    pages = next_pages(configs(**sizes), offset=offset, n_pages=6, seed=seed)
    assert [(page.config, page.row) for page in pages] == documented(sizes, offset, 6, seed, 100)


def test_no_seed_depends_on_the_process():
    code = (
        "from tplr.pages.page_draw import *; from tplr.pages.manifest import *\n"
        "cs = [DatasetConfig(n, 'train', 5000, ()) for n in ('config1', 'config2')]\n"
        "print([next_pages(cs, offset=7, n_pages=3, seed=s) for s in ('5Grw', 'ß', 42, -1)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1", "random")
    }
    assert len(outputs) == 1
    here = [next_pages(TWO, offset=7, n_pages=3, seed=seed) for seed in ("5Grw", "ß", 42, -1)]
    assert outputs == {f"{here}\n"}


def test_text_seeds_follow_the_written_rule():
    assert stream_seed("window") == int.from_bytes(hashlib.sha256(b"window").digest()[:4], "big")


@pytest.mark.parametrize("rows", [0, 100, 101])
def test_a_config_without_a_whole_page_is_named(rows):
    with pytest.raises(DataError, match=f"'small' has {rows} rows.*at least 102"):
        next_pages(configs(small=rows, large=5000), offset=0, n_pages=1, seed=0)
    assert next_pages(configs(small=102), offset=0, n_pages=2, seed=9) == (PageRef("small", 0, "train"),) * 2


def test_no_configs_at_all():
    with pytest.raises(DataError, match="no config"):
        next_pages([], offset=0, n_pages=1, seed=0)


def test_digest_tells_page_lists_and_datasets_apart():
    pages, dataset = [PageRef("a", 12, "train"), PageRef("b", 3, "train")], "f" * 64
    text = f"64:{dataset}1:a2:125:train1:b1:35:train"
    assert pages_digest(pages, dataset) == hashlib.sha256(text.encode()).hexdigest()
    assert pages_digest(pages, dataset) != pages_digest(pages[::-1], dataset)
    assert pages_digest(pages, dataset) != pages_digest(pages, "e" * 64)
    assert pages_digest([PageRef("a1", 2, "x")], dataset) != pages_digest([PageRef("a", 12, "x")], dataset)


# Group sizes of each shard; zero-row groups and shards occur in real manifests.
SHARDS = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=5), min_size=1, max_size=5)


@settings(max_examples=300)
@given(shards=SHARDS, row=st.integers(-3, 40), rows_per_page=st.integers(1, 9))
def test_exact_pages_are_the_rows_they_name(shards, row, rows_per_page):
    whole = manifest("exact", *map(sum, shards))
    rows = [(s, g, i) for s, shard in enumerate(shards) for g, size in enumerate(shard) for i in range(size)]
    page = PageRef("c", row, "train")
    if row < 0 or row + rows_per_page > len(rows):
        with pytest.raises(DataError, match="Could not find shard"):
            shard_rows(whole, page, rows_per_page)
        return
    found = [
        (int(part.shard.path[6:]), group.group, i)
        for part in shard_rows(whole, page, rows_per_page)
        for group in group_rows(part, shards[int(part.shard.path[6:])], "exact")
        for i in range(group.start, group.stop)
    ]
    assert found == rows[row : row + rows_per_page]


@settings(max_examples=300)
@given(shards=SHARDS, row=st.integers(-3, 40), rows_per_page=st.integers(1, 9))
def test_group_average_is_the_documented_rule(shards, row, rows_per_page):
    sizes = [*map(sum, shards)]
    whole, page = manifest("group-average", *sizes), PageRef("c", row, "train")
    index = next((i for i, end in enumerate(accumulate(sizes)) if 0 <= row < end), None)
    if index is None:
        with pytest.raises(DataError, match=f"Could not find shard for page {row}"):
            shard_rows(whole, page, rows_per_page)
        return
    (part,) = shard_rows(whole, page, rows_per_page)
    assert part.shard.path == f"shard-{index}"
    groups, offset = shards[index], row - sum(sizes[:index])
    average = sizes[index] // len(groups)
    if average == 0:
        with pytest.raises(DataError, match="address: exact"):
            group_rows(part, groups, "group-average")
        return
    group = min(offset // average, len(groups) - 1)
    start = min(offset % average, max(0, groups[group] - rows_per_page))
    assert group_rows(part, groups, "group-average") == ((group, start, min(start + rows_per_page, groups[group])),)


@pytest.mark.parametrize(("row", "group", "start"), [(900, 1, 67), (2499, 2, 0), (0, 0, 0), (832, 0, 832)])
def test_group_average_on_a_ragged_shard(row, group, start):
    """1000/1000/500 rows count as 833 a group: row 900 of the shard means row 1067."""
    (part,) = shard_rows(manifest("group-average", 2500), PageRef("c", row, "train"))
    assert group_rows(part, [1000, 1000, 500], "group-average")[0][:2] == (
        group,
        min(start, [1000, 1000, 500][group] - 100),
    )


def test_an_unknown_config_is_named():
    with pytest.raises(DataError, match="no config 'x'"):
        shard_rows(manifest("exact", 500), PageRef("x", 0, "train"))
