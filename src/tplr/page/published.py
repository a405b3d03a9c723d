"""Reads the published records of a run, window by window, from public buckets and the chain only.

Every document passes the same checks as in a node. A missing document, or one that fails a check, is "not known".
"""

import asyncio
import statistics
from collections.abc import Collection, Container, Iterable, MutableMapping
from typing import Any

from tplr.comms import Comms
from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import read_prologue
from tplr.errors import ChainUnavailable, ObjectNotFound, PayloadError, ScoresSealed, StoreError, StoreUnavailable
from tplr.exchange.agreed import ElectionResult, of_most_stake
from tplr.hparams import HParams
from tplr.keys import gradient_key, parse_window_key
from tplr.logging import logger
from tplr.node.score_evidence import ScoreEvidence
from tplr.node.uid_owners import uid_owners
from tplr.page.document import Checkpoint, Evaluation, Payment
from tplr.page.evaluations import figures
from tplr.page.history import MinerScore, WindowRecord
from tplr.page.sentences import Row
from tplr.schemas import DebugReport, DocumentedScore, PeerList, PeerScore, ScoreReport
from tplr.scoring.board import CreditShares
from tplr.scoring.explain import explain_rows
from tplr.storage.many import for_each, list_objects

WINDOWS_AT_ONCE = 4
REPORTS_AT_ONCE = 16
LIST_SECONDS = 10.0
# Maximum characters and rows that a page shows of another node's text.
MAX_TEXT, MAX_ROWS = 400, 40
DIGITS = 12  # shown of a fingerprint


class PublishedRun:
    """The published records of a run, as of the last ``comms.refresh``.

    After a bucket can't be read, this object does not ask it again; create one object for each update of the page.

    Args:
        spec: layout of the run's updates, whose headers name their batches.
        validator: uid of the validator whose score reports are read; None: there is none.
        evidence: explains how credit follows from earlier reports; None: records don't say it.

    Attributes:
        unanswered: windows of whose records the chain or a validator's bucket did not give one.
    """

    def __init__(
        self,
        comms: Comms,
        hparams: HParams,
        spec: PayloadSpec,
        validator: int | None,
        evidence: ScoreEvidence | None = None,
    ) -> None:
        self._comms = comms
        self._hparams = hparams
        self._spec = spec
        self._validator = validator
        self._evidence = evidence
        self._silent: set[int] = set()
        self.unanswered: set[int] = set()

    async def windows(self) -> list[int]:
        """Return the windows with a validator's published report, ascending.

        Raises:
            ChainUnavailable, StoreError: chain, or all validators' buckets, can't be read.
        """
        run = await self._begun()
        found: list[dict[int, str]] = []
        failed: StoreError | None = None
        for uid in self._comms.validators():
            try:
                found.append(await self._published_by(uid, "debug"))
            except StoreError as error:
                self._skip(uid, failed := error)
        if failed and not found:
            raise failed
        return sorted(window for window in set[int]().union(*found) if window in run)

    async def _begun(self) -> range:
        """Return the run's windows that have begun; the author of an object may name any."""
        start, now = await self._comms.get_start_window(), await self._comms.window_now()
        return range(now + 1 if start is None else start, now + 1)

    async def scored(self) -> dict[int, str]:
        """Return the ETags of the validator's published score reports by window. Raises ChainUnavailable."""
        if self._validator is None or self._validator in self._silent:
            return {}
        run = await self._begun()
        try:
            found = await self._published_by(self._validator, "scores")
        except StoreError as error:
            self._skip(self._validator, error)
            return {}
        return {window: etag for window, etag in found.items() if window in run}

    @property
    def silent(self) -> frozenset[int]:
        """The uids whose buckets could not be read."""
        return frozenset(self._silent)

    async def records(self, windows: Iterable[int]) -> list[WindowRecord]:
        """Read all published records of these windows."""
        found = await for_each(windows, self._record, concurrency=WINDOWS_AT_ONCE)
        return sorted(found, key=lambda one: one.window)

    async def checkpoints(self) -> list[Checkpoint]:
        """List the leading validator's checkpoints of the run's windows. Raises ChainUnavailable, StoreError."""
        found, run = [], await self._begun()
        for one in await self._comms.leaders_checkpoints():
            if one.window not in run:
                continue
            size = sum(info.size for info in await list_objects(one.store, one.prefix))
            found.append(Checkpoint(window=one.window, uid=one.uid, bytes=size, kept=True))
        return found

    async def evaluations(
        self, known: Container[tuple[int, int]], refused: MutableMapping[tuple[int, int], str]
    ) -> list[Evaluation]:
        """Read the metrics of the validators' published evaluations, except ``known`` ones (window, uid).

        Args:
            refused: ETags of objects that are no evaluations, which are not read again; this call adds to it.

        Raises:
            ChainUnavailable, StoreError: it is not known which windows have begun.
        """
        run = await self._begun()
        found: list[Evaluation] = []
        for uid in self._comms.validators():
            if uid in self._silent:
                continue
            try:
                published = await self._published_by(uid, "evaluation")
            except StoreError as error:
                self._skip(uid, error)
                continue
            for window, etag in published.items():
                if window not in run or (window, uid) in known or refused.get((window, uid)) == etag:
                    continue
                try:
                    result = await self._comms.get_evaluation(uid, window)
                except (StoreError, PayloadError) as error:
                    logger.warning("window %d: no evaluation of validator %d: %s", window, uid, error)
                    if isinstance(error, PayloadError):
                        refused[window, uid] = etag
                else:
                    found += figures(result, uid) if result.window == window else ()
        return found

    async def _published_by(self, uid: int, kind: str) -> dict[int, str]:
        """Return the ETags of the objects of this kind by ``uid``, by window. Raises StoreError."""
        if (store := self._comms.store_of(uid)) is None:
            return {}
        infos = await list_objects(store, f"{kind}-", deadline_seconds=LIST_SECONDS)
        keys = ((parse_window_key(info.key, self._hparams.version), info.etag) for info in infos)
        return {key.window: etag for key, etag in keys if key and key.kind == kind and key.uid == uid}

    async def _record(self, window: int) -> WindowRecord:
        scores, unread = await self._scores(window)
        owners = await self._owners(window, scores)
        # The present owner of a uid may sign reports of windows in which another hotkey had it.
        here = {uid for uid in self._comms.commitments if owners.get(uid) in (None, self._comms.get_hotkey(uid))}
        reports = await self._reports(window, here)
        owners |= {uid: self._comms.get_hotkey(uid) or "" for uid in reports}
        election, peers = await self._election(window), await self._peers(window)
        included, skipped = self._included(election, reports)
        if included is None and not self._silent.isdisjoint(self._comms.electors.uids):
            self.unanswered.add(window)
        try:
            scored = await asyncio.to_thread(self._scored, scores, await self._shares(scores)) if scores else {}
        except (ArithmeticError, ValueError):  # whoever signs scores may write what no formula takes
            scored, unread = {}, "its scores have numbers that the page can't store"
        record = WindowRecord(
            window=window,
            start=await self._start(window),
            included=None if included is None else tuple(sorted(included)),
            skipped=skipped,
            probation=tuple(sorted(peers.probation)) if peers else (),
            decided=_decided(election, peers),
            electors=election.stakes if election else {},
            commitments=election.commitments if election else {},
            tokens=await self._tokens(window, included or (), here),
            models={uid: _model(report) for uid, report in sorted(reports.items())},
            unread=unread[:MAX_TEXT],
            **scored,
        )
        return record.model_copy(update={"hotkeys": {uid: owners[uid] for uid in record.uids if uid in owners}})

    async def _owners(self, window: int, scores: ScoreReport | None) -> dict[int, str]:
        try:
            return await uid_owners(self._comms, window, scores)
        except ChainUnavailable as error:
            logger.warning("window %d: the owners of its uids are not known: %s", window, error)
            self.unanswered.add(window)
            return {}

    async def _start(self, window: int) -> float | None:
        try:
            return (await self._comms.window_start(window)).time
        except ChainUnavailable:  # too old for an ordinary node
            return None

    async def _reports(self, window: int, asked: Collection[int]) -> dict[int, DebugReport]:
        found: dict[int, DebugReport] = {}

        async def read(uid: int) -> None:
            try:
                report = await self._comms.get_report(uid, window)
            except StoreUnavailable as error:
                self._skip(uid, error)
            except (StoreError, PayloadError):
                return
            else:
                if (report.uid, report.window) == (uid, window):
                    found[uid] = report

        uids = [uid for uid in self._comms.commitments if uid in asked and uid not in self._silent]
        await for_each(uids, read, concurrency=REPORTS_AT_ONCE)
        return found

    def _skip(self, uid: int, error: StoreError) -> None:
        if uid not in self._silent:
            self._silent.add(uid)
            logger.warning("the bucket of uid %d can't be read and is left out: %s", uid, error)

    async def _election(self, window: int) -> ElectionResult | None:
        try:
            return await self._comms.get_election(window)
        except ChainUnavailable as error:
            logger.warning("window %d: its electors are not known: %s", window, error)
            self.unanswered.add(window)
            return None

    def _included(
        self, election: ElectionResult | None, reports: dict[int, DebugReport]
    ) -> tuple[list[int] | None, dict[int, str]]:
        """Return the window's decided set, or else the set that electors with most of the stake report as applied."""
        if election and election.decided:
            found = election.decided.included
            return [one.uid for one in found.included], _reasons(found.skipped)
        electors = self._comms.electors
        answers = {uid: reports[uid] for uid in electors.uids if uid in reports}
        report = of_most_stake(electors, answers, key=lambda one: tuple(sorted(one.included.items())))
        return ([int(uid) for uid in report.included], _reasons(report.skipped)) if report else (None, {})

    async def _peers(self, window: int) -> PeerList | None:
        try:
            return await self._comms.get_peer_list(window)
        except (StoreError, PayloadError) as error:
            logger.warning("window %d: no peer list: %s", window, error)
            if isinstance(error, StoreUnavailable):
                self.unanswered.add(window)
            return None

    async def _tokens(self, window: int, included: Iterable[int], here: Collection[int]) -> int | None:
        """Return the tokens that the included updates were trained on, from their headers' numbers of batches.

        Each update counts with the median, because a single header can claim any number.

        Args:
            here: uids whose buckets may hold an update of the window.
        """
        batches: list[int] = []
        uids = list(included)

        async def read(uid: int) -> None:
            if uid not in here or uid in self._silent or (store := self._comms.store_of(uid)) is None:
                return
            size = self._spec.data_start
            try:
                _, head = await store.get_piece(gradient_key(window, uid, self._hparams.version), 0, size)
                batches.append(read_prologue(head, self._spec, window=window, uid=uid)[1])
            except StoreUnavailable as error:
                self._skip(uid, error)
            except (StoreError, PayloadError):
                return

        await for_each(uids, read, concurrency=REPORTS_AT_ONCE)
        if not uids:
            return 0
        per_batch = self._hparams.batch_size * self._hparams.sequence_length
        return round(statistics.median(batches) * len(uids)) * per_batch if batches else None

    async def _scores(self, window: int) -> tuple[ScoreReport | None, str]:
        """Return the score report, or None and the reason."""
        if self._validator is None:
            return None, "no validator has a bucket on chain"
        try:
            report = await self._comms.get_scores(self._validator, window)
        except ScoresSealed as error:
            return None, str(error).removeprefix(f"{error.bucket}/{error.key}: ")
        except ObjectNotFound:
            return None, f"validator {self._validator} has published no scores of window {window}"
        except (StoreError, PayloadError) as error:
            if isinstance(error, StoreError):
                self.unanswered.add(window)
            return None, str(error)
        return (report, "") if report.window == window else (None, f"its scores say window {report.window}")

    async def _shares(self, report: ScoreReport) -> CreditShares | None:
        if self._evidence is None or self._validator is None:
            return None
        try:
            return await self._evidence.shares(report, self._validator)
        except PayloadError as error:
            logger.warning("window %d: the scores of validator %d: %s", report.window, self._validator, error)
            return None

    def _scored(self, report: ScoreReport, shares: CreditShares | None) -> dict[str, Any]:
        """Return the fields of a record that come from a score report."""
        power = self._hparams.power_normalisation
        known = [uid for uid in sorted(report.peer_scores, key=int) if int(uid) in self._uids]
        measured = [one.evaluation for one in report.observations.values() if one.evaluation]
        assigned = [one.assigned.before for one in measured if one.assigned]
        return {
            "held_out": report.held_out_loss,
            "assigned": statistics.fmean(assigned) if assigned else None,
            "scores": {int(uid): _score(report, uid, power, shares) for uid in known},
            "payment": self._payment(report),
        }

    @property
    def _uids(self) -> set[int]:
        return {neuron.uid for neuron in self._comms.metagraph.neurons}

    def _payment(self, report: ScoreReport) -> Payment | None:
        last = report.weights_set
        if last is None:
            return None
        on_chain = {uid: share for uid, share in last.on_chain.items() if uid.isdecimal() and int(uid) in self._uids}
        return Payment(
            block=last.block,
            window=self._comms.block_to_window(last.block),
            weights={int(uid): share for uid, share in sorted(on_chain.items(), key=lambda one: int(one[0]))},
        )


def _score(report: ScoreReport, uid: str, power: float, shares: CreditShares | None) -> MinerScore:
    score = report.peer_scores[uid]
    try:
        rows = explain_rows(report, int(uid), power=power, shares=shares)
    except PayloadError as error:
        rows = [("report", str(error))]
    observed = report.observations.get(uid)
    evaluation = observed.evaluation if observed else None
    return MinerScore(
        pay=report.weights.get(uid, 0.0),
        credit=_credit(score),
        loss=evaluation.assigned.before if evaluation and evaluation.assigned else None,
        struck=tuple(rule[:MAX_TEXT] for rule in report.struck.get(uid, ())[:MAX_ROWS]),
        rows=_bounded(rows),
    )


def _decided(election: ElectionResult | None, peers: PeerList | None) -> str:
    """Return a character of ``document.Elections``, or an empty string if no decision is known.

    A decision is void if peers were listed and it neither includes nor skips any.
    """
    if election is None or election.decided is None:
        return ""
    included, listed = election.decided.included, peers is not None and bool(peers.peers or peers.reserve_peers)
    return "v" if listed and not (included.included or included.skipped) else "c"


def _credit(score: PeerScore | DocumentedScore) -> float:
    return score.credit if isinstance(score, PeerScore) else score.mu - 3 * score.sigma


def _bounded(rows: list[Row]) -> tuple[Row, ...]:
    return tuple((name[:MAX_TEXT], text[:MAX_TEXT]) for name, text in rows[:MAX_ROWS])


def _reasons(skipped: dict[str, Any]) -> dict[int, str]:
    return {int(uid): str(reason.value) for uid, reason in sorted(skipped.items(), key=lambda one: int(one[0]))}


def _model(report: DebugReport) -> str:
    """Return the fingerprint and digest, shortened; nodes with the same model report the same text."""
    digest = f" {report.digest[:DIGITS]}" if report.digest else ""
    return report.fingerprint[:DIGITS] + digest
