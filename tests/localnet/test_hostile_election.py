"""Three electors over a real S3 server, one of them hostile: the other two decide equally."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tplr.chain import hotkeys
from tplr.chain.electors import Elector, Electors
from tplr.exchange.ballot_box import BallotBox, record_ballot
from tplr.exchange.ballots import BallotReader, CheckedProof, Vote, value_id
from tplr.exchange.election import Election
from tplr.exchange.election_run import ElectionRun
from tplr.exchange.envelope import Run, Signer
from tplr.exchange.quorum import WindowQuestion
from tplr.localnet.accounts import key_table, new_account
from tplr.localnet.attackers.forgery import BEHAVIOURS, behaviour
from tplr.localnet.attackers.hostile_store import HostileStore, Plot
from tplr.localnet.attackers.sealing import Sealer
from tplr.localnet.network import validator_stakes
from tplr.schemas import PeerList
from tplr.storage import S3Connections
from tplr.testing.s3server import serve

SEED = 1
RUN, DELTA = Run(3, "1"), 1.0
FOUND = {"10": "5e" * 32, "11": "6f" * 32}
LISTED = PeerList(peers=(10, 11), reserve_peers=(), initial_selection=False, sync_window=1, first_effective_window=3)
ELECTORS = range(3)
LEADER, SECOND, _ = ELECTORS


@dataclass
class Council:
    """Three electors; ``liar`` writes through a hostile store.

    Attributes:
        attacks: window, behaviour and key of each lie.
    """

    seat: Callable[[int, int], tuple[BallotBox, Election]]
    liar: int
    attacks: list[tuple[int, str, str]]

    async def decide(self, window: int) -> list[CheckedProof]:
        """Return the values to which the two honest electors are committed."""
        opens = asyncio.get_running_loop().time() + 0.3
        liar = asyncio.create_task(self._take_part(self.liar, window, opens))
        try:
            return await asyncio.gather(*(self._take_part(uid, window, opens) for uid in ELECTORS if uid != self.liar))
        finally:
            liar.cancel()
            await asyncio.gather(liar, return_exceptions=True)

    async def _take_part(self, uid: int, window: int, opens: float) -> CheckedProof:
        box, election = self.seat(uid, window)
        found: list[CheckedProof] = []

        async def committed(proof: CheckedProof) -> None:
            found.append(proof)

        record_ballot(election, await box.vote(Vote(found=FOUND, missing={}, peers=None)))
        await ElectionRun(election, box, DELTA, opens).finish(until=40.0, committed=committed)
        (proof,) = found
        return proof


@pytest.fixture
def council(tmp_path: Path) -> Callable[[int], contextlib.AbstractAsyncContextManager[Council]]:
    @contextlib.asynccontextmanager
    async def opened(liar: int) -> AsyncIterator[Council]:
        keys = [hotkeys.new_hotkey() for _ in ELECTORS]
        stakes = validator_stakes(len(ELECTORS), 1.0)
        electors = Electors(tuple(Elector(uid, keys[uid].ss58_address, round(10**9 * stakes[uid])) for uid in ELECTORS))
        accounts = [new_account() for _ in ELECTORS]
        faults, attacks = tmp_path / "faults.json", []
        faults.write_text("[]")
        plot = Plot(SEED, faults, hang_seconds=60.0, on_attack=lambda *told: attacks.append(told))
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(serve(tmp_path / "s3", key_table(accounts), faults=faults))
            connections = [await stack.enter_async_context(S3Connections(server.endpoint)) for _ in ELECTORS]

            def seat(uid: int, window: int) -> tuple[BallotBox, Election]:
                key = keys[uid]
                own = connections[uid].store(accounts[uid].writable)
                if uid == liar:
                    own = HostileStore(own.client, plot, Sealer(RUN, key.ss58_address, key.sign))
                question = WindowQuestion(
                    window=window,
                    version=RUN.version,
                    listed=LISTED,
                    size=100,
                    at_most=20,
                    effective=window + 3,
                    lists_until=1,
                    void_from=9,
                )
                box = BallotBox(
                    subject=window,
                    reader=BallotReader(electors, RUN, window),
                    signer=Signer(RUN, uid, key.ss58_address, key.sign),
                    own=own,
                    stores={
                        other: connections[uid].store(accounts[other].readable) for other in ELECTORS if other != uid
                    },
                    folder=tmp_path / f"{uid}-{window}",
                    seconds=5.0,
                )
                box.folder.mkdir()
                return box, Election(electors, uid, question, DELTA)

            yield Council(seat, liar, attacks)

    return opened


@pytest.mark.parametrize("liar", [LEADER, SECOND], ids=["leader", "minority"])
async def test_the_honest_decide_alike_whatever_one_does(council: Callable, liar: int) -> None:
    """Each behaviour in one window: no false value, and no miner left out."""
    async with council(liar) as three:
        (hangs,) = [window for window in range(len(BEHAVIOURS)) if behaviour(SEED, window) == "hang"]
        windows = [window for window in range(len(BEHAVIOURS)) if window != hangs]
        decided = await asyncio.gather(*(three.decide(window) for window in windows))
        decided.append(await three.decide(hangs))  # last, because afterwards no node can read anything in that bucket
        for window, (first, second) in zip([*windows, hangs], decided, strict=True):
            assert value_id(first.value) == value_id(second.value), window
            assert {str(one.uid): one.sha256 for one in first.value.included.included} == FOUND, window
        assert {how for _, how, _ in three.attacks} == {*BEHAVIOURS} - {"honest"}
