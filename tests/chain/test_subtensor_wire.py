"""The unmodified SDK at test nodes: behaviour that only a real connection shows."""

import asyncio
import json
from contextlib import aclosing

import pytest

bt = pytest.importorskip("bittensor")

from subtensor_node import SubtensorNode  # noqa: E402
from subtensor_runtime import raw_field  # noqa: E402
from websockets.asyncio.client import connect  # noqa: E402
from worlds import NETUID, NodeWorld  # noqa: E402

from tplr.chain.connect import open_chain  # noqa: E402
from tplr.errors import ChainUnavailable, ConfigError  # noqa: E402


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    monkeypatch.setattr("tplr.chain.subtensor.adapter.READ_SECONDS", 0.6)
    monkeypatch.setattr("tplr.chain.subtensor.endpoints.ONLY_DIAL_SECONDS", 0.6)
    monkeypatch.setattr("tplr.chain.subtensor.adapter.WRITE_SECONDS", 1.0)
    monkeypatch.setattr("tplr.chain.subtensor.adapter.WRITE_BLOCKS", 1)
    monkeypatch.setattr("tplr.chain.subtensor.endpoints.PROBE_SECONDS", 0.3)
    monkeypatch.setattr("tplr.chain.follow.STALL_BLOCKS", 2)
    monkeypatch.setattr("tplr.chain.follow.CLOSE_TIMEOUT", 0.1)


@pytest.fixture
async def world(tmp_path):
    async with NodeWorld(tmp_path) as world:
        await world.join("me", stake=100.0, permit=True)
        yield world


async def test_a_url_among_several_is_enough(world):
    second = await world.second_node()
    await world.node.stop()
    chain = await world.connect("me", f"{world.node.url},{second.url}")
    assert (await chain.metagraph()).uid_of(chain.hotkey) == 0
    await chain.close()


@pytest.mark.parametrize("fault", ["mute", "stuck", "down"])
async def test_a_node_that_is_no_use_is_left_for_the_next_one(world, fault, caplog):
    await world.pass_blocks(3)
    second = await world.second_node()
    chain = await world.connect("me", f"{world.node.url},{second.url}")
    async with aclosing(chain.blocks()) as blocks:
        first = await anext(blocks)
        match fault:
            case "mute":
                world.node.faults.mute = True
            case "stuck":
                world.node.faults.silent, world.node.faults.lag = True, 1000
            case "down":
                await world.node.stop()
        seen = [await asyncio.wait_for(anext(blocks), 10) for _ in range(8)]
        assert seen == list(range(first + 1, first + 9))
    assert second.dials >= 1
    assert await chain.commit("from the second node") > 0
    assert [function for _, function in second.accepted] == ["set_commitment"]
    assert "reconnecting in" in caplog.text
    await chain.close()


async def test_every_call_has_a_deadline(world):
    chain = await world.connect("me", world.node.url)
    world.node.faults.mute = True
    reads = (chain.head(), chain.block(1), chain.metagraph(), chain.commitments(["me"]), chain.weights())
    writes = (chain.commit("x"), chain.set_weights({0: 1.0}))
    calls = asyncio.gather(*reads, *writes, return_exceptions=True)
    errors = await asyncio.wait_for(calls, 10)
    assert all(isinstance(error, ChainUnavailable) for error in errors)
    assert [error.fate_unknown for error in errors] == [False] * 5 + [True, False]
    await asyncio.wait_for(chain.close(), 5)


async def test_a_call_that_was_forgotten_does_not_block_those_after_it(world):
    """The SDK counts nonces by itself, and a pool keeps a call with a later nonce waiting."""
    chain = await world.connect("me", world.node.url)
    world.node.faults.lose = True
    with pytest.raises(ChainUnavailable):
        await chain.commit("lost")
    world.node.faults.lose = False
    assert await chain.commit("landed") > 0
    await chain.close()


async def test_a_wallet_with_nothing_but_a_hotkey_is_enough(world):
    hotkeys = world.folder / "wallets" / "me" / "hotkeys"
    (hotkeys / "defaultpub.txt").unlink()
    async with open_chain(
        world.node.url, netuid=NETUID, wallet_path=world.folder / "wallets", wallet_name="me", hotkey="default"
    ) as chain:
        await chain.commit("hello")
        await chain.set_weights({0: 1.0})
    assert list(hotkeys.parent.rglob("*")) == [hotkeys, hotkeys / "default"]


async def test_what_can_not_be_opened_is_said(world):
    world.address("me")
    wallet = {"wallet_path": world.folder / "wallets", "wallet_name": "me", "hotkey": "default"}
    with pytest.raises(ConfigError, match=r"--subtensor.network finny: Unknown network"):
        async with open_chain("finny", netuid=NETUID, **wallet):
            pass
    world.node.faults.mute = True
    with pytest.raises(ChainUnavailable):
        async with open_chain(world.node.url, netuid=NETUID, **wallet):
            pass


async def test_the_node_itself_checks_signatures_and_nonces(world, monkeypatch):
    """Otherwise the tests would prove little about the adapter's messages."""
    chain = await world.connect("me", world.node.url)
    sent = []
    submit = SubtensorNode._rpc_author_submitAndWatchExtrinsic
    monkeypatch.setattr(
        SubtensorNode,
        "_rpc_author_submitAndWatchExtrinsic",
        lambda self, connection, data: sent.append(data) or submit(self, connection, data),
    )
    await chain.commit("hello")
    await chain.close()
    genuine = bytearray.fromhex(sent[0][2:])

    async def send(data: bytes):
        async with connect(world.node.url) as line:
            request = {
                "jsonrpc": "2.0",
                "id": 1,
                "method": "author_submitAndWatchExtrinsic",
                "params": ["0x" + data.hex()],
            }
            await line.send(json.dumps(request))
            return json.loads(await line.recv())["error"]["data"]

    assert await send(bytes(genuine)) == "Transaction is outdated"
    for at in (10, 60, len(genuine) - 1):  # signer, signature, content
        forged = genuine.copy()
        forged[at] ^= 1
        assert await send(bytes(forged)) == "Transaction has a bad signature"


@pytest.mark.parametrize(
    ("fields", "revealed"),
    [
        (["None"], b"0xzz"),  # text that the SDK would read as a hexadecimal number
        (["None"], b"0xzzzzzzzzzzz"),  # the same, with the right length before it: "0" stands for 12 bytes
        ([raw_field(b"0xzz")], None),
        ([raw_field(b"\xff\xfe")], None),
        ([{"Sha256": "0x" + "00" * 32}, "ResetBondsFlag"], None),
        ([{"TimelockEncrypted": {"encrypted": "0x3078", "reveal_round": 2**64 - 1}}], None),
    ],
)
async def test_no_commitment_of_one_hotkey_hides_those_of_the_others(world, fields, revealed):
    await world.join("evil")
    chain = await world.connect("me", world.node.url)
    await chain.commit("honest")
    world.node.runtime.fields[world.address("evil")] = fields
    if revealed is not None:
        world.node.runtime.revealed[world.address("evil")] = revealed
    await world.pass_blocks(2)
    found = await chain.commitments([world.address("evil"), chain.hotkey])
    assert found[chain.hotkey].data == "honest"
    assert found[world.address("evil")].data in ("", "0xzz", "\ufffd\ufffd")
    await chain.close()


async def test_commitments_of_former_hotkeys_cost_nothing(world):
    await world.join("other")
    chain = await world.connect("me", world.node.url)
    await chain.commit("mine")
    fields = world.node.runtime.fields
    fields |= {world.address(f"former {number}"): [raw_field(b"left")] for number in range(120)}
    await world.pass_blocks(1)
    del world.node.calls[:]
    assert (await chain.commitments([world.address("other"), chain.hotkey])).keys() == {chain.hotkey}
    reads = [one for one in world.node.calls if one in ("state_queryStorageAt", "state_getKeysPaged")]
    assert reads == ["state_queryStorageAt"]
    await chain.close()


async def test_commitments_are_read_at_one_block(world):
    chain = await world.connect("me", world.node.url)
    first = await chain.commit("one")
    await chain.commit("two")
    assert [(await chain.commitments([chain.hotkey], block))[chain.hotkey].data for block in (first, None)] == [
        "one",
        "two",
    ]
    await chain.close()
