"""A miner and a validator in one process, on a real chain file, a real server and real pages; and what can go wrong."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tplr.chain.ledger import Ledger
from tplr.chain.local import LocalChain
from tplr.comms import Comms
from tplr.data.page_dataset import PageDataset
from tplr.errors import NotRegistered
from tplr.hparams import HParams
from tplr.localnet.dataset import SUBFOLDER, prepared_corpus, upload_dataset
from tplr.localnet.network import NETUID, Network, NodeSetup, create_chain, lay_out
from tplr.localnet.plan import make_plan
from tplr.localnet.s3server import Server, Status, serve
from tplr.node.feed import Feed
from tplr.node.main import _first
from tplr.node.miner import Miner
from tplr.node.replica import Borders, Replica
from tplr.node.sources import PageSource
from tplr.node.validator import Validator
from tplr.storage import S3Connections
from tplr.telemetry import Telemetry
from tplr.training.model import build_model

CACHE = Path(__file__).parents[2] / ".cache/tplr/localnet"
MINER = 1


class Stage:
    """Everything that two roles need, and what they told."""

    def __init__(self, network: Network, hparams: HParams, server: Server, stack: contextlib.AsyncExitStack) -> None:
        self.network = network
        self.hparams = hparams
        self.server = server
        self.events: list[dict[str, Any]] = []
        self._stack = stack

    async def node(self, setup: NodeSetup) -> tuple[Replica, Feed, Borders]:
        chain = await self._stack.enter_async_context(LocalChain(self.network.chain, setup.address, netuid=NETUID))
        comms = await self._stack.enter_async_context(
            Comms(chain, self.hparams, own_bucket=setup.account.writable, endpoint=self.server.endpoint)
        )
        await comms.try_commit(setup.account.readable)
        await comms.refresh()
        connections = await self._stack.enter_async_context(S3Connections(self.server.endpoint))
        tokenizer = self.hparams.load_tokenizer(self.network.folder)
        dataset = await PageDataset.open([connections.store(self.network.dataset.readable)], SUBFOLDER, tokenizer)
        telemetry = Telemetry(role=setup.role, uid=comms.uid, listeners=(lambda event: self.events.append({**event}),))
        borders = Borders(comms=comms, clock=comms.clock, telemetry=telemetry)
        replica = await self._stack.enter_async_context(
            Replica(build_model(self.hparams), self.hparams, borders, self.network.folder / setup.name)
        )
        feed = await self._stack.enter_async_context(Feed(PageSource(dataset, self.hparams), comms))
        return replica, feed, borders

    def of(self, kind: str, role: str) -> list[dict[str, Any]]:
        return [event for event in self.events if (event["event"], event["role"]) == (kind, role)]

    async def until(self, condition: Callable[[], object], *, seconds: float = 60) -> None:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.1)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    plan = make_plan(miners=1, windows=4, run_dir=tmp_path / "run", cache=CACHE, vocab_size=512)
    corpus = await asyncio.to_thread(prepared_corpus, plan.cache, plan.corpus, plan.vocab_size)
    network = lay_out(plan, corpus)
    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    hparams = network.hparams.model_copy(
        update={
            "model": network.hparams.model.model_copy(update=tiny),
            "pages_per_window": 1,
            # 6 s, of which 4 are waited for an update that is missing.
            "blocks_per_window": 12,
            "time_window_delta_seconds": 2,
            "manifest_timeout_seconds": 0,
            "commit_margin_seconds": 0.5,
            "peer_list_window_margin": 1,
            "validator_offset": 1,
        }
    )
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve(network.storage, network.keys))
        await upload_dataset(corpus, network.dataset.writable, server.endpoint)
        create_chain(network, plan.seed)
        yield Stage(network, hparams, server, stack)


@contextlib.asynccontextmanager
async def running(*coroutines: Any) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Tasks that end with the block, in whatever state they are."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.timeout(180)
async def test_a_life_of_two_nodes(stage: Stage) -> None:
    validator, miner = stage.network.nodes
    mine = await stage.node(miner)
    watch = await stage.node(validator)
    background = [one for _, _, borders in (mine, watch) for one in (borders.clock.run(), borders.comms.run_refresh())]
    async with running(*background, Miner(*mine, stage.hparams).run(), Validator(*watch, stage.hparams).run()) as tasks:
        # They meet, agree, and the miner is paid.
        await stage.until(lambda: len(stage.of("applied", "validator")) >= 2 and stage.of("weights", "validator"))
        held = {event["window"]: event["digest"] for event in stage.of("applied", "miner")}
        for event in stage.of("applied", "validator"):
            assert event["digest"] == held[event["window"]]
            assert event["included"] == [MINER]
        assert stage.of("weights", "validator")[-1]["weights"] == {str(MINER): 1.0}

        # The validator can't read its pages: it says so, goes on with the model, and nobody's score moves.
        scores = stage.of("scores", "validator")[-1]["scores"]
        fault = stage.server.faults.add(rf"GET /dataset/{SUBFOLDER}/.*parquet", Status(404, "NoSuchKey"), times=None)
        applied = len(stage.of("applied", "validator"))
        await stage.until(lambda: stage.of("problem", "validator"))
        await stage.until(lambda: len(stage.of("applied", "validator")) > applied)
        assert "nobody is measured" in stage.of("problem", "validator")[0]["text"]
        assert stage.of("scores", "validator")[-1]["scores"] == scores
        # The miner has no pages either: its windows are lost, and it says which.
        await stage.until(lambda: stage.of("missed", "miner"))
        fault.left = 0
        stage.server.faults.clear()
        lost = {event["window"] for event in stage.of("missed", "miner")}
        await stage.until(lambda: stage.of("uploaded", "miner")[-1]["window"] > max(lost))
        assert not lost & {event["window"] for event in stage.of("uploaded", "miner")}

        # Its uid goes to somebody else: it ends, and says what to do.
        admin = Ledger(stage.network.chain)
        admin.register("other", "cold-other")
        admin.deregister(miner.address)
        admin.close()
        await stage.until(tasks[-2].done)
    with pytest.raises((NotRegistered, ExceptionGroup)) as caught:
        tasks[-2].result()
    expelled = _first(caught.value, NotRegistered)
    assert expelled is not None
    assert "register it" in str(expelled)
    assert not tasks[-1].done() or tasks[-1].cancelled()  # the validator went on


async def test_state_of_another_run_or_model_is_passed_over(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    setup = stage.network.nodes[1]
    replica, _, borders = await stage.node(setup)
    await replica.open(start_window=5)
    with torch.no_grad():
        for parameter in replica.parameters.values():
            parameter.add_(1.0)
    replica._holdings.save(9, {})

    def again(hparams: HParams) -> Replica:
        return Replica(build_model(hparams), hparams, borders, stage.network.folder / setup.name)

    same = again(stage.hparams)
    await same.open(start_window=5)
    assert same.window == 9
    assert all(torch.equal(same.parameters[name], value) for name, value in replica.parameters.items())

    fresh = build_model(stage.hparams)
    wider = stage.hparams.model.model_copy(update={"intermediate_size": 96})
    for hparams, start in (
        (stage.hparams, 6),
        (stage.hparams.model_copy(update={"model": wider}), 5),
        (stage.hparams.model_copy(update={"init_seed": 1}), 5),
    ):
        caplog.clear()
        other = again(hparams)
        await other.open(start_window=start)
        assert (other.window, other.step) == (start, 0)
        assert "starting anew" in caplog.text
        if hparams is stage.hparams:
            assert all(torch.equal(other.parameters[name], value) for name, value in fresh.named_parameters())
