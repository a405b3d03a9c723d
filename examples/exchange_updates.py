"""Three processes compress updates, exchange them over buckets, and hold the same model afterwards.

    python examples/exchange_updates.py

Each process is one participant with its own bucket and hotkey, on a chain in a file and an S3 server of the parent. It
publishes its update's hash before the window ends and the update after it, then applies the step of all updates.
"""

import asyncio
import hashlib
import multiprocessing
import os
import tempfile
import time
from contextlib import AsyncExitStack
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace

import torch

import tplr
from tplr.chain.hotkeys import new_hotkey, save_hotkey
from tplr.chain.ledger import Ledger
from tplr.config import Environment
from tplr.hparams import HParams
from tplr.localnet.accounts import bucket_variables, key_table, new_account
from tplr.localnet.plan import PROFILE
from tplr.testing.s3server import serve
from tplr.training.model import build_model
from tplr.training.outer.base import OuterScheme
from tplr.training.schemes import outer_scheme

PARTICIPANTS = 3
BLOCK_SECONDS = 0.25
# Modules that each process needs; imported once, in the process from which all are forked.
PRELOADED = ["tplr.comms", "tplr.training.schemes", "transformers.models.llama.modeling_llama"]
SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}


def constants() -> HParams:
    """Return the constants of a localnet, for a small model and windows of three seconds."""
    hparams = tplr.load_hparams(PROFILE)
    sizes = hparams.model.model_copy(update=SIZES)
    return hparams.model_copy(update={"model": sizes, "blocks_per_window": 12, "time_window_delta_seconds": 4})


def participant(
    name: str,
    variables: dict[str, str],
    chosen: "Synchronized[int]",
    ready: Barrier,
    results: "Queue[tuple[str, str]]",
) -> None:
    """Run one participant. Its environment names its bucket, like ``.env`` for a node."""
    os.environ.update(variables)
    results.put((name, asyncio.run(exchange(name, chosen, ready))))


async def exchange(name: str, chosen: "Synchronized[int]", ready: Barrier) -> str:
    """Exchange one window's updates; return a digest of the model afterwards."""
    hparams = constants()
    model = build_model(hparams)
    parameters = dict(model.named_parameters())
    scheme = outer_scheme(parameters, hparams)
    wallet = SimpleNamespace(path="wallets", name=name, hotkey_str="default")
    async with AsyncExitStack() as stack:
        comms = await stack.enter_async_context(tplr.Comms.from_env(hparams, wallet=wallet, network="local:chain.db"))
        await comms.try_commit(Environment.read().bucket("gradients", "read"))
        while len(comms.commitments) < PARTICIPANTS:
            await asyncio.sleep(BLOCK_SECONDS)
            await comms.refresh()
        clock = asyncio.create_task(comms.clock.run())
        stack.callback(clock.cancel)
        await comms.clock.wait_for_block(0)
        # All have started; the first participant in the list chooses the window of the exchange.
        if name == "participant-0":
            chosen.value = comms.clock.window + 2
        await asyncio.to_thread(ready.wait)
        window = chosen.value
        body = pack(scheme, parameters, comms.uid, window)
        await comms.clock.wait_for_window(window)
        await comms.put_commit(window, hashlib.sha256(body).hexdigest())
        await comms.clock.wait_for_window(window + 1)
        await asyncio.sleep(1.0)  # a bucket's clock has whole seconds
        await comms.put_update(window, body)
        gathered = await comms.gather_updates(range(PARTICIPANTS), window, scheme.spec)
        assert not gathered.skipped, gathered.skipped
        scheme.apply([one.update for one in gathered.updates], step=0)
        bits = 8 * len(body) / sum(one.numel() for one in parameters.values())
        print(f"{name}: window {window}, {len(body)} bytes ({bits:.2f} bits per parameter), applied 3 updates")
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in parameters.values())).hexdigest()


def pack(scheme: OuterScheme, parameters: dict[str, torch.nn.Parameter], uid: int, window: int) -> bytes:
    """Pack an update of random tensors instead of a gradient."""
    generator = torch.Generator().manual_seed(uid)
    tensors = {name: torch.randn(one.shape, generator=generator) for name, one in parameters.items()}
    return scheme.pack(tensors, step=0, window=window, uid=uid, pages_digest="0" * 64, batches=1)


def make_chain(names: list[str]) -> None:
    """Create a chain in a file with all participants registered, and their hotkeys."""
    Ledger.create(Path("chain.db"), netuid=3, block_time=BLOCK_SECONDS)
    ledger = Ledger(Path("chain.db"))
    for i, name in enumerate(names):
        hotkey = new_hotkey()
        ledger.register(hotkey.ss58_address, f"5Coldkey{i}", stake=1.0, permit=False)
        save_hotkey("wallets", name, "default", hotkey)
    while ledger.look()[0] < 4:  # a registration takes effect in the next block
        time.sleep(BLOCK_SECONDS)
    ledger.close()


async def run(names: list[str]) -> None:
    accounts = {name: new_account() for name in names}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    chosen, ready, results = context.Value("q", 0), context.Barrier(PARTICIPANTS), context.Queue()
    async with serve(Path("s3"), key_table(accounts.values())) as server:
        processes = []
        for name in names:
            variables = bucket_variables("gradients", accounts[name], "read", "write")
            variables |= {"TPLR_S3_ENDPOINT": server.endpoint, "TPLR_CACHE_FOLDER": str(Path("cache", name))}
            arguments = (name, variables, chosen, ready, results)
            processes.append(context.Process(target=participant, args=arguments, daemon=True))
            processes[-1].start()
        digests = dict([await asyncio.to_thread(results.get, timeout=120) for _ in names])
        for process in processes:
            await asyncio.to_thread(process.join)
    assert len(set(digests.values())) == 1, digests
    print(f"all {PARTICIPANTS} hold the model {next(iter(digests.values()))[:16]}…")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        names = [f"participant-{i}" for i in range(PARTICIPANTS)]
        make_chain(names)
        asyncio.run(run(names))
        os.chdir("/")


if __name__ == "__main__":
    main()
