"""Validators that copy the weights of another one."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from tplr.hparams import HParams
from tplr.localnet.attackers import GoDark, HalfAbsent, Honest, Turncoat
from tplr.localnet.attackers.scores import Copied, copied_weights
from tplr.localnet.scenarios.base import EFFORT, LAUNCH, PAID_WINDOWS, Figures, Setting, live, mean, network
from tplr.localnet.scenarios.crowds import HONEST
from tplr.localnet.scenarios.harm import TURN
from tplr.localnet.simulation import VALIDATOR, Member


def score_copiers(setting: Setting) -> Figures:
    """Simulate validators that copy the honest validator's weights, in a network whose pay changes.

    Weights are set every ``windows_per_weights`` windows; that is an epoch here.
    """
    members: list[Member] = [Honest(effort) for effort in HONEST]
    members += [GoDark("go dark", EFFORT, last=LAUNCH + 8), HalfAbsent("absent every second window", EFFORT)]
    members += [Turncoat("turncoat", EFFORT, TURN)]
    world = network(setting, members)
    live(world, LAUNCH + PAID_WINDOWS)
    epoch = world.hparams.windows_per_weights
    sealed, clear = (world.hparams.model_copy(update={"sealed_scores": one}) for one in (True, False))

    async def copied(hparams: HParams, **how: Any) -> list[Copied]:
        reports = [await world.comms.get_scores(VALIDATOR, record.window) for record in world.records]
        with tempfile.TemporaryDirectory() as folder:
            return await copied_weights(reports, hparams, world.signer, Path(folder), **how)

    found: Figures = {}
    for name, how in {
        "reports in the clear": {"hparams": clear, "reveal": 0, "late": False},
        "sealed reports": {"hparams": sealed, "reveal": 0, "late": False},
        "sealed reports, a block after weights in the clear": {"hparams": sealed, "reveal": 0, "late": True},
        "sealed reports and weights": {"hparams": sealed, "reveal": epoch, "late": True},
    }.items():
        epochs = [one for one in asyncio.run(copied(**how)) if one.age is not None]
        found[f"score copier, {name}: epochs old"] = min((one.age or 0) / epoch for one in epochs)
        found[f"score copier, {name}: overlap"] = mean([one.overlap for one in epochs])
    return found
