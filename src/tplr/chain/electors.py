"""The electors of a window: the validators that decide, by stake, which updates all nodes apply."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from tplr.chain.base import Metagraph

RAO = 10**9  # per alpha
PARTS = 10**6  # shares are compared in millionths, without floating point


@dataclass(frozen=True)
class Elector:
    """One validator with a vote; ``stake`` in rao."""

    uid: int
    hotkey: str
    stake: int


@dataclass(frozen=True)
class Electors:
    """All electors of a window in rank order: by descending stake, ties by hotkey."""

    ranked: tuple[Elector, ...]

    @cached_property
    def uids(self) -> tuple[int, ...]:
        """The electors' uids in rank order."""
        return tuple(one.uid for one in self.ranked)

    @cached_property
    def total(self) -> int:
        """The stake of all electors."""
        return sum(one.stake for one in self.ranked)

    @cached_property
    def _by_uid(self) -> dict[int, Elector]:
        return {one.uid: one for one in self.ranked}

    def __contains__(self, uid: int) -> bool:
        return uid in self._by_uid

    def hotkey(self, uid: int) -> str:
        """Return the hotkey of elector ``uid``. Raises KeyError."""
        return self._by_uid[uid].hotkey

    def stake(self, uids: Iterable[int]) -> int:
        """Return the total stake of these uids; a uid that is not an elector has none."""
        return sum(self._by_uid[uid].stake for uid in {*uids} if uid in self._by_uid)

    def outweighs(self, uids: Iterable[int]) -> bool:
        """Return whether these uids have more than half of the electors' stake."""
        return 2 * self.stake(uids) > self.total

    def rotated(self, places: int) -> "Electors":
        """Return the electors rotated by ``places``, so that a silent one does not cost the first slot every time."""
        places %= max(1, len(self.ranked))
        return Electors(self.ranked[places:] + self.ranked[:places])

    def proposer(self, slot: int) -> int:
        """Return the proposer's uid in ``slot``. Raises ZeroDivisionError without electors."""
        return self.ranked[slot % len(self.ranked)].uid


def electors_of(metagraph: Metagraph, buckets: Collection[int], share: float) -> Electors:
    """Return the electors as of one block.

    Candidates are the ``1 / share`` permit holders with a bucket that have the most stake. A candidate with at least
    ``share`` of the candidates' stake is an elector. So the largest candidate is always an elector, and there are at
    most ``1 / share`` electors.

    Args:
        buckets: uids with a valid bucket on chain.
        share: in (0, 1], compared in millionths.
    """
    able = [
        Elector(neuron.uid, neuron.hotkey, stake)
        for neuron in metagraph.neurons
        if neuron.permit and neuron.uid in buckets and (stake := round(neuron.stake * RAO)) > 0
    ]
    able.sort(key=lambda one: (-one.stake, one.hotkey.encode()))
    parts = round(share * PARTS)
    candidates = able[: PARTS // parts]
    total = sum(one.stake for one in candidates)
    return Electors(tuple(one for one in candidates if one.stake * PARTS >= total * parts))
