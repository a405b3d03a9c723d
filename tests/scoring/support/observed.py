"""Miners that a validator observes, honest and with a single fault each, and their scores."""

from collections.abc import Callable, Sequence
from typing import Any

from tplr.hparams import load_hparams
from tplr.schemas import OUT_OF_SYNC, UNREAD, Evidence, PeerObservation, PeerScore, Reason
from tplr.scoring.board import Board
from tplr.scoring.measured_window import MeasuredWindow

PAY_WINDOWS = 6
HPARAMS = load_hparams().model_copy(
    update={"pay_windows": PAY_WINDOWS, "power_normalisation": 1.0, "sync_max_steps_behind": 3}
)
UIDS = (1, 2, 3, 4, 5, 6)
NO_UPDATE: dict[str, Any] = {"included": False, "evaluation": None, "assigned_pages": None}
# Each changes an observation into one of a miner with a single fault.
WRONGS: dict[str, dict[str, Any]] = {
    **{reason.value: {"verdict": reason.value, **NO_UPDATE} for reason in Reason},
    "wrong_pages": {"assigned_pages": False, "evaluation": None},
    "another_model": {"behind": OUT_OF_SYNC},
    "unread": {"behind": UNREAD},
    "far_behind": {"behind": 4},
    "gone": {"verdict": None, "listed": False, "sampled": False, **NO_UPDATE},
}


def paid(windows: Sequence[Evidence]) -> dict[int, PeerScore]:
    """Return the scores after these windows. A board remembers only evidence, so those before are not computed."""
    *earlier, last = windows
    board = Board(HPARAMS)
    board._windows = tuple(MeasuredWindow(one, HPARAMS) for one in earlier)
    return dict(board.see(last).peer_scores)


def good(observation: Callable[..., PeerObservation], uids: Sequence[int] = UIDS) -> dict[int, PeerObservation]:
    return {uid: observation(uid) for uid in uids}
