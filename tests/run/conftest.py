"""A finished run in a folder as ``tplr localnet`` leaves it: real buckets, chain and data; random updates."""

import asyncio
import contextlib
import json
import shutil
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import pytest
from recording import Recording

from tplr import cli
from tplr.chain.clocks import ManualClock
from tplr.chain.hotkeys import load_hotkey
from tplr.chain.local import LocalChain
from tplr.comms import Comms
from tplr.config import S3Bucket
from tplr.exchange.envelope import Run, Signer
from tplr.hparams import HParams
from tplr.localnet.dataset import prepared_corpus, upload_dataset
from tplr.localnet.network import HOTKEY, NETUID, Network, NodeSetup, create_chain, lay_out
from tplr.localnet.plan import Scheme, make_plan
from tplr.schemas import Alignment, Bucket, Evaluation, LossChange, PeerObservation, PeerScore, ScoreReport
from tplr.storage import ObjectStore, S3Connections
from tplr.storage.many import list_objects
from tplr.testing.s3server import serve

CACHE = Path(__file__).parents[2] / ".cache/tplr/localnet"
START, LAST = 3, 7
CHECKPOINT = 6  # has applied all earlier windows
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}


class FinishedRun:
    """A run of the windows ``start`` to ``last``, with the digests of its model after each, and a checkpoint of the
    model after window ``kept``."""

    start, last, kept = START, LAST, CHECKPOINT - 1

    def __init__(self, folder: Path, hparams: HParams, digests: dict[int, str]) -> None:
        self.folder = folder
        self.hparams = hparams
        self.digests = digests

    def _stores(self, connections: S3Connections) -> list[ObjectStore]:
        """Return every bucket, writable."""
        table = json.loads((self.folder / "keys.json").read_text())
        return [
            connections.store(S3Bucket(name=name, access_key_id=key, secret_access_key=entry["secret"]))
            for key, entry in table.items()
            for name, access in entry["buckets"].items()
            if access == "read-write"
        ]

    def change(
        self, part: str, change: Callable[[bytes], bytes | None], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Replace the objects whose names contain ``part``, or delete them for None."""

        async def work() -> int:
            changed = 0
            table = json.loads((self.folder / "keys.json").read_text())
            async with (
                serve(self.folder / "storage", table) as server,
                S3Connections(server.endpoint) as connections,
            ):
                for store in self._stores(connections):
                    for info in await list_objects(store, ""):
                        if part in info.key:
                            body = change(await store.get(info.key, max_bytes=info.size))
                            await (
                                store.delete(info.key) if body is None else store.put(info.key, body, metadata=metadata)
                            )
                            changed += 1
            return changed

        assert asyncio.run(work())

    def signer(self, name: str, uid: int = 0) -> Signer:
        """Return the signer of a node."""
        keypair = load_hotkey(self.folder / "wallets", name, HOTKEY)
        with contextlib.closing(sqlite3.connect(self.folder / "chain.sqlite")) as chain:
            [(genesis,)] = chain.execute("SELECT hash FROM block WHERE number = 0")
        return Signer.with_key(Run(NETUID, self.hparams.version, genesis), uid, keypair)

    def hotkey(self, uid: int) -> str:
        """Return the hotkey that has the uid since the run's start."""
        with contextlib.closing(sqlite3.connect(self.folder / "chain.sqlite")) as chain:
            [(found,)] = chain.execute("SELECT hotkey FROM neuron WHERE uid = ? ORDER BY block LIMIT 1", [uid])
        return found

    def write_variables(self, bucket: Bucket) -> dict[str, str]:
        """Return the variables of the node with this gradients bucket, with its write keys."""
        table = json.loads((self.folder / "keys.json").read_text())
        key, entry = next((key, one) for key, one in table.items() if one["buckets"].get(bucket.name) == "read-write")
        keys = {"ACCESS_KEY_ID": key, "SECRET_ACCESS_KEY": entry["secret"]}
        return {
            "R2_GRADIENTS_BUCKET_NAME": bucket.name,
            "R2_GRADIENTS_ACCOUNT_ID": bucket.account_id,
            **{f"R2_GRADIENTS_{access}_{name}": value for access in ("READ", "WRITE") for name, value in keys.items()},
        }

    def forget(self, part: str) -> None:
        """Delete the objects whose names contain ``part``."""
        self.change(part, lambda _: None)


def score_report(window: int, uid: int, loss: float, hotkeys: Mapping[int, str]) -> ScoreReport:
    """``hotkeys``: of the miners 1 and 2."""
    held_out = LossChange(before=loss + 1, after=loss + 0.9, error=0.01, sequences=8)  # of a calibration
    observations = {str(one): PeerObservation(hotkey=hotkeys[one], included=True) for one in (1, 2)}
    observations["1"] = observations["1"].model_copy(
        update={"evaluation": Evaluation(assigned=None, held_out=held_out)}
    )
    return ScoreReport(
        window=window,
        uid=uid,
        profile="hardened",
        held_out_pages="",
        faults=(),
        observations=observations,
        alignment=Alignment(uids=(), products=(), norms=(), gram=(), loss=loss),
        follows_from=(),
        peer_scores={str(one): PeerScore(hotkey=hotkeys[one], credit=0.25 * one, final=0.1) for one in (1, 2)},
        struck={},
        weights={"1": 0.5, "2": 0.5},
        weights_set=None,
    ).sealed()


async def record(
    folder: Path, void: Collection[int] = (), *, scheme: Scheme = "demo", outer_delay: int = 0
) -> FinishedRun:
    """``void``: windows in which nothing is applied."""
    plan = make_plan(scheme=scheme, windows=8, miners=2, vocab_size=512, run_dir=folder, cache=CACHE)
    corpus = await asyncio.to_thread(prepared_corpus, plan.cache, plan.corpus, plan.vocab_size)
    network = lay_out(plan, corpus)
    model = network.hparams.model.model_copy(update=TINY)
    changes = {"model": model, "outer_delay": outer_delay, "pages_per_window": 1}
    changes |= {"sealed_scores": False, "peer_list_window_margin": 1}
    hparams = network.hparams.model_copy(update=changes)
    absent = {"demo", "sparseloco", "store"} - {hparams.outer}
    (folder / "hparams.json").write_text(hparams.model_dump_json(exclude=absent))
    clock = ManualClock(time.time() - 3600)  # the chain has advanced when the run is reopened
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve(network.storage, network.keys))
        await upload_dataset(corpus, network.dataset.writable, server.endpoint)
        create_chain(network, plan.seed, clock=clock)
        nodes = [node for node in network.nodes if node.role != "aggregator"]
        leader, *miners = [await opened(network, hparams, node, server.endpoint, clock, stack) for node in nodes]
        for comms in (leader, *miners):
            await comms.refresh()
        ticking = asyncio.create_task(leader.clock.run())
        stack.callback(ticking.cancel)
        recording = Recording(leader, miners, hparams, start=START, folder=folder / "state" / "validator")
        await recording.begin()
        hotkeys = {neuron.uid: neuron.hotkey for neuron in leader.metagraph.neurons}
        digests = {}
        for window in range(START, LAST + 1):
            if window == CHECKPOINT:
                await recording.checkpoint()
            await pass_windows(clock, leader, window + 2)
            await clock.drive(recording.record(void=window in void), step=0.5)
            await leader.put_scores(score_report(window, leader.uid, 6.0 - 0.1 * window, hotkeys))
            digests[window] = recording.train_state.digest()
    return FinishedRun(folder, hparams, digests)


async def opened(
    network: Network,
    hparams: HParams,
    node: NodeSetup,
    endpoint: str,
    clock: ManualClock,
    stack: contextlib.AsyncExitStack,
) -> Comms:
    chain = await stack.enter_async_context(LocalChain(network.chain, node.hotkey, netuid=NETUID, clock=clock))
    connections = await stack.enter_async_context(S3Connections(endpoint))
    aggregates, folder = network.aggregator.account.writable, network.folder / "states"
    own = node.account.writable
    comms = Comms(chain, hparams, connections, own_bucket=own, aggregator_bucket=aggregates, folder=folder)
    await clock.drive(comms.try_commit(node.account.readable), step=0.5)
    return comms


async def pass_windows(clock: ManualClock, comms: Comms, until: int) -> None:
    await clock.drive(comms.clock.wait_for_window(until), step=0.5)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return asyncio.run(record(tmp_path_factory.mktemp("finished") / "run"))


@pytest.fixture
def newest(recorded: FinishedRun, tmp_path: Path) -> FinishedRun:
    """The run that ``--local`` finds without a folder, for ``tplr``."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "latest").symlink_to(recorded.folder)
    return recorded


@pytest.fixture
def with_void_window(tmp_path: Path) -> FinishedRun:
    """A run with a void second window."""
    return asyncio.run(record(tmp_path / "void" / "run", void=(START + 1,)))


@pytest.fixture
def overlapping(tmp_path: Path) -> FinishedRun:
    """A run whose miners train while a set is applied."""
    return asyncio.run(record(tmp_path / "overlap" / "run", scheme="muon", outer_delay=1))


@pytest.fixture
def own_run(recorded: FinishedRun, tmp_path: Path) -> FinishedRun:
    """A copy that a test may damage."""
    folder = tmp_path / "run"
    shutil.copytree(recorded.folder, folder)
    return FinishedRun(folder, recorded.hparams, recorded.digests)


Tplr = Callable[..., int]


@pytest.fixture
def tplr(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tplr:
    """Runs ``tplr`` with these arguments, in a separate folder of the test; returns the exit status."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tplr.cli.reported.setup_logging", lambda **_: None)  # logging settings would outlive the test

    def run(*words: object) -> int:
        monkeypatch.setattr("sys.argv", ["tplr", *map(str, words)])  # results name the command line
        return cli.main([str(word) for word in words])

    return run
