"""A node's saved state: snapshots of the last windows on disk, each complete or absent; no pickle.

Loading a state folder of unknown origin can give a wrong state, but it executes nothing.
"""

import contextlib
import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import FailFast

from tplr.errors import StateError
from tplr.exchange.snapshot import (
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
from tplr.training.rows import StoredRows

GENERATIONS = 2
_NAME = re.compile(r"window-(\d{1,15})")


class _Written(Wire):
    """The tensors and shards that one rank has written into a snapshot."""

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
        """Read the tensors of ``group``, by their names in it. Raises StateError if a file can't be read."""
        found = self.lazily(group)
        return {name: found[name] for name in found if name not in without}

    def lazily(self, group: str, like: Mapping[str, torch.Tensor] = {}) -> "LazyTensors":
        """Map the tensors of ``group``, each read at every access; those in ``like`` get its devices and shards."""
        return LazyTensors(self, f"{group}.", like)

    def read_into(self, group: str, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors of ``group`` into ``targets``, or this rank's rows into its shards. Raises StateError.

        No second copy is made in memory.
        """
        reader = SnapshotReader(self.folder, self.manifest)
        for name, target in targets.items():
            _read_rows(reader, f"{group}.{name}", target)

    def check_finite(self) -> None:
        """Raise FalseModel if a tensor has an entry that is not finite, StateError if one can't be read.

        Weights from other nodes are checked before any of them is loaded into the model.
        """
        SnapshotReader(self.folder, self.manifest).check_finite()


class LazyTensors(Mapping[str, torch.Tensor], StoredRows):
    """Tensors of a snapshot, read from disk at every access and not cached."""

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
class SnapshotDraft:
    """One rank's part of a snapshot that has no manifest yet.

    Attributes:
        layouts: of all whole tensors.
        rows: this rank's rows of each tensor, and the number of the first row.
        shards: the shards that this rank has written.
        problem: the error if they could not be written.
    """

    place: Path
    rank: int
    window: int
    start_window: int
    global_step: int
    version: str
    values: dict[str, Any]
    layouts: dict[str, TensorLayout] = field(default_factory=dict)
    rows: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)
    shards: list[SnapshotShard] = field(default_factory=list)
    problem: StateError | None = None

    def write(self) -> None:
        """Write this rank's rows, group by group, directly from the tensors, which must not change during the call.

        Not a collective. A failure is stored as ``problem``, which ``StateFolder.finish`` reports to all ranks.
        """
        try:
            writer = ShardWriter(self.place, rank=self.rank)
            for _, names in itertools.groupby(self.rows, key=lambda name: name.split(".")[0]):
                group = {name: self.rows[name] for name in names}
                writer.write(
                    {name: one for name, (one, _) in group.items()}, {k: first for k, (_, first) in group.items()}
                )
            self.shards = writer.shards
        except StateError as error:
            self.problem = error
        except Exception as error:  # noqa: BLE001 - in a thread nothing would see it: ``finish`` raises it
            self.problem = StateError(f"{self.place}: {error!r}")
        finally:
            self.rows = {}  # free copies as soon as they are on disk


@dataclass
class StateFolder:
    """Keeps ``GENERATIONS`` snapshots (the last finished one and the newest before it), and those in ``held``.

    Attributes:
        held: windows whose snapshots are still being read.
    """

    folder: Path
    held: set[int] = field(default_factory=set)

    @property
    def size(self) -> int:
        """Bytes of all snapshots."""
        total = 0
        for path in self.folder.glob("window-*/*"):
            with contextlib.suppress(FileNotFoundError):  # a node that runs has just removed it
                total += path.stat().st_size
        return total

    def begin(
        self,
        *,
        window: int,
        start_window: int,
        global_step: int,
        version: str,
        groups: Mapping[str, Mapping[str, torch.Tensor]],
        values: Mapping[str, Any],
        copies: Mapping[str, Mapping[str, torch.Tensor]] = {},
        parallel: ParallelContext = SINGLE_PROCESS,
    ) -> SnapshotDraft:
        """Begin the snapshot of a window. ``write`` the draft, then ``finish`` it.

        ``write`` reads the tensors themselves, which must not change until it ends.

        A collective: each rank writes its shards and the tensors that only it has, all into one folder; rank 0 writes
        the manifest, with its ``values``.

        Args:
            copies: by group, copies of this rank's rows for tensors that change while the snapshot is written.

        Raises:
            StateError: a tensor has an unsupported element type, or an earlier snapshot of the window can't be removed.
        """
        place = self._place(window)
        with together(parallel):  # no rank writes before rank 0 has removed the earlier snapshot
            if parallel.rank == 0:
                remove_snapshot(place)
        draft = SnapshotDraft(place, parallel.rank, window, start_window, global_step, version, dict(values))
        with together(parallel):
            for group, tensors in groups.items():
                for name, one in tensors.items():
                    part, rows = local_rows(one.detach())
                    draft.layouts[f"{group}.{name}"] = TensorLayout.of(one)
                    if rows.stop > rows.start:
                        draft.rows[f"{group}.{name}"] = copies.get(group, {}).get(name, part), rows.start
        return draft

    def finish(self, draft: SnapshotDraft, parallel: ParallelContext = SINGLE_PROCESS) -> SavedState:
        """Make a written snapshot the newest one. A collective.

        Raises:
            StateError: a rank could not write its part, and older snapshots are kept; or an old one can't be removed.
        """
        try:
            with together(parallel):
                if draft.problem:
                    raise draft.problem
            mine = _Written(tensors=draft.layouts, shards=tuple(draft.shards)).model_dump_json().encode()
            written = [_Written.model_validate_json(one) for one in parallel.gather_bytes(mine)]
            with together(parallel):
                if parallel.rank == 0:
                    manifest = SnapshotManifest(
                        window=draft.window,
                        start_window=draft.start_window,
                        global_step=draft.global_step,
                        version=draft.version,
                        values=draft.values,
                        tensors={name: layout for one in written for name, layout in one.tensors.items()},
                        shards=tuple(shard for one in written for shard in one.shards),
                    )
                    if gap := manifest.covers(manifest.tensors):
                        raise StateError(f"{draft.place}: {gap}")
                    write_manifest(draft.place, manifest)
        except StateError:
            if parallel.rank == 0:
                with contextlib.suppress(StateError):  # a folder without a manifest is ignored
                    remove_snapshot(draft.place)
            raise
        with together(parallel):
            if parallel.rank == 0:
                self._remove_old(draft.window)
        return SavedState(draft.place, read_manifest(draft.place))

    def load(
        self, *, run: Mapping[str, Any] | None = None, until: int | None = None, clean: bool = True
    ) -> SavedState | None:
        """Find the newest complete snapshot, or None. Damaged ones and those of other runs are logged and kept.

        Args:
            run: the required ``values["run"]``; None accepts any.
            until: the latest allowed window.
            clean: remove snapshots without a manifest, left by a process that was killed while it saved. Not for the
                folder of another process, which may be saving.
        """
        for window in self._windows():
            place = self._place(window)
            if until is not None and window > until:
                continue
            try:
                manifest = read_manifest(place)
                if (gap := manifest.covers(manifest.tensors)) or manifest.window != window:
                    raise StateError(f"{place}: {gap or f'holds window {manifest.window}'}")
                if run is not None and (found := manifest.values.get("run")) != run:
                    logger.warning("saved state not used: it belongs to run %s, this run is %s", found, run)
                    continue
                check_shards(place, manifest, manifest.shards)
            except FileNotFoundError:
                if clean:
                    with contextlib.suppress(StateError):
                        remove_snapshot(place)
                continue
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

    def _remove_old(self, newest: int) -> None:
        # A snapshot of a later window was skipped: it is damaged or of another run. Later saves replace it.
        windows = sorted(self._windows(), key=lambda window: window > newest)
        for window in windows[GENERATIONS:]:
            if window not in self.held:
                remove_snapshot(self._place(window))

    def _place(self, window: int) -> Path:
        return self.folder / f"window-{window}"

    def _windows(self) -> list[int]:
        """List the windows of all snapshots, newest first."""
        names = [path.name for path in self.folder.iterdir()] if self.folder.exists() else []
        return sorted((int(match[1]) for name in names if (match := _NAME.fullmatch(name))), reverse=True)
