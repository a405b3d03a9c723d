"""A small network: all nodes are listed and included; slow, silent and absent nodes have the expected effect."""

from dataclasses import replace

import pytest

from tplr.scale.network import Design, Network, WindowResult
from tplr.scale.participants import Assumptions, Participants
from tplr.scale.sizes import BLOCK_SECONDS, run_constants

IDEAL = Assumptions(
    link_spread=0.0, hour_spread=0.0, gpu_spread=0.0, tail=0.0, crash=0.0, churn=0.0, dead=0.0, silent=0.0, bad=0.0,
    outages=(0.0, 1.0), regional=(0.0, 1.0), pack=0.0, apply=0.0,
)  # fmt: skip
UPDATE = 100_000_000


def run(
    assumed: Assumptions = IDEAL,
    *,
    windows: int = 6,
    overlap: bool = False,
    fresh: bool = False,
    seed: int = 1,
    **changes: float,
) -> list[WindowResult]:
    hparams = run_constants("1B", max_topk_peers=8, reserve_peers=4, **changes)
    people = Participants.draw(assumed, uids=24, validators=3, seed=seed)
    design = Design(hparams=hparams, update_bytes=UPDATE, block_seconds=BLOCK_SECONDS, overlap=overlap, fresh=fresh)
    return list(Network(design, assumed, people, seed).run(windows))


def test_without_faults_every_listed_update_is_included_in_every_window() -> None:
    found = run()
    assert all(one.all_included and one.listed == 8 and one.included == 8 for one in found)
    assert all(one.missed == one.away == 0 for one in found)
    # Two blocks until the bounds are final, then twelve updates of 1.6 s each over one link.
    assert all(24 + 19.2 < one.gathered < 24 + 19.2 + 5 for one in found)


def test_with_overlap_only_the_pauses_are_lost() -> None:
    paused = replace(IDEAL, pack=4.0, apply=3.0)
    without, overlap = run(), run(paused, overlap=True)
    length = 100 * BLOCK_SECONDS
    assert all(one.utilisation == pytest.approx(1 - 7 / length) for one in overlap)
    for one in without:
        assert one.utilisation == pytest.approx(1 - (15 + one.gathered + one.waited) / length, abs=1e-3)


def test_a_slow_uplink_misses_the_bound_and_nobody_is_included() -> None:
    found = run(replace(IDEAL, up=UPDATE * 8 / 75), windows=2)
    assert all(one.included == 0 and one.missed == 21 for one in found)


def test_whoever_is_away_is_replaced_and_returns() -> None:
    found = run(replace(IDEAL, crash=0.05), windows=30)
    assert any(one.away for one in found)
    assert not all(one.all_included for one in found)
    assert max(one.away for one in found) < 21


def test_silent_electors_delay_the_decision() -> None:
    assert max(one.decided for one in run(replace(IDEAL, silent=0.4), windows=12)) > 100 > run()[0].decided


def test_electors_vote_for_what_they_have_when_the_election_begins() -> None:
    slow = run(replace(IDEAL, validator_down=UPDATE * 8 * 12 / 2000), windows=2)  # all twelve take 2,000 s
    assert all(one.included == 0 and not one.all_included for one in slow)


def test_a_new_run_measures_until_the_rules_list_somebody() -> None:
    hparams = run_constants("1B")
    first = hparams.probation_windows + hparams.validator_offset + hparams.peer_list_window_margin
    found = run(fresh=True, windows=first + 3)
    assert all(one.listed == one.included == 0 and one.probation == 16 for one in found[:first])
    # No node is waited for: two blocks until the bounds are final, and the election.
    assert all(24 < one.decided < 24 + 4 and one.gathered < 24 + 1 for one in found[:first])
    assert all(one.listed == one.included == 8 and one.all_included for one in found[first:])


def test_a_new_run_without_probation_gathers_from_its_first_window() -> None:
    assert all(one.listed == one.included == 8 for one in run(fresh=True, windows=2, probation_windows=0))


def test_shared_processors_delay_gathers_and_decisions() -> None:
    alone = run(windows=2)
    busy = run(replace(IDEAL, cores=2.0, request_work=0.05), windows=2)
    # 24 nodes with 3 * 2 requests about the window and 3 * 12 for the updates; downloads take 19 s in parallel.
    work = 24 * (6 + 36) * 0.05 / 2
    for one, other in zip(alone, busy, strict=True):
        assert other.gathered == pytest.approx(24 + work, rel=0.1)
        assert other.decided > one.decided
    measures = run(replace(IDEAL, cores=2.0, request_work=0.05, measuring_work=60.0), windows=2)
    assert all(one.gathered > other.gathered + 2 for one, other in zip(measures, busy, strict=True))


def test_the_same_seed_gives_the_same_network_and_another_seed_another_one() -> None:
    assert run(Assumptions()) == run(Assumptions())
    assert run(Assumptions()) != run(Assumptions(), seed=2)
