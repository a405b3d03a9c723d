"""Decisions of electors about windows, with the included sets."""

from functools import cached_property
from pathlib import Path

from tplr.chain.electors import Electors
from tplr.chain.manager import REMEMBERED_WINDOWS
from tplr.comms.buckets import NodeBuckets
from tplr.errors import PayloadError
from tplr.exchange.aggregates import IncludedSet
from tplr.exchange.agreed import DecisionReader, ElectionResult
from tplr.exchange.ballot_box import BallotBox
from tplr.exchange.ballots import VOID_WITHIN, BallotReader, Value
from tplr.exchange.envelope import WHOLE_RUN
from tplr.exchange.quorum import void
from tplr.keys import version_at
from tplr.logging import logger


class Decisions(NodeBuckets):
    """The decisions of electors, and the ballots of an election."""

    @cached_property
    def _decisions(self) -> dict[int, DecisionReader | Value]:
        """By window: the decided value, or the reader that looks for it."""
        return {}

    @cached_property
    def _left_out(self) -> set[Path]:
        """Ballot files of earlier runs that were logged (``BallotBox.left_out``)."""
        return set()

    async def get_included(self, window: int) -> IncludedSet | None:
        """Return the decided set of a window; None if it is not decided (yet), or its electors do not answer.

        A set that a later window's decision voids is returned empty. A decision is read only once.

        Raises:
            ChainUnavailable: the window's electors are not known.
            PayloadError: electors without valid decisions leave no majority.
        """
        nothing = void(window, version_at(self._version, window)).included
        if self.is_voided(window):
            return nothing
        value = await self.get_decision(window)
        if value is None or not value.included.included:
            return value and value.included
        for later in range(window + 1, min(window + 1 + VOID_WITHIN, self.clock.window)):
            try:
                await self.get_decision(later)
            except PayloadError as error:
                logger.info("decision of window %d not read: %s", later, error)
        return nothing if self.is_voided(window) else value.included

    def is_voided(self, window: int) -> bool:
        """Return whether a later window's decision that this node has read voids ``window``."""
        later = map(self._decisions.get, range(window + 1, window + 1 + VOID_WITHIN))
        return any(isinstance(known, Value) and window in known.voided for known in later)

    async def get_decision(self, window: int) -> Value | None:
        """Return the value decided with a window; arguments, None and errors as ``get_included``."""
        if window not in self._decisions:
            reader = await self._decision_reader(window)
            self._decisions.setdefault(window, reader)  # Another task may have begun, or found the decision, meanwhile.
        known = self._decisions[window]
        self._remember_decision(window, known)
        if isinstance(known, Value):
            return known
        value = await known.look()
        if value is not None:
            self._remember_decision(window, value)
        return value

    async def get_election(self, window: int) -> ElectionResult:
        """Return the published result of a window's election. Raises ChainUnavailable if its electors are unknown."""
        return await (await self._decision_reader(window)).result()

    async def _decision_reader(self, window: int) -> DecisionReader:
        electors = await self.electors_in(window)
        return DecisionReader(BallotReader(electors, self._run, window), self.store_of, window)

    def _remember_decision(self, window: int, known: DecisionReader | Value) -> None:
        """Cache an entry and drop the least recently used one: a replay of old windows needs later decisions, too."""
        self._decisions.pop(window, None)
        self._decisions[window] = known
        if len(self._decisions) > REMEMBERED_WINDOWS:
            del self._decisions[next(iter(self._decisions))]

    def ballot_box(self, window: int | None, electors: Electors, folder: Path) -> BallotBox:
        """Return the ballot box of an election.

        Args:
            window: None for the election of the run's start.
            folder: for the ballots that this node signs.
        """
        others = [uid for uid in electors.uids if uid != self.uid]
        return BallotBox(
            subject=window,
            reader=BallotReader(electors, self._run, WHOLE_RUN if window is None else window),
            signer=self.signer,
            own=self.own_store,
            stores={uid: store for uid in others if (store := self.store_of(uid))},
            folder=folder,
            seconds=max(self._hparams.relay_seconds, 2.0),
            left_out=self._left_out,
        )
