"""A node's saved state: snapshots of the last windows on disk, each complete or absent; no pickle.

Loading a state folder of unknown origin can give a wrong state, but it executes nothing.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import FailFast

from tplr.errors import StateError
from tplr.exchange.snapshot import (
    MANIFEST,
    ShardWriter,
    SnapshotManifest,
    SnapshotReader,
    SnapshotShard,
    TensorLayout,
    check_shards,
    read_manifest,
    remove_snapshot,
    write_manifest,
)
from tplr.logging import logger
from tplr.schemas import Items, Wire
from tplr.training.parallel import SINGLE_PROCESS, ParallelContext, local_rows, together

GENERATIONS = 2
_NAME = re.compile(r"window-(\d{1,15})")


class _Written(Wire):
    """What one rank has written into a snapshot."""

    tensors: Annotated[dict[str, TensorLayout], FailFast()]
    shards: Items[SnapshotShard]


@dataclass(frozen=True)
class SavedState:
    """A complete snapshot in its folder. ``manifest.window`` is the next window to apply."""

    folder: Path
    manifest: SnapshotManifest

    @property
    def window(self) -> int:
        return self.manifest.window

    @property
    def values(self) -> dict[str, Any]:
        return self.manifest.values

    def tensors(self, group: str, without: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """The tensors of ``group``, by their names in it. Raises StateError if a file can't be read."""
        found = self.lazily(group)
        return {name: found[name] for name in found if name not in without}

    def lazily(self, group: str, like: Mapping[str, torch.Tensor] = {}) -> "LazyTensors":
        """The tensors of ``group``, each read at every access: those in ``like`` on their devices, as their shards."""
        return LazyTensors(self, f"{group}.", like)

    def read_into(self, group: str, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors of ``group`` into ``targets``, or this rank's rows into its shards. Raises StateError.

        There is no second copy in memory.
        """
        reader = SnapshotReader(self.folder, self.manifest)
        for name, target in targets.items():
            _read_rows(reader, f"{group}.{name}", target)

    def check_finite(self) -> None:
        """Raise StateError if a tensor has an entry that is no finite number: other people's weights are checked
        before one of them reaches the model."""
        SnapshotReader(self.folder, self.manifest).check_finite()


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors of a snapshot, read from disk at every access and not kept."""

    def __init__(self, saved: SavedState, prefix: str, like: Mapping[str, torch.Tensor]) -> None:
        self._layouts = saved.manifest.tensors
        self._reader = SnapshotReader(saved.folder, saved.manifest)
        self._prefix = prefix
        self._like = like

    def __getitem__(self, name: str) -> torch.Tensor:
        layout = self._layouts[self._prefix + name]
        tensor = torch.empty_like(self._like[name].detach()) if name in self._like else layout.empty()
        _read_rows(self._reader, self._prefix + name, tensor)
        return tensor

    def shape(self, name: str) -> torch.Size:
        """See ``StoredRows``."""
        return torch.Size(self._layouts[self._prefix + name].shape)

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        """See ``StoredRows``."""
        layout = self._layouts[self._prefix + name]
        found = layout.empty_rows(count)
        self._reader.read_into(self._prefix + name, found, first_row=first)
        return found

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._layouts if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _read_rows(reader: SnapshotReader, name: str, target: torch.Tensor) -> None:
    part, rows = local_rows(target)
    if rows.stop > rows.start:
        reader.read_into(name, part, first_row=rows.start)


@dataclass
class StateFolder:
    """Keeps the newest ``GENERATIONS`` snapshots, and those in ``held``.

    Attributes:
        held: windows whose snapshots are still being read.
    """

    folder: Path
    held: set[int] = field(default_factory=set)

    def save(
        self,
        *,
        window: int,
        start_window: int,
        global_step: int,
        version: str,
        groups: Mapping[str, Mapping[str, torch.Tensor]],
        values: Mapping[str, Any],
        parallel: ParallelContext = SINGLE_PROCESS,
    ) -> SavedState:
        """Write the snapshot of a window directly from the tensors, which must not change meanwhile.

        A collective: each rank writes its shards and the tensors that it alone has, all into one folder; then rank 0
        writes the manifest, of its ``values``.

        Raises:
            StateError: the disk is full; older snapshots stay.
        """
        place = self._place(window)
        if parallel.rank == 0:
            remove_snapshot(place)
        try:
            tensors, shards = self._write_shards(place, groups, parallel)
            with together(parallel):
                if parallel.rank == 0:
                    manifest = SnapshotManifest(
                        window=window,
                        start_window=start_window,
                        global_step=global_step,
                        version=version,
                        values=dict(values),
                        tensors=tensors,
                        shards=shards,
                    )
                    write_manifest(place, manifest)
        except StateError:
            if parallel.rank == 0:
                remove_snapshot(place)
            raise
        if parallel.rank == 0:
            self._remove_old()
        return SavedState(place, read_manifest(place))

    @staticmethod
    def _write_shards(
        place: Path, groups: Mapping[str, Mapping[str, torch.Tensor]], parallel: ParallelContext
    ) -> tuple[dict[str, TensorLayout], tuple[SnapshotShard, ...]]:
        """Write this rank's tensors; returns the layouts and the shards of all ranks."""
        parallel.gather_bytes(b"")  # rank 0 has removed what was there
        layouts: dict[str, TensorLayout] = {}
        with together(parallel):
            writer = ShardWriter(place, rank=parallel.rank)
            for group, tensors in groups.items():
                parts = {f"{group}.{name}": local_rows(one.detach()) for name, one in tensors.items()}
                layouts |= {f"{group}.{name}": TensorLayout.of(one) for name, one in tensors.items()}
                writer.write(
                    {name: part for name, (part, rows) in parts.items() if rows.stop > rows.start},
                    {name: rows.start for name, (_, rows) in parts.items()},
                )
        mine = _Written(tensors=layouts, shards=tuple(writer.shards)).model_dump_json().encode()
        written = [_Written.model_validate_json(one) for one in parallel.gather_bytes(mine)]
        found = {name: layout for one in written for name, layout in one.tensors.items()}
        return found, tuple(shard for one in written for shard in one.shards)

    def load(self, *, until: int | None = None, clean: bool = True) -> SavedState | None:
        """The newest complete snapshot, or None. Damaged ones are logged and left in place.

        Args:
            until: of a window not after this one.
            clean: remove snapshots without a manifest, of a process that was killed while it saved. Not for the folder
                of another process, which may be saving.
        """
        for window in self._windows():
            place = self._place(window)
            if not (place / MANIFEST).exists():
                if clean:
                    remove_snapshot(place)
                continue
            if until is not None and window > until:
                continue
            try:
                manifest = read_manifest(place)
                if (gap := manifest.covers(manifest.tensors)) or manifest.window != window:
                    raise StateError(f"{place}: {gap or f'holds window {manifest.window}'}")
                check_shards(place, manifest, manifest.shards)
            except StateError as error:
                logger.warning("saved state skipped: %s", error)
                continue
            return SavedState(place, manifest)
        return None

    def forget_after(self, window: int) -> None:
        """Remove the snapshots of windows above ``window``."""
        for later in self._windows():
            if later > window:
                remove_snapshot(self._place(later))

    def _remove_old(self) -> None:
        for window in self._windows()[GENERATIONS:]:
            if window not in self.held:
                remove_snapshot(self._place(window))

    def _place(self, window: int) -> Path:
        return self.folder / f"window-{window}"

    def _windows(self) -> list[int]:
        """Newest first."""
        names = [path.name for path in self.folder.iterdir()] if self.folder.exists() else []
        return sorted((int(match[1]) for name in names if (match := _NAME.fullmatch(name))), reverse=True)
