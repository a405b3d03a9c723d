"""Draws pages from a seed, and maps a page to rows of parquet shards.

A page is ``rows_per_page`` rows of one config of a parquet dataset. The seed, the offset and the manifest determine the
pages, so a validator can read the pages that a miner must have trained on.
"""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from tplr.errors import DataError
from tplr.pages.manifest import AddressRule, DatasetConfig, DatasetManifest, ParquetShard
from tplr.pcg64 import PCG64Stream
from tplr.schemas import PageRef
from tplr.seeds import hash_parts

ROWS_PER_PAGE = 100


def next_pages(
    configs: Iterable[DatasetConfig],
    *,
    offset: int,
    n_pages: int,
    seed: int | str,
    rows_per_page: int = ROWS_PER_PAGE,
) -> tuple[PageRef, ...]:
    """Draw ``n_pages`` pages by ``seed``, from word ``offset`` of its random stream on.

    For each page a config is drawn, with equal probability for each config, then the first row, from
    ``[0, num_rows - 1 - rows_per_page)``; with replacement. A draw may take more than one word, so lists with different
    offsets may overlap without being slices of each other.

    Raises:
        DataError: there is no config, or one of them is too short for a page.
    """
    by_name = sorted(configs, key=lambda config: config.name)
    if not by_name:
        raise DataError("the dataset's manifest lists no config to draw pages from")
    for config in by_name:
        if config.num_rows <= rows_per_page + 1:
            raise DataError(
                f"config {config.name!r} has {config.num_rows} rows; pages of {rows_per_page} rows need at least "
                f"{rows_per_page + 2}"
            )
    draw = PCG64Stream(stream_seed(seed)).advance(offset)
    pages = []
    for _ in range(n_pages):
        config = draw.choice(by_name)
        row = draw.integers(0, config.num_rows - 1 - rows_per_page)
        pages.append(PageRef(config=config.name, row=row, split=config.split))
    return tuple(pages)


def stream_seed(seed: int | str) -> int:
    """Return the 32-bit seed of a random stream.

    For an integer, the low bits of CPython's ``hash`` of it (the documented rule); for a text, the first 4 bytes,
    big-endian, of its SHA-256.
    """
    if isinstance(seed, str):
        return int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big")
    # CPython hashes integers modulo the Mersenne prime 2**61 - 1, keeps the sign, and has no hash -1.
    hashed = abs(seed) % (2**61 - 1)
    if seed < 0:
        hashed = -2 if hashed == 1 else -hashed
    return hashed & 0xFFFFFFFF


def pages_digest(pages: Iterable[PageRef], manifest_sha256: str) -> str:
    """Return ``seeds.hash_parts`` of ``DatasetManifest.sha256``, then config, row and split of each page in order.
    Different versions of a dataset give different digests."""
    return hash_parts(manifest_sha256, *(part for page in pages for part in page))


class ShardRows(NamedTuple):
    """Rows ``[start, stop)`` of a shard."""

    shard: ParquetShard
    start: int
    stop: int


class GroupRows(NamedTuple):
    """Rows ``[start, stop)`` of row group ``group`` of a shard."""

    group: int
    start: int
    stop: int


def shard_rows(manifest: DatasetManifest, page: PageRef, rows_per_page: int = ROWS_PER_PAGE) -> tuple[ShardRows, ...]:
    """Return a page's rows by shard: one shard, or several if a page of an ``exact`` dataset crosses a shard's end.

    Under ``group-average`` ``stop`` may be beyond the shard's end; ``group_rows`` then shifts the page back.

    Raises:
        DataError: the manifest does not have the page's config or rows.
    """
    config = manifest.configs.get(page.config)
    if config is None:
        raise DataError(f"page {page.config}:{page.row}: the manifest has no config {page.config!r}")
    parts = []
    first = 0
    for shard in config.shards:
        start, stop = max(page.row - first, 0), page.row + rows_per_page - first
        if page.row >= 0 and start < shard.num_rows and stop > 0:
            if manifest.address == "group-average":
                return (ShardRows(shard, start, stop),)
            parts.append(ShardRows(shard, start, min(stop, shard.num_rows)))
        first += shard.num_rows
    if not parts or (manifest.address == "exact" and page.row + rows_per_page > first):
        raise DataError(
            f"Could not find shard for page {page.row}: config {page.config!r} has {first} rows, "
            f"a page has {rows_per_page}"
        )
    return tuple(parts)


def group_rows(rows: ShardRows, group_sizes: Sequence[int], address: AddressRule) -> tuple[GroupRows, ...]:
    """Return the rows of each row group that ``rows`` selects, given the number of rows of each group.

    ``exact`` selects exactly these rows. ``group-average``, the rule of documented networks, assumes that all groups
    have equal length: in a shard with a shorter last group it selects other rows, but the same ones on every node. Its
    pages never cross a group's end; they are shifted back there.

    Raises:
        DataError: ``group-average``, and the shard has fewer rows than groups.
    """
    if address == "group-average":
        average = sum(group_sizes) // len(group_sizes)
        if not average:
            raise DataError(
                f"{rows.shard.path}: {sum(group_sizes)} rows in {len(group_sizes)} row groups can't be addressed by "
                f"group-average; write the shard with fewer groups, or set address: exact in _metadata.yaml"
            )
        group = min(rows.start // average, len(group_sizes) - 1)
        length = rows.stop - rows.start
        start = min(rows.start % average, max(0, group_sizes[group] - length))
        return (GroupRows(group, start, min(start + length, group_sizes[group])),)
    ends = list(accumulate(group_sizes))
    return tuple(
        GroupRows(group, max(rows.start - (end - size), 0), min(rows.stop - (end - size), size))
        for group, (end, size) in enumerate(zip(ends, group_sizes, strict=True))
        if rows.start < end and rows.stop > end - size and size
    )
