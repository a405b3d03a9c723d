"""The electors' decisions, as pure functions of their votes: every node gets the same result.

If honest electors hold more than half of the stake, at least one honest elector knows each hash with votes of more than
half of the stake.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tplr.chain.electors import Electors
from tplr.exchange.aggregates import Included, IncludedSet
from tplr.exchange.ballots import VOID_WITHIN, Value, Vote
from tplr.schemas import PeerList, Reason

T = TypeVar("T")


class Question(Protocol):
    """The subject of an election: how a value follows from votes."""

    def tally(self, votes: Mapping[int, Vote], electors: Electors, slot: int) -> Value | None:
        """Return the value that follows from these votes (by uid) if proposed in ``slot``, or None if there is none."""
        ...


@dataclass(frozen=True, kw_only=True)
class WindowQuestion:
    """Decides the included updates of a window and the next peer list.

    Attributes:
        listed: the peer list in effect.
        size: of an update, in bytes.
        at_most: maximum number of peers in a list.
        effective: first window of a list that is decided.
        lists_until: from this slot on no list is decided, because it could already be in effect.
        void_from: from this slot on the window is void: no update is applied.
    """

    window: int
    version: str
    listed: PeerList
    size: int
    at_most: int
    effective: int
    lists_until: int
    void_from: int

    def tally(self, votes: Mapping[int, Vote], electors: Electors, slot: int) -> Value | None:
        if slot >= self.void_from:
            return void(self.window, self.version)
        if not electors.outweighs(votes):
            return None
        included = tally_updates(votes, electors, self)
        listing = slot < self.lists_until
        peers = tally_peers(votes, electors, self) if listing else None
        return Value(included=included, peers=peers, voided=tally_lost(votes, electors, self.window))


@dataclass(frozen=True, kw_only=True)
class StartQuestion:
    """Decides the initial peer list, whose first effective window is the start of the run.

    Attributes:
        margin: number of windows between the slot, which is a window here, and the start.
    """

    version: str
    at_most: int
    margin: int

    def tally(self, votes: Mapping[int, Vote], electors: Electors, slot: int) -> Value | None:
        first = _First(slot, self.at_most, slot + self.margin)
        peers = tally_peers(votes, electors, first)
        if peers is None:
            return None
        return void(0, self.version).model_copy(update={"peers": peers.model_copy(update={"initial_selection": True})})


@dataclass(frozen=True)
class _First:
    window: int
    at_most: int
    effective: int


class _ListRules(Protocol):
    @property
    def window(self) -> int: ...

    @property
    def at_most(self) -> int: ...

    @property
    def effective(self) -> int: ...


def void(window: int, version: str) -> Value:
    """Return the value of a window in which no update is applied."""
    empty = IncludedSet(window=window, version=version, included=(), skipped={}, success_rate=0.0)
    return Value(included=empty, peers=None)


def supported(votes: Mapping[int, Vote], electors: Electors) -> dict[int, str]:
    """Return, by ascending uid, the hash of its update that more than half of the electors' stake has found."""
    voters: dict[tuple[int, str], list[int]] = {}
    for elector, vote in votes.items():
        for uid, sha256 in vote.found.items():
            voters.setdefault((int(uid), sha256), []).append(elector)
    return {uid: sha256 for (uid, sha256), who in sorted(voters.items()) if electors.outweighs(who)}


def tally_updates(votes: Mapping[int, Vote], electors: Electors, question: WindowQuestion) -> IncludedSet:
    """Return the listed peers with a supported update; the next reserve peer replaces each missing one."""
    found, listed = supported(votes, electors), question.listed
    peers = [uid for uid in listed.peers if uid in found]
    reserve = [uid for uid in listed.reserve_peers if uid in found and uid not in listed.peers]
    counted = sorted({*peers, *reserve[: len(listed.peers) - len(peers)]})
    reasons = {uid: _reason(uid, votes, electors) for uid in {*listed.peers, *listed.reserve_peers} - found.keys()}
    # Excluded reserve peers are also named, so that a node that assembles the set later does not include them.
    named = {uid: why for uid, why in reasons.items() if why is Reason.EXCLUDED or uid in listed.peers}
    return IncludedSet(
        window=question.window,
        version=question.version,
        included=tuple(Included(uid=uid, sha256=found[uid], size=question.size) for uid in counted),
        skipped={str(uid): named[uid] for uid in sorted(named)},
        success_rate=len(counted) / (len(counted) + len(named)) if counted else 0.0,
    )


def tally_lost(votes: Mapping[int, Vote], electors: Electors, window: int) -> tuple[int, ...]:
    """Return the windows before ``window`` that more than half of the electors' stake reports as lost, ascending."""
    lately = range(window - VOID_WITHIN, window)
    return tuple(one for one in lately if electors.outweighs(uid for uid, vote in votes.items() if one in vote.lost))


def _reason(uid: int, votes: Mapping[int, Vote], electors: Electors) -> Reason:
    """Return the reason with the most stake; ties go to the first by name.

    UNAVAILABLE if no elector gives a reason: then electors found different updates.
    """
    stake: Counter[Reason] = Counter()
    for elector, vote in votes.items():
        if why := vote.missing.get(str(uid)):
            stake[why] += electors.stake([elector])
    return min(stake, key=lambda why: (-stake[why], why.value), default=Reason.UNAVAILABLE)


def tally_peers(votes: Mapping[int, Vote], electors: Electors, rules: _ListRules) -> PeerList | None:
    """Return the next peer list; None to keep the present one, unless more than half of the stake votes for a list.

    A uid needs more than half of the stake for each role. It becomes a peer if that stake names it as a peer and the
    list is not full. Otherwise it is in the reserve if that stake names it as a peer or in the reserve. It is on
    probation if that stake names it in any role and it is not a peer. Peers and reserve are ranked by the stake that
    names them as a peer, then by their stake-weighted mean position, then by uid.
    """
    wishes = {elector: vote.peers for elector, vote in votes.items() if vote.peers is not None}
    if not electors.outweighs(wishes):
        return None
    chosen = {elector: [*wish.peers, *wish.reserve_peers] for elector, wish in wishes.items()}
    as_peer = _by_uid({elector: wish.peers for elector, wish in wishes.items()})
    as_listed = _by_uid(chosen)
    as_named = _by_uid({elector: [*chosen[elector], *wish.probation] for elector, wish in wishes.items()})

    def order(uid: int) -> tuple[int, int, int]:
        places = sum(electors.stake([one]) * chosen[one].index(uid) for one in as_listed[uid])
        # The mean is an integer, so that the order does not depend on floating-point rounding.
        return -electors.stake(as_peer.get(uid, ())), places // electors.stake(as_listed[uid]), uid

    listed = sorted((uid for uid, who in as_listed.items() if electors.outweighs(who)), key=order)
    peers = [uid for uid in listed if electors.outweighs(as_peer.get(uid, ()))][: rules.at_most]
    probation = [uid for uid, who in as_named.items() if electors.outweighs(who) and uid not in peers]
    return PeerList(
        peers=tuple(sorted(peers)),
        reserve_peers=tuple(uid for uid in listed if uid not in peers),
        probation=tuple(sorted(probation)),
        initial_selection=False,
        sync_window=rules.window,
        first_effective_window=rules.effective,
    )


def _by_uid(named: Mapping[int, Iterable[int]]) -> dict[int, set[int]]:
    """Invert a mapping from electors to the uids they name: return the electors that name each uid."""
    who: dict[int, set[int]] = {}
    for elector, uids in named.items():
        for uid in uids:
            who.setdefault(uid, set()).add(elector)
    return who


def majority(said: Mapping[int, T], electors: Electors) -> T | None:
    """Return the statement that electors with more than half of the stake share, or None; ``said``: by uid."""
    seen: list[T] = []
    for one in said.values():
        if one not in seen:
            seen.append(one)
            if electors.outweighs([uid for uid, other in said.items() if other == one]):
                return one
    return None
