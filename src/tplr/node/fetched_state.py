"""A checkpoint from a bucket as a saved state: downloaded, checked, and deleted after its use."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

from tplr.comms import Comms
from tplr.errors import StateError
from tplr.exchange.checkpoints import Checkpoint, discard_fetch, fetch_manifest, manifest_cap
from tplr.exchange.snapshot import SnapshotManifest, TensorLayout, remove_snapshot
from tplr.node.state import SavedState
from tplr.node.train_state import TrainState


@contextlib.asynccontextmanager
async def fetched_state(
    train_state: TrainState,
    comms: Comms,
    checkpoint: Checkpoint,
    *mirrors: Checkpoint,
    manifest: SnapshotManifest | None = None,
) -> AsyncIterator[SavedState]:
    """Download a checkpoint of the run of ``train_state``, which may then ``restore_shared`` it.

    Its files exist until the block ends.

    Args:
        mirrors: checkpoints with the same content.
        manifest: the checkpoint's manifest, if it is known.

    Raises:
        FalseModel: it has entries that are not finite numbers.
        StateError: it is of another run or model, or does not match its manifest.
        StoreError: it can't be downloaded.
    """
    tensors = shared_layout(train_state)
    manifest = manifest or await fetch_manifest(checkpoint, max_bytes=manifest_cap(tensors))
    if manifest.values.get("run") != train_state.run:
        raise StateError(f"it belongs to another run: {manifest.values.get('run')}")
    steps, windows = manifest.global_step, manifest.window - train_state.start_window
    if steps > windows:
        raise StateError(f"{steps} steps in {windows} windows")
    async with _downloaded(train_state, comms, checkpoint, tensors, manifest=manifest, mirrors=mirrors) as saved:
        yield saved


def shared_layout(train_state: TrainState) -> dict[str, TensorLayout]:
    """Return the layout of the tensors that a node loads from another one's checkpoint, by name."""
    tensors = _model_layout(train_state)
    for name, shape in train_state.outer.shared_shapes.items():
        tensors[f"outer.{name}"] = TensorLayout(dtype="F32", shape=tuple(shape))
    return tensors


async def fetch_first_weights(train_state: TrainState, comms: Comms, checkpoint: Checkpoint) -> None:
    """Start a run with the weights of another version's checkpoint. Raises StateError, StoreError."""
    async with _downloaded(train_state, comms, checkpoint, _model_layout(train_state)) as saved:
        await asyncio.to_thread(train_state.restore_first_weights, saved)


@contextlib.asynccontextmanager
async def _downloaded(
    train_state: TrainState,
    comms: Comms,
    checkpoint: Checkpoint,
    tensors: Mapping[str, TensorLayout],
    *,
    manifest: SnapshotManifest | None = None,
    mirrors: Sequence[Checkpoint] = (),
) -> AsyncIterator[SavedState]:
    """Download ``tensors`` of a checkpoint, none of which has a value that is not finite."""
    folder = train_state.snapshots.folder / "incoming"
    try:
        await asyncio.to_thread(discard_fetch, folder)
        saved = SavedState(folder, await comms.fetch_checkpoint(checkpoint, folder, tensors, manifest, mirrors))
        await asyncio.to_thread(saved.check_finite)
        yield saved
    finally:
        await asyncio.to_thread(remove_snapshot, folder)


def _model_layout(train_state: TrainState) -> dict[str, TensorLayout]:
    return {f"model.{name}": TensorLayout.of(one) for name, one in train_state.parameters.items()}
