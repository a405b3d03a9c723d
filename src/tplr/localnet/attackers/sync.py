"""Miners that hold another model, or do not prove which they hold."""

from tplr.keys import debug_key
from tplr.localnet.attackers.honest import Cheat
from tplr.localnet.simulation import World
from tplr.schemas import DebugReport


class OutOfSync(Cheat):
    """Applies only its own updates, and so trains another model."""

    own_model = True

    async def act(self, world: World, window: int) -> None:
        """Publish as an honest miner, then take a step of its own."""
        body = self.body(world, window)
        assert body is not None
        await self.publish(world, window, body)
        self.train_state.apply([world.parse(body, window, self.uid)])


class NoProof(OutOfSync):
    """Trains another model, and publishes a report that is too large to be read."""

    async def report(self, world: World, window: int) -> None:
        """One byte more than a report may have."""
        await self.store.put(debug_key(window, self.uid, world.hparams.version), b" " * (DebugReport.max_bytes + 1))
