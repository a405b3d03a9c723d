"""When the leading validator publishes peer lists, with which peers, and from which window they are effective."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tplr.chain.base import Metagraph, Neuron
from tplr.errors import PreconditionFailed, StoreUnavailable
from tplr.exchange.activity import PeerGroups
from tplr.hparams import load_hparams
from tplr.node.leader import Leader
from tplr.node.replica import NodeContext
from tplr.schemas import PeerList
from tplr.telemetry import Telemetry

START, FREQUENCY, MARGIN = 100, 5, 2
RICH = 1e6  # more stake than a miner has


class Network:
    """What a leader asks of ``Comms``: six miners, of which some are active."""

    uid = 0

    def __init__(self) -> None:
        self.clock = SimpleNamespace(window=START)
        self.leading: int | None = 0
        self.active: tuple[int, ...] = (1, 2, 3, 4)
        self.fails: list[Exception] = []
        self.posted: list[PeerList | int] = []
        self.commitments = dict.fromkeys(range(7))
        incentive = {1: 0.1, 5: 0.5}
        neurons = [Neuron(0, "validator", "", RICH, True, 0)]
        neurons += [Neuron(uid, f"{uid}", "", 0.0, False, 0, incentive.get(uid, 0.0)) for uid in range(1, 7)]
        self.metagraph = Metagraph(0, tuple(neurons))

    @property
    def leads(self) -> bool:
        return self.leading == self.uid

    def highest_stake_validator(self) -> int | None:
        return self.leading

    def validators(self) -> list[int]:
        return [0]

    async def refresh(self) -> None:
        pass

    async def get_start_window(self, validator: int | None = None) -> int | None:
        return next((one for one in self.posted if isinstance(one, int)), None)

    async def copy_run(self, _: int) -> int | None:
        return None

    async def track_active_peers(self, _: int) -> PeerGroups:
        return PeerGroups(active=self.active, eval=self.active)

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
def network() -> Network:
    return Network()


@pytest.fixture
def leader(network: Network) -> Leader:
    changes = {"peer_replacement_frequency": FREQUENCY, "peer_list_window_margin": MARGIN}
    sizes = {"minimum_peers": 2, "max_topk_peers": 2, "reserve_peers": 1}
    hparams = load_hparams().model_copy(update=changes | sizes)
    telemetry = Telemetry(role="validator", uid=0, listeners=())
    return Leader(NodeContext(comms=cast(Any, network), clock=cast(Any, network.clock), telemetry=telemetry), hparams)


async def live(leader: Leader, network: Network, windows: int) -> dict[int, PeerList]:
    """Lists published, by the window in which they were."""
    published = {}
    for window in range(START, START + windows):
        network.clock.window, before = window, len(network.lists)
        await leader.renew_peers(window, START, {1: 0.2, 2: 0.5, 3: 0.3})
        if len(network.lists) > before:
            published[window] = network.lists[-1]
    return published


async def test_the_first_list_is_there_before_the_start_window(leader: Leader, network: Network) -> None:
    assert await leader.start_window() == START + MARGIN
    first, start = network.posted
    assert isinstance(first, PeerList)
    assert (first.peers, first.reserve_peers, first.initial_selection) == ((1, 5), (2,), True)  # by incentive; active
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


async def test_a_validator_that_does_not_lead_publishes_nothing(leader: Leader, network: Network) -> None:
    network.leading = 7
    assert await live(leader, network, 2 * FREQUENCY) == {}
