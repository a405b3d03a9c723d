"""Recomputes a validator's score report of a window from the buckets, with the replayed model before the window.

Every claim about miners' objects, every product and loss, and every score that follows from the evidence of the last
windows is compared. ``audit_claims.py`` has the rules for objects that miners may have deleted or replaced.
"""

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tplr.comms import Comms
from tplr.compress.payload import Update
from tplr.errors import ChainUnavailable, ObjectNotFound, PayloadError, ScoresSealed
from tplr.exchange.ballots import VOID_WITHIN
from tplr.exchange.gather import GatherResult
from tplr.hparams import HParams
from tplr.node.audit_claims import SyncClaims, false_groups, leaves_open, omissions, refutes, without_probation
from tplr.node.audit_sets import Mismatch, same
from tplr.node.data_loader import WindowDataLoader
from tplr.node.elector import LAST_WINDOWS
from tplr.node.observer import NO_HOTKEYS, sample_batches
from tplr.node.train_state import TrainState
from tplr.node.windows import WindowUpdates
from tplr.schemas import PRODUCT_DECIMALS, VALID, DebugReport, LossChange, Reason, ScoreReport
from tplr.scoring.credit import gram_of
from tplr.scoring.profiles import score_board
from tplr.seeds import evaluation_seed
from tplr.training.evaluation import Baseline
from tplr.training.loss import Precision

# Largest accepted difference between mean losses, in nats: other processors or numbers of threads give other last bits.
# The value for bfloat16 is half a standard error of 64 sequences.
TOLERANCE: dict[Precision, float] = {"float32": 1e-4, "bfloat16": 1e-3}
# The same for products of updates with gradients and with each other, as a share of the product of the vectors'
# lengths; and for norms, as a share of the norm, so that a false one can't make an update outsized.
PRODUCT_TOLERANCE: dict[Precision, float] = {"float32": 1e-4, "bfloat16": 1e-2}
SCORE_TOLERANCE = 1e-7


class ScoreClaims:
    """Compares a validator's score reports with miners' objects, the replayed model and its earlier reports.

    Args:
        train_state: the caller's; during a check it has the model before the report's window.
        validator: uid of the audited validator.
        leave_open: called with a description of each claim that is not verified.
    """

    def __init__(
        self,
        comms: Comms,
        windows: WindowUpdates,
        hparams: HParams,
        train_state: TrainState,
        data_loader: WindowDataLoader,
        *,
        validator: int,
        leave_open: Callable[[str], None],
    ) -> None:
        self._comms = comms
        self._windows = windows
        self._hparams = hparams
        self._train_state = train_state
        self._data_loader = data_loader
        self._validator = validator
        self._leave_open = leave_open
        self._sync = SyncClaims(comms, hparams, train_state.start_window)

    async def remember(self, window: int) -> None:
        """Compute every miner's proof for ``window``, which the train state has just applied."""
        await self._sync.remember(self._train_state, window)

    async def check(self, report: ScoreReport, debug_report: DebugReport, gathered: GatherResult[Update]) -> None:
        """Compare verdicts, pages, steps behind, losses, products, peer scores and weights.

        Args:
            debug_report: the validator's report of the same window, whose set has been compared.
            gathered: the updates of that set.

        Raises:
            Mismatch: the first claim that can't be true; claims before it may have been left open.
            ChainUnavailable, StoreError, DataError: needed data can't be read now, or are not published.
        """
        same("seal of the score report", report.seal, report.sealed().seal)
        same("window of the score report", report.window, debug_report.window)
        await self._check_hotkeys(report)
        voided = await self._recently_voided(report.window)
        listed = await self._listed(report.window)
        try:
            await self._check_observations(report, debug_report, gathered, listed)
        except Mismatch as found:
            if voided is None:
                raise
            self._leave_open(
                f"scores not verified: window {voided} was voided, possibly after they were computed with another "
                f"model or set: window {report.window}: {found}"
            )
        await self._check_peer_scores(report)
        await self._check_left_out(report, listed.union(one.uid for one in gathered.updates))
        await self._check_omissions(report, listed)

    async def _listed(self, window: int) -> set[int]:
        """Return the uids on the window's peer list, in its reserve and on probation."""
        listed = await self._comms.get_peer_list(window)
        return {*listed.peers, *listed.reserve_peers, *listed.probation} if listed else set()

    async def _recently_voided(self, window: int) -> int | None:
        """Return a recent window that was voided, perhaps after a validator had scored ``window``; None if none was.

        The range that is searched is the longest time that electors take to void a window.
        """
        after = VOID_WITHIN + 1 + LAST_WINDOWS - self._hparams.validator_offset
        for recent in range(max(self._train_state.start_window, window - after), window + 1):
            included = await self._windows.published(recent)
            if included is not None and not included.included and self._comms.is_voided(recent):
                return recent
        return None

    async def _check_observations(
        self, report: ScoreReport, debug_report: DebugReport, gathered: GatherResult[Update], listed: Collection[int]
    ) -> None:
        """Compare the observations, which depend on the window's set and on the model before it."""
        included = {one.uid: one.update for one in gathered.updates}
        for uid in included:
            if seen := report.observations.get(str(uid)):
                same(f"verdict on uid {uid}", seen.verdict, VALID)
        for uid, reason in debug_report.skipped.items():
            if (seen := report.observations.get(uid)) and reason is not Reason.EXCLUDED:
                same(f"verdict on uid {uid}", seen.verdict, reason)
        for uid, seen in report.observations.items():
            same(f"uid {uid} included", seen.included, int(uid) in included)
        for what, published, found in false_groups(report, debug_report, listed):
            raise Mismatch(what, published, found)
        on_probation = [int(uid) for uid, seen in report.observations.items() if seen.probation]
        if newer := [uid for uid in on_probation if uid not in listed]:
            self._leave_open(f"probation of uids {newer} not verified: not on its list, perhaps on a newer one")
        # The reasons of a decided set are the electors'; those of a set from the peers have been compared already.
        refused = () if gathered.published else debug_report.skipped.items()
        compared = {int(uid) for uid, reason in refused if reason is not Reason.EXCLUDED}
        fetched = included | await self._fetch_others(report, compared.union(included))
        await self._check_sync(report)
        await self._check_pages(report, fetched)
        await self._check_measures(report, included, fetched)

    async def _check_hotkeys(self, report: ScoreReport) -> None:
        """Compare hotkeys with those at the window's end: who registers a uid later did no work in the window."""
        then = await self._comms.hotkeys_in(report.window)
        others = {uid: seen.hotkey for uid, seen in report.observations.items() if seen.hotkey != then.get(int(uid))}
        if others and any(fault.startswith(NO_HOTKEYS) for fault in report.faults):
            self._leave_open(
                f"hotkeys of uids {[*others]} not verified: the validator could not read the owners at the window's end"
            )
            return
        for uid, hotkey in others.items():
            raise Mismatch(f"hotkey of uid {uid}", hotkey, then.get(int(uid)))

    async def _fetch_others(self, report: ScoreReport, compared: Collection[int]) -> dict[int, Update]:
        """Compare verdicts on all uids but ``compared`` with the miners' buckets; return the valid updates found there.

        Measured updates are fetched whatever their verdict, which must be "valid". Deleted or replaced updates are left
        out. With SparseLoCo, other miners' products depend on them if no update is included.
        """
        verdicts = dict.fromkeys((uid for uid in _measured(report) if uid not in compared), VALID) | {
            int(uid): seen.verdict
            for uid, seen in report.observations.items()
            if int(uid) not in compared and seen.verdict not in (None, Reason.EXCLUDED)
        }
        unreached = [uid for uid, verdict in verdicts.items() if verdict == Reason.UNAVAILABLE]
        if unreached:
            self._leave_open(f"verdicts on uids {unreached} not verified: reported as unreachable")
        asked = {uid: verdict for uid, verdict in verdicts.items() if uid not in unreached}
        found = await self._comms.gather_updates(asked, report.window, self._train_state.outer.spec, patient=True)
        updates = {one.uid: one.update for one in found.updates}
        self._compare_verdicts(asked, dict.fromkeys(updates, VALID) | found.skipped)
        for uid in _measured(report):
            if seen := report.observations.get(str(uid)):
                same(f"verdict on uid {uid}", seen.verdict, VALID)
        return updates

    def _compare_verdicts(self, published: Mapping[int, str], now: Mapping[int, str]) -> None:
        """Compare published verdicts with the present contents of the miners' buckets."""
        for uid, verdict in published.items():
            if refutes(now[uid], verdict):
                raise Mismatch(f"verdict on uid {uid}", verdict, now[uid])
        if gone := [uid for uid, verdict in published.items() if leaves_open(now[uid], verdict)]:
            why = ", ".join(f"{uid} {published[uid]}, now {now[uid]}" for uid in gone)
            self._leave_open(f"verdicts not verified, updates or commits are deleted or replaced: {why}")

    async def _check_sync(self, report: ScoreReport) -> None:
        """Compare the reported steps behind of miners with the miners' own reports."""
        found = await self._sync.check(report)
        for uid, (published, possible) in sorted(found.refuted.items()):
            raise Mismatch(f"steps behind of uid {uid}", published, possible)
        for uids, why in (
            (found.gone, "the miners' reports are deleted, replaced or not readable now"),
            (found.unread, "reported as not readable"),
            (found.not_judged, "the validator did not judge"),
        ):
            if uids:
                self._leave_open(f"steps behind of uids {uids} not verified: {why}")

    async def _check_omissions(self, report: ScoreReport, listed: Collection[int]) -> None:
        """Check that a fault explains every missing measurement; the faults themselves are not verified."""
        if self._hparams.profile != "documented":
            _, seed = await self._seed(report.window)
            with _consistent():
                for what, published, found in omissions(report, seed):
                    raise Mismatch(what, published, found)
            if not without_probation(report):
                _check_asked(report, listed)
        for fault in report.faults:
            self._leave_open(f"the validator's own fault not verified: {fault}")

    async def _check_left_out(self, report: ScoreReport, uids: Collection[int]) -> None:
        """Check that each miner of ``uids``, on the peer list or in the set, is observed: one that is not has no score.

        A validator may only leave out a uid that had another owner, a validator's stake or no bucket at some time since
        shortly before the window: its own copy of the metagraph may be a window old.
        """
        window = report.window
        if not (missing := sorted(uid for uid in uids if str(uid) not in report.observations)):
            return
        scored = min(window + self._hparams.validator_offset, self._comms.clock.window - 1)
        since = range(max(0, window - 2), max(window, scored) + 1)
        try:
            metagraphs = [await self._comms.metagraph_in(one) for one in since]
            buckets = [await self._comms.buckets_in(one) for one in since]
        except ChainUnavailable as error:
            self._leave_open(f"uids {missing}, which are not observed, not verified: {error}")
            return
        limit = self._hparams.eval_stake_limit
        miners = [{one.uid: one.hotkey for one in at.neurons if one.stake <= limit} for at in metagraphs]
        for uid in missing:
            hotkeys = {at.get(uid) for at in miners}
            if len(hotkeys) == 1 and None not in hotkeys and all(uid in at for at in buckets):
                raise Mismatch(f"observation of uid {uid}", None, "one, as of a miner")

    async def _check_pages(self, report: ScoreReport, updates: Mapping[int, Update]) -> None:
        """Compare which miners named their assigned pages; if any update is measured, all of these must be."""
        for uid, update in updates.items():
            seen = report.observations.get(str(uid))
            if seen is None or seen.assigned_pages is None:
                continue
            own = update.pages_digest == await self._data_loader.digest(uid, report.window)
            same(f"pages of uid {uid}", seen.assigned_pages, own)
            if report.alignment and own:
                same(f"uid {uid} measured", uid in report.alignment.uids, True)

    async def _check_measures(
        self, report: ScoreReport, included: Mapping[int, Update], fetched: Mapping[int, Update]
    ) -> None:
        """Compare products and losses.

        Args:
            fetched: updates of the included set, and others as far as they are still in their buckets.
        """
        measured = _measured(report)
        if not measured:
            return
        updates = [fetched[uid] for uid in sorted(measured) if uid in fetched]
        hotkey, seed = await self._seed(report.window)
        sampled = [int(uid) for uid, seen in report.observations.items() if seen.sampled]
        held_out = await self._data_loader.held_out(report.window, hotkey, sampled)
        same("held-out pages", report.held_out_pages, held_out.digest)
        gone = sorted({*measured}.difference(one.uid for one in updates))
        if gone and self._hparams.sparseloco and not included:
            # Norm caps follow from the included updates, or from all if there are none.
            self._leave_open(f"products and losses not verified: they depend on the updates of uids {gone}")
            return
        batches = sample_batches(held_out, seed, self._hparams)
        await asyncio.to_thread(self._train_state.set_caps, list(included.values()) or updates)
        if report.alignment:
            before, found = await asyncio.to_thread(self._train_state.align, updates, batches, seed, len(measured))
            middle, longer = (), 1.0
            if included:
                step, part = [*included.values()], before.for_middle()
                halfway = await asyncio.to_thread(
                    self._train_state.middle_alignment, step, updates, part, seed, len(measured)
                )
                middle, longer = halfway.products_in(found.unit), max(1.0, halfway.unit / found.unit)
            there = _there(report, updates)
            pairs = [one and other for i, one in enumerate(there) for other in there[i:]]
            lengths = np.sqrt(np.clip(np.diag(gram_of(found)), 0.0, None))
            of_pairs = np.outer(lengths, lengths)[np.triu_indices(len(lengths))]
            for name, known, sizes in (("products", there, lengths), ("norms", there, None), ("gram", pairs, of_pairs)):
                published = itertools.compress(getattr(report.alignment, name), known)
                self._near(name, tuple(published), getattr(found, name), sizes)
            published = tuple(itertools.compress(report.alignment.middle, there))
            self._near("products after half of the step", published, middle, longer * lengths[: len(middle)])
            self._near_number("unit of products", report.alignment.unit, found.unit)
            self._compare_largest_norm(report.alignment.largest_norm, found.largest_norm)
            self._compare_loss("held-out loss", report.alignment.loss, before.loss)
        else:
            before, lengths = await asyncio.to_thread(self._train_state.baseline, batches), np.zeros(0)  # no products
        for key, seen in sorted(report.observations.items(), key=lambda item: int(item[0])):
            if seen.assigned_products or seen.evaluation:
                await self._check_evaluation(int(key), report, updates, before, lengths=lengths, seed=seed)

    async def _check_evaluation(
        self,
        uid: int,
        report: ScoreReport,
        updates: Sequence[Update],
        before: Baseline,
        *,
        lengths: np.ndarray,
        seed: int,
    ) -> None:
        """Compare the own-pages test and the losses of one miner.

        Args:
            lengths: of the updates' steps, float64 [updates].
        """
        seen = report.observations[str(uid)]
        assigned = sample_batches(await self._data_loader.assigned(uid, report.window), seed, self._hparams)
        if seen.assigned_products:
            there = _there(report, updates)
            products = await asyncio.to_thread(self._train_state.own_alignment, updates, assigned, seed, len(there))
            published = tuple(itertools.compress(seen.assigned_products, there))
            self._near(f"products on the pages of uid {uid}", published, products, lengths)
        update = next((one for one in updates if one.uid == uid), None)
        if seen.evaluation and update:
            pages = assigned if seen.evaluation.assigned else None
            found = await asyncio.to_thread(self._train_state.evaluate, update, pages, before)
            self._compare_losses(f"held-out loss of uid {uid}", seen.evaluation.held_out, found.held_out)
            if seen.evaluation.assigned and found.assigned:
                self._compare_losses(f"assigned loss of uid {uid}", seen.evaluation.assigned, found.assigned)
            elif report.profile == "documented":  # with the others, ``omissions`` knows who needs one
                raise Mismatch(f"loss on the assigned pages of uid {uid}", None, "evaluated")

    async def _seed(self, window: int) -> tuple[str, int]:
        """Return the validator's hotkey, and the seed of all its random choices after ``window``."""
        hotkey = self._comms.get_hotkey(self._validator) or ""
        return hotkey, evaluation_seed(hotkey=hotkey, block_hash=await self._comms.window_hash(window + 1))

    def _compare_losses(self, what: str, published: LossChange, found: LossChange) -> None:
        for name in LossChange.model_fields:
            self._compare_loss(f"{what}, {name}", getattr(published, name), getattr(found, name))

    def _compare_loss(self, what: str, published: float | None, found: float | None) -> None:
        if published is None or found is None:
            same(what, published, found)
        elif abs(published - found) > TOLERANCE[self._hparams.precision]:
            raise Mismatch(what, published, found)

    def _compare_largest_norm(self, published: float | None, found: float) -> None:
        if published is None:
            raise Mismatch("largest honest norm", published, found)
        self._near_number("largest honest norm", published, found)

    def _near_number(self, what: str, published: float, found: float) -> None:
        """Compare numbers that are not rounded."""
        if abs(published - found) > PRODUCT_TOLERANCE[self._hparams.precision] * abs(found):
            raise Mismatch(what, published, found)

    def _near(
        self,
        what: str,
        published: Sequence[float],
        found: Sequence[float],
        sizes: Sequence[float] | np.ndarray | None = None,
    ) -> None:
        """Compare rounded numbers up to ``PRODUCT_TOLERANCE`` of their sizes.

        Args:
            sizes: largest magnitude of each product of vectors, which is their lengths' product: rounding errors are in
                proportion to it. None: the numbers' own magnitudes.
        """
        same(f"number of {what}", len(published), len(found))
        tolerance, least = PRODUCT_TOLERANCE[self._hparams.precision], 10.0**-PRODUCT_DECIMALS
        for one, other, size in zip(published, found, map(abs, found) if sizes is None else sizes, strict=True):
            if abs(one - other) > max(tolerance * size, least):
                raise Mismatch(what, one, other)

    async def _check_peer_scores(self, report: ScoreReport) -> None:
        """Compare scores and weights with those computed from the earlier reports and this report's observations."""
        same("profile", report.profile, self._hparams.profile)
        earlier = await self._earlier_reports(report)
        if earlier is None:
            return
        board, (_, seed) = score_board(self._hparams), await self._seed(report.window)
        with _consistent():
            board.resume(earlier)
            if report.alignment:
                pool = {uid: report.observations[str(uid)].hotkey for uid in report.alignment.uids}
                sampled = tuple(int(uid) for uid, seen in report.observations.items() if seen.sampled)
                same("sampled uids", tuple(sorted(sampled)), board.sample(pool, report.window, seed))
            outcome = board.see(report.evidence)
        same("earlier windows that the scores depend on", report.follows_from, board.follows_from)
        same("uids with a peer score", sorted(report.peer_scores), sorted(map(str, outcome.peer_scores)))
        for uid, one in outcome.peer_scores.items():
            published = report.peer_scores[str(uid)]
            if not _nearly_equal(published.model_dump(), one.model_dump()):
                raise Mismatch(f"peer score of uid {uid}", published, one)
        same("penalties", report.struck, {str(uid): codes for uid, codes in outcome.struck.items()})
        found = {str(uid): one for uid, one in board.weights.items()}
        if not _nearly_equal(report.weights, found):
            raise Mismatch("weights", report.weights, found)

    async def _earlier_reports(self, report: ScoreReport) -> list[ScoreReport] | None:
        """Return the reports that the scores follow from, ascending; None if one is deleted or not published.

        All published reports of the last windows are included, because scores must use all published evidence. Windows
        without one are listed: a validator could leave out those in which a miner was absent.
        """
        oldest = max(self._train_state.start_window, report.window - self._hparams.gradient_retention_windows)
        if self._hparams.profile == "hardened":
            oldest = max(oldest, report.window - self._hparams.pay_windows + 1)
        found: dict[int, ScoreReport] = {}
        sealed, absent = list[int](), list[int]()
        for window in range(report.window - 1, oldest - 1, -1):
            try:
                found[window] = await self._comms.get_scores(self._validator, window)
            except ScoresSealed:
                sealed.insert(0, window)
                continue
            except ObjectNotFound:
                absent.insert(0, window)
                continue
            except PayloadError as error:
                raise Mismatch(f"the scores of window {window}", "some", error) from error
            if self._hparams.profile == "documented":
                break
        unread = [window for window in report.follows_from if window not in found]
        if unread:
            self._leave_open(f"peer scores not verified: no report of windows {unread}")
            return None
        if absent:
            self._leave_open(f"no scores of windows {absent}: they count for no miner")
        if sealed:  # validators publish reports in their order
            self._leave_open(
                f"scores of windows {sealed} stayed sealed, a later report did not: they count for no miner"
            )
        return [found[window] for window in sorted(found)]


@contextlib.contextmanager
def _consistent() -> Iterator[None]:
    """Evidence that no formula takes, as it contradicts itself, is a difference."""
    try:
        yield
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
        raise Mismatch("evidence from which scores can be computed", "none", found) from error


def _nearly_equal(published: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Return whether two records are equal up to ``SCORE_TOLERANCE``: linear algebra differs in the last bits."""
    return published.keys() == found.keys() and all(
        math.isclose(one, other, rel_tol=SCORE_TOLERANCE, abs_tol=SCORE_TOLERANCE)
        if isinstance(one := published[key], float) and isinstance(other := found[key], float)
        else published[key] == found[key]
        for key in found
    )


def _check_asked(report: ScoreReport, listed: Collection[int]) -> None:
    """Check that the update of every uid on the peer list was requested."""
    for uid in sorted(listed):
        if (seen := report.observations.get(str(uid))) and seen.verdict is None:
            raise Mismatch(f"verdict on uid {uid}", None, "a verdict, or a fault")


def _measured(report: ScoreReport) -> Sequence[int]:
    """Return the uids whose updates were measured: with the documented profile, those that were evaluated."""
    if report.alignment:
        return report.alignment.uids
    return [int(uid) for uid, seen in report.observations.items() if seen.evaluation]


def _there(report: ScoreReport, updates: Iterable[Update]) -> list[bool]:
    """Return, for each measured update, whether it could be fetched."""
    fetched = {one.uid for one in updates}
    return [uid in fetched for uid in report.alignment.uids] if report.alignment else []
