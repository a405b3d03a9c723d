"""A chain file in virtual time with registered hotkeys, and the same subnet on every kind of chain."""

from pathlib import Path

import pytest

from tplr.chain.clocks import ManualClock
from tplr.chain.ledger import Ledger
from tplr.chain.rules import ChainLimits

# Short periods, so that a test crosses them in a few blocks; commit-reveal as on a localnet.
LIMITS = ChainLimits(
    tempo=20, min_stake=10.0, min_allowed_weights=1, weights_rate_limit=5, commit_reveal=False, immunity_period=3
)

# Blocks are final at once, and all nodes see the newest.
EXACT = {"limits": LIMITS, "finality_lag": 0, "stale_heads": 0.0}


class World:
    """A chain in virtual time, with access for its administrator."""

    def __init__(self, path: Path, **settings: object) -> None:
        self.path = path
        self.clock = ManualClock()
        Ledger.create(path, clock=self.clock, **(EXACT | settings))  # type: ignore
        self.admin = Ledger(path, clock=self.clock, archive=True)

    def pass_blocks(self, number: int) -> int:
        """Let exactly this number of blocks be made; returns the head."""
        goal = self.admin.look()[0] + number
        while True:
            head, due = self.admin.look()
            if head >= goal:
                return head
            self.clock.advance(due - self.clock.now())

    def join(self, *hotkeys: str, **settings: object) -> None:
        for hotkey in hotkeys:
            self.admin.register(hotkey, f"cold-{hotkey}", **settings)  # type: ignore
        self.pass_blocks(1)


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path / "chain.db")
    yield made
    made.admin.close()


@pytest.fixture
def make_world(tmp_path):
    made: list[World] = []

    def make(**settings: object) -> World:
        made.append(World(tmp_path / f"chain-{len(made)}.db", **settings))
        return made[-1]

    yield make
    for world in made:
        world.admin.close()


@pytest.fixture(autouse=True)
def sdk_home(tmp_path_factory, monkeypatch):
    """The SDK caches metadata by genesis and spec, token symbols and settings: keep these out of the user's home."""
    home = tmp_path_factory.getbasetemp() / "sdk-home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("BITTENSOR_RUNTIME_CACHE_DIR", str(home / "runtimes"))
    monkeypatch.setenv("BTCLI_TOKEN_SYMBOLS_CACHE", str(home / "symbols"))
