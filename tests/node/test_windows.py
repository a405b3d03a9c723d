"""Reserve peers replace missing updates: from real uploads, in list order, one per missing update."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Any, cast

import pytest
import torch

from tplr.errors import PayloadError
from tplr.exchange.aggregates import Included, IncludedSet
from tplr.localnet.attackers import Honest, Late, Malformed
from tplr.localnet.simulation import Member, World, profile, small
from tplr.node.windows import WindowUpdates
from tplr.planner.traffic import updates_fetched
from tplr.schemas import PeerList, Reason

WINDOW = 1
# 1 to 5 upload in time; no other miner sends a valid update.
LATE, MALFORMED, ABSENT, ALSO_ABSENT, EMPTY = 6, 7, 8, 9, 10


class Absent(Honest):
    """Sends nothing."""

    async def act(self, world: World, window: int) -> None:
        """Nothing."""


class Empty(Honest):
    """Sends zeros."""

    def tensors(self, world: World, window: int) -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(one) for name, one in world.train_state.parameters.items()}


@pytest.fixture(scope="module")
def world() -> World:
    """One window's uploads, before they are gathered."""
    members: list[Member] = [Honest(1) for _ in range(5)]
    members += [Late("late", 1), Malformed("malformed", 1), Absent(1), Absent(1), Empty(1)]
    hparams = small(profile("demo"), pages_per_window=1, gather_patience_seconds=0.1)
    world = World(hparams, members, window=WINDOW)
    for member in members:
        asyncio.run(member.act(world, WINDOW))
    return world


async def found(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    peers: Sequence[int],
    reserve: Sequence[int],
    excluded: Collection[int] = (),
) -> tuple[list[int], dict[int, Reason]]:
    """Return the uids whose updates a node finds with that list, and skipped uids with reasons."""
    listed = PeerList(
        peers=tuple(peers),
        reserve_peers=tuple(reserve),
        initial_selection=False,
        sync_window=WINDOW,
        first_effective_window=WINDOW,
    )

    async def get_peer_list(_: int) -> PeerList:
        return listed

    monkeypatch.setattr(world.comms, "get_peer_list", get_peer_list)
    gathered = await WindowUpdates(cast(Any, world.comms), world.hparams, world.spec).from_peers(
        WINDOW, excluded=excluded
    )
    assert gathered.window == WINDOW
    for one in gathered.updates:
        assert (one.update.uid, one.update.window) == (one.uid, WINDOW)
    return [one.uid for one in gathered.updates], gathered.skipped


@pytest.mark.parametrize(
    ("peers", "reserve", "counted"),
    [
        ([2, 1], [3, 4], [1, 2]),  # all present: no reserve peer is used
        ([ABSENT, 2], [3, 4], [2, 3]),
        ([1, EMPTY], [3], [1, 3]),  # nine zeros of twenty would nearly halve the step
        ([1, LATE], [5, 3], [1, 5]),  # by the reserve's order, not by uid
        ([1, MALFORMED], [ABSENT, 4, 3], [1, 4]),  # reserve peers may also lack updates
        ([ABSENT, LATE, MALFORMED], [5, 2], [2, 5]),  # fewer than are missing
        ([ABSENT, ALSO_ABSENT], [5, 4, 3], [4, 5]),
        ([1, ABSENT], [1, 2], [1, 2]),  # a peer is no reserve of its own
        ([1, ABSENT], [], [1]),
        ([ABSENT], [LATE], []),
        ([], [1, 2], []),
    ],
)
async def test_the_next_of_the_reserve_fills_in(world, monkeypatch, peers, reserve, counted) -> None:
    updates, skipped = await found(world, monkeypatch, peers, reserve)
    assert updates == counted
    assert sorted(skipped) == sorted({*peers} & {LATE, MALFORMED, ABSENT, ALSO_ABSENT, EMPTY})


async def test_the_reserve_is_fetched_too(world, monkeypatch) -> None:
    """So the planner counts the updates of the list and of its reserve."""
    asked: list[int] = []
    gather = world.comms.gather_updates

    async def gather_updates(uids: Collection[int], *arguments: Any, **options: Any) -> Any:
        asked.extend(uids)
        return await gather(uids, *arguments, **options)

    monkeypatch.setattr(world.comms, "gather_updates", gather_updates)
    await found(world, monkeypatch, [2, 1], [3, 4])
    assert len(asked) == updates_fetched(
        world.hparams.model_copy(update={"max_topk_peers": 2, "reserve_peers": 2}), "miner"
    )


async def test_peers_that_were_replaced_keep_their_reason(world, monkeypatch) -> None:
    _, skipped = await found(world, monkeypatch, [LATE, ABSENT, EMPTY, 1], [3, ALSO_ABSENT, 2])
    assert skipped == {LATE: Reason.TOO_LATE, ABSENT: Reason.MISSING, EMPTY: Reason.EMPTY}


async def test_whom_the_leader_excludes_is_replaced_and_named(world, monkeypatch) -> None:
    """Also reserve peers: a node that looks for the same set later must not use them as replacements."""
    listed = {"peers": [1, 2], "reserve": [3, 4, 5]}
    updates, skipped = await found(world, monkeypatch, **listed, excluded={2, 3, 9})
    assert updates == [1, 4]
    assert skipped == {2: Reason.EXCLUDED, 3: Reason.EXCLUDED}
    again = [uid for uid, reason in skipped.items() if reason is Reason.EXCLUDED]
    assert await found(world, monkeypatch, **listed, excluded=again) == (updates, skipped)


async def test_without_a_peer_list_gathering_is_an_error(world, monkeypatch) -> None:
    async def none(_: int) -> None:
        return None

    monkeypatch.setattr(world.comms, "get_peer_list", none)
    with pytest.raises(PayloadError, match="no peer list"):
        await WindowUpdates(cast(Any, world.comms), world.hparams, world.spec).from_peers(WINDOW)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"size": 2**40}, False),  # a node would ask for that many bytes
        ({"size": 0}, False),
        ({"uid": 65535}, False),  # not on the list
    ],
)
async def test_a_set_that_can_t_be_true_is_no_set(world, monkeypatch, changed, expected) -> None:
    one = Included(uid=2, sha256="5e" * 32, size=world.spec.expected_size).model_copy(update=changed)
    included = IncludedSet(window=WINDOW, version=world.hparams.version, included=(one,), skipped={}, success_rate=1.0)
    listed = PeerList(
        peers=(1,), reserve_peers=(2,), initial_selection=False, sync_window=WINDOW, first_effective_window=WINDOW
    )

    async def get_included(_: int) -> IncludedSet:
        return included

    async def get_peer_list(_: int) -> PeerList:
        return listed

    monkeypatch.setattr(world.comms, "get_included", get_included)
    monkeypatch.setattr(world.comms, "get_peer_list", get_peer_list)
    windows = WindowUpdates(cast(Any, world.comms), world.hparams, world.spec)
    assert await windows.published(WINDOW) == (included if expected else None)
