"""Commands alone lead from a run's owner to a newcomer's running service: real chain file, storage and wallets."""

import asyncio
import io
import json
import os
import pty
import pwd
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio
import torch
from forked import ForkedCommands, unframed
from guides import GuideCommand, from_guide
from rich.console import Console

from tplr.cli import main
from tplr.hparams import load_hparams
from tplr.join import steps
from tplr.join.description import RunDescription, hparams_digest, load_description
from tplr.join.env_file import read_env_file
from tplr.localnet.dataset import prepared_corpus, upload_dataset
from tplr.localnet.network import HOTKEY, NETUID, Network, create_chain, lay_out, node_environment
from tplr.localnet.plan import make_plan, scheme_constants
from tplr.planner.host import Host
from tplr.planner.plan import make_plan as plan_of
from tplr.testing.s3server import serve

JOIN = from_guide("docs/run.md", ".venv/bin/tplr join run.toml")
DRY_RUN = from_guide("docs/run.md", ".venv/bin/tplr join run.toml --dry-run")
INSTALL = from_guide("docs/run.md", ".venv/bin/tplr join run.toml --install")
INIT = from_guide(
    "docs/run.md",
    ".venv/bin/tplr run init --name NAME --netuid 3 --hparams hparams.json --link website=https://example.org",
    {"NAME": "toy", "3": NETUID},
)
CPU = torch.device("cpu")
CACHE = Path(__file__).parents[2] / ".cache/tplr/localnet"

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@dataclass
class World:
    """A prepared network: its owner's and a newcomer's environment, without running nodes."""

    network: Network
    owner: dict[str, str]
    newcomer: dict[str, str]
    commands: ForkedCommands

    @property
    def description(self) -> Path:
        return self.network.folder / "run.toml"

    async def run(self, command: GuideCommand, *more: object, env: dict[str, str]) -> tuple[int, str]:
        """Return exit status and output of a command with more options, without frames and line breaks of tables."""
        line = [*command.process, *more]
        status, printed = await self.commands.run(line, env=env | {"COLUMNS": "200"}, folder=self.network.folder)
        return status, unframed(printed)

    async def init(self, *arguments: object, env: dict[str, str] | None = None) -> tuple[int, str]:
        return await self.run(INIT, "--network", f"local:{self.network.chain}", *arguments, env=env or self.owner)

    async def join(
        self, *arguments: object, command: GuideCommand | None = None, env: dict[str, str] | None = None
    ) -> tuple[int, str]:
        """Run ``command``, or by default the one that prints the service, in the folder of ``run.toml``."""
        wallet = ("--wallet.path", self.network.folder / "wallets", "--device", "cpu", "--no-input")
        return await self.run(command or JOIN, *wallet, *arguments, env=env or self.newcomer)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    plan = make_plan(miners=1, windows=8, run_dir=tmp_path_factory.mktemp("join") / "run", cache=CACHE)
    corpus = prepared_corpus(plan.cache, plan.corpus, plan.vocab_size)
    network = lay_out(plan, corpus)
    create_chain(network, plan.seed)
    async with serve(network.storage, network.keys) as server:
        await upload_dataset(corpus, network.dataset.writable, server.endpoint)
        owner, newcomer = (node_environment(network, node, server.endpoint) for node in network.nodes[:2])
        shared = ("R2_DATASET_", "R2_AGGREGATOR_", "TPLR_")  # variables that a newcomer only knows from run.toml
        newcomer = {name: value for name, value in newcomer.items() if not name.startswith(shared)}
        world = World(network, owner, newcomer, ForkedCommands(network.folder))
        status, said = await world.init()
        assert status == 0, said
        assert "whoever has both can join" in said
        yield world


async def test_a_newcomer_joins_with_one_command(world: World, tmp_path: Path) -> None:
    folder, units = tmp_path / "node", tmp_path / "units"
    folder.mkdir()
    (folder / ".env").write_text("HF_TOKEN=mine\nR2_DATASET_BUCKET_NAME=of-another-run\n")
    (folder / "dotenv.py").write_text("raise SystemExit('a module from the folder was imported')\n")
    given = ("--folder", folder, "--wallet.name", "miner-1", "--wallet.hotkey", HOTKEY, "--node-options=--no-compile")
    given = (*given, "--unit-folder", units)
    status, said = await world.join(*given, command=INSTALL)
    assert status == 2
    assert "give --replace-env" in said
    assert (folder / ".env").read_text().startswith("HF_TOKEN=mine\n")
    status, said = await world.join(*given, "--replace-env", command=INSTALL)
    assert status == 0, said
    for shown in (
        "website https://example.org",
        "memory of each rank",
        "$ a month",
        "all passed; uid 1",  # doctor, which only has the file
        "tplr-toy-miner.service is installed",
    ):
        assert shown in said
    assert stat.S_IMODE((folder / ".env").stat().st_mode) == 0o600
    variables = read_env_file(folder / ".env")
    assert variables["HF_TOKEN"] == "mine"
    assert (folder / ".env.old").read_text().startswith("HF_TOKEN=mine\n")
    assert variables["R2_DATASET_BUCKET_NAME"] == world.owner["R2_DATASET_BUCKET_NAME"]
    unit = (units / "tplr-toy-miner.service").read_text()
    [command], [where] = re.findall("^ExecStart=(.*)$", unit, re.M), re.findall("^WorkingDirectory=(.*)$", unit, re.M)
    assert where == str(folder)
    assert shlex.split(command)[1:5] == ["-P", "-m", "tplr.cli", "miner"]
    assert "--no-compile" in command
    # Without --install the same unit is printed, and nothing is written.
    run, given = load_description(world.description), {"wallet_path": folder, "device": "cpu", "down": 1.0, "up": 1.0}
    printed = Console(file=io.StringIO(), width=60)
    answers = steps.Answers(role="miner", node_options=[], **given)
    steps._serve(steps._unit(run, answers, ["--device", "cpu"], folder, None), answers, printed)
    said_unit = printed.file.getvalue()  # type: ignore[attr-defined]
    assert "--install installs this unit as tplr-toy-miner.service" in " ".join(said_unit.split())
    assert f"WorkingDirectory={folder}" in said_unit
    assert re.search(r"^ExecStart=.*-m tplr\.cli miner --device cpu$", said_unit, re.M)
    (folder / ".env").chmod(0o644)
    assert steps._write_env(folder / ".env", variables, run, steps.Questions(silent=True), replace=False)
    assert stat.S_IMODE((folder / ".env").stat().st_mode) == 0o600  # although it has these variables already
    secret = variables["R2_GRADIENTS_WRITE_SECRET_ACCESS_KEY"]
    assert secret == world.newcomer["R2_GRADIENTS_WRITE_SECRET_ACCESS_KEY"]
    assert secret not in said + unit


async def test_what_is_missing_is_listed_at_once(world: World, tmp_path: Path) -> None:
    env = {name: value for name, value in world.newcomer.items() if not name.startswith("R2_GRADIENTS_WRITE")}
    status, said = await world.join("--folder", tmp_path, env=env)
    assert status == 2
    for name in ("R2_GRADIENTS_WRITE_ACCESS_KEY_ID", "R2_GRADIENTS_WRITE_SECRET_ACCESS_KEY", "--wallet.hotkey"):
        assert f"{name} is missing: expected " in said
    assert f"miner-1/{HOTKEY}" in said  # the wallets to choose from
    assert not (tmp_path / ".env").exists()


async def test_a_dry_run_shows_the_costs_and_writes_nothing(world: World, tmp_path: Path) -> None:
    status, said = await world.join("--folder", tmp_path, "--role", "validator", command=DRY_RUN)
    assert status == 0
    assert "a validator on 1 x CPU" in said
    assert "training in a window" not in said  # a validator does not train
    assert list(tmp_path.iterdir()) == []


async def test_a_dry_run_fails_if_the_link_is_too_slow(world: World, tmp_path: Path) -> None:
    for role, needed in (("validator", "use a link of at least"), ("miner", "use a faster link")):
        slow = ("--folder", tmp_path, "--role", role, "--up", 0.001, "--down", 0.001)
        status, said = await world.join(*slow, command=DRY_RUN)
        assert status == 1
        assert "does not fit: " in said
        assert needed in said


async def test_an_aggregator_needs_no_gpu(world: World, tmp_path: Path) -> None:
    asked = ("--folder", tmp_path, "--role", "aggregator", "--device", "cuda")
    status, said = await world.join(*asked, command=DRY_RUN)
    assert status == 0, said
    assert "An aggregator has no model" in said


async def test_saved_states_of_the_same_node_make_room_for_the_next_ones(tmp_path: Path, monkeypatch) -> None:
    """A node that joins again to change an option needs no more space than before."""
    (tmp_path / "hparams.json").write_text(json.dumps(scheme_constants("sparseloco")))
    needed = plan_of(load_hparams(tmp_path / "hparams.json"), Host.here(CPU, tmp_path, down=1.0, up=1.0)).disk
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed // 2))
    run = SimpleNamespace(hparams=SimpleNamespace(file="hparams.json"), netuid=NETUID)
    answers = steps.Answers(role="miner", wallet_path=tmp_path, device="cpu", down=100, up=100, node_options=[])

    def fits() -> bool:
        return steps._show_costs(run, tmp_path / "run.toml", answers, tmp_path, Console(file=io.StringIO()))

    for other in (f"{NETUID}-a-b-validator", f"{NETUID + 1}-a-b-miner", f"{NETUID}-a-b-miner"):
        assert not fits()
        shard = tmp_path / "state" / other / "window-5/shard-00000-00000.safetensors"
        shard.parent.mkdir(parents=True)
        with shard.open("wb") as file:
            file.truncate(needed)
    assert fits()


@pytest.fixture
def of_nobody() -> Iterator[Path]:
    """A folder of another account with ``run.toml``, in which root joins; not in a folder that only root may enter."""
    nobody, hparams = pwd.getpwnam("nobody"), Path(__file__).parents[2] / "hparams.json"
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # TMPDIR may be private
        shutil.copy(hparams, name)
        bucket = {"bucket_name": "texts", "read_access_key_id": "a", "read_secret_access_key": "b"}
        described = {"name": "toy", "netuid": NETUID, "network": "local:none", "format": 1, "dataset": bucket}
        constants = {"file": hparams.name, "sha256": hparams_digest(hparams)}
        run = RunDescription.model_validate(described | {"s3_endpoint": "http://127.0.0.1:1", "hparams": constants})
        (Path(name) / "run.toml").write_text(run.to_toml())
        os.chown(name, nobody.pw_uid, nobody.pw_gid)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another account")
async def test_root_runs_the_checks_as_the_owner_of_the_folder(
    of_nobody: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    """What is in the folder, such as links, and what the checks import, gains nothing. The interpreter is a script."""
    script, secret, folder = of_nobody / "python", tmp_path / "secret", of_nobody / "node"
    script.write_text('#!/bin/sh\nid -u >> said; id -ru >> said; env >> said; touch "$PWD/aggregator-events.jsonl"\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    own = ("--role", "aggregator", "--folder", folder, "--wallet.name", "a", "--wallet.hotkey", "b", "--no-input")
    own += ("--ranks", 2)
    for half in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"R2_AGGREGATOR_READ_{half}", "key")
        monkeypatch.setenv(f"R2_AGGREGATOR_WRITE_{half}", "key")
    monkeypatch.setenv("R2_AGGREGATOR_BUCKET_NAME", "bucket")
    monkeypatch.setenv("HTTPS_PROXY", "http://of-the-shell")
    (tmp_path / "home/.bittensor/wallets").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    command = [
        "join",
        of_nobody / "run.toml",
        *own,
        "--device",
        "cpu",
        "--install",
        "--unit-folder",
        tmp_path / "units",
    ]
    assert main([*map(str, command)]) == 2
    assert (
        f"--wallet.path {tmp_path}/home/.bittensor/wallets: Permission denied: give a folder" in capsys.readouterr().err
    )
    command += ["--wallet.path", folder / "wallets"]
    assert main([*map(str, command)]) == 0
    nobody = pwd.getpwnam("nobody")
    said = (folder / "said").read_text().splitlines()
    assert [line for line in said if line.isdecimal()] == [
        str(nobody.pw_uid)
    ] * 4  # with two ranks: doctor, and the node's own check
    assert f"HOME={nobody.pw_dir}" in said
    assert f"TPLR_CACHE_FOLDER={folder}/cache/tplr" in said  # as in the unit
    assert "of-the-shell" not in "".join(said)  # the service does not have it
    assert {path.stat().st_uid for path in (folder, *folder.iterdir())} == {nobody.pw_uid}
    assert "User=nobody\n" in (tmp_path / "units/tplr-toy-aggregator.service").read_text()
    assert os.geteuid() == 0
    # The owner links to a file of root.
    secret.write_text("TOKEN=only-for-root\n")
    (of_nobody / "linked.toml").symlink_to(secret)
    assert main(["join", str(of_nobody / "linked.toml")]) == 2
    assert f"{of_nobody}/linked.toml: Permission denied: let the account of the node" in capsys.readouterr().err
    (folder / ".env").unlink()
    (folder / ".env").symlink_to(secret)
    assert main([*map(str, command), "--replace-env"]) == 0
    assert (folder / ".env.old").readlink() == secret
    assert "only-for-root" not in "".join(path.read_text() for path in folder.iterdir() if not path.is_symlink())


@pytest.mark.long
async def test_a_person_is_asked_and_a_mistake_stops_the_rest(world: World, tmp_path: Path) -> None:
    """On a terminal. The write key equals the read key: the bucket refuses it, so nothing is installed."""
    known = {name: value for name, value in world.newcomer.items() if not name.startswith("R2_")}
    answers = {"--wallet.name": "miner-1", "--wallet.hotkey": HOTKEY} | {
        name: value for name, value in world.newcomer.items() if name.startswith("R2_GRADIENTS_")
    }
    for half in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        answers[f"R2_GRADIENTS_WRITE_{half}"] = answers[f"R2_GRADIENTS_READ_{half}"]
    names = ("--wallet.path", str(world.network.folder / "wallets"), "--device", "cpu", "--folder", str(tmp_path))
    ours, theirs = pty.openpty()
    process = subprocess.Popen(  # noqa: ASYNC220
        [*INSTALL.process, *names, "--unit-folder", str(tmp_path / "units")],
        cwd=world.description.parent,
        env=known | {"COLUMNS": "200"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    said = await asyncio.to_thread(_converse, ours, answers)
    assert await asyncio.to_thread(process.wait) == 1, said
    assert "the write key can't write" in said
    assert "nothing is installed" in said
    assert not (tmp_path / "units").exists()
    assert answers["R2_GRADIENTS_READ_SECRET_ACCESS_KEY"] not in said  # typed, and not echoed
    assert read_env_file(tmp_path / ".env")["R2_GRADIENTS_BUCKET_NAME"] == answers["R2_GRADIENTS_BUCKET_NAME"]


def _converse(terminal: int, answers: dict[str, str]) -> str:
    """Answer each question once until the program ends; returns its output."""
    text, seen = "", 0
    while True:
        try:
            text += os.read(terminal, 4096).decode(errors="replace")
        except OSError:  # the other end is closed
            return text
        asked = re.search(r"(\S+) \([^\n]*\): $", text[seen:])
        if asked:
            seen = len(text)
            os.write(terminal, (answers[asked[1]] + "\n").encode())


async def test_a_key_that_everybody_gets_must_not_write(world: World, tmp_path: Path) -> None:
    account = world.network.dataset.writable
    env = world.owner | {
        "R2_DATASET_READ_ACCESS_KEY_ID": account.access_key_id,
        "R2_DATASET_READ_SECRET_ACCESS_KEY": account.secret_access_key,
    }
    status, said = await world.init("--replace", env=env)
    assert status == 2
    assert "dataset bucket: the read key can also write" in said
    status, said = await world.init()
    assert status == 2
    assert "run.toml exists: give --replace" in said
    status, said = await world.init("--replace", "--link", "chat=http://example.org")
    assert status == 2
    assert "--link chat=http://example.org: expected NAME=https://" in said
    status, said = await world.init("--replace", env=world.owner | {"R2_AGGREGATOR_READ_SECRET_ACCESS_KEY": "to%ken"})
    assert status == 2
    assert "R2_AGGREGATOR_READ_SECRET_ACCESS_KEY: expected" in said
    assert "Traceback" not in said
    assert "to%ken" not in said


async def test_all_problems_of_a_description_are_listed_at_once(tmp_path: Path, monkeypatch, capsys) -> None:
    """Before a key is tested: no bucket is asked."""
    (tmp_path / "run.toml").touch()
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("R2_", "TPLR_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TPLR_S3_ENDPOINT", "ftp://x")
    monkeypatch.setenv("R2_AGGREGATOR_BUCKET_NAME", "a")
    command = ["run", "init", "--name", "My Run", "--netuid", "70000", "--network", "a b", "--first-window", "-1"]
    assert main([*command, "--link", "chat", "--link", "a b=https://example.org"]) == 2
    said = capsys.readouterr().err
    for expected in (
        "run.toml exists: give --replace",
        "no file hparams.json",
        "R2_DATASET_BUCKET_NAME is missing",
        "R2_AGGREGATOR_BUCKET_NAME: expected",
        "TPLR_S3_ENDPOINT: expected http(s)://",
        "--name My Run: expected",
        "--netuid 70000: expected",
        "--network a b: expected",
        "--first-window -1: expected",
        "--link chat=: expected NAME=https://",
        "--link a b",
    ):
        assert said.count(expected) == 1, (expected, said)
    assert "String should" not in said
