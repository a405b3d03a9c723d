"""The start-up check of this machine's clock against the chain's."""

import time
from pathlib import Path

import pytest

from tplr.chain.clocks import ManualClock
from tplr.chain.ledger import Ledger
from tplr.chain.local import LocalChain
from tplr.errors import ConfigError
from tplr.node.startup import check_clock


async def check_against(path: Path, behind: float) -> None:
    """Check against a chain whose newest block is ``behind`` seconds old by this machine's clock."""
    clock = ManualClock(time.time() - behind - 600)
    Ledger.create(path, clock=clock)
    clock.advance(600)
    async with LocalChain(path, "me", clock=clock) as chain:
        await check_clock(chain)


async def test_a_clock_that_agrees_passes(tmp_path: Path) -> None:
    await check_against(tmp_path / "chain.db", behind=0)


@pytest.mark.parametrize("behind", [3600, -3600])
async def test_a_clock_far_off_is_named_with_what_to_do(tmp_path: Path, behind: int) -> None:
    with pytest.raises(ConfigError, match=r"this machine's clock is [+-]\d+ s off block \d+'s time: set it \(ntp\)"):
        await check_against(tmp_path / "chain.db", behind=behind)
