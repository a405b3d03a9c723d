"""Finds the answer that electors with more than half of the stake give, and waits no longer than needed."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from tplr.chain.electors import Electors
from tplr.errors import ObjectNotFound, PayloadError, StoreError, StoreUnavailable
from tplr.exchange.ballots import BallotReader, CheckedDecision, Decision, Value, value_id
from tplr.exchange.envelope import envelope_cap
from tplr.keys import decision_key
from tplr.logging import logger
from tplr.storage import ObjectStore

# Seconds until the remaining electors are asked if the first do not answer; seconds until a request is abandoned.
PATIENCE_SECONDS, ANSWER_SECONDS = 1.0, 10.0
# Seconds until a request for a decision is abandoned.
DECISION_SECONDS = 4.0

T = TypeVar("T")


def enough(electors: Electors, order: Sequence[int], known: Sequence[int] = ()) -> list[int]:
    """Return the first uids in ``order`` that, with the ``known`` ones, have more than half of the stake; else all."""
    asked: list[int] = []
    for uid in order:
        if electors.outweighs([*known, *asked]):
            break
        asked.append(uid)
    return asked


def of_most_stake(electors: Electors, answers: Mapping[int, T], key: Callable[[T], Hashable]) -> T | None:
    """Return the answer of electors with more than half of the stake, the first one with its key; None without one."""
    return next((answers[who[0]] for who in _alike(answers, key) if electors.outweighs(who)), None)


def _alike(answers: Mapping[int, T], key: Callable[[T], Hashable]) -> list[list[int]]:
    """Return the electors of each answer."""
    who: dict[Hashable, list[int]] = {}
    for uid, answer in answers.items():
        who.setdefault(key(answer), []).append(uid)
    return [*who.values()]


async def agreed(
    electors: Electors, ask: Callable[[int], Awaitable[T]], *, key: Callable[[T], Hashable] = repr
) -> T | None:
    """Return the answer that electors with more than half of the stake give, or None if there is none.

    Electors are asked in rank order, at first only as many as a majority needs. Electors that do not answer are waited
    for only while their answers could still decide.

    Args:
        ask: reads the answer of an elector.
        key: answers with equal keys are the same answer; the first one is returned.

    Raises:
        StoreUnavailable: there is no majority, and this elector did not answer; with its answer there may be one.
        StoreError: there is no majority, and this request to an elector failed; a later attempt may succeed.
        PayloadError: there is no majority, no request failed, and this elector's document is invalid.
    """
    answers: dict[int, T] = {}
    problems: dict[int, StoreError | PayloadError] = {}

    def undecided() -> bool:
        """Return whether electors without an answer could give a majority, now or in a later attempt."""
        silent = [uid for uid in electors.uids if uid not in answers and not _refused(problems.get(uid))]
        return any(electors.outweighs([*who, *silent]) for who in [[], *_alike(answers, key)])

    async def note(uid: int) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answers[uid] = await ask(uid)
        except TimeoutError:
            problems[uid] = StoreUnavailable(f"uid {uid}: no answer within {ANSWER_SECONDS:g} s")
        except (StoreError, PayloadError) as error:
            problems[uid] = error

    tasks: list[asyncio.Task[None]] = []
    try:
        first = enough(electors, electors.uids)
        for uids, patience in ((first, PATIENCE_SECONDS), (electors.uids, None)):
            tasks += [asyncio.create_task(note(uid)) for uid in uids if uid not in first or not tasks]
            until = patience and asyncio.get_running_loop().time() + patience
            while undecided() and (pending := {task for task in tasks if not task.done()}):
                left = until and max(0.0, until - asyncio.get_running_loop().time())
                await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if (found := of_most_stake(electors, answers, key)) is not None or left == 0.0:
                    break
            if (found := of_most_stake(electors, answers, key)) is not None:
                return found
            if not undecided():
                break
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if undecided() and (silent := [one for one in problems.values() if not _refused(one)]):
        raise silent[0]
    if others := [one for one in problems.values() if _refused(one)]:
        raise next((one for one in others if isinstance(one, StoreError)), others[0])
    return None


def _refused(problem: StoreError | PayloadError | None) -> bool:
    """Return whether an elector has answered that it has no valid answer."""
    return problem is not None and not isinstance(problem, StoreUnavailable)


class ElectionResult(NamedTuple):
    """The result of an election, as far as it is readable now.

    Attributes:
        decided: None if no value has commitments of more than half of the stake.
        stakes: share of the electors' stake, by uid, in rank order.
        commitments: by elector, whether it is committed to the decided value; electors without a readable commitment
            are missing.
    """

    decided: Value | None
    stakes: dict[int, float]
    commitments: dict[int, bool]


class DecisionReader:
    """Reads the decision of one window, repeatedly if needed; a document that was read is not read again.

    Several tasks may look at once: they share the requests, which end with the last of them.
    """

    def __init__(self, reader: BallotReader, store_of: Callable[[int], ObjectStore | None], window: int) -> None:
        """``store_of``: the bucket that an elector has now; called before each request."""
        self._reader = reader
        self._store_of = store_of
        self._key = decision_key(window, reader.run.version)
        self._window = window
        self._seen: dict[int, CheckedDecision] = {}
        self._missed: Counter[int] = Counter()
        self._refused: dict[int, PayloadError] = {}
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._waiting = 0

    async def look(self) -> Value | None:
        """Return the decided value, or None if nothing is decided or the decision can't be read now.

        Waits for ``PATIENCE_SECONDS`` at most. Without a decision, slower requests go on for the next call, up to
        ``DECISION_SECONDS``; if this call is cancelled and no other one waits, they are, too.

        Raises:
            PayloadError: electors without valid decisions leave no majority.
        """
        if (value := self._decided()) is not None:
            return value
        electors = self._reader.electors
        # Electors that did not answer before are asked last; those with an invalid decision, of up to 2 MiB in each
        # poll, only if the others are not enough.
        unseen = sorted(
            (uid for uid in electors.uids if uid not in self._seen),
            key=lambda uid: (uid in self._refused, self._missed[uid]),
        )
        asked = enough(electors, unseen, [*self._seen]) or list(electors.uids)
        await self._ask_all(asked, PATIENCE_SECONDS)
        if (value := self._decided()) is not None:
            self._cancel()
            return value
        if self._refused and not electors.outweighs(uid for uid in electors.uids if uid not in self._refused):
            raise next(iter(self._refused.values()))
        return None

    async def result(self) -> ElectionResult:
        """Ask every elector once and return the result as it is published now."""
        electors = self._reader.electors
        await self._ask_all([uid for uid in electors.uids if uid not in self._seen], None)
        decided, total = self._decided(), electors.stake(electors.uids)
        named = value_id(decided) if decided else ""
        commitments: dict[int, bool] = {}
        for one in self._seen.values():
            for uid in one.commitments:
                commitments[uid] = commitments.get(uid, False) or one.proof.id == named
        return ElectionResult(decided, {uid: electors.stake([uid]) / total for uid in electors.uids}, commitments)

    def _decided(self) -> Value | None:
        committed: dict[str, set[int]] = {}
        for one in self._seen.values():
            who = committed.setdefault(one.proof.id, set())
            who.update(one.commitments)
            if self._reader.electors.outweighs(who):
                return one.proof.value
        return None

    async def _ask_all(self, uids: Sequence[int], timeout: float | None) -> None:
        """Ask these electors, and wait; a request that is not done by then ends by itself."""
        self._asking = {uid: task for uid, task in self._asking.items() if not task.done()}
        for uid in uids:
            if uid not in self._asking:
                self._asking[uid] = asyncio.create_task(self._ask(uid))
        if tasks := [self._asking[uid] for uid in uids]:
            try:
                with self._counted():
                    done, _ = await asyncio.wait(tasks, timeout=timeout)
            except asyncio.CancelledError:
                self._cancel()
                raise
            for task in done:
                task.result()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count this caller among those that wait for requests."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def _cancel(self) -> None:
        """Cancel the requests that still run, if no caller waits for them."""
        if not self._waiting:
            for task in self._asking.values():
                task.cancel()
            self._asking.clear()

    async def _ask(self, uid: int) -> None:
        self._missed[uid] += 1
        store = self._store_of(uid)
        if store is None:
            return
        try:
            async with asyncio.timeout(DECISION_SECONDS):
                raw = await store.get(self._key, max_bytes=envelope_cap(Decision.max_bytes))
            self._seen[uid] = await asyncio.to_thread(self._reader.decision, raw, uid)
            self._refused.pop(uid, None)
        except ObjectNotFound:
            return
        except PayloadError as error:
            self._refused[uid] = error
        except (StoreError, TimeoutError) as error:
            logger.info("decision of window %d by uid %d not read: %s", self._window, uid, str(error) or "no answer")
