"""Weights on a real chain file: when they are set, retries after a refusal, and the resulting events."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from faulty import FaultyChain

from tplr.chain import ChainManager
from tplr.chain.clocks import ManualClock
from tplr.chain.ledger import Ledger
from tplr.chain.local import LocalChain
from tplr.chain.rules import ChainLimits
from tplr.comms import Comms
from tplr.hparams import HParams
from tplr.node.payment import ROUNDING, Payment, difference
from tplr.node.replica import NodeContext
from tplr.telemetry import Telemetry

BLOCKS_PER_WINDOW, EVERY, RATE_LIMIT = 4, 3, 6
LIMITS = ChainLimits(
    tempo=20, min_stake=10.0, min_allowed_weights=1, weights_rate_limit=RATE_LIMIT, commit_reveal=False, max_uids=8
)
WEIGHTS = {1: 0.25, 2: 0.75}
PAY_WINDOWS = 2


class Till:
    """A validator (uid 0) and two miners on a chain in virtual time, and its events."""

    def __init__(self, chain: LocalChain, admin: Ledger, time: ManualClock) -> None:
        self.admin = admin
        self.chain = FaultyChain(chain)
        self.node = ChainManager(self.chain, blocks_per_window=BLOCKS_PER_WINDOW, retry_interval=0.001)
        self.events: list[dict[str, Any]] = []
        self._time = time

    def payment(self, burn_uid: int | None = None) -> Payment:
        """Return the payment of a validator that has just started."""
        telemetry = Telemetry(role="validator", uid=0, listeners=(lambda event: self.events.append({**event}),))
        context = NodeContext(comms=cast(Comms, self.node), clock=self.node.clock, telemetry=telemetry)
        hparams = SimpleNamespace(windows_per_weights=EVERY, pay_windows=PAY_WINDOWS, burn_uid=burn_uid)
        return Payment(context, cast(HParams, hparams))

    async def pay(
        self, payment: Payment, weights: dict[int, float] = WEIGHTS, scored: int = 0, unpaid_windows: int = 0
    ) -> None:
        window = self.node.clock.window
        # Slowly: no epoch may end while a busy machine reads the weights back.
        await self._time.drive(payment.pay(window, weights, scored=scored, unpaid_windows=unpaid_windows), step=0.5)

    async def pass_blocks(self, number: int) -> None:
        goal = self.node.clock.block + number
        await self._time.drive(self.node.clock.wait_for_block(goal), step=1.0)

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    async def in_force(self) -> dict[int, float]:
        return (await self.chain.weights()).get(0, {})


@pytest.fixture
async def till(tmp_path: Path) -> AsyncIterator[Till]:
    path, time = tmp_path / "chain.db", ManualClock()
    Ledger.create(path, clock=time, limits=LIMITS, finality_lag=0, stale_heads=0.0, skipped_slots=0.0)
    admin = Ledger(path, clock=time, archive=True)
    admin.register("validator", "cold", stake=100.0, permit=True)
    for miner in ("miner-1", "miner-2"):
        admin.register(miner, f"cold-{miner}")
    async with LocalChain(path, "validator", clock=time) as chain:
        made = Till(chain, admin, time)
        following = asyncio.ensure_future(made.node.clock.run())
        await time.drive(made.node.clock.wait_for_block(RATE_LIMIT + 2))  # registration counts as an update
        await made.node.refresh()
        yield made
        following.cancel()
    admin.close()


async def test_weights_are_set_when_due_read_back_and_reported(till: Till) -> None:
    payment = till.payment()
    first = till.node.clock.window
    assert payment.due(first, WEIGHTS)
    assert payment.last is None
    await till.pay(payment)
    assert payment.last is not None
    assert payment.last.intended == {"1": 0.25, "2": 0.75}
    assert payment.last.on_chain == pytest.approx(payment.last.intended, abs=1e-4)  # 16 bits a weight
    assert {str(uid): weight for uid, weight in (await till.in_force()).items()} == payment.last.on_chain
    (event,) = till.events_of("weights")
    assert (event["block"], event["on_chain"]) == (payment.last.block, payment.last.on_chain)
    assert [payment.due(first + later, WEIGHTS) for later in range(EVERY + 1)] == [False] * EVERY + [True]


async def test_nothing_is_set_before_anybody_has_a_score(till: Till) -> None:
    payment = till.payment()
    await till.pay(payment, {})
    assert till.chain.calls.count("set_weights") == 0
    assert payment.due(till.node.clock.window, WEIGHTS)  # and it is due again in the next window


async def test_after_long_without_a_score_the_weight_is_burned_until_somebody_has_one(till: Till) -> None:
    payment = till.payment(burn_uid=0)
    await till.pay(payment)
    await till.pass_blocks(EVERY * BLOCKS_PER_WINDOW)
    await till.pay(payment, {}, unpaid_windows=PAY_WINDOWS - 1)
    assert await till.in_force() == pytest.approx(WEIGHTS, abs=1e-4)
    await till.pay(payment, {}, unpaid_windows=PAY_WINDOWS)
    assert await till.in_force() == {0: 1.0}
    assert not payment.due(till.node.clock.window, {})
    assert payment.due(till.node.clock.window, WEIGHTS)  # a miner with a score does not wait
    await till.pass_blocks(RATE_LIMIT)
    await till.pay(payment)
    assert await till.in_force() == pytest.approx(WEIGHTS, abs=1e-4)
    assert not payment.due(till.node.clock.window, WEIGHTS)


async def test_without_a_burn_uid_old_weights_stay_and_are_reported(till: Till) -> None:
    payment = till.payment()
    await till.pay(payment)
    for windows in range(2 * PAY_WINDOWS + 1):
        await till.pay(payment, {}, unpaid_windows=windows)
    assert await till.in_force() == pytest.approx(WEIGHTS, abs=1e-4)
    assert len(till.events_of("problem")) == 2
    assert all("set burn_uid" in event["text"] for event in till.events_of("problem"))


async def test_a_restarted_validator_waits_for_the_chain_s_rate_limit(till: Till) -> None:
    before = till.payment()
    await till.pay(before)
    restarted = till.payment()
    assert restarted.due(till.node.clock.window, WEIGHTS)  # it has no memory, but the chain has
    await till.pay(restarted, {1: 1.0})
    assert restarted.last is None
    assert "rate limited by the chain" in till.events_of("problem")[0]["text"]
    assert before.last is not None
    allowed = before.last.block + RATE_LIMIT
    calls = till.chain.calls.count("set_weights")
    while till.node.clock.block < allowed:
        assert not restarted.due(till.node.clock.window, WEIGHTS)  # and the chain is not asked in the meantime
        await till.pass_blocks(1)
    assert till.chain.calls.count("set_weights") == calls
    assert restarted.due(till.node.clock.window, WEIGHTS)
    await till.pay(restarted, {1: 1.0})
    assert await till.in_force() == {1: 1.0}


async def test_a_chain_that_fails_is_tried_again_with_the_next_window(till: Till) -> None:
    payment = till.payment()
    window = till.node.clock.window
    for _ in range(10):
        till.chain.fail("set_weights", "lost")
    await till.pay(payment)
    assert till.chain.calls.count("set_weights") == 5  # some attempts at once, then no more in this window
    assert (payment.last, len(till.events_of("problem"))) == (None, 1)
    assert payment.due(window + 1, WEIGHTS)
    await till.pay(payment)
    assert payment.due(window + 1, WEIGHTS)
    await till.pay(payment)
    assert payment.last is not None
    assert not payment.due(window + 1, WEIGHTS)


async def test_a_refusal_never_ends_the_validator(till: Till) -> None:
    payment = till.payment()
    await till.pay(payment, {7: 1.0})  # no such uid
    assert "UidVecContainInvalidOne" in till.events_of("problem")[-1]["text"]
    till.admin.deregister("validator")
    await till.pass_blocks(2)
    await till.pay(payment)
    assert "has no uid" in till.events_of("problem")[-1]["text"]
    assert payment.last is None


async def test_weights_that_can_t_be_read_back_were_set_all_the_same(till: Till) -> None:
    payment = till.payment()
    till.chain.fail("weights", "lost")
    await till.pay(payment)
    assert payment.last is not None
    assert payment.last.on_chain == {}
    assert "not read back" in till.events_of("problem")[0]["text"]
    assert not payment.due(till.node.clock.window, WEIGHTS)
    assert await till.in_force() == pytest.approx(WEIGHTS, abs=1e-4)


async def test_weights_are_in_force_as_soon_as_they_are_set(till: Till) -> None:
    payment = till.payment()
    assert await payment.in_force() is None
    first = till.node.clock.window
    assert payment.next_due(first) == first
    await till.pay(payment, scored=5)
    assert payment.next_due(first) == payment.next_due(first + EVERY) == first + EVERY
    assert await payment.in_force() == 5
    calls = till.chain.calls.count("weights")
    assert await payment.in_force() is None  # nothing new, and the chain is not asked
    assert till.chain.calls.count("weights") == calls


async def test_weights_that_the_chain_s_limit_lowers_are_known_when_they_are_in_force(till: Till) -> None:
    """Else their report stays sealed for many windows."""
    till.admin.set_limits(max_weight=39321)
    await till.pass_blocks(2)
    payment = till.payment()
    await till.pay(payment, scored=5)
    assert await till.in_force() == pytest.approx({1: 0.4, 2: 0.6}, abs=1e-4)
    assert await payment.in_force() == 5


def test_weights_of_a_report_are_compared_as_the_chain_lowers_them() -> None:
    assert difference({1: 0.4, 2: 0.6}, WEIGHTS, 0.6) < ROUNDING < difference({1: 0.4, 2: 0.6}, WEIGHTS, 0.7)
    for stated in ({}, {1: 0.9}, {1: 1e308, 2: 1e308}):  # anybody can publish them
        assert difference({1: 0.4, 2: 0.6}, stated, 0.6) > ROUNDING


async def test_weights_of_a_chain_that_can_not_be_read_are_not_in_force(till: Till) -> None:
    payment = till.payment()
    till.chain.fail("weights", "lost")
    till.chain.fail("weights", "lost")
    await till.pay(payment, scored=5)
    assert await payment.in_force() is None
    assert await payment.in_force() == 5


async def test_sealed_weights_are_in_force_when_the_chain_reveals_them(till: Till) -> None:
    till.admin.set_limits(commit_reveal=True)
    await till.pass_blocks(2)
    payment = till.payment()
    await till.pay(payment, scored=5)
    await till.pass_blocks(RATE_LIMIT)
    await till.pay(payment, {1: 1.0}, scored=9)
    found = []
    for _ in range(3 * LIMITS.tempo):
        if (scored := await payment.in_force()) is not None:
            # The revealed weights are the ones that were set, not later ones.
            assert await till.in_force() == pytest.approx(WEIGHTS if scored == 5 else {1: 1.0}, abs=1e-4)
            found.append(scored)
        await till.pass_blocks(1)
    assert found in ([5, 9], [9])  # both may be revealed with one epoch
    assert await payment.in_force() is None


async def test_sealed_weights_are_read_back_with_the_next_ones(till: Till) -> None:
    till.admin.set_limits(commit_reveal=True)
    await till.pass_blocks(2)
    payment = till.payment()
    await till.pay(payment)
    assert payment.last is not None
    assert payment.last.on_chain == {}
    await till.pass_blocks(2 * (LIMITS.tempo + 1))
    await till.pay(payment, {1: 1.0})
    assert payment.last.intended == {"1": 1.0}
    assert payment.last.on_chain == pytest.approx({"1": 0.25, "2": 0.75}, abs=1e-4)
