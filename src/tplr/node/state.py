"""A node's saved state: snapshots of the last windows on disk, each complete or absent; no pickle.

Loading a state folder of unknown origin can give a wrong state, but it executes nothing.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tplr.errors import StateError
from tplr.exchange.snapshot import (
    MANIFEST,
    ShardWriter,
    SnapshotManifest,
    SnapshotReader,
    check_shards,
    read_manifest,
    remove_snapshot,
    write_manifest,
)
from tplr.logging import logger

GENERATIONS = 2
_NAME = re.compile(r"window-(\d{1,15})")


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

    def tensors(self, group: str) -> dict[str, torch.Tensor]:
        """All tensors of ``group``, by their names in it. Raises StateError if a file can't be read."""
        return dict(self.lazily(group))

    def lazily(self, group: str) -> "LazyTensors":
        """The tensors of ``group``, each read at every access."""
        return LazyTensors(self, f"{group}.")

    def read_into(self, group: str, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors of ``group`` into ``targets``, without a second copy in memory. Raises StateError."""
        reader = SnapshotReader(self.folder, self.manifest)
        for name, target in targets.items():
            reader.read_into(f"{group}.{name}", target)


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors of a snapshot, read from disk at every access and not kept."""

    def __init__(self, saved: SavedState, prefix: str) -> None:
        self._layouts = saved.manifest.tensors
        self._reader = SnapshotReader(saved.folder, saved.manifest)
        self._prefix = prefix

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._layouts[self._prefix + name].empty()
        self._reader.read_into(self._prefix + name, tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._layouts if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


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
    ) -> SavedState:
        """Write the snapshot of a window directly from the tensors, which must not change meanwhile.

        Raises:
            StateError: the disk is full; older snapshots stay.
        """
        place = self._place(window)
        remove_snapshot(place)
        try:
            writer = ShardWriter(place)
            for group, tensors in groups.items():
                writer.write({f"{group}.{name}": tensor for name, tensor in tensors.items()})
            manifest = SnapshotManifest(
                window=window,
                start_window=start_window,
                global_step=global_step,
                version=version,
                values=dict(values),
                tensors=writer.tensors,
                shards=tuple(writer.shards),
            )
            write_manifest(place, manifest)
        except StateError:
            remove_snapshot(place)
            raise
        self._remove_old()
        return SavedState(place, manifest)

    def load(self) -> SavedState | None:
        """The newest complete snapshot, or None. Damaged ones are logged and left in place.

        Snapshots without a manifest, of a process that was killed while it saved, are removed.
        """
        for window in self._windows():
            place = self._place(window)
            if not (place / MANIFEST).exists():
                remove_snapshot(place)
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
