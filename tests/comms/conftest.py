"""Three nodes with their buckets on one server and one chain: each finds the objects that the others publish."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from three_nodes import HOTKEYS, NAMES, World

from tplr.chain.clocks import ManualClock
from tplr.chain.commitment import encode_commitment
from tplr.chain.ledger import Ledger
from tplr.chain.local import LocalChain
from tplr.comms import Comms
from tplr.hparams import HParams
from tplr.localnet.accounts import key_table, new_account
from tplr.localnet.plan import scheme_constants
from tplr.storage import S3Connections
from tplr.testing.s3server import Rules, serve


@pytest.fixture(scope="module")
def hparams() -> HParams:
    changes = {"gradient_retention_windows": 5, "topk_compression": 2}
    return HParams.model_validate(scheme_constants("demo")).model_copy(update=changes)


@pytest.fixture
async def world(tmp_path: Path, hparams: HParams) -> AsyncIterator[World]:
    made = World()
    made.clock = ManualClock()
    made.accounts = [new_account() for _ in NAMES]
    made.common = new_account("common")
    path = made.chain = tmp_path / "chain.db"
    Ledger.create(path, clock=made.clock, finality_lag=0)
    admin = Ledger(path, clock=made.clock)
    for name in (*NAMES, "evil"):
        admin.register(
            HOTKEYS[name].ss58_address, f"cold-{name}", stake=1e6 if name == "leader" else 1.0, permit=name == "leader"
        )
    admin.close()
    rules = Rules(one_write_per_second=False, max_clock_skew=1e12)
    async with contextlib.AsyncExitStack() as stack:
        serving = serve(tmp_path / "s3", key_table([*made.accounts, made.common]), rules=rules, clock=made.clock.now)
        made.server = await stack.enter_async_context(serving)
        evil = await stack.enter_async_context(LocalChain(path, HOTKEYS["evil"], clock=made.clock))
        await made.clock.drive(evil.commit("127.0.0.1:9000/".ljust(128, "0")))
        made.nodes = []
        for name, account in zip(NAMES, made.accounts, strict=True):
            chain = await stack.enter_async_context(LocalChain(path, HOTKEYS[name], clock=made.clock))
            await made.clock.drive(chain.commit(encode_commitment(account.readable)))
            connections = await stack.enter_async_context(S3Connections(made.server.endpoint))
            made.nodes.append(Comms(chain, hparams, connections, own_bucket=account.writable, folder=tmp_path / name))
        for comms in made.nodes:
            await comms.refresh()
        yield made
