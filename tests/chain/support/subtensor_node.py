"""A test subtensor node: the JSON-RPC that the SDK uses, over a real websocket, on a chain file.

State and rules are the ledger's; encoding, nonces and signatures are those of the genuine runtime (see
``subtensor_runtime.py``). The reveal of sealed weights is not imitated: this node can't open them, so they never come
into force. Forks, fees and proofs are not imitated either.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Self

from subtensor_runtime import OPAQUE_METADATA, Extrinsic, InvalidTransaction, Runtime, runtime_version
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from tplr.chain.ledger import Ledger
from tplr.errors import ChainError

ZERO = "0x" + "00" * 32
# InvalidTransaction::Custom of the runtime, by the name that the SDK gives it.
CUSTOM_ERRORS = {"StakeAmountTooLow": 1, "RateLimitExceeded": 6}
POLL_SECONDS = 0.02


class RpcError(Exception):
    """Becomes the ``error`` of a JSON-RPC answer."""

    def __init__(self, code: int, message: str, data: str | dict[str, Any] | None = None) -> None:
        self.payload = {"code": code, "message": message} | ({"data": data} if data else {})
        super().__init__(message)


@dataclass
class Faults:
    """Current faults of this node, until they are reset.

    Attributes:
        mute: requests are taken and never answered, and nothing is announced.
        silent: no new block is announced, but requests are answered.
        lag: blocks behind the true head.
        throttle: message of a gateway with which every request is refused.
        retry_after: seconds for which that gateway asks to send nothing, 0 if it does not say.
        mute_writes: submissions are accepted and take effect, but are never reported.
        refuse: message with which the pool refuses submissions.
        lose: submissions are accepted and dropped.
        cut: connections are dropped right after a submission was taken, before the answer.
    """

    mute: bool = False
    silent: bool = False
    lag: int = 0
    throttle: str = ""
    retry_after: float = 0.0
    mute_writes: bool = False
    refuse: str = ""
    lose: bool = False
    cut: bool = False


@dataclass
class Pooled:
    """An extrinsic that waits for a block, and the subscribers of its status."""

    extrinsic: Extrinsic
    watcher: Callable[[Any], None]


@dataclass
class Included:
    """The content of a block: bytes of its extrinsics, and the outcome of each (None: success)."""

    extrinsics: list[bytes] = field(default_factory=list)
    outcomes: list[str | None] = field(default_factory=list)


class SubtensorNode:
    """Serves ``ledger`` while its context is open. Give the ledger without finality lag and with all of its state.

    Attributes:
        url: its address.
        listening: whether it accepts connections.
        faults: the current faults.
        calls: names of the called methods.
        accepted: extrinsics that the pool took, ``(signer, function)`` each.
        dials: number of connections so far.
        runtime: encodes the state; commitments can be added to it.
    """

    def __init__(self, ledger: Ledger, *, finality_lag: int = 0, retained_blocks: int | None = None) -> None:
        self.faults = Faults()
        self.calls: list[str] = []
        self.accepted: list[tuple[str, str]] = []
        self.dials = 0
        self._ledger = ledger
        self._finality_lag, self._retained_blocks = finality_lag, retained_blocks
        self.runtime = Runtime()
        self._pool: dict[int, Pooled] = {}
        self._included: defaultdict[int, Included] = defaultdict(Included)
        self._nonces: defaultdict[str, int] = defaultdict(int)
        self._numbers: dict[str, int] = {}
        self._storage: dict[int, dict[bytes, bytes]] = {}
        self._connections: set[ServerConnection] = set()
        # By subscription id: its connection, and the kind of head it follows (None for an extrinsic's fate).
        self._subscriptions: dict[str, tuple[ServerConnection, str | None]] = {}
        self._ids = count(1)
        self._outbox: asyncio.Queue[tuple[ServerConnection, str]] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        self._group = await asyncio.TaskGroup().__aenter__()
        self._tasks = [self._group.create_task(self._announce()), self._group.create_task(self._send())]
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await self.stop()
        await self._group.__aexit__(None, None, None)

    async def start(self, port: int = 0) -> None:
        """Listen."""
        self._server = await serve(self._serve, "127.0.0.1", port, max_size=2**24)
        self.port = self._server.sockets[0].getsockname()[1]
        self.listening = True
        self.url = f"ws://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        """Refuse new connections, and drop existing ones."""
        self.listening = False
        self.drop_connections()
        self._server.close()
        await self._server.wait_closed()

    def drop_connections(self) -> None:
        """Drop all connections without closing them, like a crashed node or a broken line."""
        for connection in list(self._connections):
            connection.transport.abort()

    # Blocks

    def head(self) -> int:
        """The newest block that this node knows."""
        head, _ = self._ledger.look()
        for number, pooled in list(self._pool.items()):
            receipt = self._ledger.receipt(number)
            if receipt is not None:
                del self._pool[number]
                included = self._included[receipt.block]
                included.extrinsics.append(pooled.extrinsic.data)
                included.outcomes.append(receipt.error.name if receipt.error else None)
                self._nonces[pooled.extrinsic.signer] += 1
                pooled.watcher({"inBlock": self._hash(receipt.block)})
        return max(0, head - self.faults.lag)

    def _final(self) -> int:
        return max(0, self.head() - self._finality_lag)

    def _hash(self, number: int) -> str:
        found = self._ledger.block(number).hash
        self._numbers[found] = number
        return found

    def _number(self, block_hash: str | None) -> int:
        """Return the number of the block whose header is requested."""
        if block_hash is None:
            return self.head()
        if block_hash not in self._numbers:
            for number in range(self._ledger.look()[0] + 1):
                self._hash(number)
        return self._numbers[block_hash]

    def _state(self, block_hash: str | None) -> int:
        """Return the number of the block whose state is requested."""
        number = self._number(block_hash)
        if self._retained_blocks is not None and number < self.head() - self._retained_blocks:
            raise RpcError(4003, f"Client error: UnknownBlock: State already discarded for {block_hash}")
        return number

    def _header(self, number: int) -> dict[str, Any]:
        parent = self._hash(number - 1) if number else ZERO
        roots = {"stateRoot": ZERO, "extrinsicsRoot": ZERO, "digest": {"logs": []}}
        return {"parentHash": parent, "number": hex(number)} | roots

    def _state_of(self, number: int) -> dict[bytes, bytes]:
        if number not in self._storage:
            # A new block may still get receipts from this node, so only finished blocks are kept.
            state = self.runtime.storage(self._ledger, number, self._included[number].outcomes)
            if number == self._ledger.look()[0]:
                return state
            self._storage[number] = state
            if len(self._storage) > 64:
                self._storage.pop(next(iter(self._storage)))
        return self._storage[number]

    # Connections

    async def _serve(self, connection: ServerConnection) -> None:
        self.dials += 1
        self._connections.add(connection)
        try:
            async for text in connection:
                request = json.loads(text)
                self.calls.append(request["method"])
                if self.faults.mute:
                    continue
                answer: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
                try:
                    if self.faults.throttle:
                        wait = self.faults.retry_after
                        limit = {"code": -32005, "data": {"retry_after": wait}} if wait else {"code": -32000}
                        raise RpcError(message=self.faults.throttle, **limit)
                    method = getattr(self, f"_rpc_{request['method']}")
                    answer["result"] = method(connection, *request["params"])
                    if self.faults.mute_writes and "submit" in request["method"]:
                        continue
                except RpcError as error:
                    answer["error"] = error.payload
                await self._outbox.put((connection, json.dumps(answer)))
        except ConnectionClosed:
            pass
        finally:
            self._connections.discard(connection)
            for name in [name for name, (holder, _) in self._subscriptions.items() if holder is connection]:
                del self._subscriptions[name]

    async def _send(self) -> None:
        """Send all messages from one task, so that an answer precedes the messages that it announces."""
        while True:
            connection, text = await self._outbox.get()
            try:
                await connection.send(text)
            except ConnectionClosed:
                continue

    async def _announce(self) -> None:
        seen = {"New": self.head(), "Finalized": self._final()}
        while True:
            await asyncio.sleep(POLL_SECONDS)
            for kind, number in (("New", self.head()), ("Finalized", self._final())):
                # A node that lags announces older heads again.
                first = seen[kind] + 1 if number > seen[kind] else number
                seen[kind], fresh = number, range(first, number + 1) if number != seen[kind] else range(0)
                if self.faults.silent or self.faults.mute:
                    continue
                for name, (connection, followed) in list(self._subscriptions.items()):
                    for each in fresh if followed == kind else ():
                        self._notify(connection, name, f"chain_{kind.lower()}Head", self._header(each))

    def _notify(self, connection: ServerConnection, name: str, method: str, result: object) -> None:
        params = {"subscription": name, "result": result}
        self._outbox.put_nowait((connection, json.dumps({"jsonrpc": "2.0", "method": method, "params": params})))

    def _subscribe(self, connection: ServerConnection, kind: str | None) -> str:
        name = f"subscription-{next(self._ids)}"
        self._subscriptions[name] = (connection, kind)
        return name

    # Methods, by their names on the wire

    def _rpc_chain_getHead(self, _: object) -> str:
        return self._hash(self.head())

    def _rpc_chain_getFinalizedHead(self, _: object) -> str:
        return self._hash(self._final())

    def _rpc_chain_getBlockHash(self, _: object, number: int) -> str | None:
        return self._hash(number) if number <= self.head() else None

    def _rpc_chain_getHeader(self, _: object, block_hash: str | None) -> dict[str, Any]:
        return self._header(self._number(block_hash))

    def _rpc_chain_getBlock(self, _: object, block_hash: str) -> dict[str, Any]:
        number = self._number(block_hash)
        extrinsics = ["0x" + data.hex() for data in self._included[number].extrinsics]
        return {"block": {"header": self._header(number), "extrinsics": extrinsics}, "justifications": None}

    def _rpc_state_getRuntimeVersion(self, _: object, block_hash: str | None) -> dict[str, Any]:
        self._state(block_hash)
        return runtime_version()

    def _rpc_state_getStorageAt(self, _: object, key: str, block_hash: str | None) -> str | None:
        value = self._state_of(self._state(block_hash)).get(bytes.fromhex(key[2:]))
        return None if value is None else "0x" + value.hex()

    def _rpc_state_queryStorageAt(self, _: object, keys: list[str], block_hash: str) -> list[dict[str, Any]]:
        changes = [[key, self._rpc_state_getStorageAt(None, key, block_hash)] for key in keys]
        return [{"block": block_hash, "changes": changes}]

    def _rpc_state_getKeysPaged(self, _: object, prefix: str, size: int, start: str, block_hash: str) -> list[str]:
        keys = sorted("0x" + key.hex() for key in self._state_of(self._state(block_hash)))
        return [key for key in keys if key.startswith(prefix) and key > start][:size]

    def _rpc_state_call(self, _: object, name: str, parameters: str, block_hash: str | None = None) -> str:
        number = self._state(block_hash)
        if name == "Metadata_metadata_at_version":
            return "0x" + OPAQUE_METADATA.hex()
        if name == "TransactionPaymentApi_query_info":
            return "0x" + self.runtime.payment_info().hex()
        assert name == "SubnetInfoRuntimeApi_get_metagraph", name
        raw = bytes.fromhex(parameters.removeprefix("0x"))
        return "0x" + self.runtime.metagraph(self._ledger, number, raw).hex()

    def _rpc_account_nextIndex(self, _: object, address: str) -> int:
        self.head()
        return self._nonces[address] + sum(pooled.extrinsic.signer == address for pooled in self._pool.values())

    def _rpc_chain_subscribeNewHeads(self, connection: ServerConnection) -> str:
        name = self._subscribe(connection, "New")
        if not self.faults.silent:
            # A real node announces the current head at once.
            self._notify(connection, name, "chain_newHead", self._header(self.head()))
        return name

    def _rpc_chain_subscribeFinalizedHeads(self, connection: ServerConnection) -> str:
        return self._subscribe(connection, "Finalized")

    def _unsubscribe(self, _: object, name: str) -> bool:
        return self._subscriptions.pop(name, None) is not None

    _rpc_chain_unsubscribeNewHeads = _unsubscribe
    _rpc_chain_unsubscribeFinalizedHeads = _unsubscribe
    _rpc_author_unwatchExtrinsic = _unsubscribe

    def _rpc_author_submitAndWatchExtrinsic(self, connection: ServerConnection, data: str) -> str:
        if self.faults.refuse:
            raise RpcError(1010, "Invalid Transaction", self.faults.refuse)
        head = self.head()
        try:
            extrinsic = self.runtime.read_extrinsic(
                bytes.fromhex(data.removeprefix("0x")),
                genesis_hash=bytes.fromhex(self._hash(0)[2:]),
                hash_of=lambda number: bytes.fromhex(self._hash(number)[2:]),
                head=head,
            )
            ahead = self._check_nonce(extrinsic)
        except InvalidTransaction as error:
            raise RpcError(1010, "Invalid Transaction", str(error)) from error
        name = self._subscribe(connection, None)
        if ahead:
            # Kept until the missing nonces arrive, which are never sent.
            self._notify(connection, name, "author_extrinsicUpdate", "future")
        elif not self.faults.lose:
            number = self._into_ledger(extrinsic)
            self._pool[number] = Pooled(
                extrinsic, lambda status: self._notify(connection, name, "author_extrinsicUpdate", status)
            )
        self.accepted.append((extrinsic.signer, extrinsic.function))
        if self.faults.cut:
            self.drop_connections()
        return name

    def _check_nonce(self, extrinsic: Extrinsic) -> bool:
        """Whether the nonce is ahead of its account's next one."""
        expected = self._rpc_account_nextIndex(None, extrinsic.signer)
        if extrinsic.nonce < expected:
            raise InvalidTransaction("Transaction is outdated")
        return extrinsic.nonce > expected

    def _into_ledger(self, extrinsic: Extrinsic) -> int:
        arguments = extrinsic.arguments
        assert arguments["netuid"] == self._ledger.genesis.netuid
        try:
            match extrinsic.function:
                case "set_commitment":
                    ((variant, value),) = arguments["info"]["fields"][0].items()
                    raw = bytes.fromhex(value.removeprefix("0x")) if value else b""
                    assert variant == f"Raw{len(raw)}"
                    return self._ledger.submit(extrinsic.signer, "commit", raw.decode())
                case "set_mechanism_weights":
                    assert not self._ledger.limits().commit_reveal, "plain weights where they must be sealed"
                    pairs = list(zip(arguments["dests"], arguments["weights"], strict=True))
                    return self._ledger.submit(extrinsic.signer, "weights", pairs)
                case "commit_timelocked_mechanism_weights":
                    assert self._ledger.limits().reveal_epochs > 1000, "sealed weights can't be opened here"
                    assert arguments["reveal_round"] > 0
                    assert arguments["commit_reveal_version"] == 4
                    # The chain does not check their content: it accepts any row.
                    row = [(neuron.uid, 1) for neuron in self._ledger.metagraph().neurons]
                    return self._ledger.submit(extrinsic.signer, "weights", row)
        except ChainError as error:
            raise RpcError(1010, "Invalid Transaction", f"Custom error: {CUSTOM_ERRORS[error.name]}") from error
        raise AssertionError(f"unexpected call {extrinsic.module}.{extrinsic.function}")
