"""Start-up problems are listed in one table with their remedies; exit status 2. Real processes."""

import asyncio
import contextlib
import json
import re
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from forked import ForkedCommands, unframed
from guides import from_guide

from tplr.chain.hotkeys import hotkey_file, new_hotkey, save_hotkey
from tplr.chain.local import LocalChain
from tplr.errors import ChainUnavailable
from tplr.localnet.dataset import prepared_corpus, upload_dataset
from tplr.localnet.network import HOTKEY, NETUID, Network, create_chain, lay_out, node_command, node_environment
from tplr.localnet.plan import make_plan
from tplr.node.start_checks import sole_node
from tplr.testing.s3server import Server, Status, serve

CACHE = Path(__file__).parents[2] / ".cache/tplr/localnet"
ROOT = Path(__file__).parents[2]


class World:
    """A prepared network with a running server and without running nodes."""

    def __init__(self, network: Network, server: Server, commands: ForkedCommands) -> None:
        self.network = network
        self.server = server
        self.commands = commands
        self.node = network.nodes[1]
        self.env = node_environment(network, self.node, server.endpoint) | {"COLUMNS": "200"}
        self.command = [str(part) for part in node_command(network, self.node)]

    async def check(self, *more: str, env: dict[str, str] | None = None) -> tuple[int, str]:
        """Run a miner's start-up checks; return exit status and the text of its table without frame and line breaks."""
        return await self._run([*self.command, "--check", *more], env)

    async def start(self) -> tuple[int, str]:
        """Run a miner until it ends."""
        return await self._run(self.command, None)

    async def doctor(self, *more: str, env: dict[str, str] | None = None) -> tuple[int, str]:
        """Run ``tplr doctor`` with the miner's arguments."""
        script = next(i for i, part in enumerate(self.command) if part.endswith("miner.py"))
        wallet = {"NAME": self.node.name, "HOTKEY": HOTKEY}
        command = from_guide("docs/miner.md", ".venv/bin/tplr doctor --wallet.name NAME --wallet.hotkey HOTKEY", wallet)
        return await self._run([*command.process, *self.command[script + 1 :], *more], env)

    async def _run(self, command: list[str], env: dict[str, str] | None) -> tuple[int, str]:
        status, printed = await self.commands.run(
            command, env=self.env if env is None else env, folder=self.network.folder
        )
        return status, unframed(printed)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    plan = make_plan(miners=1, windows=8, run_dir=tmp_path_factory.mktemp("world") / "run", cache=CACHE)
    corpus = prepared_corpus(plan.cache, plan.corpus, plan.vocab_size)
    network = lay_out(plan, corpus)
    create_chain(network, plan.seed)
    async with serve(network.storage, network.keys) as server:
        await upload_dataset(corpus, network.dataset.writable, server.endpoint)
        async with LocalChain(network.chain, hotkey="") as chain, asyncio.timeout(30):
            await first_final_block(chain)
        yield World(network, server, ForkedCommands(network.folder))


async def first_final_block(chain: LocalChain) -> None:
    """Return when the chain has one: before, a healthy node says that it asks again."""
    while True:
        with contextlib.suppress(ChainUnavailable):
            await chain.block(1)
            return
        await asyncio.sleep(0.1)


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_healthy_node_passes(world: World) -> None:
    from_guide(
        "docs/miner.md",
        ".venv/bin/python neurons/miner.py --wallet.name NAME --wallet.hotkey HOTKEY --device cuda --check",
        {"NAME": world.node.name, "HOTKEY": HOTKEY, "cuda": "cpu"},
    ).check_run_by([*world.command, "--check"])
    status, text = await world.check()
    assert status == 0
    chosen = (
        r"\d+ cores, \d+ GiB, device cpu: \d+ transfers, \d+ data threads, \d+ tensor threads, "
        r"\d+ checkpoint parts, \d+ peers"
    )
    assert re.fullmatch(rf"[\d:]+ INFO miner {chosen} miner: all start-up checks passed ", text)


async def test_all_problems_are_listed_at_once(world: World, tmp_path: Path) -> None:
    raw = json.loads((world.network.folder / "hparams.json").read_text())
    raw["bach_size"] = raw.pop("batch_size")
    (tmp_path / "hparams.json").write_text(json.dumps(raw))
    env = {name: value for name, value in world.env.items() if not name.startswith("R2_GRADIENTS_WRITE")}
    del env["R2_DATASET_BUCKET_NAME"]
    env |= {"TPLR_TRANSFERS": "many", "TPLR_CACHE_FOLDER": "~no-such-user/cache"}
    status, text = await world.check(
        *("--hparams", str(tmp_path / "hparams.json")),
        *("--wallet.hotkey", "nobody", "--device", "cuda:77"),
        env=env,
    )
    assert status == 2
    for expected in (
        "bach_size is not a known key",
        "batch_size is missing",
        "R2_GRADIENTS_WRITE_ACCESS_KEY_ID is missing",
        "R2_GRADIENTS_WRITE_SECRET_ACCESS_KEY is missing",
        "R2_DATASET_BUCKET_NAME is missing",
        "TPLR_TRANSFERS is 'many': expected a whole number from 1 on",
        "TPLR_CACHE_FOLDER is ~no-such-user/cache",
        "check --wallet.path, --wallet.name, --wallet.hotkey",
        "--device cuda:77",
        "--device cpu",
    ):
        assert expected in text
    assert "Traceback" not in text
    assert text.count("R2_GRADIENTS_WRITE_ACCESS_KEY_ID is missing") == 1
    assert text.count("TPLR_TRANSFERS is 'many'") == 1


async def test_model_larger_than_the_machine_is_refused_before_it_is_built(world: World, tmp_path: Path) -> None:
    raw = json.loads((world.network.folder / "hparams.json").read_text())
    raw["model"] |= {"num_hidden_layers": 400, "hidden_size": 8192, "intermediate_size": 28672}
    raw["tokenizer_name"] = str(world.network.folder / raw["tokenizer_name"])
    (tmp_path / "hparams.json").write_text(json.dumps(raw))
    status, text = await world.check("--hparams", str(tmp_path / "hparams.json"))
    assert status == 2
    assert "1 x CPU: each of 1 ranks needs" in text
    assert "torchrun with more than 1 ranks" in text
    assert "saved states take" in text


async def test_bucket_that_refuses_names_the_variables(world: World) -> None:
    env = dict(world.env)
    for half in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        env[f"R2_GRADIENTS_WRITE_{half}"] = env[f"R2_GRADIENTS_READ_{half}"]
    status, text = await world.check(env=env)
    assert status == 2
    assert "the write key can't write" in text
    assert "check R2_GRADIENTS_WRITE_*" in text
    assert "AccessDenied" in text


async def test_key_that_would_let_the_world_write_is_refused(world: World) -> None:
    env = dict(world.env)
    for half in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        env[f"R2_GRADIENTS_READ_{half}"] = env[f"R2_GRADIENTS_WRITE_{half}"]
    status, text = await world.check(env=env)
    assert status == 2
    assert "the read key can also write" in text
    assert env["R2_GRADIENTS_READ_SECRET_ACCESS_KEY"] not in text


async def test_dead_storage_and_missing_dataset(world: World) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
        status, text = await world.check(env=world.env | {"TPLR_S3_ENDPOINT": nowhere})
    assert status == 3
    assert "an external service is down, try again" in text
    assert "the write key can't write" in text
    assert "check R2_GRADIENTS_WRITE_*" not in text  # a refused connection says nothing about the keys
    assert text.count("the server or the network is down") == 1
    status, text = await world.check(env=world.env | {"TPLR_DATASET_SUBFOLDER": "elsewhere"})
    assert status == 2
    assert "elsewhere/_metadata.yaml: no such object (404): check R2_DATASET_* and TPLR_DATASET_SUBFOLDER" in text
    status, text = await world.check(env=world.env | {"R2_DATASET_READ_SECRET_ACCESS_KEY": "0" * 64})
    assert status == 2
    assert "_metadata.yaml: access denied (403): check R2_DATASET_* and TPLR_DATASET_SUBFOLDER" in text


async def test_a_dataset_that_alone_does_not_answer_is_given_up(world: World) -> None:
    world.server.faults.add(f"^[A-Z]+ /{world.network.dataset.name}[/?]", Status(503, "SlowDown"), times=None)
    status, text = await world.check()
    world.server.faults.clear()
    assert status == 3
    assert "the dataset's bucket does not answer" in text
    assert "the write key" not in text


async def test_a_storage_that_hangs_is_given_up(world: World) -> None:
    """``node/test_checks.py`` tests the time."""
    with socket.create_server(("127.0.0.1", 0)) as mute:  # accepts, and never answers
        endpoint = f"http://127.0.0.1:{mute.getsockname()[1]}"
        status, text = await world.check(env=world.env | {"TPLR_S3_ENDPOINT": endpoint})
    assert status == 3
    assert "no answer within" in text
    assert "check R2_GRADIENTS_WRITE_*" not in text


async def test_one_503_is_no_reason_to_give_up(world: World) -> None:
    for method in ("PUT", "GET"):
        world.server.faults.add(f"^{method} /[^/]+/probe", Status(503, "SlowDown"), times=1)
    status, text = await world.check()
    world.server.faults.clear()
    assert status == 0, text


async def test_what_is_wrong_here_counts_more_than_what_is_down_outside(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    here = ("--device", "gpu", "--profile", str(tmp_path / "file"))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
        status, text = await world.check(*here, env=world.env | {"TPLR_S3_ENDPOINT": nowhere})
    assert status == 2
    assert "--device gpu: Expected one of cpu, cuda" in text
    assert f"--profile {tmp_path}/file: File exists; give a writable folder" in text
    assert "Traceback" not in text


async def test_doctor_says_all_of_a_node_at_once(world: World) -> None:
    status, text = await world.doctor()
    assert status == 0, text
    assert "start-up checks of the miner" in text
    assert "all passed; uid" in text
    env = dict(world.env, TPLR_DATASET_SUBFOLDER="elsewhere", R2_GRADIENTS_READ_ACCESS_KEY="typo")
    status, text = await world.doctor("--device", "cuda:77", "--wallet.hotkey", "nobody", env=env)
    assert status == 1
    for found in (
        "elsewhere/_metadata.yaml",
        "--device cuda:77",
        "check --wallet.path",
        "unknown variable R2_GRADIENTS_READ_ACCESS_KEY",
        "did you mean R2_GRADIENTS_READ_ACCESS_KEY_ID?",
    ):
        assert found in text


async def test_a_second_node_of_one_hotkey_is_refused_and_checks_are_not(world: World) -> None:
    with sole_node(world.network.folder / "state" / f"{NETUID}-{world.node.name}-{HOTKEY}-miner"):
        async with asyncio.timeout(60):
            status, text = await world.start()
        assert status == 2
        assert re.search(r"state \S+-miner: process \d+ on \S+ uses it; stop that node: two nodes of one hotkey", text)
        assert (await world.check())[0] == 0


async def test_unregistered_hotkey(world: World) -> None:
    save_hotkey(world.network.folder / "wallets", world.node.name, "stranger", new_hotkey())
    status, text = await world.check("--wallet.hotkey", "stranger")
    assert status == 2
    assert "has no uid on subnet 3: register it" in text


async def test_a_hotkey_without_its_private_key_is_refused_before_it_has_to_sign(world: World) -> None:
    """Wallets have such files beside the others, for sharing."""
    file = hotkey_file(world.network.folder / "wallets", world.node.name, HOTKEY)
    whole = json.loads(file.read_text())
    public = {name: whole[name] for name in ("accountId", "publicKey", "ss58Address")}
    file.with_name("public").write_text(json.dumps(public))
    status, text = await world.check("--wallet.hotkey", "public")
    assert status == 2
    assert "has no private key on this machine and can't sign: check --wallet.path" in text


async def test_localnet_with_a_port_in_use_and_other_wrong_arguments(world: World, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tplr.cli", "localnet", "--miners", 0, "--corpus", "nowhere"]
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        status, printed = await world.commands.run(
            [*command, "--port", port, "--window-seconds", 0.3],
            env=world.commands.env | {"COLUMNS": "200"},
            folder=tmp_path,
        )
    assert status == 2
    for expected in (
        f"--port {port}: Address already in use",
        "--miners 0: expected 1",
        "--corpus nowhere: no such folder",
        "--window-seconds 0.3: expected at least",
    ):
        assert expected in printed
    assert "Traceback" not in printed
    assert list(tmp_path.iterdir()) == []
