"""Setting weights on chain: when they are due, until they are there, and what the chain then says."""

from collections.abc import Mapping

from tplr.errors import ChainError, RateLimited
from tplr.hparams import HParams
from tplr.logging import logger
from tplr.node.replica import NodeContext
from tplr.schemas import WeightsSet


class Payment:
    """Pays every ``windows_per_weights`` windows; what the chain refuses is tried again with the next window.

    Attributes:
        last: what was last set, and read back; None before.
    """

    def __init__(self, context: NodeContext, hparams: HParams) -> None:
        self._comms = context.comms
        self._telemetry = context.telemetry
        self._every = hparams.windows_per_weights
        self._next_window = 0
        self._not_before_block = 0
        self.last: WeightsSet | None = None

    def due(self, window: int) -> bool:
        """Whether it is time to pay."""
        return window >= self._next_window and self._comms.clock.block >= self._not_before_block

    async def pay(self, window: int, weights: Mapping[int, float]) -> None:
        """Set ``weights`` (shares by uid) and read them back. Never raises for what the chain says."""
        if not weights:
            logger.info("no weights to set: nobody has a score above 0 yet")
            return
        try:
            block = await self._comms.set_weights(weights)
        except RateLimited as error:
            self._not_before_block = error.retry_at or 0
            self._complain(f"weights not set, the chain wants them later: {error}")
            return
        except ChainError as error:
            self._complain(f"weights not set: {error}")
            return
        self._next_window = window + self._every
        intended = {str(uid): weight for uid, weight in weights.items()}
        self.last = WeightsSet(block=block, intended=intended, on_chain=await self._read_back())
        logger.info("weights set in block %d: %s", block, {uid: round(weight, 4) for uid, weight in weights.items()})
        self._telemetry.emit("weights", block=block, weights=intended, on_chain=self.last.on_chain)

    async def _read_back(self) -> dict[str, float]:
        """This validator's weights in force; where the chain seals weights for a while, those set before."""
        try:
            rows = await self._comms.chain.weights()
            own = rows.get(self._comms.uid, {})
        except ChainError as error:
            self._complain(f"weights set, but not read back: {error}")
            return {}
        return {str(uid): weight for uid, weight in sorted(own.items())}

    def _complain(self, text: str) -> None:
        logger.warning("%s", text)
        self._telemetry.emit("problem", text=text)
