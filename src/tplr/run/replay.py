"""``tplr replay``: applies a run's windows again, unchanged and changed, and compares losses on held-out pages.

The updates are used as they were sent. A participant that is left out here has influenced the others' updates. So a
difference is the contribution of its updates to the model, not the difference to a run without it.
"""

import asyncio
import contextlib
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError

from tplr.compress.payload import Update
from tplr.errors import ConfigError
from tplr.hparams import HParams, problems_of
from tplr.logging import logger
from tplr.node.data_loader import WindowDataLoader
from tplr.node.network_reader import NetworkReader
from tplr.node.replay import agreed_updates, chosen_window
from tplr.node.train_state import SHARED, TrainState
from tplr.node.windows import WindowUpdates
from tplr.run.window_model import loaded_state
from tplr.training.evaluation import sequence_losses
from tplr.training.model import build_model
from tplr.training.schemes import payload_spec

RATE, POINTS = "outer_learning_rate", "outer_learning_rate_points"
MEASURED = 8  # number of windows that are measured, unless all are

CAVEAT = (
    "The others' updates are taken as they were: each was trained on the model that all of them made. So this is what "
    "the change does to the applied windows, not what the run would have become."
)


@dataclass(frozen=True)
class ReplayRequest:
    """The windows to replay, and the changes.

    Attributes:
        first, last: first and last window to apply again, as in ``chosen_window``.
        without: uids whose updates are left out.
        scheme: changed constants of the update scheme, by name; ``GROUP.NAME`` for constants in a group.
    """

    first: str
    last: str
    without: tuple[int, ...]
    scheme: Mapping[str, Any]


class Comparison(NamedTuple):
    """Mean losses in nats per token after a window, on the same held-out sequences.

    Attributes:
        error: standard error of the mean difference over sequences.
    """

    window: int
    as_it_was: float
    changed: float
    error: float
    sequences: int

    @property
    def difference(self) -> float:
        """``changed`` minus ``as_it_was``: positive if the change increases the loss."""
        return self.changed - self.as_it_was


async def replay(
    network: NetworkReader, request: ReplayRequest, device: torch.device | str = "cpu"
) -> list[Comparison]:
    """Replay windows, and return the comparisons after some of them, including the last one.

    Raises:
        ConfigError: a window is not one of the run's, no uid to leave out was included, or a constant is wrong.
        TplrError: updates are deleted, or can't be read now.
    """
    changed_hparams = with_scheme(network.hparams, request.scheme)
    start = await network.start_window()
    first, last = [await chosen_window(network, text, start) for text in (request.first, request.last)]
    if first > last:
        raise ConfigError(f"--from {first} --to {last}: expected the first window before the last")
    windows = range(first, last + 1)
    if request.without:
        await _check_left_out(network, windows, request.without)
    with tempfile.TemporaryDirectory(prefix="tplr-replay-") as folder:
        scratch = Path(folder)
        usual = await loaded_state(network, "nearest", first - 1, scratch / "usual", device=device)
        changed = await asyncio.to_thread(copied_state, usual, changed_hparams, scratch / "changed", device)
        async with network.data_loader() as data_loader:
            return await _compare(network, data_loader, (usual, changed), windows, request.without)


def with_scheme(hparams: HParams, changes: Mapping[str, Any]) -> HParams:
    """Return the run's constants with changed constants of its update scheme.

    A changed ``outer_learning_rate`` is constant: the points of the run's schedule are left out unless given, too.

    Raises:
        ConfigError: there is no such constant, or its value is wrong.
    """
    values = json.loads(hparams.model_dump_json())
    for name, value in changes.items():
        *groups, key = name.split(".")
        place = scheme = values[hparams.outer]
        for group in groups:
            place = place.get(group) if isinstance(place, dict) else None
        if not isinstance(place, dict) or key not in place:
            raise ConfigError(
                f"--with-scheme {name}: expected a constant of {hparams.outer}: {', '.join(_names(scheme))}"
            )
        place[key] = value
    if RATE in changes and POINTS not in changes:
        values[hparams.outer][POINTS] = []
    try:
        return HParams.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise ConfigError([f"--with-scheme: {text}" for text in problems_of(error)]) from error


def copied_state(state: TrainState, hparams: HParams, folder: Path, device: torch.device | str) -> TrainState:
    """Copy a training state with its weights, steps and shared tensors, under other constants. Blocks.

    Raises:
        ConfigError: updates of the run can't be applied under these constants.
    """
    copy = TrainState(build_model(hparams, device), hparams, folder)
    if copy.spec.layout != state.spec.layout:
        raise ConfigError("--with-scheme: updates of the run have another layout")
    with torch.no_grad():
        for name, parameter in copy.parameters.items():
            parameter.copy_(state.parameters[name])
    copy.start_window, copy.global_step = state.start_window, state.global_step
    tensors = state.outer.state_dict()["tensors"]
    copy.outer.load_shared({name: one for name, one in tensors.items() if name.startswith(SHARED)})
    return copy


def comparison(window: int, as_it_was: np.ndarray, changed: np.ndarray) -> Comparison:
    """Compare losses (float64 [sequences]) of the same sequences."""
    differences = changed - as_it_was
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    return Comparison(window, float(as_it_was.mean()), float(changed.mean()), error, len(differences))


async def _check_left_out(network: NetworkReader, windows: range, without: Sequence[int]) -> None:
    """Raise ConfigError if the windows' sets, which are small, include none of these uids."""
    updates, included = WindowUpdates(network.comms, network.hparams, payload_spec(network.hparams)), set[int]()
    for window in windows:
        found = await updates.published(window) or await updates.reported(window)
        if found is not None:
            included |= {one.uid for one in found.included}
        if found is None or included.intersection(without):  # an unknown set is known when its updates are gathered
            return
    raise _nobody_left_out(windows, without, included)


def _nobody_left_out(windows: range, without: Sequence[int], included: set[int]) -> ConfigError:
    return ConfigError(
        f"--without-uid {','.join(map(str, without))}: windows {windows[0]} to {windows[-1]} have no update of it, "
        f"but of uids {sorted(included)}"
    )


async def _compare(
    network: NetworkReader,
    data_loader: WindowDataLoader,
    states: tuple[TrainState, TrainState],
    windows: range,
    without: Sequence[int],
) -> list[Comparison]:
    step = max(1, -(-len(windows) // MEASURED))
    measured = {*windows[::-1][::step]}
    usual, changed = states
    left_out, included = 0, set[int]()
    found: list[Comparison] = []
    agreed = agreed_updates(network.comms, network.hparams, usual.spec, windows)
    async with contextlib.aclosing(agreed) as gathered_windows:
        async for gathered in gathered_windows:
            updates: list[Update] = [one.update for one in gathered.updates]
            kept = [one for one in updates if one.uid not in without]
            left_out += len(updates) - len(kept)
            included |= {one.uid for one in updates}
            await asyncio.to_thread(usual.apply, updates)
            await asyncio.to_thread(changed.apply, kept)
            if gathered.window in measured:
                found.append(await _measure(network, data_loader, states, gathered.window, included))
                logger.info("window %d: %+.5f nats per token", gathered.window, found[-1].difference)
    if without and not left_out:
        raise _nobody_left_out(windows, without, included)
    return found


async def _measure(
    network: NetworkReader,
    data_loader: WindowDataLoader,
    states: tuple[TrainState, TrainState],
    window: int,
    included: set[int],
) -> Comparison:
    hotkey = network.comms.get_hotkey(network.validator()) or ""
    held_out = await data_loader.held_out(window, hotkey, sorted(included))
    precision = network.hparams.precision
    usual, changed = [
        await asyncio.to_thread(sequence_losses, state.model, held_out.batches, precision) for state in states
    ]
    return comparison(window, usual, changed)


def _names(group: Mapping[str, Any], prefix: str = "") -> list[str]:
    return [
        name
        for key, value in group.items()
        for name in (_names(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key])
    ]
