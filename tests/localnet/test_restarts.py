"""A node that ends with status 3 is restarted a limited number of times. Real processes."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tplr.errors import LocalnetError
from tplr.localnet import restarts
from tplr.localnet.plan import make_plan
from tplr.localnet.process import Child
from tplr.localnet.supervisor import Localnet

COUNT = "from pathlib import Path; runs = Path('runs'); runs.open('a').write('x'); started = len(runs.read_text())\n"
WAIT = "import time; print('up', flush=True); time.sleep(60)"

Make = Callable[[str, str], Child]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Child] = []

    def child(name: str, code: str) -> Child:
        made.append(Child(name, [sys.executable, "-c", code], env={}, folder=tmp_path, log=tmp_path / f"{name}.log"))
        return made[-1]

    yield child
    for one in made:
        one.kill()


def supervised(node: Child, storage: Child, tmp_path: Path) -> Localnet:
    """A network of one node, in its state after all processes have started."""
    net = Localnet(make_plan(miners=1, windows=8, run_dir=tmp_path / "run", cache=tmp_path))
    net.storage, net.nodes, net._hostile = storage, {node.name: node}, set()
    for child in (storage, node):
        child.start()
    return net


async def check_until(net: Localnet, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            net._check()
            await asyncio.sleep(0.02)


async def test_a_node_is_started_again_while_something_outside_is_down(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(restarts, "PAUSE_SECONDS", 0.3)
    node = make("miner-1", f"{COUNT}if started < 3: raise SystemExit(3)\n{WAIT}")
    began = time.monotonic()
    net = supervised(node, make("storage", WAIT), tmp_path)
    await check_until(net, lambda: "up" in node.log.read_text())
    assert (tmp_path / "runs").read_text() == "xxx"
    assert time.monotonic() - began >= 2 * 0.3
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "starting it again in 0.3 s (1 of 3)",
        "starting it again in 0.3 s (2 of 3)",
    ]


async def test_it_is_given_up_in_the_end(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "PAUSE_SECONDS", 0.0)
    net = supervised(make("miner-1", f"{COUNT}raise SystemExit(3)"), make("storage", WAIT), tmp_path)
    with pytest.raises(LocalnetError, match="miner-1 ended unexpectedly with status 3"):
        await check_until(net, lambda: False)
    assert len((tmp_path / "runs").read_text()) == 1 + restarts.MOST


@pytest.mark.parametrize("wrong", ["miner-1", "storage"])
async def test_every_other_end_is_an_error_at_once(make: Make, tmp_path: Path, wrong: str) -> None:
    codes = {"miner-1": WAIT, "storage": WAIT, wrong: f"{COUNT}raise SystemExit({3 if wrong == 'storage' else 2})"}
    net = supervised(make("miner-1", codes["miner-1"]), make("storage", codes["storage"]), tmp_path)
    with pytest.raises(LocalnetError, match=f"{wrong} ended unexpectedly"):
        await check_until(net, lambda: False)
    assert (tmp_path / "runs").read_text() == "x"
