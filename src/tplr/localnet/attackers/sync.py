"""Miners that hold a different model, or publish no readable proof of their model."""

from tplr.keys import debug_key
from tplr.localnet.attackers.honest import Cheat
from tplr.localnet.simulation import World
from tplr.schemas import DebugReport


class OutOfSync(Cheat):
    """Applies only its own updates, so it trains a different model."""

    own_model = True

    async def act(self, world: World, window: int) -> None:
        """Publish like an honest miner, then apply only its own update."""
        body = self.body(world, window)
        assert body is not None
        await self.publish(world, window, body)
        self.train_state.apply([world.parse(body, window, self.uid)])


class NoProof(OutOfSync):
    """Trains a different model, and publishes a report that is too large to be read."""

    async def report(self, world: World, window: int) -> None:
        """Publish a report that is one byte larger than allowed."""
        await self.store.put(debug_key(window, self.uid, world.hparams.version), b" " * (DebugReport.max_bytes + 1))
