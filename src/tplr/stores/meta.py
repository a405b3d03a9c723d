"""``meta.json``, which describes a shard of a store. The rich form is written; the bare form can be read as well.

::

    {"sequence": {"shape": [7], "dtype": "int32", "offsets": [0, 3, 7]},     bare: shape and dtype, perhaps offsets
     "responses": {..., "offsets": [0, 2, 5, 9, 11], "groups": [0, 2, 4]},    two records with two lists each
     "_store": {"format": "bin", "version": 1, "total_tokens": 7, "records": 2, "block_bytes": 1048576,
                "files": [{"path": "sequence.bin", "bytes": 28, "sha256": "…", "blocks": ["…"]}]}}

``offsets`` holds the start of each list of numbers, then the total. A record is one list; with ``groups``, which is
cumulative in the same way, it is several. ``blocks`` are the SHA-256 of each ``block_bytes`` of the file, so that a
part of it can be checked as well.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tplr.errors import DataError
from tplr.stores.detect import META, StoreFormat

VERSION = 1
RESERVED = "_store"
BLOCK_BYTES = 2**20

# Types of both NumPy and torch.
DTYPES = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "float16", "float32", "float64")

_Count = Annotated[int, Field(ge=0)]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class KeyMeta(_Strict):
    """One key of a shard.

    Attributes:
        shape: of the whole array in C order; its elements are read as one row.
    """

    shape: list[_Count]
    dtype: str
    offsets: list[_Count] | None = None
    groups: list[_Count] | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @model_validator(mode="after")
    def _check(self) -> "KeyMeta":
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        last = self.elements
        for name, values in (("offsets", self.offsets), ("groups", self.groups)):
            if name == "groups" and values is not None:
                if self.offsets is None:
                    raise ValueError("groups without offsets")
                last = len(self.offsets) - 1
            if values is not None:
                _check_cumulative(name, values, last)
        return self

    @property
    def records(self) -> int | None:
        """Number of records; None if the shard has no record positions."""
        cuts = self.groups or self.offsets
        return None if cuts is None else len(cuts) - 1


class FileMeta(_Strict):
    """One file of a shard; ``path`` is relative to the folder of ``meta.json``."""

    path: str
    bytes: _Count
    sha256: _Sha256
    blocks: list[_Sha256]


class ShardMeta(_Strict):
    """The rich form's description of the whole shard."""

    format: StoreFormat
    version: Literal[1]
    total_tokens: _Count
    records: _Count
    block_bytes: Annotated[int, Field(gt=0)]
    files: list[FileMeta]

    @model_validator(mode="after")
    def _check(self) -> "ShardMeta":
        for file in self.files:
            if len(file.blocks) != -(-file.bytes // self.block_bytes):
                raise ValueError(
                    f"file {file.path}: {len(file.blocks)} blocks of {self.block_bytes} bytes do not fit {file.bytes}"
                )
            if Path(file.path).name != file.path:
                raise ValueError(f"file {file.path!r} is not a plain file name")
        return self


class Meta(BaseModel):
    """A ``meta.json``; ``shard`` is None in the bare form."""

    model_config = ConfigDict(frozen=True)

    keys: dict[str, KeyMeta]
    shard: ShardMeta | None

    def to_json(self) -> bytes:
        """The file's bytes; equal values give equal bytes."""
        value: dict[str, Any] = {name: key.model_dump(exclude_none=True) for name, key in self.keys.items()}
        if self.shard:
            value[RESERVED] = self.shard.model_dump()
        return json.dumps(value, separators=(",", ":")).encode()


def read_meta(folder: Path) -> Meta:
    """The ``meta.json`` in ``folder``. Raises DataError as ``parse_meta``, FileNotFoundError."""
    return parse_meta((folder / META).read_bytes(), str(folder / META))


def parse_meta(data: bytes, where: str) -> Meta:
    """Read and check a ``meta.json`` of either form.

    Raises:
        DataError: it is malformed; names ``where`` and the first problem.
    """
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({len(data)} bytes; cut off?): {error}") from error
    if not isinstance(raw, dict):
        raise DataError(f"{where}: expected an object of keys, got {type(raw).__name__}")
    shard = raw.pop(RESERVED, None)
    try:
        meta = Meta.model_validate({"keys": raw, "shard": shard})
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(f"{where}: {'.'.join(map(str, first['loc'][1:]))}: {first['msg']}") from error
    records = {key.records for key in meta.keys.values()} - {None}
    if len(records) > 1:
        raise DataError(f"{where}: its keys have different numbers of records: {_by_key(meta.keys)}")
    return meta


def check_size(where: object, size: int, key: KeyMeta) -> None:
    """Raise DataError if the elements of ``key`` do not take ``size`` bytes."""
    expected = key.elements * np.dtype(key.dtype).itemsize
    if size != expected:
        cut = "it was truncated" if size < expected else "the dtype or shape differs"
        raise DataError(
            f"{where} has {size} bytes; {key.elements} elements of {key.dtype} take {expected}: {cut}; "
            "fetch or prepare it again"
        )


def _check_cumulative(name: str, values: list[int], last: int) -> None:
    if not values or values[0] != 0 or values[-1] != last or (np.diff(values) < 0).any():
        raise ValueError(f"{name} must ascend from 0 to {last}")


def _by_key(keys: Mapping[str, KeyMeta]) -> str:
    return ", ".join(f"{name} {key.records}" for name, key in keys.items())
