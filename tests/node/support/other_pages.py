"""A miner that trains on other pages than the assigned ones, and says so."""

from tplr.localnet.attackers import WrongPages
from tplr.localnet.simulation import World


class OtherPages(WrongPages):
    """Trains on other pages, and reports them truthfully."""

    def body(self, world: World, window: int) -> bytes | None:
        return self.outer.pack(
            self.tensors(world, window),
            step=world.train_state.global_step,
            window=window,
            uid=self.uid,
            pages_digest="0" * 64,
            batches=self.effort,
        )
