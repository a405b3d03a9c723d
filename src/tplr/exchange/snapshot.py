"""Snapshots: a folder with a node's state at one window, as shards of tensors and a manifest, which is written last.

A shard is a safetensors file. Its header has one encoding, which follows from the manifest, so no untrusted header is
parsed. A tensor may be split into pieces of rows. This bounds the size of a shard, several processes can write one
snapshot (each its own rows), and a reader reads only the rows that it needs.
"""

import contextlib
import hashlib
import itertools
import json
import math
import shutil
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Literal, Self

import torch
from blake3 import blake3
from pydantic import ConfigDict, FailFast, Field, model_validator

from tplr.direct_io import UncachedWriter
from tplr.errors import FalseModel, PayloadError, StateError
from tplr.files import atomic_write, atomic_writer, sync_folder, write_error
from tplr.schemas import Blake3, Items, Sealed, Sha256, Window, Wire
from tplr.storage.parts import MAX_PARTS, PartHashes, count_parts
from tplr.untrusted import parse_untrusted, printable

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 * 2**20
MAX_SHARD_BYTES = 2**28
COPY_BYTES = 2**24

ElementType = Literal["F32", "BF16", "I64", "U8", "F16", "I32", "BOOL"]
DTYPES: dict[ElementType, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "U8": torch.uint8,
    "F16": torch.float16,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
_NAMES: dict[torch.dtype, ElementType] = {dtype: name for name, dtype in DTYPES.items()}

Count = Annotated[int, Field(ge=0, lt=2**53)]


class Piece(Wire):
    """Rows ``[start, start + rows)`` of a tensor; a scalar is one row."""

    tensor: Annotated[str, Field(min_length=1, max_length=512)]
    start: Count
    rows: Count


class SnapshotShard(Wire):
    """One file of a snapshot, with its pieces concatenated in this order.

    Attributes:
        size: of the file in bytes.
        blake3s: digest of each transfer part (``storage.parts``), for readers: costs a fifth of SHA-256.
        sha256s: digest of each transfer part, for the store that receives it.
    """

    name: Annotated[str, Field(pattern=r"^shard-[0-9]{1,5}-[0-9]{1,5}\.safetensors$")]
    size: Count
    blake3s: Items[Blake3] = Field(max_length=MAX_PARTS)
    sha256s: Items[Sha256] = Field(max_length=MAX_PARTS)
    pieces: Items[Piece]

    @model_validator(mode="after")
    def _has_a_digest_for_each_part(self) -> Self:
        for digests in (self.blake3s, self.sha256s):
            if len(digests) != count_parts(self.size):
                raise ValueError(f"{self.name}: {len(digests)} digests of {count_parts(self.size)} parts")
        return self


class TensorLayout(Wire):
    """Shape and element type of a whole tensor."""

    dtype: ElementType
    shape: Items[Count] = Field(max_length=8)

    @model_validator(mode="after")
    def _has_a_size(self) -> Self:
        # An empty tensor of huge rows has no bytes, but torch can't create it.
        if math.prod(max(1, size) for size in self.shape) >= 2**53:
            raise ValueError(f"a tensor of shape {self.shape}")
        return self

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize

    def empty(self) -> torch.Tensor:
        """Return an uninitialized tensor of this layout."""
        return torch.empty(self.shape, dtype=DTYPES[self.dtype])

    def empty_rows(self, count: int) -> torch.Tensor:
        """Return uninitialized rows of a tensor of this layout; a scalar is one row of one entry."""
        return torch.empty((count, *self.shape[1:]), dtype=DTYPES[self.dtype])

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorLayout":
        """Return the layout of a tensor. Raises StateError for an element type that snapshots do not support."""
        if tensor.dtype not in _NAMES:
            raise StateError(f"a tensor of {tensor.dtype}: snapshots hold {', '.join(map(str, _NAMES))}")
        return cls(dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape))


class SnapshotManifest(Sealed):
    """Contents of a snapshot.

    Attributes:
        window: the next window to apply.
        start_window: first window of the run.
        global_step: number of outer steps applied, the position of every schedule.
        version: of the run's rules, as in object keys.
        values: JSON values by owner.
    """

    kind: ClassVar[str] = "checkpoint"
    max_bytes: ClassVar[int] = MAX_MANIFEST_BYTES

    # ``parse_manifest`` finds unknown keys by comparing encodings: a million errors take seconds and gigabytes.
    model_config = ConfigDict(extra="ignore")

    format: Literal[3] = 3
    window: Window
    start_window: Window
    global_step: Count
    version: Annotated[str, Field(max_length=64)]
    values: dict[str, Any]
    tensors: Annotated[dict[str, TensorLayout], FailFast()] = Field(max_length=100_000)
    shards: Items[SnapshotShard] = Field(max_length=100_000)

    def covers(self, names: Iterable[str]) -> str | None:
        """Return why the pieces do not hold every row of each of ``names`` exactly once, or None if they do."""
        wanted = set(names)
        rows: dict[str, list[tuple[int, int]]] = {name: [] for name in wanted}
        for shard in self.shards:
            for piece in shard.pieces:
                if piece.tensor not in self.tensors:
                    return f"{printable(piece.tensor[:80])}: a piece of an unknown tensor"
                if piece.tensor in wanted:
                    rows[piece.tensor].append((piece.start, piece.rows))
        for name in sorted(wanted):
            reached = 0
            for start, count in sorted(rows[name]):
                if start != reached:
                    return f"{name}: its pieces have a gap or overlap at row {reached}"
                reached += count
            if reached != self.tensors[name].rows:
                return f"{name}: pieces of {reached} rows, the tensor has {self.tensors[name].rows}"
        return None


class ShardWriter:
    """Writes the rows of one of several processes, shard by shard, from the tensors' memory without a copy.

    Raises:
        StateError: the folder can't be created.
    """

    def __init__(self, folder: Path, *, rank: int = 0, max_bytes: int = MAX_SHARD_BYTES) -> None:
        self.shards: list[SnapshotShard] = []
        self.tensors: dict[str, TensorLayout] = {}
        self._folder = folder
        self._rank = rank
        self._max_bytes = max_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(folder, error) from error

    def write(self, tensors: Mapping[str, torch.Tensor], first_rows: Mapping[str, int] | None = None) -> None:
        """Write tensors, or this process's rows of them. Raises StateError for an unknown element type.

        Args:
            first_rows: first row of this process by name, default 0. The process that writes the manifest must then
                supply the shapes of the whole tensors.
        """
        first_rows = first_rows or {}
        self.tensors |= {name: TensorLayout.of(tensor) for name, tensor in tensors.items()}
        batch: list[tuple[Piece, torch.Tensor]] = []
        size = 0
        for name, tensor in tensors.items():
            rows = tensor.detach().reshape(-1) if tensor.dim() == 0 else tensor.detach()
            per_piece = max(1, self._max_bytes // max(1, self.tensors[name].row_bytes))
            for start in range(0, max(1, len(rows)), per_piece):
                part = rows[start : start + per_piece]
                if batch and size + part.nbytes > self._max_bytes:
                    self._write_shard(batch)
                    batch, size = [], 0
                batch.append((Piece(tensor=name, start=first_rows.get(name, 0) + start, rows=len(part)), part))
                size += part.nbytes
        if batch:
            self._write_shard(batch)

    def _write_shard(self, pieces: list[tuple[Piece, torch.Tensor]]) -> None:
        name = f"shard-{self._rank:05d}-{len(self.shards):05d}.safetensors"
        head = shard_head(self.tensors, [piece for piece, _ in pieces])
        size = len(head) + sum(rows.nbytes for _, rows in pieces)
        read, sent = PartHashes(size, blake3), PartHashes(size, hashlib.sha256)
        with atomic_writer(self._folder / name) as file:
            writer = UncachedWriter(file)
            for data in itertools.chain([head], *(_bytes_of(rows) for _, rows in pieces)):
                read.update(data)
                sent.update(data)
                writer.write(data)
            writer.finish()
        digests = {"blake3s": read.hexdigests(), "sha256s": sent.hexdigests()}
        self.shards.append(SnapshotShard(name=name, size=size, pieces=tuple(piece for piece, _ in pieces), **digests))


def write_manifest(folder: Path, manifest: SnapshotManifest) -> None:
    """Write the manifest, which makes the shards in ``folder`` a snapshot. Raises StateError."""
    body = manifest.sealed().model_dump_json().encode()
    if len(body) > MAX_MANIFEST_BYTES:  # no reader would accept the snapshot, and its author may delete older ones
        raise StateError(f"{folder}: a manifest of {len(body)} bytes, a manifest has at most {MAX_MANIFEST_BYTES}")
    atomic_write(folder / MANIFEST, body)


def read_manifest(folder: Path) -> SnapshotManifest:
    """Read the manifest of a folder. Raises FileNotFoundError if there is none, StateError if it is not usable."""
    path = folder / MANIFEST
    try:
        if (size := path.stat().st_size) > MAX_MANIFEST_BYTES:
            raise StateError(f"{path}: {size} bytes, a manifest has at most {MAX_MANIFEST_BYTES}")
        body = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StateError(f"{path}: {error.strerror or error}") from error
    return parse_manifest(body, str(path))


def parse_manifest(body: bytes, name: str) -> SnapshotManifest:
    """Parse a manifest. Raises StateError if the bytes are not a valid one."""
    try:
        manifest = parse_untrusted(body, SnapshotManifest, name)
    except PayloadError as error:
        raise StateError(str(error)) from error
    # A manifest has one encoding, so this finds keys that pydantic ignored as unknown.
    if manifest.seal != manifest.sealed().seal or manifest.model_dump_json().encode() != body:
        raise StateError(f"{name}: its seal does not match, the file is torn or was changed")
    return manifest


def shard_head(tensors: Mapping[str, TensorLayout], pieces: Iterable[Piece]) -> bytes:
    """Return the safetensors header of a shard, preceded by its length."""
    header: dict[str, object] = {}
    start = 0
    for piece in pieces:
        layout = tensors[piece.tensor]
        size = piece.rows * layout.row_bytes
        header[f"{piece.tensor}@{piece.start}"] = {
            "dtype": layout.dtype,
            "shape": [piece.rows, *layout.shape[1:]] if layout.shape else [1],
            "data_offsets": [start, start + size],
        }
        start += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8, as in files of the safetensors library
    return len(text).to_bytes(8, "little") + text


def check_shards(folder: Path, manifest: SnapshotManifest, shards: Iterable[SnapshotShard]) -> None:
    """Raise StateError unless these files are complete and match the manifest."""
    for shard in shards:
        check_head(folder, manifest, shard)
        path = folder / shard.name
        hashes = PartHashes(shard.size, blake3)
        with _reading(path) as file:
            while data := file.read(COPY_BYTES):
                hashes.update(data)
        if hashes.hexdigests() != shard.blake3s:
            raise StateError(f"{path}: checksum mismatch, the file is torn or was changed")


def check_head(folder: Path, manifest: SnapshotManifest, shard: SnapshotShard) -> None:
    """Raise StateError unless a file's size and header match its pieces."""
    path = folder / shard.name
    head = shard_head(manifest.tensors, shard.pieces)
    data_bytes = sum(piece.rows * manifest.tensors[piece.tensor].row_bytes for piece in shard.pieces)
    if shard.size != len(head) + data_bytes:
        raise StateError(f"{path}: size {shard.size}, expected {len(head) + data_bytes} for its pieces")
    with _reading(path) as file:
        if file.read(len(head)) != head:
            raise StateError(f"{path}: its header does not match its pieces")


@dataclass(frozen=True)
class _PiecePlace:
    """A piece, its shard, and its offset in the shard's file, in bytes."""

    piece: Piece
    shard: SnapshotShard
    offset: int

    @property
    def stop(self) -> int:
        """Row after the last one."""
        return self.piece.start + self.piece.rows


class SnapshotReader:
    """Reads rows of tensors from a checked folder; only the requested rows are read."""

    def __init__(self, folder: Path, manifest: SnapshotManifest) -> None:
        self._folder = folder
        self._tensors = manifest.tensors
        self._places: dict[str, list[_PiecePlace]] = {}
        for shard in manifest.shards:
            offset = len(shard_head(manifest.tensors, shard.pieces))
            for piece in shard.pieces:
                self._places.setdefault(piece.tensor, []).append(_PiecePlace(piece, shard, offset))
                offset += piece.rows * manifest.tensors[piece.tensor].row_bytes
        for places in self._places.values():
            places.sort(key=lambda place: place.piece.start)

    @torch.no_grad()
    def read_into(self, name: str, target: torch.Tensor, *, first_row: int = 0) -> None:
        """Copy rows ``[first_row, first_row + len(target))`` of a tensor into ``target``, piece by piece.

        Raises:
            StateError: no such tensor or rows, another shape or element type, or the file can't be read.
        """
        layout = self._tensors.get(name)
        flat = target.reshape(1) if target.dim() == 0 else target
        if layout is None or layout.shape[1:] != tuple(target.shape[1:]) or DTYPES[layout.dtype] != target.dtype:
            raise StateError(f"snapshot: {name} is {layout}, expected {tuple(target.shape)} of {target.dtype}")
        done = 0
        places = self._places.get(name, [])
        # An author may cut a tensor into one piece for each row, so only the pieces with these rows are visited.
        for place in places[bisect_right(places, first_row, key=lambda place: place.stop) :]:
            start, stop = max(place.piece.start, first_row), min(place.stop, first_row + len(flat))
            if start >= stop:
                break
            self._read_rows(place, start, flat[start - first_row : stop - first_row])
            done += stop - start
        if done != len(flat):
            raise StateError(f"snapshot: {name} has {done} of the rows {first_row} to {first_row + len(flat)}")

    @torch.no_grad()
    def check_finite(self) -> None:
        """Raise FalseModel if a floating-point tensor has an infinite or NaN entry; reads all of them."""
        for name, places in self._places.items():
            layout = self._tensors[name]
            if not DTYPES[layout.dtype].is_floating_point:
                continue
            for place in places:
                rows = max(1, COPY_BYTES // max(1, layout.row_bytes))
                for start in range(place.piece.start, place.stop, rows):
                    part = layout.empty_rows(min(rows, place.stop - start))
                    self._read_rows(place, start, part)
                    if not part.isfinite().all():
                        raise FalseModel(f"snapshot of {self._folder}: {name} has entries that are not finite numbers")

    def _read_rows(self, place: _PiecePlace, first_row: int, target: torch.Tensor) -> None:
        """Read the rows of one piece that begin at the tensor's ``first_row``."""
        row_bytes = self._tensors[place.piece.tensor].row_bytes
        with _reading(self._folder / place.shard.name) as file:
            file.seek(place.offset + (first_row - place.piece.start) * row_bytes)
            _read_rows(file, target, row_bytes)


def remove_snapshot(folder: Path) -> None:
    """Remove a snapshot, the manifest first, so that no partial snapshot has one. Raises StateError."""
    try:
        if folder.exists():
            (folder / MANIFEST).unlink(missing_ok=True)
            sync_folder(folder)
            shutil.rmtree(folder)
    except OSError as error:
        raise write_error(folder, error) from error


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise StateError(f"{path}: {error.strerror or error}") from error


def _bytes_of(rows: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in blocks; views of its memory if it is on a CPU."""
    for start in range(0, len(rows), step := max(1, COPY_BYTES // max(1, rows[:1].nbytes))):
        yield rows[start : start + step].contiguous().cpu().view(torch.uint8).reshape(-1).numpy().data


def _read_rows(file: BinaryIO, target: torch.Tensor, row_bytes: int) -> None:
    step = max(1, COPY_BYTES // max(1, row_bytes))
    for start in range(0, len(target), step):
        part = target[start : start + step]
        data = file.read(part.nbytes)
        if len(data) != part.nbytes:
            raise OSError("the file ends before its last tensor")
        if data:
            part.copy_(torch.frombuffer(bytearray(data), dtype=part.dtype).view(part.shape))
