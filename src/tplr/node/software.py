"""Publishes a node's software versions, and detects that most validators run newer ones."""

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version as package_version
from typing import Any

from tplr.errors import Outdated, PayloadError, StoreError, StoreUnavailable
from tplr.keys import RunVersion
from tplr.logging import logger
from tplr.node.replica import NodeContext
from tplr.schemas import Software

# An upgrade is announced many windows ahead, so validators' documents are read only every so many windows; as long as
# none is found, they are read in every window.
READ_EVERY_WINDOWS = 5
# As in a ``Software`` document; the stages of a release, ascending.
_VERSION = re.compile(r"([0-9]+(?:\.[0-9]+)*)(?:(a|b|rc)([0-9]{1,9}))?(?:\.dev([0-9]{1,9}))?")
_STAGES = ("dev", "a", "b", "rc", "release")


def own_software(uid: int, version: RunVersion) -> Software:
    """Return this node's software document, with the newest rules of its hparams.

    Its package version has no local part and no post-release: 1.0 of 1.0.post1+cpu.
    """
    since, newest = version.changes[-1] if version.changes else (0, str(version))
    published = _VERSION.match(package_version("tplr"))
    assert published
    return Software(uid=uid, package=published[0], spec_version=int(newest), since=since)


class SoftwareWatch:
    """Compares this node's software with that of validators with more than half of all validators' stake."""

    def __init__(self, context: NodeContext, version: RunVersion, *, publishes: bool = True) -> None:
        """``publishes``: whether the node has a bucket on chain, where others find its document."""
        self._comms, self._clock, self._telemetry = context.comms, context.clock, context.telemetry
        self._version, self._publishes = version, publishes
        self._others: dict[tuple[int, str], Software] = {}  # by uid and hotkey of the validators
        self._logged: set[str] = set()

    async def run(self) -> None:
        """Publish this node's document, then compare versions in each window until cancelled.

        Raises:
            Outdated: most validators follow rules, in effect now, that this node does not know.
        """
        own = own_software(self._comms.uid, self._version)
        published, read_in = not self._publishes, 0
        async for tick in self._clock.ticks():
            if not published:
                published = await self._publish(own)
            if not self._others or tick.window - read_in >= READ_EVERY_WINDOWS:
                self._others, read_in = await self._read(), tick.window
            self._compare(own, tick.window)

    async def _publish(self, own: Software) -> bool:
        try:
            await self._comms.put_software(own)
        except StoreError as error:
            logger.warning("software not published: %s", error)
            return False
        return True

    async def _read(self) -> dict[tuple[int, str], Software]:
        """Read the documents of the validators that have one; of a bucket that is down, the one that was read before.

        Otherwise a bucket that does not answer would look like a change of the rules that is withdrawn.
        """
        owners = {one.uid: one.hotkey for one in self._comms.metagraph.neurons}
        asked = [(uid, owners[uid]) for uid in self._comms.validators()]
        found = await asyncio.gather(*(self._document(uid, self._others.get((uid, key))) for uid, key in asked))
        return {which: one for which, one in zip(asked, found, strict=True) if one}

    async def _document(self, uid: int, before: Software | None) -> Software | None:
        try:
            found = await self._comms.get_software(uid)
        except StoreUnavailable:
            return before
        except (StoreError, PayloadError):
            return None
        return found if found.uid == uid else None

    def _compare(self, own: Software, window: int) -> None:
        stakes = {one.uid: one.stake for one in self._comms.metagraph.neurons if one.permit}
        if (found := newer_software(own, self._others.values(), stakes)) is None:
            self._note_withdrawn(own, window)
            return
        text, newer = found
        if newer.spec_version > own.spec_version and window >= newer.since:
            raise Outdated(text)
        self._log_once(text, own, newer, window)

    def _note_withdrawn(self, own: Software, window: int) -> None:
        """Log and emit that an earlier finding no longer holds, such as a change of the rules that was withdrawn."""
        if self._logged:
            self._logged.clear()
            logger.info("most validators no longer run anything newer")
            self._emit("", own, own, window)

    def _log_once(self, text: str, own: Software, newer: Software, window: int) -> None:
        """Log and emit each finding once."""
        if text in self._logged:
            return
        self._logged.add(text)
        logger.warning("%s", text)
        self._emit(text, own, newer, window)

    def _emit(self, text: str, own: Software, newer: Software, window: int) -> None:
        self._telemetry.emit(
            "outdated",
            window=window,
            text=text,
            package=own.package,
            network_package=newer.package,
            spec_version=own.spec_version,
            network_spec_version=newer.spec_version,
            since=newer.since,
        )


def newer_software(
    own: Software, others: Iterable[Software], stakes: Mapping[int, float]
) -> tuple[str, Software] | None:
    """Return a text on what to do and the newest software that validators with more than half of all stake have.

    None if validators with more than half of the stake do not run newer software than ``own``. Validators
    with less than half can't move the window of an announced change of the rules.

    Args:
        others: documents of validators.
        stakes: of all uids with a permit.
    """
    others = list(others)

    def by_rules(one: Software) -> tuple[Any, ...]:
        return one.spec_version, -one.since, _order(one)

    rules = _most([one for one in others if one.spec_version > own.spec_version], stakes, by_rules)
    if rules is not None:
        text = (
            f"from window {rules.since} on, the network follows version {rules.spec_version} of the rules, "
            f"this node version {own.spec_version}: get the run's new hparams file (and package {rules.package}), "
            "restart"
        )
        return text, rules
    package = _most([one for one in others if _order(one) > _order(own)], stakes, _order)
    if package is not None:
        return f"the network runs package {package.package}, this node {own.package}: upgrade it", package
    return None


def _most(
    newer: Sequence[Software], stakes: Mapping[int, float], key: Callable[[Software], tuple[Any, ...]]
) -> Software | None:
    """Return the greatest by ``key`` that authors with more than half of the stake have or exceed; None without one.

    So authors with less than half of the stake can't choose it.
    """
    agreed = 0.0
    for one in sorted(newer, key=key, reverse=True):
        agreed += stakes.get(one.uid, 0.0)
        if agreed * 2 > sum(stakes.values()):
            return one
    return None


def _order(software: Software) -> tuple[Any, ...]:
    """Return a key that sorts package versions: dev versions, then pre-releases, then the release."""
    match = _VERSION.fullmatch(software.package)
    assert match
    release, stage, number, dev = match.groups()
    parts = [*map(int, release.split(".")), 0, 0, 0][:4]  # 1.0 is 1.0.0
    stage = stage or ("dev" if dev else "release")
    return parts, _STAGES.index(stage), int(number or 0), float(dev or "inf")
