"""``tplr explain`` and ``tplr audit``: read and recompute a validator's published work; both write nothing."""

import asyncio
import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tplr.errors import ConfigError, ObjectNotFound, PayloadError, ScoresSealed
from tplr.files import check_outputs
from tplr.node.arguments import Arguments
from tplr.node.audit import Auditor
from tplr.node.audit_stamps import AuditStamp, append_stamp
from tplr.node.audit_weights import unexplained_weights
from tplr.node.checks import check_device
from tplr.node.network_reader import NetworkReader, Surroundings, open_network, this_environment
from tplr.node.replay import load_state, published_windows, reading_state
from tplr.node.score_evidence import ScoreEvidence
from tplr.schemas import ScoreReport
from tplr.scoring.explain import explain
from tplr.untrusted import printable

AGREES, DIFFERS = 0, 1


@dataclass(frozen=True)
class Request:
    """The arguments of ``explain`` or ``audit``, and how to reach the network.

    Attributes:
        window: a number, or ``latest`` for the newest window whose scores are published.
        uid: the miner to explain; an audit ignores it.
        validator: uid of the validator whose reports are read; None for the leading validator.
        source: where an audit starts: ``start``, ``checkpoint``, or the folder of a node's saved state.
        all: whether an audit checks the scores of every window, not only of the last.
        record: file to which an audit's result is appended; None for no file.
    """

    window: str
    uid: int
    validator: int | None
    source: str
    all: bool
    network: Arguments
    record: Path | None = None


def main(command: str, request: Request, surroundings: Surroundings | None = None) -> int:
    """Run ``explain`` or ``audit``, in this process's environment or in ``surroundings``.

    Returns:
        Exit status: 0 after success (and agreement), 1 if the audit found a difference.

    Raises:
        TplrError, OSError: the data are unavailable, or the result can't be written.
    """
    return asyncio.run(_main(command, request, surroundings or this_environment))


async def _main(command: str, request: Request, surroundings: Surroundings) -> int:
    async with surroundings() as environment, open_network(request.network, environment) as network:
        return await (_explain if command == "explain" else _audit)(request, network)


async def _explain(request: Request, network: NetworkReader) -> int:
    validator, hparams = network.validator(request.validator), network.hparams
    window = await _chosen(network, request.window, validator)
    report = await _scores(network, validator, window)
    power, known = hparams.power_normalisation, str(request.uid) in report.peer_scores
    shares = await ScoreEvidence(network.comms, hparams).shares(report, validator) if known else None
    text = explain(report, request.uid, power=power, shares=shares)
    if not known:
        raise ConfigError(text)
    print(text)  # noqa: T201 - the command's output
    return AGREES


async def _chosen(network: NetworkReader, asked: str, validator: int) -> int:
    """Return the window of this number, or the newest whose scores a validator has published.

    Raises:
        ConfigError: no scores are published.
        ChainUnavailable, StoreError: its windows can't be listed.
    """
    if asked != "latest":
        return int(asked)
    windows = await published_windows(network, validator, "scores")
    if not windows:
        raise ConfigError(f"validator {validator} has published no scores")
    return windows[-1]


async def _scores(network: NetworkReader, validator: int, window: int) -> ScoreReport:
    """Read the scores of a window.

    Raises:
        ConfigError: they are not published; the text names the windows that are.
        ScoresSealed: they are published later.
        ChainUnavailable, StoreError, PayloadError: they can't be read.
    """
    try:
        return await network.comms.get_scores(validator, window)
    except ScoresSealed:
        raise
    except ObjectNotFound as error:
        windows = await published_windows(network, validator, "scores")
        kept = network.hparams.gradient_retention_windows
        others = f"those that it has are of windows {windows[0]} to {windows[-1]}" if windows else "it has none"
        raise ConfigError(
            f"validator {validator} has published no scores of window {window}; {others} (some are skipped while it "
            f"catches up, and all are deleted after gradient_retention_windows, {kept})"
        ) from error


async def _audit(request: Request, network: NetworkReader) -> int:
    validator, hparams = network.validator(request.validator), network.hparams
    await asyncio.to_thread(check_outputs, {"--record": request.record}, "appended file")
    async with network.data_loader() as data_loader:
        start = await network.start_window()
        until = await _chosen(network, request.window, validator)
        if until < start:
            raise ConfigError(f"window {until} is before the run's first one, {start}: nothing to audit")
        with contextlib.suppress(PayloadError):  # the audit of that window names it as a difference
            await _scores(network, validator, until)
        with tempfile.TemporaryDirectory() as folder:
            device = check_device(network.arguments.device)
            train_state = await asyncio.to_thread(
                reading_state, network, request.source, start, Path(folder), device=device
            )
            window = await load_state(network, train_state, request.source, until=until)
            auditor = Auditor(train_state, window, data_loader, network.comms, hparams, validator=validator)
            found = await auditor.audit(until, scores_from=window if request.all else None)
    unexplained = await unexplained_weights(network, validator)
    compared = f"included sets and fingerprints, and the scores of {'all' if request.all else 'the last'}"
    agrees = f"AGREES: validator {validator}, windows {window} to {until}: {compared}"
    believed = [f"BELIEVED: {text}" for text in [*auditor.unverified, *([unexplained] if unexplained else [])]]
    lines = [f"DIFFERS: {found}" if found else agrees, *believed]
    print("\n".join(map(printable, lines)))  # noqa: T201
    if request.record:
        stamp = AuditStamp(
            first=window,
            last=until,
            validator=validator,
            agrees=not found,
            text=str(found) if found else compared,
        )
        await asyncio.to_thread(append_stamp, request.record, stamp)
    return DIFFERS if found else AGREES
