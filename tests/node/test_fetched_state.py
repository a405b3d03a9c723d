"""A run that begins with an earlier version's weights: all nodes and audits take what most electors publish alike."""

import contextlib
import re
from collections.abc import AsyncIterator, Iterator

import pytest
import torch
from catching_up import START, CatchUp

from tplr.chain.ledger import Ledger
from tplr.comms import Comms
from tplr.errors import ObjectNotFound, StateError, StoreUnavailable, TplrError
from tplr.exchange.checkpoints import publish
from tplr.exchange.snapshot import MANIFEST
from tplr.keys import checkpoint_prefix
from tplr.node.network_reader import NetworkReader
from tplr.node.replay import load_state
from tplr.node.replica import Replica
from tplr.node.train_state import TrainState
from tplr.testing.s3server import Status
from tplr.training.fingerprint import digest
from tplr.training.model import build_model

CLAIMED = 9 * 10**14  # a window that is newer than any other
RECORDED = START + 2


class NextRun:
    """A run that begins with the weights of the recorded one; its start is chosen in the present window."""

    def __init__(self, recorded: CatchUp, replica: Replica, comms: Comms) -> None:
        self._stage, self._replica, self._comms = recorded.stage, replica, comms
        self._start = comms.clock.window + self._stage.hparams.peer_list_window_margin

    async def node(self) -> str:
        """Return the digest of the first weights of a node."""
        await self._stage.drive(self._replica.open(self._start))
        assert (self._replica.window, self._replica.train_state.global_step) == (self._start, 0)
        return digest(self._replica.train_state.parameters)

    async def audit(self) -> str:
        """Return the digest of the first weights of an audit."""
        hparams = self._stage.hparams
        audited = TrainState(build_model(hparams), hparams, self._stage.folder("audit"))
        audited.start_window = self._start
        reader = NetworkReader(None, None, None, hparams, self._comms)
        assert await self._stage.drive(load_state(reader, audited, "start", until=self._start)) == self._start
        return digest(audited.parameters)

    async def both(self) -> set[str]:
        return {await self.node(), await self.audit()}

    async def errors(self) -> list[tuple[type[TplrError], str]]:
        """Return the errors of a node and of an audit."""
        found = []
        for first_weights in (self.node, self.audit):
            with pytest.raises(TplrError) as error:
                await first_weights()
            found.append((error.type, str(error.value)))
        return found


@contextlib.asynccontextmanager
async def next_run(recorded: CatchUp) -> AsyncIterator[NextRun]:
    stage = recorded.stage
    await stage.pass_windows(1, recorded.newcomer.clock)
    update = {"spec_version": 2, "checkpoint_init_version": stage.hparams.version}
    stage.hparams = stage.hparams.model_copy(update=update)
    context = await stage.context(stage.setup("miner-3"))
    async with stage.running(context.clock.run()), stage.replica(stage.setup("miner-3"), context) as replica:
        await stage.drive(context.clock.wait_for_window(0))
        yield NextRun(recorded, replica, context.comms)


@contextlib.contextmanager
def another_model(recorded: CatchUp) -> Iterator[TrainState]:
    train_state = recorded.recording.train_state
    parameter = next(iter(train_state.parameters.values()))
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter.add_(1.0)
        yield train_state
        parameter.copy_(kept)


def make_elector(recorded: CatchUp, comms: Comms, share: float) -> None:
    """Give ``comms`` this multiple of the leading validator's stake."""
    leader = recorded.leader.comms
    with contextlib.closing(Ledger(recorded.stage.network.chain, clock=recorded.stage.clock)) as admin:
        admin.set_stake(comms.hotkey, share * leader.metagraph.neurons[leader.uid].stake)
        admin.set_permit(comms.hotkey)


@pytest.fixture
async def run(catch_up) -> AsyncIterator[CatchUp]:
    """A run with a checkpoint, whose objects have the times of the stage's clock."""
    async with catch_up(dated_by_hand=True) as recorded:
        await recorded.record(2)
        await recorded.recording.checkpoint()
        yield recorded


async def test_a_sole_elector_chooses_the_first_weights(run: CatchUp) -> None:
    async with next_run(run) as following:
        assert await following.both() == {digest(run.recording.train_state.parameters)}


@pytest.mark.parametrize("attack", ["newer window", "same window", "garbage", "refused"])
async def test_an_elector_with_less_than_half_of_the_stake_neither_chooses_nor_prevents_them(
    run: CatchUp, attack: str
) -> None:
    hostile = run.miners[0].comms
    make_elector(run, hostile, 0.9)
    with another_model(run) as train_state:
        saved = train_state.save(RECORDED if attack == "same window" else CLAIMED, {})
    await publish(hostile.own_store, saved.folder, signer=hostile.signer, keep_last=9)
    if attack == "garbage":
        await hostile.own_store.put(checkpoint_prefix(CLAIMED, hostile.uid, "1") + MANIFEST, b"garbage")
        await hostile.own_store.put(checkpoint_prefix(RECORDED, hostile.uid, "1") + MANIFEST, b"garbage")
    elif attack == "refused":
        listing = rf"^GET /{hostile.own_store.name}\?"
        run.stage.server.faults.add(listing, Status(403, "AccessDenied"), times=None)
    async with next_run(run) as following:
        assert await following.both() == {digest(run.recording.train_state.parameters)}


async def test_without_a_majority_the_error_says_what_was_found(run: CatchUp) -> None:
    leader, other = run.leader.comms, run.miners[0].comms
    make_elector(run, other, 1.0)
    async with next_run(run) as following:
        for kind, text in await following.errors():
            assert kind is ObjectNotFound
            assert re.match(r"version 1: no checkpoint from before 20.* UTC is published alike by electors", text)
            assert f"uid {leader.uid}: windows [{RECORDED}]" in text
            assert f"uid {other.uid}: none" in text
            assert "let most electors publish the same one" in text


async def test_electors_with_different_checkpoints_or_closed_buckets_give_no_first_weights(run: CatchUp) -> None:
    other = run.miners[0].comms
    make_elector(run, other, 1.0)
    with another_model(run) as train_state:
        await other.publish_checkpoint(train_state.save(RECORDED, {}).folder)
    async with next_run(run) as following:
        assert {kind for kind, _ in await following.errors()} == {StateError}
        listing = rf"^GET /{run.leader.comms.own_store.name}\?"
        run.stage.server.faults.add(listing, Status(403, "AccessDenied"), times=None)
        for kind, text in await following.errors():
            assert kind is StoreUnavailable
            assert f"uid {run.leader.comms.uid}: " in text
            assert "access denied" in text


async def test_a_checkpoint_that_was_published_after_the_start_was_chosen_is_not_taken(run: CatchUp) -> None:
    """Nodes that start before it and nodes that start after it have the same first weights."""
    before = digest(run.recording.train_state.parameters)
    async with next_run(run) as following:
        with another_model(run) as train_state:
            await run.leader.comms.publish_checkpoint(train_state.save(RECORDED + 1, {}).folder)
        assert await following.both() == {before}
