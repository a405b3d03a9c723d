"""The score board of a profile."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from tplr.hparams import HParams
from tplr.schemas import DocumentedScore, Evidence, PeerScore, ScoreReport
from tplr.scoring.board import Board, Outcome
from tplr.scoring.documented.board import DocumentedBoard


class ScoreBoard(Protocol):
    """A validator's evidence of past windows, and the scores that follow from it.

    Attributes:
        peer_scores: by uid, of the last window.
        finals: final scores by ascending uid.
        weights: each miner's share of the pay, by ascending uid, without zeros.
        follows_from: windows of the earlier reports that determine the current scores.
        newest: the last window that it has seen; -1 before the first.
    """

    hparams: HParams

    @property
    def peer_scores(self) -> Mapping[int, PeerScore | DocumentedScore]: ...

    @property
    def finals(self) -> dict[int, float]: ...

    @property
    def weights(self) -> dict[int, float]: ...

    @property
    def follows_from(self) -> tuple[int, ...]: ...

    @property
    def newest(self) -> int: ...

    def proven(self, uid: int) -> bool | None:
        """Return True if a miner is known to help the model, False if it is known not to, None if not known yet."""
        ...

    def sample(self, pool: Mapping[int, str], window: int, seed: int) -> tuple[int, ...]:
        """Return the uids of the pool (hotkeys by uid) to evaluate in ``window``, ascending."""
        ...

    def see(self, evidence: Evidence) -> Outcome:
        """Add a window's evidence."""
        ...

    def resume(self, reports: Iterable[ScoreReport]) -> None:
        """Continue from earlier reports, ascending."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state. Raises StateError for another version or shape; then nothing has changed."""
        ...


def score_board(hparams: HParams) -> ScoreBoard:
    """Create an empty board of the profile."""
    return DocumentedBoard(hparams) if hparams.profile == "documented" else Board(hparams)
