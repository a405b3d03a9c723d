"""Miners whose steps are steep: they have a large slope, and overshoot."""

from tplr.localnet.attackers import Honest, PlainGradient
from tplr.localnet.scenarios.base import EFFORT, LAUNCH, PAID_WINDOWS, Figures, Setting, live, mean, network, pay, ratio
from tplr.localnet.simulation import Member

HONEST, LITTLE = 4, 8  # miners of average effort; sequences of one more, and of each sender
STEEP = {"a sender of plain gradients": 1, "three senders of plain gradients": 3}
SHORTER, SCALE = "a sender of shorter plain gradients", 0.3


def plain_gradients(setting: Setting) -> Figures:
    """Simulate four honest miners of average effort and one of little, alone, and beside senders of plain gradients."""

    def beside(crew: list[Member]) -> tuple[list[float], float]:
        members = [*(Honest(EFFORT) for _ in range(HONEST)), Honest(LITTLE), *crew]
        world = live(network(setting, members), LAUNCH + PAID_WINDOWS)
        return pay(world, range(1, len(members) + 1)), world.held_out_loss()

    crews: dict[str, list[Member]] = {
        name: [PlainGradient("plain gradient", LITTLE) for _ in range(count)] for name, count in STEEP.items()
    }
    crews[SHORTER] = [PlainGradient("shorter plain gradient", LITTLE, SCALE)]
    _, without = beside([])
    found: Figures = {}
    for name, crew in crews.items():
        paid, loss = beside(crew)
        equal, steep = paid[HONEST], paid[HONEST + 1 :]  # the honest miner of little effort is paid least
        found[f"{name}: pay"] = sum(steep)
        found[f"{name}: over an honest miner of {LITTLE}"] = ratio(mean(steep), equal)
        found[f"{name}: loss"] = loss / without
    return found
