"""Simulates a network of hundreds of nodes, window by window: waiting times, training time and requests.

The protocol's own code decides: ``earned_peers`` selects the listed peers, ``UploadBounds`` judges whether an update is
in time, and each elector's ``Election`` and ``WindowQuestion`` decide the included set. Links, stores and participants
are random (``participants.py``). Transfers of one node share its link (``links.py``). Nothing changes between two
completions, so the number of events in a window grows with selected peers and readers, not with bytes or seconds.

A run may begin like a real one, without any known peer (``Design.fresh``): its first windows only measure, until the
rules list somebody. If nodes share processors, a burst of requests delays every request (``load.py``).

Simplifications: all electors have the same scores, so they want the same list; a slow request delays but never fails;
merit is drawn once for each miner.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from tplr.chain.electors import Elector, Electors
from tplr.exchange.agreed import enough
from tplr.exchange.ballots import Vote
from tplr.exchange.gather import POLL_SECONDS
from tplr.exchange.polling import GROWTH
from tplr.exchange.updates import STORE_CLOCK_SECONDS
from tplr.hparams import HParams
from tplr.node import windows as node_windows
from tplr.node.elector import closes_after, window_question
from tplr.scale.draws import log_normal, stream
from tplr.scale.election import Outcome, SimulatedElection
from tplr.scale.links import finish_times
from tplr.scale.load import ROUNDS, Burst
from tplr.scale.newcomer import catch_up
from tplr.scale.participants import Assumptions, Participants, Requests
from tplr.scale.polls import count_polls
from tplr.schemas import PeerList, Reason, UploadBounds
from tplr.scoring.selection import ChosenPeers, earned_peers

INFINITE = math.inf
# Successive requests of a node, each sent to electors with more than half of the stake: one for the window's decision,
# and two for its peer list (LIST and GET). A node sends them before it gathers, and again to learn the decision.
ASKED = 3
# First window of the run, in which the first peer list takes effect.
FIRST_WINDOW = 0


@dataclass(frozen=True, kw_only=True)
class Design:
    """The configuration of a simulated run, which simulations vary and compare.

    Attributes:
        overlap: miners train a window while they gather the set of the window before (``outer_delay`` 1).
        fresh: the run begins: no peer has been measured, and with ``probation_windows`` no peer is listed.
        checkpoint_uploads: number of parts of its own checkpoint that a miner uploads concurrently with its update; 0:
            miners publish no checkpoints.
        state_bytes: size of a miner's checkpoint.
        checkpoint_bytes: number of bytes that a newcomer fetches of an elector's checkpoint.
    """

    hparams: HParams
    update_bytes: int
    block_seconds: float
    overlap: bool
    fresh: bool = False
    checkpoint_uploads: int = 0
    state_bytes: float = 0.0
    checkpoint_bytes: float = 0.0

    @property
    def window_seconds(self) -> float:
        return self.hparams.blocks_per_window * self.block_seconds


@dataclass(frozen=True, kw_only=True)
class WindowResult:
    """The result of one window. Times are seconds since the window's end; infinite: never.

    Attributes:
        listed, included, probation: number of uids.
        all_included: every listed peer's update is included, so no reserve peer had to replace one.
        decided: time from which the decision can be read.
        uploaded: time from which the median update among those in time can be read.
        gathered, gathered_late: times by which 50 % and 95 % of the miners had finished their gather.
        waited: the median miner's seconds from the end of its gather until it knows the set.
        utilisation, utilisation_low: share of the window in which a miner's devices train: median and 10 % quantile.
        uninformed: number of miners that did not know the decision ``manifest_timeout_seconds`` after their gather.
        missed: number of present miners whose update was not in time.
        away: number of absent miners.
        validator_link: seconds for which the window's downloads, including probation, occupy the median validator's
            link.
        class_b, elector_b: number of reads of one listed peer's bucket, and of the busiest elector's bucket.
        ballots: mean number of reads by an elector in the election.
    """

    window: int
    listed: int
    included: int
    probation: int
    all_included: bool
    decided: float
    uploaded: float
    gathered: float
    gathered_late: float
    waited: float
    utilisation: float
    utilisation_low: float
    uninformed: int
    missed: int
    away: int
    validator_link: float
    class_b: float
    elector_b: float
    ballots: float


@dataclass
class _Miners:
    """The state that changes from window to window, by uid."""

    away_until: np.ndarray  # first window in which it takes part again
    here_since: np.ndarray
    valid: np.ndarray  # bool (uids, pay_windows): its update was in time; the last column is the newest window
    measured: np.ndarray  # number of windows in which validators measured it, since ``here_since``
    behind: np.ndarray  # seconds after a window's end from which it can gather the next set
    backlog: np.ndarray  # bytes of its own checkpoint that are not uploaded yet
    merit: np.ndarray


@dataclass
class Network:
    """A simulated network; ``run`` yields the result of each window."""

    design: Design
    assumed: Assumptions
    participants: Participants
    seed: int
    lists: list[PeerList] = field(default_factory=list)

    def __post_init__(self) -> None:
        people, hparams = self.participants, self.design.hparams
        self._requests = Requests(self.assumed, self.seed)
        ranked = [Elector(uid, f"hotkey-{uid:05d}", 2 * people.validators - uid) for uid in range(people.validators)]
        self.electors = Electors(tuple(ranked))
        count = people.uids
        self._miners = _Miners(
            away_until=np.zeros(count, dtype=np.int64),
            here_since=np.full(count, -hparams.pay_windows, dtype=np.int64),
            valid=np.ones((count, hparams.pay_windows), dtype=bool),
            measured=np.full(count, 0 if self.design.fresh else hparams.pay_windows, dtype=np.int64),
            behind=np.zeros(count),
            backlog=np.zeros(count),
            merit=people.merit.copy(),
        )
        self._miners.valid[people.dead] = False
        self._miners.valid[: people.validators] = False
        # Uids measured in windows not scored yet: validators score a window ``validator_offset`` windows later.
        self._unscored: deque[np.ndarray] = deque()
        self.lists = [self._listing(self._wished(FIRST_WINDOW), FIRST_WINDOW, FIRST_WINDOW)]

    def run(self, windows: int) -> Iterator[WindowResult]:
        """Simulate and yield the first ``windows`` windows, in order."""
        for window in range(FIRST_WINDOW, FIRST_WINDOW + windows):
            self._come_and_go(window)
            yield self._window(window)

    # Presence

    def _come_and_go(self, window: int) -> None:
        """Apply the window's crashes, and its uids that change hands."""
        people, miners, assumed = self.participants, self._miners, self.assumed
        rng = stream(self.seed, "churn", window)
        crash, churn = rng.random(people.uids) < assumed.crash, rng.random(people.uids) < assumed.churn
        lengths, merits = rng.exponential(assumed.away, people.uids), log_normal(rng, 1.0, assumed.quality, people.uids)
        bad = rng.random(people.uids) < assumed.bad
        for uid in np.flatnonzero(crash & (miners.away_until <= window)):
            gone = 1 + int(lengths[uid])
            miners.away_until[uid] = window + gone + self._catching_up(int(uid), behind=gone)
        listed = {*self.lists[-1].peers, *self.lists[-1].reserve_peers}
        for uid in np.flatnonzero(churn[people.validators :]) + people.validators:
            if int(uid) in listed:
                continue
            miners.away_until[uid] = window + 1 + self._catching_up(int(uid), behind=window)
            miners.here_since[uid], miners.measured[uid] = miners.away_until[uid], 0
            for measured in self._unscored:
                measured[uid] = False
            miners.valid[uid] = False
            miners.merit[uid] = 0.0 if bad[uid] else merits[uid]

    def _catching_up(self, uid: int, *, behind: int) -> int:
        """Return the number of windows until a node that lacks ``behind`` windows has caught up."""
        design, hparams = self.design, self.design.hparams
        frequency = hparams.checkpoint_frequency
        upload = design.checkpoint_bytes / float(np.median(self.participants.up)) / design.window_seconds
        found = catch_up(
            hparams,
            behind=behind,
            checkpoint=design.checkpoint_bytes,
            update=design.update_bytes,
            rate=float(self.participants.down[uid]),
            window_seconds=design.window_seconds,
            apply=self.assumed.apply,
            checkpoint_age=int(behind % frequency + upload) if behind >= frequency else None,
        )
        return 10**9 if math.isinf(found.seconds) else math.ceil(found.seconds / design.window_seconds)

    def _here(self, window: int) -> np.ndarray:
        return self._miners.away_until <= window

    # One window

    def _window(self, window: int) -> WindowResult:
        people, hparams = self.participants, self.design.hparams
        listed = self._list_of(window)
        named = [*listed.peers, *listed.reserve_peers]
        here = self._here(window)
        readers = np.flatnonzero(here & ~people.dead)
        available, in_time = self._upload(window, here)
        found, ends, polls, burst = self._gather(window, readers, named, available, in_time)
        done = np.maximum(ends.max(axis=1, initial=0.0), burst.done)
        election, known = self._elect(window, listed, named=named, readers=readers, found=found, ends=ends, burst=burst)
        value = election.decided
        included = {one.uid for one in value.included.included} if value else set[int]()
        waits = np.minimum(self._told(window, known, done, burst), done + hparams.manifest_timeout_seconds)
        miners = readers >= people.validators
        utilisation = self._train(readers[miners], waits[miners])
        missed = here & ~in_time & ~people.dead
        self._remember(listed, in_time)
        if value and value.peers and value.peers.first_effective_window > window:
            self.lists.append(value.peers)
        request = self.assumed.request + self.assumed.latency
        polls = count_polls(waits - done, shortest=node_windows.POLL_SECONDS, request=request)
        return WindowResult(
            window=window,
            listed=len(listed.peers),
            included=len(included),
            probation=len(listed.probation),
            all_included=bool(listed.peers) and set(listed.peers) <= included,
            decided=known,
            uploaded=_quantile(available[in_time], 0.5),
            gathered=_quantile(done[miners], 0.5),
            gathered_late=_quantile(done[miners], 0.95),
            waited=_quantile((waits - done)[miners], 0.5),
            utilisation=_quantile(utilisation, 0.5),
            utilisation_low=_quantile(utilisation, 0.1),
            uninformed=int((known > done + hparams.manifest_timeout_seconds)[miners].sum()),
            missed=int(missed[people.validators :].sum()),
            away=int((~here)[people.validators :].sum()),
            validator_link=self._validator_link(listed, readers[~miners]),
            class_b=float(polls.sum(axis=0).max(initial=0.0)) + 2 * len(readers),
            elector_b=float(polls.sum()) + sum(election.requests.values()) / max(1, len(self.electors.uids)),
            ballots=sum(election.requests.values()) / max(1, len(election.requests)),
        )

    def _upload(self, window: int, here: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each uid, the seconds after the window's end until its update can be read, and if it is in time.

        The time is infinite for a miner without an update.
        """
        design, people, miners, assumed = self.design, self.participants, self._miners, self.assumed
        count, hparams = people.uids, design.hparams
        late = np.maximum(0.0, assumed.pack / people.speed - hparams.commit_margin_seconds)
        begin = UploadBounds.resolution + self._requests.seconds("put", window, count) + late
        # A miner that was still gathering when the window ended has not trained it.
        begin = np.where(here & (miners.behind < design.window_seconds), begin, INFINITE)
        busy = miners.backlog > 0
        rate = self._rates("upload", window, people.up) / np.where(busy, 1 + design.checkpoint_uploads, 1)
        rate = np.minimum(rate, people.upload_connection)
        out_from, out_until = self._requests.outages(window, count, design.window_seconds)
        hit = (begin < out_until) & (begin + design.update_bytes / rate > out_from)
        available = np.where(hit, np.maximum(begin, out_until), begin) + design.update_bytes / rate
        self._send_checkpoints(window)
        bounds = UploadBounds(start=0.0, end=hparams.time_window_delta_seconds)
        in_time = np.array([at < INFINITE and bounds.judge(math.floor(at)) is None for at in available])
        in_time &= ~people.dead
        in_time[: people.validators] = False
        return available, in_time

    def _send_checkpoints(self, window: int) -> None:
        """Send each miner's own checkpoint with the link capacity that its update leaves."""
        design, miners, frequency = self.design, self._miners, self.design.hparams.checkpoint_frequency
        if not design.checkpoint_uploads:
            return
        sent = np.maximum(0.0, self.participants.up * design.window_seconds - design.update_bytes)
        miners.backlog = np.maximum(0.0, miners.backlog - sent)
        if window % frequency == 0:
            miners.backlog[self.participants.validators :] = design.state_bytes

    def _gather(
        self, window: int, readers: np.ndarray, named: list[int], available: np.ndarray, in_time: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, Burst]:
        """Simulate all readers' gathers of the named peers' updates.

        Returns:
            Arrays of shape (readers, named): whether the update is found (bool); seconds after the window's end at
            which the reader has it or knows that it is missing; number of requests. And the burst of all requests.
        """
        design, people, miners = self.design, self.participants, self._miners
        shape = (len(readers), len(named))
        rng = stream(self.seed, "polls", window)
        request = self._requests.seconds("get", window, shape)
        final = self.assumed.final_blocks * design.block_seconds
        begins = np.maximum(miners.behind[readers], final)
        if not design.overlap:  # a miner gathers after its own update is uploaded or abandoned
            own = np.where(in_time, available, UploadBounds.resolution)[readers]
            begins = np.maximum(begins, own)
        last = design.hparams.time_window_delta_seconds + STORE_CLOCK_SECONDS
        ready, valid = available[named], in_time[named]
        pause = np.maximum(POLL_SECONDS, GROWTH * np.where(valid, ready, 0.0))[None, :]
        burst = self._burst(readers, begins, updates=int(valid.sum()))
        listed_by = begins + ASKED * self._requests.seconds("list", window, len(readers))
        burst = replace(burst, done=np.maximum(burst.done, listed_by))
        first = np.broadcast_to(listed_by[:, None], shape)
        looked = np.where(first >= ready, first, np.maximum(first, ready[None, :] + rng.random(shape) * pause))
        starts = np.where(valid[None, :], looked + ROUNDS * request, INFINITE)
        capacity = self._rates("download", window, people.down)[readers]
        ends = np.full(shape, INFINITE)
        for row, (rates, connection) in enumerate(zip(capacity, people.download_connection[readers], strict=True)):
            ends[row] = finish_times(starts[row].tolist(), design.update_bytes, capacity=rates, connection=connection)
        known_missing = np.maximum(begins[:, None], last) + request
        ends = np.maximum(np.where(valid[None, :], ends, known_missing), burst.done[:, None])
        waiting = np.where(valid[None, :], ready[None, :], last) - begins[:, None]
        polls = count_polls(waiting, shortest=POLL_SECONDS, request=request)
        return np.broadcast_to(valid, shape), ends, polls, burst

    def _burst(self, readers: np.ndarray, begins: np.ndarray, *, updates: int) -> Burst:
        """Return the burst of the readers' requests, together with the validators' measurements at that time."""
        assumed = self.assumed
        work = np.full(len(readers), (ASKED * self._half + ROUNDS * updates) * assumed.request_work)
        measuring = [(0.0, assumed.measuring_work)] * int((readers < self.participants.validators).sum())
        return Burst.of(begins, work, cores=assumed.cores, others=measuring if assumed.measuring_work else ())

    def _told(self, window: int, known: float, done: np.ndarray, burst: Burst) -> np.ndarray:
        """Return, for each reader, the seconds after the window's end until it has gathered and read the decision.

        All readers read the decision at about the same time: a second burst.
        """
        if math.isinf(known):
            return np.full(len(done), INFINITE)
        # A reader asks as soon as its gather is done, and then with the pauses of ``pause_after``.
        pause = np.maximum(node_windows.POLL_SECONDS, GROWTH * np.maximum(0.0, known - done))
        asked = np.where(done >= known, done, known + stream(self.seed, "told", window).random(len(done)) * pause)
        asked += np.array([burst.wait(at) for at in asked])
        work = np.full(len(asked), ASKED * self._half * self.assumed.request_work)
        read = Burst.of(asked, work, cores=self.assumed.cores).done
        return np.maximum(read, asked + ASKED * self._requests.seconds("told", window, len(done)))

    @property
    def _half(self) -> int:
        """Number of electors that a node asks first: the largest ones that hold more than half of the stake."""
        return len(enough(self.electors, self.electors.uids))

    def _elect(
        self,
        window: int,
        listed: PeerList,
        *,
        named: list[int],
        readers: np.ndarray,
        found: np.ndarray,
        ends: np.ndarray,
        burst: Burst,
    ) -> tuple[Outcome, float]:
        """Run the election; return its outcome, and the seconds after the window's end until the decision can be read.

        An elector that lacks updates when the election begins votes for the updates that it has.
        """
        design, hparams = self.design, self.design.hparams
        electors = self.electors.rotated(window)
        opens = closes_after(hparams, design.update_bytes, design.block_seconds)
        question = window_question(
            window, listed, electors, hparams, size=design.update_bytes, block_time=design.block_seconds
        )
        request = self._requests.seconds("ballots", window, self.participants.uids)
        quiet = stream(self.seed, "silent", window).random(self.participants.uids) < self.assumed.silent
        wish = self._wish(window)
        votes: dict[int, tuple[float, Vote]] = {}
        for row, uid in enumerate(readers.tolist()):
            if uid not in electors or quiet[uid]:
                continue
            here = dict(zip(named, found[row] & (ends[row] <= opens), strict=True))
            has = {str(peer): f"{peer:032x}{window:032x}" for peer, yes in here.items() if yes}
            lacks = {str(peer): Reason.MISSING for peer, yes in here.items() if not yes}
            done = min(max(float(ends[row].max(initial=0.0)), float(burst.done[row])), opens)
            votes[uid] = (done - opens, Vote(found=has, missing=lacks, peers=wish))
        election = SimulatedElection(
            electors,
            question,
            window=window,
            delta=hparams.relay_seconds,
            request={uid: float(request[uid]) for uid in votes},
            wait=lambda at: burst.wait(opens + at),
        )
        outcome = election.run(votes, until=3 * design.window_seconds)
        return outcome, float(opens + outcome.known(electors))

    def _train(self, readers: np.ndarray, ready: np.ndarray) -> np.ndarray:
        """Return the share of the next window in which each miner trains, and set the time of its next gather."""
        design, miners, assumed = self.design, self._miners, self.assumed
        speed, length = self.participants.speed[readers], design.window_seconds
        blocked = (assumed.apply + assumed.save) / speed
        if design.overlap:
            # Training pauses to pack, to apply, and to wait for a set that arrives after the next window's end.
            begin = blocked + assumed.pack / speed + np.maximum(0.0, ready - length)
            stop, free = length, ready
        else:
            begin = ready + blocked
            stop, free = length - design.hparams.commit_margin_seconds, begin
        needed = assumed.training / speed
        # A miner that is more than a window late misses the next one and resumes with the newest.
        miners.behind[:] = 0.0
        miners.behind[readers] = np.maximum(0.0, free - length) % length
        return np.clip(np.minimum(stop - begin, needed), 0.0, None) / length

    def _rates(self, purpose: str, window: int, median: np.ndarray) -> np.ndarray:
        return median * log_normal(
            stream(self.seed, "hour", purpose, window), 1.0, self.assumed.hour_spread, len(median)
        )

    def _validator_link(self, listed: PeerList, validators: np.ndarray) -> float:
        """Return the seconds for which a window's downloads occupy the median validator's link.

        It fetches the updates of peers and reserve peers twice (for its vote, and when they are included), and those on
        probation once.
        """
        updates = 2 * len(listed.peers) + 2 * len(listed.reserve_peers)
        updates += len({*listed.probation} - {*listed.reserve_peers})
        rate = _quantile(self.participants.down[validators], 0.5)
        return updates * self.design.update_bytes / rate if len(validators) else INFINITE

    # Peer lists

    def _remember(self, listed: PeerList, in_time: np.ndarray) -> None:
        """Record the uids whose update was in time, and those that validators measured."""
        miners = self._miners
        miners.valid = np.concatenate([miners.valid[:, 1:], in_time[:, None]], axis=1)
        measured = np.zeros(len(in_time), dtype=bool)
        measured[sorted({*listed.peers, *listed.reserve_peers, *listed.probation})] = True
        self._unscored.append(measured & in_time)
        # A window's election is after its end, so one more window has been scored by then.
        while len(self._unscored) >= max(1, self.design.hparams.validator_offset):
            miners.measured += self._unscored.popleft()

    def _list_of(self, window: int) -> PeerList:
        return next(one for one in reversed(self.lists) if one.first_effective_window <= window)

    def _wish(self, window: int) -> PeerList | None:
        """Return the peer list that all electors want, by the rule of ``Leader``; None: keep the current list."""
        hparams, present = self.design.hparams, self.lists[-1]
        listed = {*present.peers, *present.reserve_peers}
        active, proven = self._active(), self._proven()
        waiting = {uid for uid in active if proven.get(uid) and uid not in listed}
        room = len(listed) < hparams.max_topk_peers + hparams.reserve_peers
        wished = self._wished(window)
        newcomers = {*wished.probation} - listed - {*present.probation}
        due = window % hparams.peer_replacement_frequency == 0
        lost = any(proven.get(uid) is False for uid in listed)
        if not (due or lost or newcomers or (waiting and room)):
            return None
        return self._listing(wished, window, window + 1 + hparams.peer_list_window_margin)

    def _active(self) -> set[int]:
        recent = self._miners.valid[:, -self.design.hparams.recent_windows :]
        return {*np.flatnonzero(recent.any(axis=1)).tolist()}

    def _proven(self) -> dict[int, bool | None]:
        enough = self._miners.measured >= self.design.hparams.probation_windows
        return {uid: bool(self._miners.merit[uid] > 0) if enough[uid] else None for uid in sorted(self._active())}

    def _wished(self, window: int) -> ChosenPeers:
        hparams, presence = self.design.hparams, self._miners.valid.mean(axis=1)
        active = self._active()
        present = self.lists[-1] if self.lists else None
        return earned_peers(
            active,
            self._proven(),
            {uid: float(self._miners.merit[uid] * presence[uid]) for uid in sorted(active)},
            listed=(*present.peers, *present.reserve_peers) if present else (),
            at_most=hparams.max_topk_peers,
            reserve=hparams.reserve_peers,
            seed=window,
            turn=window
            // (2 * (hparams.probation_windows + hparams.validator_offset + hparams.peer_list_window_margin)),
        )

    def _listing(self, chosen: ChosenPeers, window: int, effective: int) -> PeerList:
        return PeerList(
            peers=chosen.peers,
            reserve_peers=chosen.reserve,
            probation=chosen.probation,
            initial_selection=False,
            sync_window=window,
            first_effective_window=effective,
        )


def _quantile(values: np.ndarray, share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else math.nan
