"""When a node rolls back because of its model: at most twice in a row, also if it replays equal windows."""

from types import SimpleNamespace
from typing import Any

import pytest

from tplr.errors import StoreUnavailable
from tplr.exchange.aggregates import Included, IncludedSet
from tplr.exchange.gather import GatheredUpdate
from tplr.node import agreement
from tplr.node.agreement import Agreement
from tplr.node.windows import WindowUpdates


class NothingPublished:
    """No window's included set is known."""

    async def published(self, _: int) -> None:
        return None


class DecidedLate(WindowUpdates):
    """Reports name two updates; the later decision has one of them."""

    def __init__(self, *, decided: bool = True) -> None:
        self._comms = SimpleNamespace(clock=SimpleNamespace(window=9))  # type: ignore[assignment]
        self._decided = decided

    async def published(self, window: int) -> IncludedSet | None:
        return included_in(window, 1) if self._decided else None

    async def reported(self, window: int) -> IncludedSet | None:
        return included_in(window, 1, 2)

    async def _aggregated(self, included: IncludedSet) -> dict[int, GatheredUpdate[Any]]:
        return {one.uid: GatheredUpdate(one.uid, None, one.sha256, one.size) for one in included.included}


def included_in(window: int, *uids: int) -> IncludedSet:
    included = tuple(Included(uid=uid, sha256=f"{uid:064x}", size=1) for uid in uids)
    return IncludedSet(window=window, version="1", included=included, skipped={}, success_rate=1.0)


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """Return the reports of most electors, by window."""
    fingerprints: dict[int, str] = {}

    async def agreed_report(_: object, window: int) -> SimpleNamespace | None:
        return report(fingerprints[window]) if window in fingerprints else None

    monkeypatch.setattr(agreement, "agreed_report", agreed_report)
    return fingerprints


def report(fingerprint: str, outer: str = "caps", included: dict[str, str] | None = None) -> SimpleNamespace:
    return SimpleNamespace(fingerprint=fingerprint, outer_fingerprint=outer, included=included or {})


def new() -> Agreement:
    return Agreement(SimpleNamespace(alone=False), NothingPublished())  # type: ignore[arg-type]


def note(one: Agreement, outer: str = "caps", **fingerprints: str) -> None:
    for window, fingerprint in fingerprints.items():
        gathered = SimpleNamespace(window=int(window[1:]), published=True)
        one.note(gathered, report(fingerprint, outer))  # type: ignore[arg-type]


async def divergence(one: Agreement) -> tuple[int, bool] | None:
    found = await one.first_divergence()
    return found and (found.window, found.local_state_failed)


async def test_windows_that_are_replayed_and_equal_do_not_begin_the_count_again(reported, caplog) -> None:
    reported.update({5: "five", 6: "six"})
    one = new()
    found = []
    for _ in range(3):
        note(one, w5="five", w6="another")
        found.append(await divergence(one))
        before, one = one, new()  # also after a restart in between
        one.load_state_dict(before.state_dict())
    assert found == [(6, False), (6, True), None]
    assert "still differs from most electors' after rollbacks" in caplog.text
    # A later equal window ends it.
    reported.update({7: "seven", 8: "eight"})
    note(one, w7="seven", w8="another")
    assert await divergence(one) == (8, False)


async def test_equal_weights_with_other_norm_caps_are_rolled_back(reported) -> None:
    """The next window that clips an update would give other weights."""
    reported[5] = "five"
    one = new()
    note(one, outer="other caps", w5="five")
    assert await divergence(one) == (5, False)
    note(one, w5="five")
    assert await divergence(one) is None


async def test_electors_that_do_not_answer_are_not_asked_for_every_window(monkeypatch, reported) -> None:
    """Each request may take ten seconds, and up to 32 windows wait: a node would miss its next windows."""
    asked: list[int] = []

    async def silent(_: object, window: int) -> None:
        asked.append(window)
        raise StoreUnavailable("no answer")

    one = new()
    note(one, w5="five", w6="another", w7="seven", w8="eight")
    with monkeypatch.context() as outage:
        outage.setattr(agreement, "agreed_report", silent)
        assert await divergence(one) is None
    assert asked == [5, 6]
    reported.update({5: "five", 6: "six"})
    assert await divergence(one) == (6, False)


async def test_a_set_that_only_reports_name_is_compared_when_it_is_decided(reported) -> None:
    """Live nodes roll back in this case, and so must a node that caught up before."""
    one = Agreement(SimpleNamespace(alone=False, is_voided=lambda _: False), DecidedLate())  # type: ignore[arg-type]
    gathered = await DecidedLate(decided=False).find(7)
    assert not gathered.published
    one.note(gathered, report("model", included={str(got.uid): got.sha256 for got in gathered.updates}))  # type: ignore[arg-type]
    assert await divergence(one) == (7, False)
