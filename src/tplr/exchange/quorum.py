"""What electors decide together: pure functions of their votes, the same on every node.

A hash with votes of more than half of the electors' stake is known to at least one honest elector, as long as the
honest ones hold more than half.
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
    """What a value is decided about."""

    def tally(self, votes: Mapping[int, Vote], electors: Electors, slot: int) -> Value | None:
        """The value that follows from these votes by uid, if it is proposed in ``slot``; None: there is none."""
        ...


@dataclass(frozen=True, kw_only=True)
class WindowQuestion:
    """Which updates a window consists of, and which peer list follows.

    Attributes:
        listed: the peer list in effect.
        size: of an update, in bytes.
        at_most: peers of a list.
        effective: first window of a list that is decided.
        lists_until: later slots decide no list: it could be in effect already.
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
    """Which peer list the run starts with, and so in which window: the list's first one.

    Attributes:
        margin: windows between the slot, which is a window here, and the start.
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
    """The value of a window in which nothing is applied."""
    empty = IncludedSet(window=window, version=version, included=(), skipped={}, success_rate=0.0)
    return Value(included=empty, peers=None)


def supported(votes: Mapping[int, Vote], electors: Electors) -> dict[int, str]:
    """By uid, ascending: the hash of its update that more than half of the electors' stake has found."""
    voters: dict[tuple[int, str], list[int]] = {}
    for elector, vote in votes.items():
        for uid, sha256 in vote.found.items():
            voters.setdefault((int(uid), sha256), []).append(elector)
    return {uid: sha256 for (uid, sha256), who in sorted(voters.items()) if electors.outweighs(who)}


def tally_updates(votes: Mapping[int, Vote], electors: Electors, question: WindowQuestion) -> IncludedSet:
    """The listed peers with a supported update; each missing one is replaced by the next of the reserve."""
    found, listed = supported(votes, electors), question.listed
    peers = [uid for uid in listed.peers if uid in found]
    reserve = [uid for uid in listed.reserve_peers if uid in found and uid not in listed.peers]
    counted = sorted({*peers, *reserve[: len(listed.peers) - len(peers)]})
    reasons = {uid: _reason(uid, votes, electors) for uid in {*listed.peers, *listed.reserve_peers} - found.keys()}
    # Excluded reserve peers are named too: whoever looks for the set later must not fill in with them.
    named = {uid: why for uid, why in reasons.items() if why is Reason.EXCLUDED or uid in listed.peers}
    return IncludedSet(
        window=question.window,
        version=question.version,
        included=tuple(Included(uid=uid, sha256=found[uid], size=question.size) for uid in counted),
        skipped={str(uid): named[uid] for uid in sorted(named)},
        success_rate=len(counted) / (len(counted) + len(named)) if counted else 0.0,
    )


def tally_lost(votes: Mapping[int, Vote], electors: Electors, window: int) -> tuple[int, ...]:
    """The windows before ``window`` that more than half of the electors' stake says are lost, ascending."""
    lately = range(window - VOID_WITHIN, window)
    return tuple(one for one in lately if electors.outweighs(uid for uid, vote in votes.items() if one in vote.lost))


def _reason(uid: int, votes: Mapping[int, Vote], electors: Electors) -> Reason:
    """The reason with the most stake, among equals the first by name; if none is given, electors saw it differ."""
    stake: Counter[Reason] = Counter()
    for elector, vote in votes.items():
        if why := vote.missing.get(str(uid)):
            stake[why] += electors.stake([elector])
    return min(stake, key=lambda why: (-stake[why], why.value), default=Reason.UNAVAILABLE)


def tally_peers(votes: Mapping[int, Vote], electors: Electors, rules: _ListRules) -> PeerList | None:
    """The next peer list; None, so that the present one stays, unless more than half of the stake wants another.

    Whom more than half of the stake names as a peer is one, or in the reserve if there are too many; whom it names as a
    peer or in the reserve is in the reserve; whom it names at all is on probation. The order is by the stake that
    names a uid as a peer, then by the mean place by stake, then by uid.
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
        # The mean is compared as an integer: no float takes part.
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
    """Who names each uid, from whom each elector names."""
    who: dict[int, set[int]] = {}
    for elector, uids in named.items():
        for uid in uids:
            who.setdefault(uid, set()).add(elector)
    return who


def majority(said: Mapping[int, T], electors: Electors) -> T | None:
    """What electors with more than half of the stake say alike, of what each says by uid; else None."""
    seen: list[T] = []
    for one in said.values():
        if one not in seen:
            seen.append(one)
            if electors.outweighs([uid for uid, other in said.items() if other == one]):
                return one
    return None
