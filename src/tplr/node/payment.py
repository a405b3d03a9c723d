"""Sets weights on chain when they are due, retries on refusal, and reads them back."""

from collections.abc import Mapping
from typing import NamedTuple

from tplr.chain.rules import capped
from tplr.errors import ChainError, RateLimited, UnsupportedRuntime
from tplr.hparams import HParams
from tplr.logging import logger
from tplr.node.replica import NodeContext
from tplr.schemas import WeightsSet

# Largest accepted sum of differences, over all uids, between set weights and those on chain, which have 16 bits.
ROUNDING = 0.01


def difference(row: Mapping[int, float], weights: Mapping[int, float], max_weight: float) -> float:
    """Return the sum of differences, by uid, between weights on chain and those that setting ``weights`` gives.

    Args:
        weights: above 0. They sum to 1; others, which a report may state, are compared as they are.
        max_weight: as in ``Chain``.
    """
    if max(weights.values(), default=0.0) > max_weight and abs(sum(weights.values()) - 1) <= ROUNDING:
        weights = capped(weights, max_weight)
    return sum(abs(row.get(uid, 0.0) - weights.get(uid, 0.0)) for uid in row.keys() | weights.keys())


class _Set(NamedTuple):
    """Weights that were set, and the newest window whose scores they are based on."""

    scored: int
    weights: Mapping[int, float]


class Payment:
    """Sets weights every ``windows_per_weights`` windows; after a refusal it retries in the next window.

    Attributes:
        last: the weights last set, and as read back; None before the first time.
    """

    def __init__(self, context: NodeContext, hparams: HParams) -> None:
        self._comms = context.comms
        self._telemetry = context.telemetry
        self._every = hparams.windows_per_weights
        self._pay_windows = hparams.pay_windows
        self._burn_uid = hparams.burn_uid
        self._burned = False  # the last weights went to the burn uid
        self._next_window = 0
        self._not_before_block = 0
        self._unconfirmed: list[_Set] = []
        self.last: WeightsSet | None = None

    def next_due(self, window: int) -> int:
        """Return the next window, from ``window`` on, in which weights are due."""
        return max(window, self._next_window)

    def due(self, window: int, weights: Mapping[int, float]) -> bool:
        """Return whether to set ``weights`` in ``window``; after burned weight, at once when a miner has a score."""
        due = window >= self._next_window or (self._burned and bool(weights))
        return due and self._comms.clock.block >= self._not_before_block

    async def pay(self, window: int, weights: Mapping[int, float], *, scored: int, unpaid_windows: int = 0) -> None:
        """Set ``weights`` (shares by uid) and read them back. A refusal is logged, not raised.

        Args:
            scored: newest window whose scores they are based on.
            unpaid_windows: number of consecutive measured windows without a miner's score; from ``pay_windows`` on, the
                burn uid gets all weight.
        """
        if burned := not weights:
            weights = self._burn(unpaid_windows)
        if not weights:
            return
        try:
            block = await self._comms.set_weights(weights)
        except RateLimited as error:
            self._not_before_block = error.retry_at or 0
            self._report_problem(f"weights not set, rate limited by the chain: {error}")
            return
        except (ChainError, UnsupportedRuntime) as error:
            self._report_problem(f"weights not set: {error}")
            return
        self._next_window, self._burned = window + self._every, burned
        self._unconfirmed.append(_Set(scored, dict(weights)))
        intended = {str(uid): weight for uid, weight in weights.items()}
        self.last = WeightsSet(block=block, intended=intended, on_chain=await self._read_back())
        logger.info("weights set in block %d: %s", block, {uid: round(weight, 4) for uid, weight in weights.items()})
        self._telemetry.emit("weights", block=block, weights=intended, on_chain=self.last.on_chain)

    def _burn(self, unpaid_windows: int) -> Mapping[int, float]:
        """Return the weights for when no miner has a score; empty to keep those on chain."""
        if unpaid_windows < self._pay_windows:
            logger.info("no weights to set: no miner has a score above 0")
            return {}
        if self._burn_uid is not None:
            return {self._burn_uid: 1.0}
        if unpaid_windows % self._pay_windows == 0:
            self._report_problem(
                f"no miner has had a score above 0 for {unpaid_windows} windows: set burn_uid, or old weights stay "
                "on chain"
            )
        return {}

    async def in_force(self) -> int | None:
        """Return the newest window whose scores the weights in force are based on; None if no new ones are in force.

        If the chain seals weights (commit-reveal), they come into force some epochs after they were set.
        """
        if not self._unconfirmed:
            return None
        row = {int(uid): weight for uid, weight in (await self._read_back()).items()}
        try:
            limit = await self._comms.chain.max_weight()
        except ChainError as error:
            self._report_problem(f"weights not compared with those on chain: {error}")
            return None
        for index, one in reversed(list(enumerate(self._unconfirmed))):
            if difference(row, one.weights, limit) <= ROUNDING:
                del self._unconfirmed[: index + 1]
                return one.scored
        return None

    async def _read_back(self) -> dict[str, float]:
        """Read this validator's weights in force; with commit-reveal, these were set earlier."""
        try:
            rows = await self._comms.chain.weights()
            own = rows.get(self._comms.uid, {})
        except ChainError as error:
            self._report_problem(f"weights not read back: {error}")
            return {}
        return {str(uid): weight for uid, weight in sorted(own.items())}

    def _report_problem(self, text: str) -> None:
        logger.warning("%s", text)
        self._telemetry.emit("problem", text=text)
