"""The model that a run's nodes agreed on after a window: streamed from a saved state, or replayed to it."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from tplr.logging import logger
from tplr.node.network_reader import NetworkReader
from tplr.node.replay import (
    apply_windows,
    check_agreement,
    chosen_window,
    layout_state,
    load_first_weights,
    load_state,
    reading_state,
    starting_point,
)
from tplr.node.train_state import TrainState
from tplr.run.folder import LoadedModel


class WindowModel(NamedTuple):
    """A model after a window.

    Attributes:
        window: the last applied window.
        global_step: number of applied outer steps.
        tensors: float32 parameters by name; those of a saved state are read from disk at every access.
        fingerprint: the one that most electors reported; None if their reports are not published.
    """

    window: int
    global_step: int
    tensors: Mapping[str, torch.Tensor]
    fingerprint: str | None


async def loaded_state(
    network: NetworkReader, source: str, window: int, scratch: Path, *, device: torch.device | str = "cpu"
) -> TrainState:
    """Load a training state into memory, with all windows up to ``window`` applied.

    Args:
        source: start of the replay, as in ``starting_point``.
        scratch: an empty folder.

    Raises:
        As ``starting_point`` and ``apply_windows``.
    """
    start = await network.start_window()
    state = await asyncio.to_thread(reading_state, network, source, start, scratch, device=device)
    begin = await load_state(network, state, source, until=window + 1)
    await apply_windows(network, state, range(begin, window + 1))
    await check_agreement(network, state.parameters, window, step=state.global_step)
    return state


@contextlib.asynccontextmanager
async def window_model(
    network: NetworkReader, source: str, window: int, scratch: Path, *, device: torch.device | str = "cpu"
) -> AsyncIterator[WindowModel]:
    """Yield the model after ``window``. A saved state of exactly that window is not loaded: its tensors stay on disk.

    Arguments and errors are those of ``loaded_state``. The tensors are available until the block ends.
    """
    start = await network.start_window()
    layout = await asyncio.to_thread(layout_state, network, source, start, scratch / "fetched")
    async with starting_point(network, layout, source, until=window + 1) as saved:
        if saved is not None and saved.window == window + 1:
            tensors, step = saved.lazily("model"), saved.manifest.global_step
        else:
            state = await asyncio.to_thread(reading_state, network, source, start, scratch / "replayed", device=device)
            if saved is None:
                await load_first_weights(network, state)
            else:
                await asyncio.to_thread(state.restore_shared, saved)
            begin = start if saved is None else saved.window
            logger.info("replaying windows %d to %d", begin, window)
            await apply_windows(network, state, range(begin, window + 1))
            tensors, step = state.parameters, state.global_step
        fingerprint = await check_agreement(network, tensors, window, step=step)
        yield WindowModel(window, step, tensors, fingerprint)


async def loaded_model(network: NetworkReader, window: str, device: torch.device | str = "cpu") -> LoadedModel:
    """Load the model after a window into memory, with the run's tokenizer.

    Args:
        window: as in ``chosen_window``.

    Raises:
        As ``loaded_state``.
    """
    last = await chosen_window(network, window, await network.start_window())
    with tempfile.TemporaryDirectory(prefix="tplr-model-") as scratch:
        state = await loaded_state(network, "nearest", last, Path(scratch), device=device)
    return LoadedModel(state.model, await asyncio.to_thread(network.tokenizer))
