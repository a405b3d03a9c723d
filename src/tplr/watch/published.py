"""Source of ``tplr watch`` for any network: reads public buckets and the chain repeatedly."""

import contextlib
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from tplr.chain.connect import LOCAL_PREFIX
from tplr.errors import PayloadError, StoreError
from tplr.node.network_reader import NetworkReader
from tplr.node.software import READ_EVERY_WINDOWS, newer_software
from tplr.page.history import WindowRecord
from tplr.page.published import REPORTS_AT_ONCE, PublishedRun
from tplr.page.read_windows import ReadWindows
from tplr.schemas import Software
from tplr.storage.many import for_each
from tplr.training.schemes import payload_spec
from tplr.watch.frame import Frame, loss_fact
from tplr.watch.view import Applied, Clock, Election, NetworkView

COLUMNS = ("node", "doing", "window", "loss", "included", "credit", "pay", "stake")
WINDOWS = 8  # number of windows shown
# Nodes may publish the reports of a window some windows later, so each read includes the newest windows again.
UNSETTLED_WINDOWS = 4
LOOKS_IN_A_WINDOW = 4
# A validator reports a window after it has applied it, so it can be late.
LATE_WINDOWS = 3
MIN_SECONDS = 2.0  # between two reads


class PublishedSource:
    """The frames of a run, from its published records.

    Attributes:
        seconds: time between two reads.
    """

    def __init__(self, network: NetworkReader, *, validator: int | None, windows: int = WINDOWS) -> None:
        """``validator``: uid whose scores are shown; None: the leading one. ``windows``: number of windows read."""
        self._network = network
        self._comms = network.comms
        self._hparams = network.hparams
        self._validator = validator
        self._windows = windows
        self._spec = payload_spec(network.hparams)
        self._records: dict[int, WindowRecord] = {}
        self._read = ReadWindows(UNSETTLED_WINDOWS)
        self._software: dict[tuple[int, str], Software] = {}  # by uid and hotkey
        self._software_read = -READ_EVERY_WINDOWS
        self._first = True
        self.seconds = max(MIN_SECONDS, self._window_seconds / LOOKS_IN_A_WINDOW)

    @property
    def _window_seconds(self) -> float:
        return self._hparams.blocks_per_window * self._comms.chain.block_time

    async def look(self) -> Frame:
        """Return a frame of the currently published records. Raises ChainError, StoreError."""
        if not self._first:
            await self._comms.refresh()
        self._first = False
        validator = self._comms.highest_stake_validator() if self._validator is None else self._validator
        published = PublishedRun(self._comms, self._hparams, self._spec, validator)
        shown = (await published.windows())[-self._windows :]
        scored = await published.scored()
        all_of = {*shown, *sorted(scored)[-1:]}
        wanted = self._read.wanted(all_of, self._records, validator=validator, scored=scored)
        for record in await published.records(wanted):
            before = self._records.get(record.window)
            self._records[record.window] = before.completed_by(record) if before else record
        self._read.note(wanted, unanswered=published.unanswered, validator=validator, scored=scored)
        self._records = {window: one for window, one in self._records.items() if window in all_of}
        await self._read_software()
        return self._frame(shown, validator, published.silent)

    async def _read_software(self) -> None:
        window = self._comms.clock.window
        if window - self._software_read < READ_EVERY_WINDOWS:
            return
        self._software_read = window

        async def read(uid: int) -> None:
            with contextlib.suppress(StoreError, PayloadError):
                found = await self._comms.get_software(uid)
                if found.uid == uid:
                    self._software[uid, self._owners[uid]] = found

        await for_each(sorted(self._comms.commitments), read, concurrency=REPORTS_AT_ONCE)

    @property
    def _owners(self) -> dict[int, str]:
        return {neuron.uid: neuron.hotkey for neuron in self._comms.metagraph.neurons}

    def _frame(self, shown: Sequence[int], validator: int | None, silent: Collection[int | None]) -> Frame:
        clock = self._comms.clock
        now = Clock(
            window=clock.window,
            block=clock.block,
            at=time.time(),
            seconds_left=clock.seconds_left(),
            block_age=clock.seconds_since_block(),
            window_seconds=self._window_seconds,
        )
        chain = self._comms.metagraph
        stakes = {one.uid: one.stake for one in chain.neurons if one.permit}
        view = view_of(
            [self._records[window] for window in sorted(self._records)],
            uids=sorted(self._comms.commitments),
            validators=self._comms.validators(),
            judge=validator,
            owners=self._owners,
        )
        view.clock = now
        known = self._owners.items()
        software = {uid: self._software[uid, hotkey] for uid, hotkey in known if (uid, hotkey) in self._software}
        for node in view.nodes.values():
            if node.uid in software:
                found = newer_software(
                    software[node.uid], [software[uid] for uid in self._comms.validators() if uid in software], stakes
                )
                node.outdated = found[0] if found else ""
            if node.uid in silent:
                node.doing, node.problem = "silent", "its bucket does not answer"
        network = self._network.arguments.network
        title = f"templar: {'localnet' if network.startswith(LOCAL_PREFIX) else network}, "
        title += f"netuid {self._comms.chain.netuid}, version {self._hparams.version}"
        scored = max((window for window, one in self._records.items() if one.scores), default=None)
        facts = [*loss_fact(view)]
        if scored is not None:
            facts.append(f"credit and pay: window {scored}, by validator {validator}")
        return Frame(title, view, COLUMNS, tuple(facts), tuple(self._notes(shown, now.window, scored=scored)))

    def _notes(self, shown: Sequence[int], window: int, *, scored: int | None) -> Iterator[str]:
        """Yield notes about missing records."""
        if not shown:
            yield "no window is published yet"
            return
        if (ago := window - shown[-1]) > self._hparams.validator_offset + LATE_WINDOWS:
            yield f"the newest report of a validator is of window {shown[-1]}, {ago} windows ago"
        if scored is None:
            yield self._records[shown[-1]].unread or "no scores are published yet"


def view_of(
    records: Sequence[WindowRecord],
    *,
    uids: Iterable[int],
    validators: Iterable[int],
    judge: int | None,
    owners: Mapping[int, str],
) -> NetworkView:
    """Return a view of the nodes that have a bucket.

    Args:
        records: by window, ascending.
        uids: uids with a bucket on chain, including ``validators``.
        judge: the validator whose scores the records contain.
        owners: the present owners' hotkeys by uid; what records say of former owners is left out.
    """
    votes, records = records, [record.of_owners(owners) for record in records]
    voters = set(validators)
    names = {uid: f"{'validator' if uid in voters else 'miner'} {uid}" for uid in uids}
    view = NetworkView({name: name.split()[0] for name in names.values()})
    newest = max((record.window for record in records if record.models), default=-1)
    for uid, name in names.items():
        node = view.nodes[name]
        node.uid, node.running = uid, True
        for record in records:
            if uid in record.models:
                included = record.included or ()
                node.applied[record.window] = Applied(included, record.skipped, record.models[uid], "")
            score = record.scores.get(uid)
            if score and score.loss is not None:
                node.training_loss[record.window] = score.loss
            if uid == judge and record.scores:
                if record.held_out is not None:
                    node.held_out_loss[record.window] = record.held_out
                node.scores = {other: one.credit for other, one in record.scores.items()}
                node.weights = {other: one.pay for other, one in record.scores.items()}
            if uid in record.electors:
                node.stake = record.electors[uid]
            node.problem = _problem(record, uid) or node.problem
        node.doing = _doing(node.window, newest, on_probation=bool(records) and uid in records[-1].probation)
    for record in votes:
        if record.electors:
            committed = sum(share for uid, share in record.electors.items() if record.commitments.get(uid))
            view.elections[record.window] = Election(bool(record.decided), record.decided == "v", committed)
    _name_who_differs(view)
    return view


def _doing(window: int | None, newest: int, *, on_probation: bool) -> str:
    if window is None:
        return "no report"
    if newest - window > 1:
        return f"{newest - window} behind"
    return "on probation" if on_probation else "in step"


def _problem(record: WindowRecord, uid: int) -> str:
    score = record.scores.get(uid)
    if score and score.struck:
        return f"struck in window {record.window}: {', '.join(score.struck)}"
    return f"left out of window {record.window}: {record.skipped[uid]}" if uid in record.skipped else ""


def _name_who_differs(view: NetworkView) -> None:
    """Set a problem at each node whose model differs from the majority's."""
    for window, held in view.disagreements().items():
        (most, count), *others = Counter(held.values()).most_common()
        if others and others[0][1] == count:
            continue
        for name, model in held.items():
            if model != most:
                view.nodes[name].problem = f"its model differs from most nodes' after window {window}"
