"""A checkpoint from a bucket as a saved state: downloaded, checked, and deleted after its use."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial

from tplr.comms import Comms
from tplr.errors import StateError
from tplr.exchange.checkpoints import Checkpoint, discard_fetch, fetch_manifest, manifest_cap, part_of
from tplr.exchange.snapshot import SnapshotManifest, TensorLayout, remove_snapshot
from tplr.hparams import HParams
from tplr.logging import logger
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
        manifest: the ``shared_part`` of the checkpoint's manifest, if it is known.

    Raises:
        FalseModel: it has entries that are not finite numbers.
        StateError: it is of another run or model, or does not match its manifest.
        StoreError: it can't be downloaded.
    """
    tensors = shared_layout(train_state)
    if manifest is None:
        whole = await fetch_manifest(checkpoint, max_bytes=manifest_cap(tensors))
        manifest = await asyncio.to_thread(shared_part, train_state, whole)
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


def shared_part(train_state: TrainState, manifest: SnapshotManifest) -> SnapshotManifest:
    """Return what a node uses of a checkpoint's manifest. Raises StateError if it is of another run or model."""
    if manifest.values.get("run") != train_state.run:
        raise StateError(f"it belongs to another run: {manifest.values.get('run')}")
    return part_of(manifest, shared_layout(train_state), values=["run"])


async def fetch_first_weights(train_state: TrainState, comms: Comms, hparams: HParams) -> None:
    """Start a run with the weights of the newest checkpoint of ``checkpoint_init_version`` that electors agree on.

    Only checkpoints from before the window in which the electors chose the run's start count. No node learns the start
    earlier, so all nodes and later readers choose among the same ones, also while the other version goes on publishing.

    Raises:
        ChainUnavailable: the time of that window is not known.
        StateError, StoreError: as ``Comms.agreed_checkpoint``, or the checkpoint can't be used.
    """
    version, wanted = hparams.checkpoint_init_version, _model_layout(train_state)
    chosen = max(0, train_state.start_window - hparams.peer_list_window_margin)
    before = (await comms.window_start(chosen)).time
    logger.info("checkpoint_init_version %s: looking for a checkpoint from before window %d", version, chosen)
    used, cap = partial(part_of, wanted=wanted), manifest_cap(wanted)
    found = await comms.agreed_checkpoint(used, version, before=before, max_bytes=cap)
    first, *mirrors = found.checkpoints
    async with _downloaded(train_state, comms, first, wanted, manifest=found.manifest, mirrors=mirrors) as saved:
        await asyncio.to_thread(train_state.restore_first_weights, saved)
    logger.info("first weights: those of version %s, window %d, by uid %d", version, first.window, first.uid)


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
