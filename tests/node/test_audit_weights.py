"""Weights on chain that are in an old report alone; test_inspect_cli.py has those that are in none."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tplr.errors import StoreUnavailable
from tplr.node import audit_weights
from tplr.node.audit_weights import LATE, unexplained_weights

EVERY, PAY_WINDOWS = 3, 20
OLD, NEW = {"1": 1.0}, {"2": 1.0}


async def told(monkeypatch: pytest.MonkeyPatch, reports: list[dict[str, float] | None]) -> str | None:
    """Return what is told of weights ``OLD``, if windows from 0 on have these weights (None: not readable)."""

    async def published_windows(*_: object) -> list[int]:
        return [*range(len(reports))]

    async def get_scores(_: int, window: int) -> Any:
        if (weights := reports[window]) is None:
            raise StoreUnavailable("no network")
        return SimpleNamespace(weights=weights)

    async def weights() -> dict[int, dict[int, float]]:
        return {0: {int(uid): weight for uid, weight in OLD.items()}}

    async def max_weight() -> float:
        return 1.0

    monkeypatch.setattr(audit_weights, "published_windows", published_windows)
    comms = SimpleNamespace(get_scores=get_scores, chain=SimpleNamespace(weights=weights, max_weight=max_weight))
    hparams = SimpleNamespace(windows_per_weights=EVERY, pay_windows=PAY_WINDOWS, burn_uid=None)
    return await unexplained_weights(cast(Any, SimpleNamespace(comms=comms, hparams=hparams)), 0)


async def test_weights_that_are_only_in_an_old_report_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A validator could pay by them for as long as they are in its newest reports."""
    late = LATE * EVERY
    assert await told(monkeypatch, [NEW, OLD, *[NEW] * late]) is None
    text = await told(monkeypatch, [NEW, OLD, *[NEW] * (late + 1)])
    assert text == f"its weights on chain are those of window 1, and its newest readable report is of {late + 2}"
    assert await told(monkeypatch, [NEW, OLD, *[NEW] * late, None]) is None
    assert await told(monkeypatch, [OLD, *[NEW] * (late + 1), OLD]) is None
    text = await told(monkeypatch, [OLD, *[NEW] * PAY_WINDOWS])
    assert text == "its weights on chain (uid 1 1.0000) are those of none of its readable reports"
