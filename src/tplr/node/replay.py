"""Brings a reader's model to a window: finds a starting point, applies updates, and compares the result."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tplr.comms import Comms
from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import Update
from tplr.concurrency.prefetch import Prefetch
from tplr.errors import ConfigError, PayloadError, StateError, WindowLost
from tplr.exchange.gather import GatherResult
from tplr.home_paths import expanded
from tplr.hparams import HParams
from tplr.keys import parse_window_key
from tplr.logging import logger
from tplr.node.fetched_state import fetch_first_weights, fetched_state
from tplr.node.network_reader import NetworkReader
from tplr.node.state import SavedState
from tplr.node.train_state import TrainState
from tplr.node.windows import WindowUpdates, published_report
from tplr.seeds import fingerprint_seed
from tplr.storage.many import list_objects
from tplr.training.fingerprint import digest, fingerprint, outer_fingerprint
from tplr.training.model import build_model, meta_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Starting points of a replay other than a folder: the first weights; the leading validator's newest checkpoint that is
# not after the window; that checkpoint, or the first weights if there is none.
PUBLISHED = ("start", "checkpoint", "nearest")
PREFETCH_WINDOWS = 2  # windows that are fetched while one is applied


def reading_state(
    network: NetworkReader,
    source: str,
    start: int,
    scratch: Path,
    *,
    device: torch.device | str = "cpu",
    model: PreTrainedModel | None = None,
) -> TrainState:
    """Create a training state of the run for a reader. Blocks.

    Args:
        source: one of ``PUBLISHED``, or the folder of a node's saved state.
        scratch: an empty folder for fetched files.
        model: default: a model with the first weights of ``init_seed``, on ``device``.
    """
    folder = scratch if source in PUBLISHED else expanded(Path(source))
    model = build_model(network.hparams, device) if model is None else model
    train_state = TrainState(model, network.hparams, folder)
    train_state.start_window = start
    return train_state


def layout_state(network: NetworkReader, source: str, start: int, scratch: Path) -> TrainState:
    """As ``reading_state``, without memory for tensors; for finding and fetching saved states. Blocks."""
    return reading_state(network, source, start, scratch, model=meta_model(network.hparams))


@contextlib.asynccontextmanager
async def starting_point(
    network: NetworkReader, train_state: TrainState, source: str, *, until: int
) -> AsyncIterator[SavedState | None]:
    """Find the state to start from, of a window up to ``until``; its files exist until the block ends.

    Args:
        source: as in ``reading_state``.

    Yields:
        The state, or None for the run's first weights.

    Raises:
        ConfigError: there is no such state.
        StateError: it is of another run, or does not match its manifest or the electors' reports.
        StoreError: it can't be downloaded.
    """
    if source == "nearest":
        published = await network.comms.leaders_checkpoints()
        source = "checkpoint" if any(one.window <= until for one in published) else "start"
    if source == "start":
        yield None
    elif source == "checkpoint":
        checkpoint = await network.newest_checkpoint(until=until)
        async with fetched_state(train_state, network.comms, checkpoint) as fetched:
            await _check_fetched(network, fetched, by=checkpoint.uid)
            yield fetched
    else:
        saved = await asyncio.to_thread(train_state.saved, until=until, clean=False)
        if saved is None:
            raise ConfigError(
                f"--from {source}: no saved state of this run of window {until} or before; give --from start, --from "
                "checkpoint or another folder"
            )
        yield saved


async def _check_fetched(network: NetworkReader, fetched: SavedState, *, by: int) -> None:
    """Raise StateError if most electors report another state than this checkpoint."""
    model, shared, step = fetched.lazily("model"), fetched.lazily("outer"), fetched.manifest.global_step
    try:
        await check_agreement(network, model, fetched.window - 1, step=step, shared=shared)
    except StateError as error:
        raise StateError(f"checkpoint of window {fetched.window} by uid {by}: {error}") from error


async def load_state(network: NetworkReader, train_state: TrainState, source: str, *, until: int) -> int:
    """Load the state that ``starting_point`` finds; return the next window to apply."""
    async with starting_point(network, train_state, source, until=until) as saved:
        if saved is not None:
            await asyncio.to_thread(train_state.restore_shared, saved)
            return saved.window
    await load_first_weights(network, train_state)
    return train_state.start_window


async def load_first_weights(network: NetworkReader, train_state: TrainState) -> None:
    """Load the weights of another version's checkpoint, if the run begins with it; else keep those of ``init_seed``."""
    if network.hparams.checkpoint_init_version:
        await fetch_first_weights(train_state, network.comms, network.hparams)


async def agreed_updates(
    comms: Comms, hparams: HParams, spec: PayloadSpec, windows: range
) -> AsyncGenerator[GatherResult[Update]]:
    """Yield the updates of past windows that all nodes applied, in order. Close it (``contextlib.aclosing``).

    Raises:
        WindowLost: the updates of a window are deleted, or no node reports which ones they are.
        ChainUnavailable, StoreError: they can't be read now.
    """
    updates = WindowUpdates(comms, hparams, spec)
    async with Prefetch(updates.find, size=1 + PREFETCH_WINDOWS) as prefetch:
        for window in windows:
            for ahead in range(window, min(windows.stop, window + 1 + PREFETCH_WINDOWS)):
                prefetch.start(ahead)
            try:
                yield await prefetch.take(window)
            except PayloadError as error:
                raise WindowLost(f"window {window}: {error}") from error


async def apply_windows(network: NetworkReader, train_state: TrainState, windows: range) -> None:
    """Apply these windows to ``train_state``, which has all earlier ones; compare the model with published reports.

    Raises:
        StateError: the model differs from the one that most electors report.
        WindowLost, ChainUnavailable, StoreError: as ``agreed_updates``.
    """
    agreed = agreed_updates(network.comms, network.hparams, train_state.spec, windows)
    async with contextlib.aclosing(agreed) as gathered_windows:
        async for gathered in gathered_windows:
            await asyncio.to_thread(train_state.apply, [one.update for one in gathered.updates])
            await check_agreement(
                network,
                train_state.parameters,
                gathered.window,
                step=train_state.global_step,
                shared=train_state.outer.shared,
            )
            logger.info("window %d applied: updates of uids %s", gathered.window, [one.uid for one in gathered.updates])


async def check_agreement(
    network: NetworkReader,
    parameters: Mapping[str, torch.Tensor],
    window: int,
    *,
    step: int,
    shared: Mapping[str, torch.Tensor] | None = None,
) -> str | None:
    """Return the fingerprint of a model after ``window``; None if no report of most electors is published.

    Args:
        parameters: of the whole model; each is read when it is needed.
        step: number of outer steps applied.
        shared: the outer scheme's shared tensors, which are compared, too, as is the digest, if the report has one.

    Raises:
        StateError: electors with more than half of the stake report another fingerprint.
    """
    report = await published_report(network.comms, window, whole=True)
    if report is None:
        return None
    found = await model_fingerprint(network, parameters, window, step=step)
    compared = [("fingerprint", found, report.fingerprint)]
    if shared is not None:
        of_outer = await _outer_fingerprint(network, shared, window, whole=bool(report.digest))
        compared.append(("outer fingerprint", of_outer, report.outer_fingerprint))
        if report.digest:
            compared.append(("digest", await asyncio.to_thread(digest, parameters), report.digest))
    for name, mine, reported in compared:
        if mine != reported:
            raise StateError(
                f"window {window}: this model's {name} is {mine}, the validators report {reported}: run tplr audit to "
                "find the first difference"
            )
    return found


async def model_fingerprint(
    network: NetworkReader, parameters: Mapping[str, torch.Tensor], window: int, *, step: int
) -> str:
    """Compute the fingerprint of a model after ``window`` as nodes do."""
    seed, samples = await _fingerprint_seed(network, window), network.hparams.fingerprint_samples
    return await asyncio.to_thread(fingerprint, parameters, step=step, seed=seed, samples=samples)


async def _outer_fingerprint(
    network: NetworkReader, shared: Mapping[str, torch.Tensor], window: int, *, whole: bool
) -> str:
    seed, samples = await _fingerprint_seed(network, window), None if whole else network.hparams.fingerprint_samples
    return await asyncio.to_thread(outer_fingerprint, shared, seed=seed, samples=samples)


async def _fingerprint_seed(network: NetworkReader, window: int) -> int:
    return fingerprint_seed(window=window, block_hash=await network.comms.window_hash(window + 1))


async def published_windows(network: NetworkReader, uid: int, kind: str) -> list[int]:
    """List, ascending, the windows for which the bucket of ``uid`` has an object of ``kind``, as in ``WindowKey``.

    Objects of another uid, and of windows that have not ended by the chain, are left out: their author can give them
    any name. Whether the others are what their names say is only known when they are read.

    Raises:
        ChainUnavailable: it is not known which windows have ended.
        StoreError: its bucket can't be listed.
    """
    store = network.comms.store_of(uid)
    listed = [] if store is None else await list_objects(store, f"{kind}-")
    now = await network.comms.window_now()
    keys = [parse_window_key(info.key, network.hparams.version) for info in listed]
    found = {key.window for key in keys if key and key.kind == kind and key.uid in (uid, None)}
    return sorted(window for window in found if window < now)


async def reported_windows(network: NetworkReader) -> list[int]:
    """List, ascending, the windows that the leading validator has reported. Raises as ``published_windows``."""
    leader = network.comms.highest_stake_validator()
    return [] if leader is None else await published_windows(network, leader, "debug")


async def chosen_window(network: NetworkReader, asked: str, start: int) -> int:
    """Return the window that ``asked`` names.

    Args:
        asked: a number; ``start`` for the run's first window; ``latest`` for the newest one that has ended and of
            which the leading validator's bucket lists a report; or ``checkpoint`` for the last one that its newest
            checkpoint has applied.

    Raises:
        ConfigError: it is before the run's ``start``, or the leading validator has not reported it yet; or there is no
            checkpoint.
        ChainUnavailable, StoreError: the windows or checkpoints can't be listed.
    """
    if asked == "checkpoint":
        try:
            return (await network.newest_checkpoint()).window - 1
        except ConfigError as error:
            raise ConfigError(f"{error}: --window latest takes the newest window's model") from error
    reported = await reported_windows(network)
    if not reported:
        raise ConfigError("the leading validator has reported no window yet: the run has just begun, or has ended")
    named = {"start": start, "latest": reported[-1]}
    window = named[asked] if asked in named else int(asked)
    if not start <= window <= reported[-1]:
        raise ConfigError(f"window {window}: expected one from {start}, the run's first, to {reported[-1]}, its newest")
    return window
