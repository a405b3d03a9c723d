"""The fault injector injects exactly the faults that it announces."""

import pytest
from faulty import FaultyChain

from tplr.chain.local import LocalChain
from tplr.errors import ChainUnavailable


@pytest.fixture
async def chain(world):
    world.join("me")
    async with LocalChain(world.path, "me", clock=world.clock) as chain:
        yield chain


async def lost_calls(chain, seed):
    faulty = FaultyChain(chain, seed=seed, rate=0.3)
    lost = []
    for number in range(60):
        try:
            assert await faulty.head() == 1
        except ChainUnavailable:
            lost.append(number)
    assert faulty.calls == ["head"] * 60
    return lost


async def test_a_share_of_calls_is_lost_as_the_seed_says(chain):
    lost = await lost_calls(chain, 1)
    assert 8 < len(lost) < 30
    assert lost == await lost_calls(chain, 1) != await lost_calls(chain, 2)


@pytest.mark.parametrize(
    ("fault", "lands", "unknown"),
    [("lost", False, False), ("vanished", False, True), ("landed", True, True), ("late", True, True)],
)
async def test_faults_do_what_their_names_say_once(world, chain, fault, lands, unknown):
    faulty = FaultyChain(chain)
    faulty.fail("commit", fault)
    with pytest.raises(ChainUnavailable) as failed:
        await world.clock.drive(faulty.commit("hello"))
    assert failed.value.fate_unknown == unknown
    world.pass_blocks(1)
    assert ("me" in await faulty.commitments(["me"])) == lands
    assert await world.clock.drive(faulty.commit("again")) > 0


async def test_a_lagging_head_and_a_held_stream(world, chain):
    faulty = FaultyChain(chain)
    world.pass_blocks(5)
    faulty.lag = 2
    assert await faulty.head() == await chain.head() - 2
    blocks = faulty.blocks()
    first = await anext(blocks)
    faulty.silent = True
    world.pass_blocks(3)
    faulty.silent = False
    assert [await anext(blocks) for _ in range(3)] == [first + 1, first + 2, first + 3]
    await blocks.aclose()
