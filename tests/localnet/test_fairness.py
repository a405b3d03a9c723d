"""A miner that loses windows to faults is paid for the delivered ones, and never more than one that lost fewer."""

import json
import math
from pathlib import Path

import pytest
from fairness import FEWEST_MORE, FEWEST_WINDOWS, Earned, earned, gains_by_loss, spread

from tplr.cli import main
from tplr.hparams import HParams
from tplr.telemetry import read_events
from tplr.telemetry.events import Event

WINDOWS = 36  # about ten of these pass before any miner is paid


def event(kind: str, window: int, **fields: object) -> Event:
    return {"event": kind, "window": window, **fields}


def test_windows_that_were_not_scored_count_for_nobody() -> None:
    events = [event("applied", window, included=[1, 2] if window % 2 else [2]) for window in range(1, 9)]
    scored = (2, 3, 5, 6, 8)
    events += [event("scores", window, scores={"1": 1.0, "2": 3.0}) for window in scored]
    found = earned(events, pay_windows=6)
    assert list(found) == list(scored)
    assert found[8] == {1: Earned(0.25, 2, 2), 2: Earned(0.75, 4, 0)}
    assert found[2] == {1: Earned(0.25, 0, 1), 2: Earned(0.75, 1, 0)}
    nobody = earned([event("scores", 1, scores={"1": 0.0})], pay_windows=6)
    assert nobody == {1: {1: Earned(0.0, 0, 1)}}


def test_pay_is_compared_for_each_window_delivered() -> None:
    few = Earned(0.1, FEWEST_WINDOWS - 1, 9)
    pay = {1: Earned(0.6, 12, 1), 2: Earned(0.2, 5, 8), 3: few}
    assert spread(pay) == pytest.approx(1.25)
    assert spread({1: pay[1], 3: few}) is None
    unpaid = Earned(0.0, 13, 1)
    assert spread({1: unpaid, 2: unpaid}) is None
    assert spread({1: pay[1], 2: unpaid}) == math.inf


def test_whoever_lost_more_and_earns_more_is_named() -> None:
    pay = {1: Earned(0.6, 10, FEWEST_MORE), 2: Earned(0.4, 13, 0)}
    assert gains_by_loss(pay) == [(1, 2)]
    assert gains_by_loss({**pay, 1: Earned(0.6, 11, FEWEST_MORE - 1)}) == []
    assert gains_by_loss({**pay, 1: Earned(0.4, 10, FEWEST_MORE)}) == []


@pytest.mark.localnet
@pytest.mark.long
@pytest.mark.timeout(900)
def test_who_loses_windows_to_chaos_is_paid_for_the_others(tmp_path: Path) -> None:
    """Real processes that are killed, paused and cut off; three equal miners. After every scored window."""
    run = tmp_path / "run"
    options = ("--miners", "3", "--windows", str(WINDOWS), "--window-seconds", "10", "--chaos")
    main(["localnet", *options, "--run-dir", str(run)])  # other tests check the other outcomes
    hparams = HParams.model_validate(json.loads((run / "hparams.json").read_text()))
    events, _ = read_events(run / "events" / "validator.jsonl")
    found = earned(events, pay_windows=hparams.pay_windows)
    last = found[max(found)]
    assert {window: pairs for window, pay in found.items() if (pairs := gains_by_loss(pay))} == {}
    ratio = spread(last)
    assert ratio is not None, last
    assert ratio <= 1.6, last  # the target of the worst seed, ``localnet/targets.py``
