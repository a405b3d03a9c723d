"""When the leading validator publishes peer lists, with which peers, and from which window they are effective."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tplr.chain.base import Metagraph, Neuron
from tplr.errors import PreconditionFailed, StateError, StoreUnavailable
from tplr.exchange.activity import PeerGroups
from tplr.hparams import load_hparams
from tplr.node import leader as leader_module
from tplr.node.leader import Leader
from tplr.node.replica import NodeContext
from tplr.schemas import PeerList, PeerScore
from tplr.scoring.profiles import ScoreBoard
from tplr.telemetry import Telemetry

START, FREQUENCY, MARGIN = 100, 5, 2
RICH = 1e6  # more stake than a miner has


class Network:
    """What a leader asks of ``Comms``: six miners, of which some are active."""

    uid = 0

    def __init__(self) -> None:
        self.clock = SimpleNamespace(window=START)
        self.leading: int | None = 0
        self.others = False
        self.copied = 0
        self.active: tuple[int, ...] = (1, 2, 3, 4)
        self.unknown: tuple[int, ...] = ()
        self.fails: list[Exception] = []
        self.posted: list[PeerList | int] = []
        self.commitments = dict.fromkeys(range(7))
        incentive = {1: 0.1, 5: 0.5}
        neurons = [Neuron(0, "validator", "", RICH, True, 0)]
        neurons += [Neuron(uid, f"{uid}", "", 0.0, False, 0, incentive.get(uid, 0.0)) for uid in range(1, 7)]
        self.metagraph = Metagraph(0, tuple(neurons))

    @property
    def electors(self) -> frozenset[int | None]:
        return frozenset({self.leading})

    @property
    def alone(self) -> bool:
        return self.leading == self.uid and not self.others

    async def refresh(self) -> None:
        pass

    async def get_start_window(self, validator: int | None = None) -> int | None:
        return next((one for one in self.posted if isinstance(one, int)), None)

    async def copy_run(self, _: int) -> None:
        self.copied += 1

    async def track_active_peers(self, _: int) -> PeerGroups:
        return PeerGroups(active=self.active, eval=self.active, unknown=self.unknown)

    async def get_peer_list(self) -> PeerList | None:
        return self.lists[-1] if self.lists else None

    async def post_peer_list(self, peers: PeerList) -> None:
        if self.fails:
            raise self.fails.pop()
        self.posted.append(peers)

    async def post_start_window(self, window: int) -> None:
        self.posted.append(window)

    @property
    def lists(self) -> list[PeerList]:
        return [one for one in self.posted if isinstance(one, PeerList)]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    async def as_wanted(_context: object, _hparams: object, wish: PeerList, _folder: object) -> PeerList:
        return wish

    monkeypatch.setattr(leader_module, "decide_start", as_wanted)
    return Network()


@pytest.fixture
def leader(network: Network) -> Leader:
    changes = {"peer_replacement_frequency": FREQUENCY, "peer_list_window_margin": MARGIN}
    sizes = {"minimum_peers": 2, "max_topk_peers": 2, "reserve_peers": 1}
    return made(network, **changes, **sizes, probation_windows=0)


def made(network: Network, **changes: int) -> Leader:
    hparams = load_hparams().model_copy(update=changes)
    telemetry = Telemetry(role="validator", uid=0, listeners=())
    context = NodeContext(comms=cast(Any, network), clock=cast(Any, network.clock), telemetry=telemetry)
    return Leader(context, hparams, Path("unused"))  # the election of the start is replaced


class Scores:
    """What a leader asks of its score board."""

    def __init__(self, **weights: float) -> None:
        self.weights = {int(uid): weight for uid, weight in weights.items()}
        self.peer_scores: dict[int, PeerScore] = {}

    def score(self, uid: int, measured: int, mean: float, error: float = 0.01, *, hotkey: str = "") -> None:
        self.peer_scores[uid] = PeerScore(
            hotkey=hotkey or f"{uid}", measured=measured, mean=mean, error=error, merit=max(0.0, mean)
        )

    def proven(self, uid: int) -> bool | None:
        found = self.peer_scores.get(uid)
        return None if found is None or found.measured < PROBATION else found.mean > 2 * found.error


PROBATION = 3
BY_WEIGHT = cast(ScoreBoard, Scores(**{"1": 0.2, "2": 0.5, "3": 0.3}))


async def live(leader: Leader, network: Network, windows: int) -> dict[int, PeerList]:
    """Lists published, by the window in which they were."""
    published = {}
    for window in range(START, START + windows):
        network.clock.window, before = window, len(network.lists)
        await leader.renew_peers(window, START, BY_WEIGHT)
        if len(network.lists) > before:
            published[window] = network.lists[-1]
    return published


async def test_the_first_list_is_there_before_the_start_window(leader: Leader, network: Network) -> None:
    assert await leader.start_window() == START + MARGIN
    first, start = network.posted
    assert isinstance(first, PeerList)
    assert (first.peers, first.reserve_peers, first.initial_selection) == ((1, 5), (2,), True)  # by incentive; active
    assert first.probation == (2, 3, 4, 6)
    assert first.first_effective_window == start == START + MARGIN


async def test_a_first_list_that_is_there_already_holds(leader: Leader, network: Network) -> None:
    network.fails = [PreconditionFailed("exists")]
    assert await leader.start_window() == START + MARGIN
    assert network.posted == [START + MARGIN]


async def test_lists_come_every_few_windows_and_hold_some_windows_later(leader: Leader, network: Network) -> None:
    published = await live(leader, network, 3 * FREQUENCY + 1)
    assert list(published) == [START + FREQUENCY, START + 2 * FREQUENCY, START + 3 * FREQUENCY]
    for window, one in published.items():
        assert one.first_effective_window == window + MARGIN
        assert (one.peers, one.reserve_peers) == ((2, 3), (1,))  # by weight


async def test_what_fails_is_tried_again_with_the_next_window(leader: Leader, network: Network) -> None:
    network.fails = [StoreUnavailable("away")] * 2
    assert list(await live(leader, network, FREQUENCY + 4)) == [START + FREQUENCY + 2]


async def test_too_few_active_miners_leave_the_list_as_it_is(leader: Leader, network: Network) -> None:
    network.active = (1,)
    assert await live(leader, network, FREQUENCY + 2) == {}
    network.active = (1, 2)
    assert list(await live(leader, network, FREQUENCY + 2)) == [START + FREQUENCY]


async def test_a_validator_that_is_no_elector_publishes_nothing(leader: Leader, network: Network) -> None:
    network.leading = 7
    assert await live(leader, network, 2 * FREQUENCY) == {}
    assert network.copied == 2 * FREQUENCY


async def test_one_of_several_electors_publishes_what_was_decided(leader: Leader, network: Network) -> None:
    network.others = True
    assert await live(leader, network, FREQUENCY + 1) == {}
    wish = leader.wish
    assert wish
    assert (wish.peers, wish.reserve_peers) == ((2, 3), (1,))
    await leader.decided(None)
    assert leader.wish == wish
    # Most others wanted somebody else: its own wish is not repeated until the next list is due.
    other = wish.model_copy(update={"peers": (3, 4)})
    await leader.decided(other)
    assert (network.lists, leader.wish) == ([other], None)
    assert await live(leader, network, FREQUENCY + 2) == {}
    assert leader.wish is None
    await leader.decided(other.model_copy(update={"first_effective_window": 10**6}))
    assert network.lists == [other]  # nothing new


# --- a place that is earned ---------------------------------------------------------------------------------------


@pytest.fixture
def strict(network: Network) -> Leader:
    sizes = {"minimum_peers": 2, "max_topk_peers": 3, "reserve_peers": 1, "probation_windows": PROBATION}
    return made(network, peer_replacement_frequency=FREQUENCY, peer_list_window_margin=MARGIN, **sizes)


async def scored(leader: Leader, network: Network, window: int, scores: Scores, *struck: int) -> PeerList | None:
    """The list that a leader publishes after it has scored a window, or None."""
    network.clock.window, before = window + 1, len(network.lists)
    leader.see(window, cast(ScoreBoard, scores), struck)
    await leader.renew_peers(window + 1, START, cast(ScoreBoard, scores))
    return network.lists[-1] if len(network.lists) > before else None


def names(found: PeerList | None) -> tuple[tuple[int, ...], ...] | None:
    return None if found is None else (found.peers, found.reserve_peers, found.probation)


async def test_at_launch_nobody_is_on_the_list_and_everybody_is_measured(strict: Leader, network: Network) -> None:
    assert await strict.start_window() == START + MARGIN
    (first,) = network.lists
    assert (names(first), first.initial_selection) == (((), (), (1, 2, 3, 4, 5, 6)), True)


async def test_who_is_proven_comes_onto_the_list_at_once(strict: Leader, network: Network) -> None:
    await strict.start_window()
    scores = Scores()
    for window in range(START, START + PROBATION - 1):
        for uid in (1, 2, 3, 4):
            scores.score(uid, measured=1 + window - START, mean=0.1)
        assert await scored(strict, network, window, scores) is None
    for uid, mean in {1: 0.3, 2: 0.1, 3: -0.1, 4: 0.015}.items():
        scores.score(uid, PROBATION, mean)
    found = await scored(strict, network, START + PROBATION - 1, scores)
    assert names(found) == ((1, 2), (), (3, 4))  # 4 may be chance; fewer than the places there are
    assert found is not None
    assert found.first_effective_window == START + PROBATION + MARGIN
    assert strict.excluded == {3, 4}
    assert await scored(strict, network, START + PROBATION, scores) is None  # nothing to change


async def test_a_newcomer_is_measured_at_once_and_comes_onto_a_full_list_when_it_is_renewed(strict, network) -> None:
    await strict.start_window()
    scores = Scores()
    network.active = (1, 2, 3, 4)
    for uid in network.active:
        scores.score(uid, 9, 0.1 * uid)
    assert names(await scored(strict, network, START, scores)) == ((2, 3, 4), (1,), (1,))
    network.commitments |= {7: None}
    network.active = (1, 2, 3, 4, 7)
    assert names(await scored(strict, network, START + 1, scores)) == ((2, 3, 4), (1,), (1, 7))
    scores.score(7, PROBATION, 0.35)
    assert await scored(strict, network, START + 2, scores) is None
    assert names(await scored(strict, network, START + FREQUENCY - 1, scores)) == ((3, 4, 7), (2,), (1, 2))


async def test_known_zeros_and_who_is_struck_leave_the_list_at_once(strict: Leader, network: Network) -> None:
    await strict.start_window()
    scores = Scores()
    for uid in (1, 2, 3):
        scores.score(uid, 9, 0.1)
    assert names(await scored(strict, network, START, scores)) == ((1, 2, 3), (), (4,))
    scores.score(2, 10, -0.01)
    assert names(await scored(strict, network, START + 1, scores)) == ((1, 3), (), (2, 4))
    assert 2 in strict.excluded  # out of the sets of this node, also while the old list holds
    assert names(await scored(strict, network, START + 2, scores, 3)) == ((1,), (), (2, 3, 4))
    assert strict.excluded == {2, 3}
    # It stays off for as many windows as probation takes, whatever it earned.
    restarted = made(network, probation_windows=PROBATION, max_topk_peers=3, reserve_peers=1)
    restarted.load_state_dict(strict.state_dict())
    for leader in (strict, restarted):
        at = START + 2 + PROBATION
        assert names(await scored(leader, network, at - 1, scores)) in (None, ((1,), (), (2, 3, 4)))
        assert names(await scored(leader, network, at, scores)) == ((1, 3), (), (2, 4))
        network.posted.append(network.lists[-2])


async def test_a_uid_that_is_registered_again_inherits_neither_a_place_nor_a_strike(strict, network) -> None:
    await strict.start_window()
    scores = Scores()
    for uid in (1, 2, 3):
        scores.score(uid, 9, 0.1)
    assert names(await scored(strict, network, START, scores, 3)) == ((1, 2), (), (3, 4))
    for uid in (2, 3):  # others have taken these uids; neither was measured for long enough
        again = replace(network.metagraph.neurons[uid], hotkey=f"another {uid}")
        neurons = (*network.metagraph.neurons[:uid], again, *network.metagraph.neurons[uid + 1 :])
        network.metagraph = replace(network.metagraph, neurons=neurons)
        scores.score(uid, PROBATION - 1, 0.1, hotkey=again.hotkey)
    restarted = made(network, probation_windows=PROBATION, max_topk_peers=3, reserve_peers=1)
    restarted.load_state_dict(strict.state_dict())
    for leader in (strict, restarted):
        assert names(await scored(leader, network, START + 1, scores)) == ((1,), (), (2, 3, 4))
        assert leader.excluded == {2}  # while the list before is in effect
        network.posted.append(network.lists[-2])
    # 3 earns its place although the miner before it was struck; 2 keeps nothing against it, either.
    for uid in (2, 3):
        scores.score(uid, PROBATION, 0.1, hotkey=f"another {uid}")
    assert names(await scored(strict, network, START + 2, scores)) == ((1, 2, 3), (), (4,))
    assert strict.excluded == frozenset()


async def test_who_is_excluded_is_known_after_a_restart(strict: Leader, network: Network) -> None:
    await strict.start_window()
    scores = Scores()
    scores.score(1, 9, -0.1)
    await scored(strict, network, START, scores)
    restarted = made(network, probation_windows=PROBATION)
    restarted.load_state_dict(strict.state_dict())
    assert restarted.excluded == strict.excluded == {1}


async def test_a_bucket_that_does_not_answer_costs_no_place_for_a_while(strict: Leader, network: Network) -> None:
    await strict.start_window()
    scores = Scores()
    for uid in (1, 2):
        scores.score(uid, 9, 0.1)
    assert names(await scored(strict, network, START, scores)) == ((1, 2), (), (3, 4))
    network.active, network.unknown = (1, 3, 4), (2,)
    found = {}
    for window in range(START + 1, START + 4 * FREQUENCY):
        if one := await scored(strict, network, window, scores):
            found[window + 1] = one.peers
    assert found == {START + FREQUENCY: (1, 2)} | {START + n * FREQUENCY: (1,) for n in (2, 3, 4)}


async def test_a_leader_that_restarts_without_a_network_empties_no_list(strict: Leader, network: Network) -> None:
    await strict.start_window()
    scores = Scores()
    for uid in (1, 2):
        scores.score(uid, 9, 0.1)
    await scored(strict, network, START, scores)
    restarted = made(network, probation_windows=PROBATION, max_topk_peers=3, reserve_peers=1)
    restarted.load_state_dict(strict.state_dict())
    network.active, network.unknown = (), (1, 2, 3, 4)
    assert names(await scored(restarted, network, START + FREQUENCY, scores)) in (None, ((1, 2), (), ()))
    assert network.lists[-1].peers == (1, 2)


async def test_a_leader_without_scores_keeps_the_list(strict: Leader, network: Network) -> None:
    await strict.start_window()
    scores = Scores()
    for uid in (1, 2):
        scores.score(uid, 9, 0.1)
    await scored(strict, network, START, scores)
    other = made(network, probation_windows=PROBATION, max_topk_peers=3, reserve_peers=1)
    assert names(await scored(other, network, START + FREQUENCY, Scores())) == ((1, 2), (), (3, 4))
    assert other.excluded == frozenset()


async def test_the_documented_profile_has_no_probation(network: Network) -> None:
    leader = made(network, probation_windows=0, max_topk_peers=2, reserve_peers=1)
    leader._hparams = leader._hparams.model_copy(update={"profile": "documented"})
    await leader.start_window()
    assert network.lists[0].probation == ()


def test_a_malformed_state_is_refused(strict: Leader) -> None:
    saved = strict.state_dict()
    for change in ({"struck": 7}, {"struck": {"a": "b"}}, {"places": {"a": "b"}}, {"excluded": ["a"]}):
        with pytest.raises(StateError):
            strict.load_state_dict(saved | change)
    with pytest.raises(StateError):
        strict.load_state_dict({})
