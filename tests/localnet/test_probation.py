"""A place on the peer list is earned: with real training, the real leader, and the delays of its lists."""

import asyncio
from typing import get_args

import pytest

from tplr.hparams import load_hparams
from tplr.localnet.attackers import Changed, Honest, Noise, Zeros
from tplr.localnet.plan import DEFAULT_SCHEME, Scheme
from tplr.localnet.scenarios.base import EFFORT
from tplr.localnet.simulation import START_WINDOW, Member, WindowRecord, World, profile, small
from tplr.schemas import Reason

# Half a minute of one core, as for the scenarios.
pytestmark = pytest.mark.timeout(900)

WINDOWS = 18
PAGES = 4  # of 8 sequences; an average miner uses three
# Production's delays and budgets: docs/scoring.md says how long a newcomer waits with them.
PRODUCTION = {
    "peer_replacement_frequency",
    "peer_list_window_margin",
    "validator_offset",
    "probation_windows",
    "recent_windows",
    "uids_per_window",
    "max_topk_peers",
    "reserve_peers",
}
JOINS = START_WINDOW + 6  # the newcomer's first window
WAY_IN = 10  # windows until an honest newcomer is applied, at most
FIRST = ("one", "two", "three")
WRECKERS = ("signs flipped", "flipped and larger", "noise", "zeros")


class Newcomer(Honest):
    """Sends nothing before its first window."""

    async def act(self, world: World, window: int) -> None:
        if window >= JOINS:
            await super().act(world, window)


def members() -> list[Member]:
    return [
        *(Honest(EFFORT) for _ in FIRST),
        Newcomer(EFFORT),
        Changed("signs flipped", EFFORT, lambda one, _: -one),
        Changed("flipped and larger", EFFORT, lambda one, _: -3 * one),
        Noise("noise"),
        Zeros("zeros"),
    ]


NEWCOMER = len(FIRST) + 1
CHEATS = range(NEWCOMER + 1, NEWCOMER + 1 + len(WRECKERS))


OTHERS = [pytest.param(one, marks=pytest.mark.long) for one in get_args(Scheme) if one != DEFAULT_SCHEME]


@pytest.fixture(scope="module", params=[DEFAULT_SCHEME, *OTHERS])
def records(request: pytest.FixtureRequest) -> list[WindowRecord]:
    """Windows of a run with production's delays, probation and budgets."""
    hparams = small(profile(request.param), pages_per_window=PAGES, **load_hparams().model_dump(include=PRODUCTION))
    world = World(hparams, members(), measures_loss=False)
    asyncio.run(world.run(WINDOWS))
    return world.records


def included(record: WindowRecord) -> set[int]:
    return {uid for uid, seen in record.seen.observations.items() if seen.included}


def first_included(records: list[WindowRecord], uid: int) -> int:
    return min(record.window for record in records if uid in included(record))


def test_the_first_windows_only_measure(records: list[WindowRecord]) -> None:
    first = min(first_included(records, uid) for uid in range(1, NEWCOMER))
    assert first - START_WINDOW >= 3 + 2 + 2 - 1  # probation, offset and margin
    for record in records[: first - START_WINDOW]:
        assert (record.peers, included(record), record.weights) == ((), set(), {})
        assert record.seen.alignment is not None
    assert all(first_included(records, uid) - START_WINDOW < WAY_IN for uid in range(1, NEWCOMER))


def test_an_honest_newcomer_of_average_effort_is_applied_and_paid_within_ten_windows(records) -> None:
    first = first_included(records, NEWCOMER)
    measured = [
        record.window
        for record in records
        if (found := record.seen.observations[NEWCOMER]).probation and found.verdict == "valid"
    ]
    assert measured[0] <= JOINS + 1  # the simulated leader sees it one window later than a real one
    assert JOINS + 3 < first < JOINS + WAY_IN
    assert NEWCOMER not in records[first - START_WINDOW - 1].weights
    assert records[-1].weights[NEWCOMER] > 0


def test_cheats_are_measured_and_never_applied(records: list[WindowRecord]) -> None:
    for record in records:
        assert not included(record) & {*CHEATS}
        assert not {*CHEATS} & {*record.weights}
    assert not {*CHEATS} & {*records[-1].peers}
    last = records[-1].seen.observations
    assert [last[uid].verdict for uid in CHEATS] == ["valid", "valid", "valid", Reason.EMPTY]
