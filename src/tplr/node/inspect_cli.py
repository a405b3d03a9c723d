"""``tplr explain`` and ``tplr audit``: read and recompute a validator's published work; both write nothing."""

import asyncio
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from tplr.comms import Comms
from tplr.config import Environment
from tplr.errors import ConfigError, ObjectNotFound, ScoresSealed, TplrError
from tplr.exchange.checkpoints import Checkpoint
from tplr.hparams import HParams
from tplr.logging import logger, setup_logging
from tplr.node.arguments import Arguments
from tplr.node.audit import Auditor
from tplr.node.checks import check_device
from tplr.node.data_loader import WindowDataLoader
from tplr.node.reader import Surroundings, connected, here
from tplr.node.sources import open_data_source
from tplr.node.train_state import TrainState
from tplr.resources import LocalMachine, Resources
from tplr.scoring.explain import explain
from tplr.storage import S3Connections
from tplr.training.model import build_model

AGREES, DIFFERS, UNKNOWN = 0, 1, 2
PUBLISHED = ("start", "checkpoint")  # values of --from that need no local state


@dataclass(frozen=True)
class Request:
    """The arguments of ``explain`` or ``audit``, and how to reach the network.

    Attributes:
        uid: the miner to explain; an audit ignores it.
        validator: whose reports are read; None: those of the leading validator.
        source: where an audit starts: ``start``, ``checkpoint``, or the folder of a node's saved state.
        all: whether an audit checks the scores of every window, not only of the last.
    """

    window: int
    uid: int
    validator: int | None
    source: str
    all: bool
    network: Arguments


def main(command: str, request: Request, surroundings: Surroundings | None = None) -> int:
    """Run ``explain`` or ``audit``, in this process's environment or in ``surroundings``.

    Returns:
        Exit status: 0 after success (and agreement), 1 if the audit found a difference, 2 if the data are unavailable.
    """
    setup_logging(debug=request.network.debug)
    try:
        return asyncio.run(_main(command, request, surroundings or here))
    except (TplrError, OSError) as error:
        logger.error("%s", error)
        return UNKNOWN


async def _main(command: str, request: Request, surroundings: Surroundings) -> int:
    async with surroundings() as environment:
        return await (_explain if command == "explain" else _audit)(request, environment)


async def _explain(request: Request, environment: Environment) -> int:
    async with (
        S3Connections.of(environment) as connections,
        connected(request.network, environment, connections) as (hparams, comms),
    ):
        validator = _validator(comms, request)
        try:
            report = await comms.get_scores(validator, request.window)
        except ScoresSealed:
            raise
        except ObjectNotFound as error:
            raise ConfigError(
                f"validator {validator} has published no scores of window {request.window}: it skipped it, or they are "
                f"older than gradient_retention_windows ({hparams.gradient_retention_windows})"
            ) from error
    if str(request.uid) not in report.peer_scores:
        raise ConfigError(explain(report, request.uid, power=hparams.power_normalisation))
    print(  # noqa: T201 - what the command is for
        explain(report, request.uid, power=hparams.power_normalisation)
    )
    return AGREES


async def _audit(request: Request, environment: Environment) -> int:
    async with AsyncExitStack() as stack:
        connections = await stack.enter_async_context(S3Connections.of(environment))
        hparams, comms = await stack.enter_async_context(connected(request.network, environment, connections))
        validator = _validator(comms, request)
        await comms.refresh()
        clock = asyncio.create_task(comms.clock.run())
        stack.callback(clock.cancel)
        await comms.clock.wait_for_block(0)
        tokenizer = hparams.load_tokenizer(request.network.hparams.parent)
        resources = Resources.choose(LocalMachine.here(), environment.variables)
        source = await open_data_source(
            hparams, tokenizer, connections, environment.dataset(), environment.cache_folder, resources=resources
        )
        data_loader = await stack.enter_async_context(WindowDataLoader(source, comms))
        start = await comms.get_start_window()
        if start is None:
            raise ConfigError("no start window is published: the run has not started")
        if request.window < start:
            raise ConfigError(f"window {request.window} is before the run's first one, {start}: nothing to audit")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        train_state = await asyncio.to_thread(_train_state, request, hparams, start, folder)
        window = await _load(request, train_state, comms, hparams)
        auditor = Auditor(train_state, window, data_loader, comms, hparams, validator=validator)
        found = await auditor.audit(request.window, scores_from=window if request.all else None)
    if found:
        print(f"DIFFERS: {found}")  # noqa: T201
        return DIFFERS
    print(  # noqa: T201
        f"AGREES: validator {validator}, windows {window} to {request.window}: included sets and fingerprints, and "
        f"the scores of {'all' if request.all else 'the last'}"
    )
    return AGREES


def _train_state(request: Request, hparams: HParams, start: int, scratch: Path) -> TrainState:
    """A training state with the first weights of ``init_seed``."""
    model = build_model(hparams, check_device(request.network.device))
    folder = scratch if request.source in PUBLISHED else Path(request.source).expanduser()
    train_state = TrainState(model, hparams, folder)
    train_state.start_window = start
    return train_state


async def _load(request: Request, train_state: TrainState, comms: Comms, hparams: HParams) -> int:
    """Load the state where the replay starts. Returns the next window to apply."""
    if request.source == "start":
        if version := hparams.checkpoint_init_version:
            await train_state.fetch_first_weights(comms, await _checkpoint(comms, version))
        return train_state.start_window
    if request.source == "checkpoint":
        checkpoint = await _checkpoint(comms, hparams.version, until=request.window)
        async with train_state.fetched(comms, checkpoint) as fetched:
            await asyncio.to_thread(train_state.restore_shared, fetched)
        return checkpoint.window
    saved = await asyncio.to_thread(train_state.saved, until=request.window, clean=False)
    if saved is None:
        raise ConfigError(
            f"--from {request.source}: no saved state of this run of window {request.window} or before; give --from "
            "start, --from checkpoint or another folder"
        )
    await asyncio.to_thread(train_state.restore, saved)
    return saved.window


async def _checkpoint(comms: Comms, version: str, until: int | None = None) -> Checkpoint:
    """The leading validator's newest checkpoint of a window up to ``until``."""
    for one in await comms.leaders_checkpoints(version):
        if until is None or one.window <= until:
            return one
    before = "" if until is None else f" of window {until} or before"
    raise ConfigError(f"the leading validator has published no checkpoint of version {version}{before}")


def _validator(comms: Comms, request: Request) -> int:
    validator = comms.highest_stake_validator() if request.validator is None else request.validator
    if validator is None:
        raise ConfigError("no validator has a bucket on chain: give --validator")
    return validator
