"""Checks a set that a validator decided alone against the peers' buckets, as far as they still show it.

A miner can delete or replace its update and its commit; the buckets' time stamps show which objects were replaced. So a
missing update contradicts no claim, and its bytes may be in objects that the electors published. Four things contradict
a validator: a commit, written in time, with another hash than the published one; an update that was written too early
to be accepted; a uid that is not on the peer list; and a valid update, written in time, that it reports as not found.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tplr.comms import Comms
from tplr.compress.payload import Update
from tplr.errors import ObjectNotFound, PayloadError, StoreError, StoreUnavailable, WindowLost
from tplr.exchange.aggregates import reported_set
from tplr.exchange.gather import HASH_FIELD, GatheredUpdate, GatherResult
from tplr.exchange.updates import STORE_CLOCK_SECONDS
from tplr.hparams import HParams
from tplr.logging import logger
from tplr.node.audit_claims import BELIEVED, NEVER_VALID, UNREACHED, leaves_open, refutes
from tplr.node.windows import WindowUpdates
from tplr.schemas import DebugReport, PeerList, Reason, UploadBounds


class Mismatch(Exception):
    """A published value that can't be true. ``parts``: its name, the published value, and the found value."""

    def __init__(self, what: str, published: object, found: object) -> None:
        self.parts = (what, published, found)
        super().__init__(what)

    def __str__(self) -> str:
        what, published, found = self.parts
        return f"{what}: published {published}, found {found}"


def same(what: str, published: object, found: object) -> None:
    """Raise Mismatch unless the two values are equal."""
    if published != found:
        raise Mismatch(what, published, found)


@dataclass
class OwnSet:
    """A set that its validator decided alone.

    Attributes:
        gathered: its updates, without those that no node can provide.
        unverified: descriptions of the claims that are not verified.
        lost: an error if some of its updates are not available from any node, so that the window can't be applied.
    """

    gathered: GatherResult[Update]
    unverified: list[str] = field(default_factory=list)
    lost: StoreUnavailable | WindowLost | None = None


class SetClaims:
    """Compares a validator's sets with the peers' buckets."""

    def __init__(self, comms: Comms, windows: WindowUpdates, hparams: HParams, *, size: int) -> None:
        """``size``: of an update, in bytes."""
        self._comms = comms
        self._windows = windows
        self._hparams = hparams
        self._size = size

    async def check(self, report: DebugReport) -> OwnSet:
        """Compare the set in ``report`` with the peers' buckets, and find its updates.

        Raises:
            Mismatch: the first claim that can't be true.
            PayloadError: there is no peer list.
            ChainUnavailable, StoreError: the comparison is not possible now.
        """
        window = report.window
        listed = await self._comms.get_peer_list(window)
        if listed is None:
            raise PayloadError("the electors have published no peer list for this window")
        named = {*listed.peers, *listed.reserve_peers}
        claimed = {int(uid): sha256 for uid, sha256 in sorted(report.included.items(), key=lambda one: int(one[0]))}
        for uid, sha256 in claimed.items():
            same(f"update of uid {uid}", sha256, sha256 if uid in named else "not listed")
        skipped = {int(uid): reason for uid, reason in report.skipped.items() if int(uid) not in claimed}
        found = await self._windows.from_peers(
            window,
            unreached=[uid for uid, reason in skipped.items() if reason in UNREACHED],
            excluded=[uid for uid, reason in skipped.items() if reason is Reason.EXCLUDED],
            fill_in=False,
        )
        there = {one.uid: one for one in found.updates}
        now = found.skipped | {uid: one.sha256 for uid, one in there.items()}
        gone = {uid: sha256 for uid, sha256 in claimed.items() if now[uid] != sha256}
        commits = {uid: await self._commit(uid, window) for uid in gone}
        for uid, sha256 in gone.items():
            if now[uid] in NEVER_VALID:
                raise Mismatch(f"update of uid {uid}", sha256, now[uid])
            if commits[uid] not in (None, sha256):
                raise Mismatch(f"update of uid {uid}", sha256, f"{commits[uid]}, by its commit")
        made = OwnSet(replace(found, skipped={uid: why for uid, why in found.skipped.items() if uid in skipped}))
        self._compare_skipped(report, listed, claimed, now, made)
        kept = {uid: one for uid, one in there.items() if claimed.get(uid) == one.sha256}
        kept |= await self._recover(report, gone, now, commits, made)
        made.gathered = replace(made.gathered, updates=tuple(kept[uid] for uid in sorted(kept)))
        return made

    async def _commit(self, uid: int, window: int) -> str | None:
        """Return the hash in a commit that every node certainly found; None if there is no such commit."""
        if not self._hparams.require_commit:
            return None
        try:
            commit = await self._comms.get_commit(uid, window)
        except StoreError as error:
            if not isinstance(error, ObjectNotFound):
                logger.info("window %d: commit of uid %d not read: %s", window, uid, error)
            return None
        start = (await self._comms.upload_bounds(window, 0.0)).start
        bounds = UploadBounds(start - STORE_CLOCK_SECONDS, float("inf"))
        # A later commit may have replaced one that the validator had read.
        certain = bounds.judge(commit.last_modified) is Reason.TOO_EARLY and not commit.in_parts
        return commit.metadata.get(HASH_FIELD, "") if certain else None

    def _compare_skipped(
        self, report: DebugReport, listed: PeerList, claimed: Mapping[int, str], now: Mapping[int, str], made: OwnSet
    ) -> None:
        """Compare the skip reasons of listed peers, and the reserve peers that replace them."""
        skipped = {int(uid): reason for uid, reason in report.skipped.items()}
        absent = [uid for uid in listed.peers if uid not in claimed]
        for uid in absent:
            if uid not in skipped and now[uid] != Reason.UNAVAILABLE:
                raise Mismatch(f"why uid {uid} is not included", None, now[uid])
        for uid, reason in skipped.items():
            if uid not in absent and not (reason is Reason.EXCLUDED and uid in now):
                raise Mismatch(f"why uid {uid} is not included", reason.value, None)
            if uid in now and refutes(verdict := now[uid] if now[uid] in [*Reason] else "valid", reason):
                # If the update is valid now, name its hash, which is more informative than "valid".
                what = f"update of uid {uid}" if verdict == "valid" else f"verdict on uid {uid}"
                raise Mismatch(what, reason.value, now[uid])
        if left := [uid for uid, why in skipped.items() if why not in BELIEVED and leaves_open(now[uid], why)]:
            told = ", ".join(f"{uid} {skipped[uid]}, now {now[uid]}" for uid in left)
            made.unverified.append(f"verdicts not verified, updates or commits are deleted or replaced: {told}")
        reserve = [uid for uid in listed.reserve_peers if uid not in listed.peers]
        taken = [uid for uid in reserve if uid in claimed]
        for uid in taken[len(absent) :]:
            raise Mismatch(f"update of uid {uid}", claimed[uid], "not needed")
        free = reserve if len(taken) < len(absent) else reserve[: reserve.index(taken[-1])] if taken else []
        passed = [uid for uid in free if uid not in claimed and now[uid] not in [*Reason]]
        if passed:
            # No reason is published for them, and their buckets may not have answered then.
            made.unverified.append(f"uids {passed} of the reserve not verified: skipped as if unreachable")

    async def _recover(
        self,
        report: DebugReport,
        gone: Mapping[int, str],
        now: Mapping[int, str],
        commits: Mapping[int, str | None],
        made: OwnSet,
    ) -> dict[int, GatheredUpdate[Update]]:
        """Find updates that are no longer valid in their buckets, by their published hashes, at any node."""
        if not gone:
            return {}
        window, spec = report.window, self._windows.spec
        again = await self._comms.gather_updates(gone, window, spec, sha256s=gone, patient=True)
        found = {one.uid: one for one in again.updates}
        if found:
            made.unverified.append(f"uids {sorted(found)}: commits not verified: deleted or replaced")
        missing = [uid for uid in gone if uid not in found]
        try:
            kept = (
                await self._windows.kept(reported_set(report, self._hparams.version, size=self._size), missing)
                if missing
                else {}
            )
        except PayloadError as error:
            raise Mismatch("the included set", "one that can be applied", error) from error
        for uid, one in sorted(kept.items()):
            shown = "its commit names this hash" if commits[uid] else "no commit shows that the miner published them"
            made.unverified.append(
                f"uid {uid}: its bucket now: {now[uid]}; its bytes are from the electors, and {shown}"
            )
            found[uid] = one
        lost = [uid for uid in missing if uid not in kept]
        if away := [uid for uid in lost if again.skipped.get(uid) is Reason.UNAVAILABLE]:
            text = f"window {window}: the update of uid {away[0]}, which was applied, can't be reached now"
            made.lost = StoreUnavailable(text)
        elif lost:
            made.lost = WindowLost(self._describe_lost(report, lost, now, commits))
        return found

    def _describe_lost(
        self, report: DebugReport, lost: list[int], now: Mapping[int, str], commits: Mapping[int, str | None]
    ) -> str:
        """Describe the claimed updates that no node can provide, and the evidence of who deleted them."""
        told = []
        for uid in lost:
            text = f"uid {uid}, sha256 {report.included[str(uid)][:12]}…; its bucket now: {now[uid]}; "
            if commits[uid]:
                text += "its commit, written in time, names this hash: the miner has deleted the update"
            else:
                text += "no commit shows whether the miner deleted it or never published it"
            told.append(text)
        if report.window < self._windows.oldest:
            held = "; it is older than gradient_retention_windows, and all nodes may have deleted it"
        elif self._hparams.manifest_timeout_seconds:
            held = f"; the electors, uid {report.uid} included, publish no aggregate of this set"
        else:
            held = ""
        return (
            f"window {report.window}: validator {report.uid} claims updates that no node can provide: "
            f"{'; '.join(told)}{held}. The rest of its set agrees. Start from a state of a later window (--from)"
        )
