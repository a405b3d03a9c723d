"""Nodes that disconnect and return, that accept connections and do not answer, and runtimes with missing parts."""

import asyncio
import gc
import re
import time
from contextlib import aclosing

import pytest

bt = pytest.importorskip("bittensor")

import subtensor_node  # noqa: E402
from websockets.asyncio.server import serve  # noqa: E402
from worlds import NodeWorld  # noqa: E402

from tplr.chain import ChainManager  # noqa: E402
from tplr.chain.connect import open_chain  # noqa: E402
from tplr.chain.subtensor import EndpointHead, adapter, endpoints, probe_endpoints  # noqa: E402
from tplr.errors import ChainUnavailable, ConfigError, OtherChain, RateLimited  # noqa: E402


@pytest.fixture
async def world(tmp_path):
    async with NodeWorld(tmp_path) as world:
        await world.join("me", stake=100.0, permit=True)
        yield world


@pytest.fixture
async def mute_url():
    """A websocket that accepts connections and requests, answers pings, and sends nothing else."""

    async def swallow(connection):
        async for _ in connection:
            pass

    async with serve(swallow, "127.0.0.1", 0) as server:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture
def impatience(monkeypatch):
    """A fiftieth of the usual waits for a silent node; pauses between two dials are unchanged."""
    monkeypatch.setattr("tplr.chain.subtensor.adapter.QUIET_SECONDS", 0.1)
    monkeypatch.setattr("tplr.chain.subtensor.endpoints.PROBE_SECONDS", 0.2)
    monkeypatch.setattr("tplr.chain.follow.CLOSE_TIMEOUT", 0.1)


async def until(condition):
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("not within 10 s")


async def test_reads_and_blocks_continue_after_an_outage_of_the_only_node(world, caplog):
    """With the waits of production; the outage is longer than the longest pause between two dials."""
    chain = await world.connect("me", world.node.url)
    async with aclosing(chain.blocks()) as blocks:
        first = await anext(blocks)
        port = world.node.port
        await world.node.stop()
        waiting = asyncio.ensure_future(anext(blocks))
        began = time.monotonic()
        while time.monotonic() - began < 8:
            with pytest.raises(ChainUnavailable):
                await chain.head()
            await asyncio.sleep(0.5)
        await world.node.start(port)
        # Reads at once, blocks after one pause at most, without a gap.
        async with asyncio.timeout(5):
            assert await chain.head() > first
            assert await waiting == first + 1
        assert await asyncio.wait_for(anext(blocks), 5) == first + 2
    await chain.close()
    gc.collect()  # an exception that was never retrieved is logged when its task is collected
    assert "never retrieved" not in caplog.text


async def test_a_mute_node_that_is_listed_first_is_passed_over_at_opening(world, mute_url, monkeypatch):
    monkeypatch.setattr("tplr.chain.subtensor.endpoints.DIAL_SECONDS", 1.0)
    both, known = f"{mute_url},{world.node.url}", world.admin.genesis_hash
    chain = await asyncio.wait_for(world.connect("me", both, genesis=known), 10)
    assert await chain.head() > 0
    await chain.close()


async def test_only_mute_nodes_end_the_opening(world, mute_url, monkeypatch):
    monkeypatch.setattr("tplr.chain.subtensor.endpoints.DIAL_SECONDS", 0.3)
    with pytest.raises(ChainUnavailable):
        await asyncio.wait_for(world.connect("me", f"{mute_url},{mute_url}"), 10)
    # Each connection that is left open costs a file, and a mute node is dialled again and again.
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "rpc-session"]


async def test_a_read_that_is_given_up_while_it_dials_an_archive_leaves_no_connection(tmp_path, mute_url):
    """A node that catches up reads again and again: each connection that is left open costs a file."""

    def sessions():
        return sum(task.get_name() == "rpc-session" for task in asyncio.all_tasks())

    async with NodeWorld(tmp_path, retained=5) as world:
        await world.join("me", stake=100.0, permit=True)
        await world.pass_blocks(20)
        chain = await world.connect("me", world.node.url, archive=[mute_url])
        for read in [asyncio.create_task(chain.metagraph(2)) for _ in range(3)]:  # two wait while another dials
            await until(lambda: sessions() == 2)
            await asyncio.sleep(0.1)
            read.cancel()
            await asyncio.wait({read})
        await until(lambda: sessions() == 1)
        await chain.close()


async def test_a_gateway_that_says_how_long_to_wait_is_left_alone_for_so_long(world, caplog):
    """Each request until then may make its ban longer."""
    chain = await world.connect("me", world.node.url)
    async with aclosing(chain.blocks()) as blocks:
        await anext(blocks)
        world.node.faults.throttle, world.node.faults.retry_after = "too many requests", 30.0
        with pytest.raises(ChainUnavailable) as refused:
            await chain.head()
        assert refused.value.retry_after == 30.0
        calls, dials = len(world.node.calls), world.node.dials
        # Nor do other calls ask it, such as those of a loop that was not refused.
        for other in (chain.head(), chain.metagraph(), chain.commit("a" * 128)):
            with pytest.raises(ChainUnavailable) as refused:
                await other
            assert 20 < refused.value.retry_after <= 30
        world.node.drop_connections()
        waiting = asyncio.ensure_future(anext(blocks))
        await until(lambda: re.search(r"reconnecting in (2\d|30)\.\d s", caplog.text))
        await asyncio.sleep(1.0)
        assert (len(world.node.calls), world.node.dials) == (calls, dials)
        waiting.cancel()
        await asyncio.wait({waiting})
    await chain.close()


async def test_blocks_that_still_arrive_from_a_gateway_that_limits_requests_are_followed(world, impatience):
    chain = await world.connect("me", world.node.url)
    async with aclosing(chain.blocks()) as blocks:
        last = await anext(blocks)
        world.node.faults.throttle, world.node.faults.retry_after = "too many requests", 30.0
        with pytest.raises(ChainUnavailable):
            await chain.head()
        calls = len(world.node.calls)
        for _ in range(3):
            last += 1
            assert await asyncio.wait_for(anext(blocks), 5) == last
        assert len(world.node.calls) == calls
    await chain.close()


async def test_a_gateway_that_refuses_to_be_dialled_is_not_dialled_again_before_its_time(world, caplog):
    dials, seconds = 0, "30"  # the seconds of its pause

    def refuse(connection, request):
        nonlocal dials
        dials += 1
        answer = connection.respond(429, "too many connections")
        answer.headers["Retry-After"] = seconds
        return answer

    async with serve(lambda _: None, "127.0.0.1", 0, process_request=refuse) as gateway:
        limited = f"ws://127.0.0.1:{gateway.sockets[0].getsockname()[1]}"
        chain = await world.connect("me", f"{limited},{world.node.url}")
        assert await chain.head() > 0
        await world.node.stop()
        for _ in range(2):
            with pytest.raises(ChainUnavailable) as refused:
                await chain.head()
            assert refused.value.retry_after == 0.0  # the other node may answer earlier
        assert dials == 1
        assert caplog.text.count(f"{world.node.url} can't be reached: ") == 2
        assert caplog.text.count(f"{limited} can't be reached: ") == 1  # once in a pause
        chain._pauses._until.clear()  # the pause ends, and the next one begins
        caplog.clear()
        for _ in range(3):
            with pytest.raises(ChainUnavailable):
                await chain.head()
        assert dials == 2
        assert caplog.text.count(f"{limited} can't be reached: ") == 1
        chain._pauses._until.clear()
        caplog.clear()
        seconds = "0"  # without a pause, each failure is logged
        for _ in range(2):
            with pytest.raises(ChainUnavailable):
                await chain.head()
        assert dials == 4
        assert caplog.text.count(f"{limited} can't be reached: ") == 2
        await chain.close()


async def test_who_recovers_from_a_silence_in_a_pause_logs_it_once(world, impatience, caplog):
    """The blocks' loop asks a silent endpoint every few seconds whether it lives."""
    chain = await world.connect("me", world.node.url)
    await chain.head()
    world.node.faults.throttle, world.node.faults.retry_after = "too many requests", 30.0
    for _ in range(3):
        await chain._recover(1)
    assert len(re.findall(r"does not answer: |can't be reached: ", caplog.text)) == 1
    await chain.close()


async def test_a_mute_node_costs_the_opening_no_more_than_a_head_start(world, mute_url, monkeypatch):
    monkeypatch.setattr("tplr.chain.subtensor.endpoints.HEAD_START_SECONDS", 0.2)
    began = time.monotonic()
    known = world.admin.genesis_hash  # else the others would be asked for theirs
    chain = await world.connect("me", f"{mute_url},{mute_url},{world.node.url}", genesis=known)
    assert time.monotonic() - began < endpoints.DIAL_SECONDS
    assert await chain.head() > 0
    await chain.close()


async def test_each_endpoint_says_its_head_or_why_not(world, mute_url, monkeypatch):
    monkeypatch.setattr("tplr.chain.subtensor.endpoints.DIAL_SECONDS", 3.0)
    dead = "ws://127.0.0.1:9"
    found = await probe_endpoints(f"{world.node.url},{dead},{mute_url}", [f"{world.node.url}/archive"])
    assert [name for name, _ in found] == [world.node.url, dead, mute_url, world.node.url]
    good, refused, mute, archive = [said for _, said in found]
    assert isinstance(good, EndpointHead)
    assert isinstance(archive, EndpointHead)
    assert good.number > 0
    assert good.time == pytest.approx(time.time(), abs=600)
    assert "refused" in refused.lower() or "connect" in refused.lower()
    assert "no answer in 3 s" in mute


@pytest.mark.parametrize(
    "url",
    [
        "wss://user:5ec2e7@127.0.0.1:9",
        "wss://127.0.0.1:9?key=5ec2e7",
        "wss://127.0.0.1:9/5ec2e7",
        "https://127.0.0.1:9/5ec2e7",
        "wss://5ec2e7@127.0.0.1",
        "wss://127.0.0.1:5ec2e7",
        "wss:///5ec2e7",
        "wss://[127.0.0.1/5ec2e7",
    ],
)
async def test_no_part_of_a_url_that_may_be_an_access_key_is_said(url, caplog, tmp_path):
    """An endpoint's URL is copied from a provider's page, often with its key or another scheme."""
    where = {"netuid": 1, "wallet_path": tmp_path, "wallet_name": "w", "hotkey": None}
    asked = (
        probe_endpoints(url),
        probe_endpoints("ws://127.0.0.1:9", [url]),
        adapter.SubtensorChain.open(url, **where),
    )
    said = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(one, list | ChainUnavailable | ConfigError) for one in said), said
    assert "5ec2e7" not in str(said) + caplog.text


async def test_a_key_in_the_url_of_a_redirect_is_not_said(caplog, tmp_path):
    """A gateway that is asked without TLS redirects to its URL with TLS, and the client's error says that URL."""

    async def redirect(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 301 Moved\r\nLocation: https://gateway.example/5ec2e7\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(redirect, "127.0.0.1", 0) as gateway:
        url = f"ws://127.0.0.1:{gateway.sockets[0].getsockname()[1]}/5ec2e7"
        with pytest.raises(ChainUnavailable) as error:
            await adapter.SubtensorChain.open(url, netuid=1, wallet_path=tmp_path, wallet_name="w", hotkey=None)
    said = str(error.value) + caplog.text
    assert "https://gateway.example" in said
    assert "5ec2e7" not in said


def test_a_mute_node_counts_as_dead_within_ten_seconds():
    assert adapter.QUIET_SECONDS + endpoints.PROBE_SECONDS < 10
    assert endpoints.DIAL_SECONDS < 10


async def test_a_read_at_a_node_that_falls_mute_ends_early_and_the_next_node_serves(world, impatience):
    second = await world.second_node()
    chain = await world.connect("me", f"{world.node.url},{second.url}")
    world.node.faults.mute = True
    began = time.monotonic()
    with pytest.raises(ChainUnavailable, match="does not answer: switched to"):
        await chain.metagraph()
    assert time.monotonic() - began < 5  # not the 30 s of a read
    assert (await chain.metagraph()).uid_of(chain.hotkey) == 0
    await chain.close()


@pytest.mark.parametrize("fault", ["mute", "down"])
async def test_a_block_is_final_only_if_the_node_that_answers_says_so(world, impatience, fault):
    """The next node lags: it may still replace a block that was final at the previous node."""
    second = await world.second_node()
    second._finality_lag = 1000
    chain = await world.connect("me", f"{world.node.url},{second.url}")
    number = await world.pass_blocks(1)
    assert (await chain.block(number)).number == number
    if fault == "mute":
        world.node.faults.mute = True
    else:
        await world.node.stop()
    with pytest.raises(ChainUnavailable, match="does not answer: switched to"):
        await chain.head()
    with pytest.raises(ChainUnavailable, match="is not final yet"):
        await chain.block(number)
    await chain.close()


@pytest.mark.parametrize("fault", ["mute", "down"])
async def test_a_node_of_another_chain_is_no_fallback(world, impatience, tmp_path, caplog, fault, monkeypatch):
    """Its blocks have other numbers: a node's windows would jump, and never come back."""
    monkeypatch.setattr("tplr.chain.subtensor.endpoints.DIAL_SECONDS", 0.5)
    (tmp_path / "other").mkdir()
    async with NodeWorld(tmp_path / "other") as other:
        port = other.node.port
        await other.node.stop()  # else the list would be refused at once
        chain = await world.connect("me", f"{world.node.url},{other.node.url}")
        await other.node.start(port)
        last = await other.pass_blocks(await chain.head() + 50)
        async with aclosing(chain.blocks()) as blocks:
            await anext(blocks)
            if fault == "mute":
                world.node.faults.mute = True
            else:
                await world.node.stop()
            for read in (chain.head, chain.metagraph, chain.head):
                with pytest.raises(ChainUnavailable):
                    await read()
            world.node.faults.mute = False
            if fault == "down":
                await world.node.start(world.node.port)
            assert await asyncio.wait_for(anext(blocks), 10) < last
        assert (await chain.block(0)).hash == chain.genesis
        assert (await chain.metagraph()).uid_of(chain.hotkey) == 0
        assert f"{other.node.url} can't be reached: it serves another chain" in caplog.text
        await chain.close()


async def test_the_main_network_is_known_by_its_genesis(world, tmp_path, caplog, monkeypatch):
    """Its first node is down at the opening: the next one that answers must not define the chain."""
    assert endpoints.endpoints_of("finney").genesis == bt.settings.FINNEY_GENESIS_HASH
    assert endpoints.endpoints_of(f"ws://127.0.0.1:9,{bt.settings.NETWORKS['finney']}").genesis
    assert endpoints.endpoints_of("test").genesis is None
    (tmp_path / "other").mkdir()
    async with NodeWorld(tmp_path / "other") as other:
        await other.pass_blocks(1)
        both = f"{world.node.url},{other.node.url}"
        monkeypatch.setattr("tplr.chain.subtensor.endpoints.MAIN_NETWORK_URLS", {world.node.url})
        monkeypatch.setattr("tplr.chain.subtensor.endpoints.FINNEY_GENESIS_HASH", world.admin.genesis_hash)
        [(_, head), (_, refused)] = await probe_endpoints(both)
        assert isinstance(head, EndpointHead)
        assert "serves another chain" in refused
        await world.node.stop()
        with pytest.raises(ChainUnavailable):
            await world.connect("me", both)
    assert f"{other.node.url} can't be reached: it serves another chain" in caplog.text


async def test_nodes_of_two_unknown_chains_are_refused_at_the_opening(world, tmp_path):
    """Else the first that answers would decide, in each process anew."""
    (tmp_path / "other").mkdir()
    async with NodeWorld(tmp_path / "other") as other:
        with pytest.raises(ConfigError) as refused:
            await world.connect("me", f"{world.node.url},{other.node.url}")
        for said in (world.admin.genesis_hash, other.admin.genesis_hash, other.node.url, "remove the wrong one"):
            assert said in str(refused.value)
    chain = await world.connect("me", f"{world.node.url},{other.node.url}")  # one that is down now is checked later
    await chain.close()


async def test_a_chain_that_is_known_is_not_exchanged_for_another(world, tmp_path):
    (tmp_path / "other").mkdir()
    async with NodeWorld(tmp_path / "other") as other:
        where = {"netuid": 1, "wallet_path": tmp_path, "wallet_name": "me", "hotkey": None}
        known = {"genesis": world.admin.genesis_hash, **where}
        both = f"{other.node.url},{world.node.url}"
        async with open_chain(both, **known) as chain:
            assert chain.genesis == world.admin.genesis_hash
        for wrong in (other.node.url, f"local:{tmp_path}/other/chain.db"):
            with pytest.raises(OtherChain) as refused:
                await open_chain(wrong, **known).__aenter__()
            assert (refused.value.found, refused.value.expected) == (other.admin.genesis_hash, chain.genesis)
        await world.node.stop()
        with pytest.raises(ChainUnavailable) as down:  # it may return, so this is nothing to correct
            await open_chain(both, **known).__aenter__()
        assert not isinstance(down.value, OtherChain)


async def test_blocks_continue_from_the_next_node_when_the_stream_falls_mute(world, impatience):
    second = await world.second_node()
    chain = await world.connect("me", f"{world.node.url},{second.url}")
    async with aclosing(chain.blocks()) as blocks:
        first = await anext(blocks)
        world.node.faults.mute = True
        seen = [await asyncio.wait_for(anext(blocks), 5) for _ in range(6)]
    assert seen == list(range(first + 1, first + 7))
    await chain.close()


async def test_a_connection_does_not_grow_with_the_number_of_reads(world):
    chain = await world.connect("me", world.node.url)
    for _ in range(20):
        await chain.head()
    (session,) = [task for task in asyncio.all_tasks() if task.get_name() == "rpc-session"]
    assert len(session._callbacks or ()) < 5  # type: ignore[attr-defined]
    await chain.close()


async def test_a_slow_read_at_a_living_node_is_waited_for(world, impatience, monkeypatch):
    """A large answer is late, but the node announces its head in the meantime."""
    chain = await world.connect("me", world.node.url)

    async def late():
        await asyncio.sleep(1.0)
        return 7

    assert await chain._read(late()) == 7
    await chain.close()


async def test_a_read_that_is_cancelled_leaves_those_that_wait_for_the_same_metadata(world, tmp_path, monkeypatch):
    """The SDK's calls share one download of a new runtime's metadata: no other call ends as if it were cancelled."""
    chain = await world.connect("me", world.node.url)
    manager = chain._substrate.raw._runtimes
    download, asked, answered = manager._download_metadata, asyncio.Event(), asyncio.Event()

    async def late(*args):
        asked.set()
        await answered.wait()
        return await download(*args)

    monkeypatch.setattr(manager, "_download_metadata", late)
    for cancelled in (0, 1):  # the call that downloads, and one that waits for it
        monkeypatch.setenv("BITTENSOR_RUNTIME_CACHE_DIR", str(tmp_path / f"runtimes-{cancelled}"))
        manager._codecs._data.clear()
        manager._head_codec = None
        asked.clear()
        answered.clear()
        calls = [asyncio.create_task(chain.metagraph())]
        await asyncio.wait_for(asked.wait(), 5)
        calls += [asyncio.create_task(chain.metagraph()) for _ in range(2)]
        await asyncio.sleep(0.6)  # they reach the download, too
        calls[cancelled].cancel()
        await asyncio.sleep(0.1)
        answered.set()
        ended = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
        assert isinstance(ended.pop(cancelled), asyncio.CancelledError)
        assert all(isinstance(one, ChainUnavailable) for one in ended), ended
        assert (await chain.metagraph()).uid_of(chain.hotkey) == 0
    await chain.close()


async def test_a_second_commitment_too_soon_says_the_block(tmp_path):
    async with NodeWorld(tmp_path, commitment_quota=200) as world:
        await world.join("me", stake=100.0, permit=True)
        chain = await world.connect("me", world.node.url)
        await chain.commit("a" * 128)
        with pytest.raises(RateLimited) as refused:
            await chain.commit("b" * 128)
        at, head = refused.value.retry_at, await chain.head()
        assert at is not None
        assert f"retry at block {at}" in str(refused.value)
        assert head < at <= head + world.limits.tempo + 1
        # And that is the first block at which it works.
        await world.pass_blocks(at - head)
        assert await chain.commit("b" * 128) >= at
        await chain.close()


async def test_a_runtime_without_a_needed_api_is_a_configuration_error(tmp_path, monkeypatch):
    """At once, with advice, because a retry would also fail."""
    lacking = subtensor_node.OPAQUE_METADATA.replace(b"SubnetInfoRuntimeApi", b"SubnetInfoRuntimeXyz")
    assert lacking != subtensor_node.OPAQUE_METADATA
    monkeypatch.setattr(subtensor_node, "OPAQUE_METADATA", lacking)
    # Else the SDK would take the metadata of another test's node with the same genesis.
    monkeypatch.setenv("BITTENSOR_RUNTIME_CACHE_DIR", str(tmp_path / "runtimes"))
    async with NodeWorld(tmp_path) as world:
        await world.join("me", stake=100.0, permit=True)
        chain = await world.connect("me", world.node.url)
        manager = ChainManager(chain, blocks_per_window=3, retry_interval=30.0)
        for call in (chain.metagraph(), manager.set_weights({0: 1.0})):
            with pytest.raises(ConfigError, match="update tplr and bittensor"):
                await asyncio.wait_for(call, 10)
        await chain.close()
