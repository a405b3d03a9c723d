"""Short form of ``scripts/simulate_attackers.py``: it fails when an attack starts to pay.

Few windows, few pages and a single seed: the bounds are the targets of ``localnet/targets.py``, for those attacks whose
figures do not depend on chance. Who trains on other pages than its own needs more tests than these windows have.
"""

import asyncio
import math
from typing import Literal

import pytest

from tplr.localnet.attackers import Changed, Copier, GoDark, Honest, Noise, NoProof, Timed, Twin, Zeros
from tplr.localnet.scenarios import LAUNCH, PROBATION, Setting, network, pay, ratio
from tplr.localnet.simulation import VOCABULARY, Member, World, profile, small

# Half a minute of one core; far more on a busy machine.
pytestmark = pytest.mark.timeout(900)

EFFORT = 16
HONEST = (1, 2, 3, 4)
PAID = 8


def crowd() -> list[Member]:
    """Four honest miners and some attacks."""
    return [
        *(Honest(EFFORT) for _ in HONEST),
        GoDark("go dark", EFFORT, last=LAUNCH),
        Timed("timed work", EFFORT, "poison"),
        Changed("signs flipped", EFFORT, lambda one, _: -one),
        Zeros("zeros"),
        Noise("noise"),
        Noise("giant", 1e6),
        NoProof("no proof", EFFORT),
        *(Twin("twin", 12, EFFORT) for _ in range(4)),
        Copier("copier", 1),
    ]


@pytest.fixture(scope="module", params=[pytest.param("demo", marks=pytest.mark.long), "sparseloco"])
def world(request: pytest.FixtureRequest) -> World:
    hparams = small(
        profile(request.param),
        pages_per_window=2,
        evaluation_sequences=16,
        uids_per_window=6,
        pay_windows=PAID,
        probation_windows=PROBATION,
    )
    world = World(hparams, crowd(), measures_loss=False)
    asyncio.run(world.run(LAUNCH + PAID))
    return world


def uids(world: World, name: str) -> list[int]:
    return [uid for uid, member in world.by_uid.items() if member.name == name]


@pytest.mark.parametrize("name", ["go dark", "signs flipped", "zeros", "noise", "giant", "no proof"])
def test_it_earns_nothing(world: World, name: str) -> None:
    assert pay(world, uids(world, name)) == [0.0]


@pytest.mark.parametrize("name", ["signs flipped", "zeros"])
def test_what_harms_is_never_gathered(world: World, name: str) -> None:
    (uid,) = uids(world, name)
    assert not any(uid in record.peers for record in world.records)


def test_a_giant_leaves_the_list_when_its_norm_can_be_compared(world: World) -> None:
    """Its direction is honest and its step is clipped; before an update is included there is no usual norm."""
    (uid,) = uids(world, "giant")
    gathered = [record.window for record in world.records if uid in record.peers]
    scored_and_listed = world.hparams.validator_offset + world.hparams.peer_list_window_margin
    assert len(gathered) <= scored_and_listed
    assert uid not in world.records[-1].peers


def test_work_in_some_windows_is_paid_far_below_its_share(world: World) -> None:
    (uid,) = uids(world, "timed work")
    (earned,) = pay(world, [uid])
    assert earned <= 0.3 * max(pay(world, HONEST))


def test_one_update_over_four_uids_earns_little_more_than_one(world: World) -> None:
    """The target is 1.2 after 20 windows. After eight, a second uid may not have been found out by its few tests."""
    assert sum(pay(world, uids(world, "twin"))) <= 1.5 * max(pay(world, HONEST))


def test_honest_miners_are_gathered_and_paid(world: World) -> None:
    assert {*HONEST} <= {*world.records[-1].peers}
    assert min(pay(world, HONEST[1:])) > 0
    assert sum(pay(world, HONEST)) > 0.5


@pytest.mark.parametrize("scheme", ["demo", "sparseloco"])
def test_a_network_has_the_budgets_of_production(scheme: Literal["demo", "sparseloco"]) -> None:
    world = network(Setting(scheme, VOCABULARY, 0), crowd())
    assert world.hparams.uids_per_window == profile(scheme).uids_per_window
    assert world.hparams.outer == scheme


def test_nothing_of_nothing_is_nothing() -> None:
    assert ratio(0.0, 0.0) == 0.0
    assert ratio(1.0, 0.0) == math.inf
    assert ratio(1.0, 2.0) == 0.5
