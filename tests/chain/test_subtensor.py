"""The adapter of the SDK, through the SDK's interface for other backends: a substrate on an embedded chain.

The tests cover the SDK calls, the values read from them, and errors with their names. They do not cover the wire:
encoding and signing happen below that interface.
"""

import asyncio
from contextlib import aclosing

import pytest

bt = pytest.importorskip("bittensor")

from tplr.chain import rules  # noqa: E402
from tplr.chain.local import LocalChain  # noqa: E402
from tplr.chain.rules import ChainLimits  # noqa: E402
from tplr.chain.subtensor import SubtensorChain  # noqa: E402
from tplr.chain.subtensor.sdk import translate  # noqa: E402
from tplr.errors import ChainUnavailable, ConfigError, NotPermitted, NotRegistered, RateLimited, Rejected  # noqa: E402


class LedgerSubstrate:
    """``bt.Substrate`` whose state is a chain file; calls land in the next block."""

    def __init__(self, world):
        self.token_symbols: dict[int, str] = {}
        self.world = world
        self.ledger = world.admin
        self.final_lag = 0
        self.streams: list[list[int | Exception]] = []
        self.fail_submit: bt.ExtrinsicResult | Exception | None = None

    def balance(self, rao, netuid=0):
        return bt.Balance(int(rao), netuid, None)

    async def close(self):
        pass

    async def block_number(self):
        return self.ledger.look()[0]

    async def finalized_block_number(self):
        return self.ledger.look()[0] - self.final_lag

    async def block_time(self):
        return 12.0

    async def block_hash(self, block=None):
        number = await self.block_number() if block is None else block
        try:
            return self.ledger.block(number).hash
        except ChainUnavailable as error:
            raise bt.ChainError(f"no block at height {number}") from error

    def _number(self, block_hash):
        head = self.ledger.look()[0]
        if block_hash is None:
            return head
        return next(number for number in range(head + 1) if self.ledger.block(number).hash == block_hash)

    async def query(self, module, item, params=None, block_hash=None):
        block = self._number(block_hash)
        limits, graph = self.ledger.limits(block), self.ledger.metagraph(block)
        match item:
            case "Now":
                return round(self.ledger.block(block).time * 1000)
            case "Uids":
                return graph.uid_of(params[1])
            case "CommitRevealWeightsEnabled":
                return limits.commit_reveal
            case "WeightsSetRateLimit":
                return limits.weights_rate_limit
            case "LastUpdate":
                return [neuron.last_update for neuron in graph.neurons]
            case "MinAllowedWeights":
                return limits.min_allowed_weights
            case "WeightsVersionKey":
                return 0
            case "Tempo":
                return limits.tempo
            case "LastEpochBlock":
                return 0
            case "MaxWeightsLimit":
                return limits.max_weight
            case "SubnetEpochConsensus":
                return "Yuma"
        raise AssertionError(f"unexpected read of {module}.{item}")

    async def query_map(self, module, item, params=None, block_hash=None):
        block = self._number(block_hash)
        match item:
            case "Weights":
                rows = self.ledger.weights(block).items()
                return [(uid, [(to, round(share * 65535)) for to, share in row.items()]) for uid, row in rows]
        raise AssertionError(f"unexpected read of {module}.{item}")

    async def query_batch(self, module, item, param_sets, block_hash=None):
        assert (module, item) == ("Commitments", "CommitmentOf")
        found = self.ledger.commitments(self._number(block_hash))
        records = {
            hotkey: {"info": {"fields": [_raw_field(entry.data)]}, "block": entry.block, "deposit": 0}
            for hotkey, entry in found.items()
        }
        return [records.get(hotkey) for _, hotkey in param_sets]

    async def runtime_call(self, api, method, params, block_hash=None):
        assert (api, method) == ("SubnetInfoRuntimeApi", "get_metagraph")
        if params != [1]:
            return None
        graph = self.ledger.metagraph(self._number(block_hash))
        neurons = graph.neurons
        unused = dict.fromkeys(
            ("tempo", "last_step", "blocks_since_last_step", "owner_hotkey", "owner_coldkey", "network_registered_at"),
            0,
        )
        return unused | {
            "netuid": 1,
            "block": graph.block,
            "hotkeys": [neuron.hotkey for neuron in neurons],
            "coldkeys": [neuron.coldkey for neuron in neurons],
            "active": [True for _ in neurons],
            "validator_permit": [neuron.permit for neuron in neurons],
            "last_update": [neuron.last_update for neuron in neurons],
            "incentives": [round(neuron.incentive * 65535) for neuron in neurons],
            "total_stake": [round(neuron.stake * 1e9) for neuron in neurons],
        }

    async def blocks(self, *, finalized=False):
        for entry in self.streams.pop(0):
            if isinstance(entry, Exception):
                raise entry
            yield {"header": {"number": entry, "parentHash": None}}

    async def compose(self, call):
        return call

    async def estimate_fee(self, call, keypair):
        return bt.Balance(0, 0, None)

    async def submit(self, call, keypair, *, nonce=None, period=None, wait_for_inclusion, wait_for_finalization):
        assert wait_for_inclusion
        assert not wait_for_finalization
        if isinstance(self.fail_submit, Exception):
            raise self.fail_submit
        if self.fail_submit is not None:
            return self.fail_submit
        module, function, params = call
        assert params["netuid"] == 1
        if (module, function) == ("Commitments", "set_commitment"):
            ((variant, value),) = params["info"]["fields"][0].items()
            raw = bytes.fromhex(value.removeprefix("0x"))
            assert variant == f"Raw{len(raw)}"
            number = self.ledger.submit(keypair.ss58_address, "commit", raw.decode())
        else:
            assert (module, function) == ("SubtensorModule", "set_mechanism_weights")
            pairs = list(zip(params["dests"], params["weights"], strict=True))
            number = self.ledger.submit(keypair.ss58_address, "weights", pairs)
        self.world.pass_blocks(1)
        block, error = self.ledger.receipt(number)
        if error is not None:
            return bt.ExtrinsicResult(success=False, error=bt.ChainError(str(error), error.name))
        return bt.ExtrinsicResult(success=True, extrinsic_id=f"{block}-0003")


def _raw_field(text):
    return {f"Raw{len(text.encode())}": "0x" + text.encode().hex()}


@pytest.fixture
def wallet(tmp_path, monkeypatch):
    for name in ("HOME", "BITTENSOR_RUNTIME_CACHE_DIR", "BTCLI_TOKEN_SYMBOLS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    wallet = bt.Wallet("node", "default", str(tmp_path / "wallets"))
    wallet.create_new_hotkey(use_password=False, suppress=True)
    return wallet


@pytest.fixture
async def chain(world, wallet):
    substrate = LedgerSubstrate(world)
    hotkey = wallet.hotkey.ss58_address
    about = {"genesis": world.admin.genesis_hash, "netuid": 1, "block_time": 12.0}
    chain = SubtensorChain(substrate, wallet, hotkey=hotkey, **about)  # type: ignore
    yield chain
    await chain.close()


async def test_reads_say_the_same_as_the_chain_they_read(world, chain):
    world.join("a", "b", chain.hotkey, stake=25.5)
    world.admin.set_stake("b", 0.000000001)
    world.pass_blocks(21)
    await chain.commit("hello")
    await chain.set_weights({0: 1.0, 1: 3.0})
    async with LocalChain(world.path, chain.hotkey, clock=world.clock) as local:
        head = await local.head()
        assert await chain.head() == head
        assert await chain.metagraph() == await local.metagraph()
        assert await chain.metagraph(5) == await local.metagraph(5)
        hotkeys = {"a", chain.hotkey}
        assert await chain.commitments(hotkeys) == await local.commitments(hotkeys)
        assert await chain.commitments(hotkeys, 5) == {}
        assert (await chain.weights())[2] == pytest.approx((await local.weights())[2], abs=1e-4)
        assert await chain.weights(5) == {}
        for number in (0, 1, head):
            assert await chain.block(number) == await local.block(number)


async def test_blocks_are_final_or_refused(world, chain):
    world.pass_blocks(10)
    chain._substrate.final_lag = 3
    assert (await chain.block(7)).number == 7
    for number, name in ((8, "NotFinal"), (10, "NotFinal"), (11, "UnknownBlock")):
        with pytest.raises(ChainUnavailable) as refused:
            await chain.block(number)
        assert refused.value.name == name


async def test_a_broken_stream_is_resumed_without_gaps_or_repeats(chain):
    lost = bt.ChainError("Connection lost during subscription")
    chain.block_time = 0.001
    chain._substrate.streams = [[5, 6, lost], [6, 5, 9], [lost], [9, 10, 10, 12]]
    async with aclosing(chain.blocks()) as blocks:
        assert [await anext(blocks) for _ in range(8)] == [5, 6, 7, 8, 9, 10, 11, 12]


async def test_a_silent_stream_is_left_after_some_blocks(chain):
    asked = 0

    async def silent_then_live(*, finalized=False):
        nonlocal asked
        asked += 1
        yield {"header": {"number": asked, "parentHash": None}}
        await asyncio.Event().wait()

    chain.block_time = 0.001
    chain._substrate.blocks = silent_then_live
    async with aclosing(chain.blocks()) as blocks:
        assert [await anext(blocks) for _ in range(3)] == [1, 2, 3]


async def test_refusals_of_the_chain_keep_their_names(world, chain):
    with pytest.raises(NotRegistered) as refused:
        await chain.commit("x")
    assert refused.value.name == "AccountNotAllowedCommit"
    with pytest.raises(NotRegistered):
        await chain.set_weights({0: 1.0})
    world.join("other", chain.hotkey, stake=100.0)
    with pytest.raises(RateLimited):
        await chain.set_weights({0: 1.0})
    world.pass_blocks(6)
    with pytest.raises(NotPermitted) as refused:
        await chain.set_weights({0: 1.0})
    assert refused.value.name == "NeuronNoValidatorPermit"
    with pytest.raises(Rejected, match="129"):
        await chain.commit("x" * 129)
    with pytest.raises(Rejected, match="zero"):
        await chain.set_weights({0: 0.0})


async def test_the_quota_of_commitments_is_a_rate_limit(make_world, wallet):
    world = make_world(limits=ChainLimits(commitment_quota=128))
    hotkey = wallet.hotkey.ss58_address
    world.join(hotkey)
    about = {"genesis": world.admin.genesis_hash, "netuid": 1, "block_time": 12.0}
    chain = SubtensorChain(LedgerSubstrate(world), wallet, hotkey=hotkey, **about)  # type: ignore
    await chain.commit("x" * 128)
    with pytest.raises(RateLimited) as refused:
        await chain.commit("x" * 128)
    assert refused.value.name == "SpaceLimitExceeded"
    assert refused.value.retry_at is not None


async def test_an_unknown_subnet_is_said(chain):
    chain.netuid = 7
    with pytest.raises(Rejected, match="no subnet 7"):
        await chain.metagraph()


@pytest.mark.parametrize(
    "failure",
    [
        bt.ChainError("Connection lost; the extrinsic may already be in the pool"),
        bt.ExtrinsicResult(success=False, error=bt.ChainError("Connection lost")),
        bt.ExtrinsicResult(success=False, error=bt.ChainError("usurped", "Usurped")),
        bt.ExtrinsicResult(success=True),
        bt.RpcConnectionError("no answer"),
        TimeoutError(),
        OSError("broken pipe"),
    ],
)
async def test_a_write_without_the_chains_word_has_an_unknown_fate(chain, failure):
    chain._substrate.fail_submit = failure
    with pytest.raises(ChainUnavailable) as refused:
        await chain.commit("x")
    assert refused.value.fate_unknown


@pytest.mark.parametrize(
    ("error", "expected", "name"),
    [
        (bt.ChainError("x", "SettingWeightsTooFast"), RateLimited, "SettingWeightsTooFast"),
        (bt.ChainError("x", "RateLimitExceeded"), RateLimited, "RateLimitExceeded"),
        (bt.ChainError("x", "NotEnoughStakeToSetWeights"), NotPermitted, "NotEnoughStakeToSetWeights"),
        (bt.ChainError("x", "StakeAmountTooLow"), NotPermitted, "StakeAmountTooLow"),
        (bt.ChainError("x", "UidVecContainInvalidOne"), Rejected, "UidVecContainInvalidOne"),
        (bt.ChainError("x", "NoSuchErrorYet"), Rejected, "NoSuchErrorYet"),
        (bt.ChainError("x", code=bt.ErrorCode.NOT_REGISTERED), NotRegistered, "NotRegistered"),
        (bt.ChainError("state discarded"), ChainUnavailable, "ChainUnavailable"),
        (bt.BittensorError("All weights are zero"), Rejected, "InvalidArgument"),
        (ValueError('Storage function "X" not found'), ChainUnavailable, "ValueError"),
    ],
)
def test_errors_are_classified_by_name_first(error, expected, name):
    translated = translate(error, sent=True)
    assert type(translated) is expected
    assert translated.name == name
    assert getattr(translated, "fate_unknown", False) == (str(error) == "state discarded")
    if isinstance(error, bt.ChainError):  # the chain refuses calls, never reads
        read = translate(error, sent=False)
        assert type(read) is ChainUnavailable
        assert not read.fate_unknown


async def test_a_missing_hotkey_and_a_dead_node_are_said(wallet, tmp_path):
    there = {"netuid": 1, "wallet_path": tmp_path / "wallets", "wallet_name": "node"}
    with pytest.raises(ConfigError, match=r"check --wallet\.path"):
        await SubtensorChain.open("ws://127.0.0.1:9", hotkey="none", **there)
    (tmp_path / "wallets" / "node" / "hotkeys" / "torn").write_text("{")
    with pytest.raises(ConfigError, match="torn"):
        await SubtensorChain.open("ws://127.0.0.1:9", hotkey="torn", **there)
    for hotkey in ("default", None):  # read-only use needs no wallet
        with pytest.raises(ChainUnavailable):
            await SubtensorChain.open("ws://127.0.0.1:9", hotkey=hotkey, **there)


@pytest.mark.parametrize("limit", [0.0, 0.21, 0.3, 0.5, 0.6, 1.0])
@pytest.mark.parametrize("weights", [[1.0], [3.0, 1.0], [8.0, 4.0, 2.0, 1.0, 1.0], [1.0] * 5, [5.0, 5.0, 0.1]])
def test_shares_are_capped_as_by_the_sdk(weights, limit):
    found = rules.capped(dict(enumerate(weights)), limit)
    assert [*found.values()] == pytest.approx(bt.intents.weights.clip_to_max_weight(weights, limit), abs=1e-5)
