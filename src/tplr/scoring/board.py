"""The scores a validator keeps: one entry a miner, moved by each evaluation."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tplr.errors import StateError
from tplr.scoring.measures import Measurement, binary_indicator, gradient_score

VERSION = 1


@dataclass(frozen=True)
class Entry:
    """What is kept of one miner.

    Attributes:
        hotkey: a uid that changes hands starts anew.
        score: moving average of the gradient score, clipped at 0 each time: never negative.
        binary: moving average of the binary indicator, in [-1, 1]; kept and published, not yet part of the weight.
        last_window: of its last evaluation.
    """

    hotkey: str
    score: float = 0.0
    binary: float = 0.0
    evaluations: int = 0
    last_window: int = -1


class ScoreBoard:
    """Entries by uid. Evaluations of one window may come in any order."""

    def __init__(self, *, alpha: float) -> None:
        self._alpha = alpha
        self._entries: dict[int, Entry] = {}

    @property
    def entries(self) -> dict[int, Entry]:
        """A copy, by ascending uid."""
        return dict(sorted(self._entries.items()))

    @property
    def scores(self) -> dict[int, float]:
        """Score by ascending uid."""
        return {uid: entry.score for uid, entry in self.entries.items()}

    def follow(self, hotkeys: Mapping[int, str]) -> None:
        """Keep who is still registered under the same hotkey; forget the rest."""
        self._entries = {uid: entry for uid, entry in self._entries.items() if hotkeys.get(uid) == entry.hotkey}

    def record(self, window: int, measured: Iterable[Measurement], hotkeys: Mapping[int, str]) -> None:
        """Move the entries of the miners that were measured in ``window``."""
        for one in measured:
            entry = self._entries.get(one.uid) or Entry(hotkey=hotkeys[one.uid])
            self._entries[one.uid] = replace(
                entry,
                score=self._average(entry.score, max(0.0, gradient_score(one)), entry.evaluations),
                binary=self._average(entry.binary, binary_indicator(one), entry.evaluations),
                evaluations=entry.evaluations + 1,
                last_window=window,
            )

    def _average(self, old: float, new: float, count: int) -> float:
        # The plain mean until 1/alpha evaluations are in: a first value must not count for ever, nor a zero start.
        weight = max(self._alpha, 1 / (count + 1))
        return old + weight * (new - old)

    def state_dict(self) -> dict[str, Any]:
        """A fresh plain structure."""
        return {"version": VERSION, "entries": {str(uid): asdict(entry) for uid, entry in self.entries.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state; StateError if it is of another version or shape."""
        if set(state) != {"version", "entries"} or state["version"] != VERSION:
            raise StateError(f"scores: expected version {VERSION} with entries, got {sorted(state)}")
        try:
            self._entries = {int(uid): Entry(**entry) for uid, entry in state["entries"].items()}
        except (TypeError, ValueError, AttributeError) as error:
            raise StateError(f"scores: malformed entry: {error}") from error
