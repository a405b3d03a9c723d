"""Collects a validator's observations of a window, and builds the score report from them."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tplr.errors import ChainUnavailable, DataError, PayloadError, StoreError, TrainingError
from tplr.logging import logger
from tplr.schemas import Alignment, Evidence, PeerObservation, ScoreReport, WeightsSet
from tplr.scoring.board import Outcome
from tplr.scoring.profiles import ScoreBoard


@dataclass
class Observation:
    """The observations of a window by uid, and the other contents of its score report."""

    window: int
    observations: dict[int, PeerObservation]
    alignment: Alignment | None = None
    held_out_pages: str = ""
    faults: list[str] = field(default_factory=list)

    @property
    def evidence(self) -> Evidence:
        """The evidence that scores are computed from."""
        return Evidence(
            window=self.window,
            observations={str(uid): one for uid, one in sorted(self.observations.items())},
            alignment=self.alignment,
        )

    def note(self, uid: int, **seen: Any) -> None:
        """Set fields of the observation of ``uid``; ignored if it is not a miner."""
        if uid in self.observations:
            self.observations[uid] = self.observations[uid].model_copy(update=seen)

    @contextlib.contextmanager
    def own_fault(self, what: str) -> Iterator[None]:
        """Record a failure within the block as this validator's own fault."""
        try:
            yield
        except (ChainUnavailable, DataError, PayloadError, StoreError, TrainingError) as error:
            logger.warning("window %d: %s: %s", self.window, what, error)
            self.faults.append(f"{what}: {error}")


def score_report(
    seen: Observation, outcome: Outcome, board: ScoreBoard, *, uid: int, weights_set: WeightsSet | None
) -> ScoreReport:
    """Build the score report that validator ``uid`` publishes."""
    evidence = seen.evidence
    return ScoreReport(
        window=seen.window,
        uid=uid,
        profile=board.hparams.profile,
        held_out_pages=seen.held_out_pages,
        faults=tuple(seen.faults),
        observations=evidence.observations,
        alignment=evidence.alignment,
        follows_from=board.follows_from,
        peer_scores={str(uid): one for uid, one in sorted(outcome.peer_scores.items())},
        struck={str(uid): codes for uid, codes in sorted(outcome.struck.items())},
        weights={str(uid): weight for uid, weight in board.weights.items()},
        weights_set=weights_set,
    ).sealed()
