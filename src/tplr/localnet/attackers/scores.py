"""Simulates a validator without a model that copies its weights from an honest one's reports or weights.

The honest validator publishes and pays with the code of nodes; chain and bucket are in memory.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, cast

from tplr.errors import ObjectNotFound
from tplr.exchange import scores
from tplr.exchange.envelope import Signer
from tplr.hparams import HParams
from tplr.node.payment import Payment
from tplr.node.replica import NodeContext
from tplr.node.score_reports import ScoreReports
from tplr.schemas import ScoreReport, ScoreSeal
from tplr.storage import MemoryStore
from tplr.telemetry import Telemetry

Weights = Mapping[int, float]


class Known(NamedTuple):
    """Publicly readable weights, and the window whose scores they come from; -1: there are none."""

    scored: int = -1
    weights: Weights = MappingProxyType({})


class Copied(NamedTuple):
    """The weights that a copier could set when an honest validator set weights, compared with the honest ones.

    Attributes:
        age: windows between the scores of both; None: there was nothing to copy.
        overlap: pay that both agree on: 1 if they are equal, 0 if they pay no miner in common.
    """

    age: int | None
    overlap: float


def overlap(one: Weights, other: Weights) -> float:
    """Return the share of the pay that two rows of weights, each with sum 1, agree on."""
    return sum(min(weight, other.get(uid, 0.0)) for uid, weight in one.items())


class _Chain:
    """One validator's weights on chain, readable ``reveal`` windows after it set them, and its bucket."""

    def __init__(self, signer: Signer, reveal: int) -> None:
        self.uid = signer.uid
        self.window = self.block = self.scored = -1
        self.store = MemoryStore("honest", clock=lambda: 0.0)
        self.chain = self.clock = self
        self._signer = signer
        self._reveal = reveal
        self._set: list[tuple[int, Known]] = []

    async def set_weights(self, weights: Weights) -> int:
        self._set.append((self.window, Known(self.scored, dict(weights))))
        return self.block

    async def max_weight(self) -> float:
        return 1.0

    async def weights(self) -> dict[int, Weights]:
        return {self.uid: self.in_force.weights}

    @property
    def in_force(self) -> Known:
        shown = [known for window, known in self._set if window + self._reveal <= self.window]
        return shown[-1] if shown else Known()

    async def put_scores(self, report: ScoreReport) -> None:
        await scores.put_scores(self.store, report, self._signer)

    async def put_scores_seal(self, seal: ScoreSeal) -> None:
        await scores.put_seal(self.store, seal, self._signer)


async def copied_weights(
    reports: Sequence[ScoreReport], hparams: HParams, signer: Signer, folder: Path, *, reveal: int, late: bool
) -> list[Copied]:
    """Return the weights that a copier could set each time an honest validator with these reports sets weights.

    Args:
        reports: the honest validator's, of consecutive windows.
        folder: for its sealed reports.
        reveal: windows until the chain shows weights: 0 if it does not seal them.
        late: whether the copier sets its weights after the honest validator in that window, or before.
    """
    chain = _Chain(signer, reveal)
    telemetry = Telemetry(role="validator", uid=signer.uid, listeners=())
    comms = cast(Any, chain)
    payment = Payment(cast(NodeContext, SimpleNamespace(comms=comms, telemetry=telemetry)), hparams)
    publishing = ScoreReports(comms, telemetry, hparams, folder)

    async def known(newest: int) -> Known:
        """Return the newest weights that anybody can read."""
        for window in range(newest, chain.in_force.scored, -1):
            try:
                report = await scores.get_scores(chain.store, window, signer, hparams)
            except ObjectNotFound:
                continue
            return Known(window, {int(uid): weight for uid, weight in report.weights.items()})
        return chain.in_force

    found = []
    for report in reports:
        present = report.window + hparams.validator_offset
        chain.window, chain.block, chain.scored = present, present, report.window
        weights = {int(uid): weight for uid, weight in report.weights.items()}
        await publishing.publish(report, weights_due=payment.next_due(present))
        due = bool(weights) and payment.due(present, weights)
        copied = await known(report.window)
        if due:
            await payment.pay(present, weights, scored=report.window)
        await publishing.release(await payment.in_force(), newest=present)
        if due:
            copied = await known(report.window) if late else copied
            age = report.window - copied.scored if copied.weights else None
            found.append(Copied(age, overlap(copied.weights, weights)))
    return found
