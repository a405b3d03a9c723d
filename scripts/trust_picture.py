"""Draws the picture of docs/trust.md: the documents that three electors publish about a window, and their readers.

    python scripts/trust_picture.py

The electors run the nodes' own code (``exchange/election.py``) in simulated time: a request takes 50 ms, and a node
polls every quarter of a second. Signatures are left out.
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

from tplr.chain.electors import Elector, Electors
from tplr.exchange.ballots import (
    CheckedDecision,
    CheckedRelay,
    CheckedStatus,
    Commitment,
    Echo,
    Proposal,
    Vote,
    value_id,
)
from tplr.exchange.election import SLOT, Commit, Election, Propose, Repeat, SendStatus, Wanted
from tplr.exchange.envelope import Author, Run, Signed, body_sha256
from tplr.exchange.quorum import WindowQuestion
from tplr.schemas import Document, PeerList

PICTURE = Path(__file__).parents[1] / "docs" / "trust.png"
WINDOW, DELTA, REQUEST, PAUSE, STEP = 7, 2.0, 0.05, 0.25, 0.01
STAKES = {0: 40, 3: 33, 4: 27}
FOUND = {0: 0.0, 3: 0.12, 4: 0.3}  # seconds after the bound at which each elector has all updates
MINERS = (1, 2)
COLOURS = {"vote": "#4c78a8", "status": "#b279a2", "proposal": "#e45756", "echo": "#f58518", "decision": "#4c9f70"}


def signed(document: Document, uid: int) -> Signed:
    """Return the document as if elector ``uid`` had signed it."""
    author = Author(Run(3, "1"), uid, f"key-{uid}")
    return Signed(document, document.kind, WINDOW, author, body_sha256(document), b"")


@dataclass
class Sent:
    """A document in a bucket: the time from which it can be read, and the time at which each reader read it."""

    kind: str
    uid: int
    at: float
    read: dict[int, float] = field(default_factory=dict)


class Window:
    """One window of a group of electors, some of them silent."""

    def __init__(self, silent: tuple[int, ...]) -> None:
        self.electors = Electors(tuple(Elector(uid, f"key-{uid}", stake) for uid, stake in STAKES.items()))
        listed = PeerList(
            peers=MINERS, reserve_peers=(), initial_selection=False, sync_window=1, first_effective_window=3
        )
        rules = {"effective": WINDOW + 3, "lists_until": 1, "void_from": 3}
        self.question = WindowQuestion(window=WINDOW, version="1", listed=listed, size=100, at_most=20, **rules)
        self.nodes = {uid: Election(self.electors, uid, self.question, DELTA) for uid in STAKES if uid not in silent}
        self.buckets: dict[Wanted, tuple[Sent, Any]] = {}
        self.sent: list[Sent] = []
        self.decided: dict[int, float] = {}

    def run(self, seconds: float) -> None:
        """Let each node read, act and pause, until that time."""
        lives = {uid: self._live(uid) for uid in self.nodes}
        wakes = dict(FOUND)
        for tick in range(round(seconds / STEP)):
            now = tick * STEP
            for uid, life in lives.items():
                if wakes[uid] <= now:
                    wakes[uid] = now + (next(life) if wakes[uid] == FOUND[uid] else life.send(now))

    def _live(self, uid: int) -> Generator[float, float, None]:
        node, now = self.nodes[uid], FOUND[uid]
        vote = signed(Vote(found={str(one): f"{one:064x}" for one in MINERS}, missing={}, peers=None), uid)
        node.vote(vote)
        self._put(Wanted("vote", uid, 0), vote, "vote", uid, now)
        now = yield REQUEST
        while True:
            began, wanted = now, node.wanted(now)
            if wanted:
                now = yield REQUEST
            for one in wanted:
                self._read(uid, one, now)
            while actions := node.act(began, now):
                for action in actions:
                    self._say(uid, action, now)
            if node.decided:
                self.decided.setdefault(uid, now)
            now = yield PAUSE

    def _read(self, uid: int, wanted: Wanted, now: float) -> None:
        key = wanted if wanted.kind != "decision" else Wanted("decision", wanted.uid, 0)
        sent, document = self.buckets.get(key, (None, None))
        if sent is None or sent.at > now:
            return
        sent.read.setdefault(uid, now)
        node = self.nodes[uid]
        feed = {"vote": node.vote, "relay": node.relay, "status": node.status, "decision": node.decision}
        feed[wanted.kind](document)

    def _say(self, uid: int, action: Any, now: float) -> None:
        node = self.nodes[uid]
        match action:
            case SendStatus(slot, votes, proof):
                status = CheckedStatus(uid, slot, votes, proof)
                self._put(Wanted("status", uid, slot), status, "status", uid, now)
            case Commit(proof, votes, others):
                own = {uid: signed(Commitment(value=proof.id), uid)}
                decision = CheckedDecision(uid, proof, votes, {**others, **own})
                node.decision(decision)
                self._put(Wanted("decision", uid, 0), decision, "decision", uid, now)
            case Propose(slot, value, votes, proof):
                named = {str(voter): one.sha256 for voter, one in votes.items()}
                proposal = signed(Proposal(slot=slot, value=value, votes=named), uid)
                echo = signed(Echo(slot=slot, value=value_id(value)), uid)
                relay = CheckedRelay(uid, value_id(value), echo, proposal, votes, proof)
                node.relay(relay)
                self._put(Wanted("relay", uid, slot), relay, "proposal", uid, now)
            case Repeat(other):
                echo = signed(Echo(slot=other.slot, value=other.id), uid)
                relay = CheckedRelay(uid, other.id, echo, other.proposal, other.votes, other.proof)
                node.relay(relay)
                self._put(Wanted("relay", uid, other.slot), relay, "echo", uid, now)

    def _put(self, key: Wanted, document: Any, kind: str, uid: int, now: float) -> None:
        sent = Sent(kind, uid, now + REQUEST)
        if key not in self.buckets:
            self.sent.append(sent)
        self.buckets[key] = (sent, document)


def draw(axes: Any, window: Window, title: str) -> None:
    """Draw one lane for each elector, and a line from each document to each reader."""
    lanes = {uid: -place for place, uid in enumerate(STAKES)}
    last = max(window.decided.values())
    for sent in window.sent:
        for reader, at in sent.read.items():
            axes.plot([sent.at, at], [lanes[sent.uid], lanes[reader]], color=COLOURS[sent.kind], alpha=0.45, lw=0.9)
    for sent in window.sent:
        axes.plot(sent.at, lanes[sent.uid], "o", color=COLOURS[sent.kind], markersize=7, zorder=3)
    for uid, at in window.decided.items():
        axes.plot(at, lanes[uid], "|", color="black", markersize=20, markeredgewidth=2, zorder=4)
    for slot in range(int(last // (SLOT * DELTA)) + 1):
        axes.axvline(slot * SLOT * DELTA, color="#999999", lw=0.8, ls=":")
        axes.annotate(f"slot {slot}", (slot * SLOT * DELTA, 0.45), (3, 0), textcoords="offset points", fontsize=8)
    axes.set_yticks(list(lanes.values()), [f"{stake} % of stake" for stake in STAKES.values()])
    axes.set_ylim(min(lanes.values()) - 0.4, 0.7)
    axes.set_xlim(-0.02 * last, 1.05 * last)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("seconds since all updates of the window are in or out")
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Run both windows and draw them."""
    figure, (well, silent) = plt.subplots(2, 1, figsize=(9, 6), layout="constrained")
    honest, without = Window(()), Window((0,))
    honest.run(6.0)
    without.run(30.0)
    draw(well, honest, "all answer: decided as soon as all have echoed")
    draw(silent, without, "the first proposer is silent: the next slot decides")
    handles: list[Any] = [
        Line2D([], [], marker="o", ls="", color=colour, label=kind) for kind, colour in COLOURS.items()
    ]
    handles.append(Line2D([], [], marker="|", ls="", color="black", markersize=12, markeredgewidth=2, label="knows it"))
    figure.legend(handles=handles, loc="outside right upper", frameon=False)
    figure.savefig(PICTURE, dpi=110)
    for name, window in (("all answer", honest), ("one silent", without)):
        print(name, {uid: round(at, 2) for uid, at in window.decided.items()})


if __name__ == "__main__":
    main()
