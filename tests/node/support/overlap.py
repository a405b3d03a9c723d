"""Miners with ``outer_delay`` 1 whose training lasts until the window's end, so that a set can interrupt it."""

import time
from typing import Any

from tplr.hparams import HParams
from tplr.node.miner import Miner

# Windows of 8 s: four nodes in one process keep up.
CONSTANTS = {
    "outer_delay": 1,
    "blocks_per_window": 16,
    "time_window_delta_seconds": 3,
    "commit_margin_seconds": 1.5,
    "minimum_peers": 2,
    "pages_per_window": 4,
    "manifest_timeout_seconds": 1.0,
    "checkpoint_frequency": 2,
}
INNER_STEPS = 1000
BATCH_SECONDS = 0.25


def many_steps(hparams: HParams) -> HParams:
    """With so many inner steps in a window that only its end ends it."""
    assert hparams.sparseloco is not None
    constants = hparams.sparseloco.model_copy(update={"inner_steps": INNER_STEPS})
    return hparams.model_copy(update={"sparseloco": constants})


class BusyMiner(Miner):
    """Its device needs so long for a batch that training never ends before its time, and there is one to interrupt.

    Attributes:
        interrupted: windows in whose training an earlier one was applied, and that were trained further.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.interrupted: set[int] = set()
        self._lacked: dict[int, int] = {}  # by trained window: the window that was to be applied when it began

    @property
    def training(self) -> bool:
        """Whether a window's training has begun and not ended; it may be paused."""
        return self._training is not None

    @property
    def paused(self) -> bool:
        """Whether a training is paused between two inner steps."""
        return self._train_state._unfinished is not None

    @property
    def expects(self) -> bool:
        """Whether a training that runs now is from weights with the expected step of this miner's own update."""
        return self.training and not self.paused and self._train_state._own is not None

    def _out_of_time(self) -> bool:
        time.sleep(BATCH_SECONDS)  # in the training's thread
        if (window := self._training) is not None and self._replica.window > self._lacked.setdefault(
            window, self._replica.window
        ):
            self.interrupted.add(window)
        return super()._out_of_time()


def began_before_it_held(stage: Any, node: str) -> list[int]:
    """Windows whose training ``node`` began before, and ended after, it had applied the window before."""
    applied = [(event["window"], event["time"]) for event in stage.of("applied", node)]
    return [
        event["window"]
        for event in stage.of("trained", node)
        if any(
            window == event["window"] - 1 and event["time"] - event["seconds"] < when < event["time"]
            for window, when in applied
        )
    ]
