"""A dataset's manifest, parsed and checked.

Two objects make the manifest: ``_metadata.yaml`` names the configs, ``_shard_sizes.json`` their shards::

    configs: [{config_name: CC-MAIN-2013-20}, ...]                     # _metadata.yaml
    address: exact                                                     # ours; group-average without it

    {"CC-MAIN-2013-20": {"split": "train", "total_rows": 9,            # _shard_sizes.json
                         "shards": [{"path": "bucket/folder/CC-MAIN-2013-20/0.parquet", "num_rows": 9,
                                     "byte_size": 4321, "sha256": "...", "row_group_size": 4}, ...]}, ...}

``byte_size``, ``sha256`` and ``row_group_size`` are optional. The order of the shards is part of the protocol, because
it determines the rows of a page. So nodes compare manifests by ``DatasetManifest.sha256``.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError

from tplr.errors import DataError

METADATA = "_metadata.yaml"
SHARD_SIZES = "_shard_sizes.json"
TEXT_COLUMN = "text"

AddressRule = Literal["group-average", "exact"]

_Count = Annotated[int, Field(ge=0, strict=True)]


@dataclass(frozen=True)
class ParquetShard:
    """One parquet file. ``parse_manifest`` checks the bounds of its fields.

    Attributes:
        path: key of the file, relative to the dataset's subfolder.
        byte_size: size of the file, or None if the manifest lacks it.
        sha256: hex SHA-256 of the file's bytes, or None.
        row_group_size: number of rows of every row group except the last, which has the rest; or None.
    """

    path: str
    num_rows: _Count
    byte_size: _Count | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    row_group_size: Annotated[int, Field(ge=1, strict=True)] | None = None

    def disagreement(self, group_sizes: Sequence[int]) -> str | None:
        """Return how a file with row groups of these sizes differs from the manifest; None if it does not."""
        if sum(group_sizes) != self.num_rows:
            return f"{sum(group_sizes)} rows, the manifest says {self.num_rows}"
        most = self.row_group_size
        if most is not None and [*group_sizes] != [min(most, self.num_rows - i) for i in range(0, self.num_rows, most)]:
            return (
                f"row groups of {_in_short(group_sizes)} rows, the manifest says {most} each and the rest in the last"
            )
        return None


@dataclass(frozen=True)
class DatasetConfig:
    """A named part of the dataset; its rows are those of its shards, one after another."""

    name: str
    split: str
    num_rows: int
    shards: tuple[ParquetShard, ...]


@dataclass(frozen=True)
class DatasetManifest:
    """All configs by name, in the manifest's order.

    Attributes:
        address: rule by which a page's row number selects rows (see ``page_draw.group_rows``).
        sha256: of the two manifest objects: hex SHA-256 of the SHA-256 of ``_metadata.yaml``, then that of
            ``_shard_sizes.json``.
    """

    configs: Mapping[str, DatasetConfig]
    address: AddressRule
    sha256: str


class _ConfigEntry(BaseModel):
    config_name: str


class _Metadata(BaseModel):
    configs: list[_ConfigEntry]
    address: AddressRule = "group-average"


class _Sizes(BaseModel):
    split: str = "train"
    total_rows: _Count
    shards: list[ParquetShard]


def parse_manifest(metadata: bytes, shard_sizes: bytes, subfolder: str) -> DatasetManifest:
    """Parse and check the two manifest objects.

    The config ``default`` and configs without shard sizes are left out, as in the documented system. Shard paths may
    begin with a bucket's name and ``subfolder``; both are removed, because replicas have other buckets.

    Raises:
        DataError: an object is malformed, or contradicts itself; the message says where.
    """
    described = _validated(METADATA, _Metadata, _parsed_yaml(metadata))
    sizes = _parsed_json(shard_sizes)
    configs = {}
    for name in (entry.config_name for entry in described.configs):
        if name != "default" and name in sizes:
            configs[name] = _config(name, _validated(f"{SHARD_SIZES}: {name}", _Sizes, sizes[name]), subfolder)
    digests = hashlib.sha256(metadata).digest() + hashlib.sha256(shard_sizes).digest()
    return DatasetManifest(MappingProxyType(configs), described.address, hashlib.sha256(digests).hexdigest())


def _config(name: str, sizes: _Sizes, subfolder: str) -> DatasetConfig:
    shards = tuple(replace(shard, path=_inner_path(shard.path, subfolder)) for shard in sizes.shards)
    total = sum(shard.num_rows for shard in shards)
    if total != sizes.total_rows:
        raise DataError(f"{SHARD_SIZES}: {name}: total_rows is {sizes.total_rows}, but the shards add up to {total}")
    paths = [shard.path for shard in shards]
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise DataError(f"{SHARD_SIZES}: {name}: shard {twice} is listed twice, so its rows would count twice")
    return DatasetConfig(name, sizes.split, total, shards)


def _in_short(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes[:5])) + (", …" if len(sizes) > 5 else "")


def _inner_path(path: str, subfolder: str) -> str:
    _, found, inner = f"/{path}".partition(f"/{subfolder}/")
    inner = inner if found else path
    if not inner or inner.startswith("/") or ".." in inner.split("/"):
        raise DataError(f"{SHARD_SIZES}: shard path {path!r} is not a path inside {subfolder}/")
    return inner


def _parsed_yaml(text: bytes) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{METADATA} is not YAML ({len(text)} bytes): {error}") from error


def _parsed_json(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{SHARD_SIZES} is not JSON ({len(text)} bytes; cut off?): {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{SHARD_SIZES}: expected an object of configs, got {type(value).__name__}")
    return value


def _validated(where: str, model: type[BaseModel], value: object) -> Any:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
