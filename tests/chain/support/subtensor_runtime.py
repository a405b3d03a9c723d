"""A ledger encoded as by a genuine runtime (spec 461): storage, runtime calls, events, and checked extrinsics."""

import lzma
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import bittensor_core as core

from tplr.chain import rules
from tplr.chain.ledger import Ledger

SPEC_VERSION, TRANSACTION_VERSION, SS58_FORMAT = 461, 1, 42
METADATA_FILE = Path(__file__).parent / "subtensor-spec461-metadata.v15.xz"
# Some(OpaqueMetadata), as a node answers; the SCALE length before the bytes themselves takes four.
OPAQUE_METADATA = lzma.decompress(METADATA_FILE.read_bytes())
SIGNED_V4 = 0x84
DISPATCH_INFO = {"weight": {"ref_time": 0, "proof_size": 0}, "class": "Normal", "pays_fee": "Yes"}


class InvalidTransaction(Exception):
    """A refusal by the pool, with a real node's message."""


@dataclass(frozen=True)
class Extrinsic:
    """A call with a valid signature. ``signer`` is an ss58 address."""

    data: bytes
    signer: str
    nonce: int
    module: str
    function: str
    arguments: dict[str, Any]

    @property
    def hash(self) -> str:
        return "0x" + blake2b(self.data, digest_size=32).hexdigest()


def raw_field(data: bytes) -> dict[str, str]:
    """Return the field of a commitment that holds ``data``; the variant's name is the length."""
    return {f"Raw{len(data)}": "0x" + data.hex()}


class Runtime:
    """Encoding and decoding by the metadata.

    Attributes:
        fields: fields of commitments that the ledger can't hold, by hotkey.
        revealed: what was revealed of timelocked commitments, by hotkey.
    """

    def __init__(self) -> None:
        self.fields: dict[str, list[Any]] = {}
        self.revealed: dict[str, bytes] = {}
        self._core = core.Runtime(OPAQUE_METADATA[5:], SPEC_VERSION, TRANSACTION_VERSION, SS58_FORMAT)
        self._apis = self._core.runtime_api_map()
        self._errors = {
            error["name"]: (pallet["index"], error["index"])
            for pallet in self._core.metadata_ir()["pallets"]
            for error in pallet["errors"]
            if pallet["name"] in ("SubtensorModule", "Commitments")
        }

    def key(self, module: str, item: str, *parameters: object) -> bytes:
        return bytes(self._core.storage_key(module, item, list(parameters)))

    def storage(self, ledger: Ledger, block: int, outcomes: list[str | None]) -> dict[bytes, bytes]:
        """Return all state that clients of a subnet read, at ``block``, by storage key; ``outcomes`` are those of its
        calls."""
        netuid = ledger.genesis.netuid
        limits, neurons = ledger.limits(block), ledger.metagraph(block).neurons
        epoch = rules.epoch_of(block, limits, netuid)
        epoch_start = rules.epoch_start(epoch, limits, netuid)
        found: dict[bytes, bytes] = {}

        def put(module: str, item: str, parameters: list, value: object) -> None:
            entry = self._core.storage_entry(module, item)
            found[self.key(module, item, *parameters)] = bytes(self._core.encode(entry.value_type, value))

        put("Timestamp", "Now", [], round(ledger.block(block).time * 1000))
        put("System", "Events", [], [self._event(number, outcome) for number, outcome in enumerate(outcomes)])
        for item, value in {
            "CommitRevealWeightsEnabled": limits.commit_reveal,
            "WeightsSetRateLimit": limits.weights_rate_limit,
            "MinAllowedWeights": min(limits.min_allowed_weights, len(neurons)),
            "MaxWeightsLimit": limits.max_weight,
            "Tempo": limits.tempo,
            "RevealPeriodEpochs": 1,
            "LastEpochBlock": epoch_start,
            "PendingEpochAt": 0,
            "SubnetEpochIndex": epoch,
            "BlocksSinceLastStep": block - epoch_start,
            "TokenSymbol": list(b"t"),
            "LastUpdate": [neuron.last_update for neuron in neurons],
            "ValidatorPermit": [neuron.permit for neuron in neurons],
        }.items():
            put("SubtensorModule", item, [netuid], value)
        for neuron in neurons:
            put("SubtensorModule", "Uids", [netuid, neuron.hotkey], neuron.uid)
        for uid, row in ledger.weights(block).items():
            top = max(row.values())
            put("SubtensorModule", "Weights", [netuid, uid], [(to, round(w / top * 65535)) for to, w in row.items()])
        commitments = {
            hotkey: (commitment.block, [raw_field(commitment.data.encode())])
            for hotkey, commitment in ledger.commitments(block).items()
        } | {hotkey: (block, fields) for hotkey, fields in self.fields.items()}
        for hotkey, (since, fields) in commitments.items():
            value = {"deposit": 0, "block": since, "info": {"fields": fields}}
            put("Commitments", "CommitmentOf", [netuid, hotkey], value)
        for hotkey, plain in self.revealed.items():
            put("Commitments", "RevealedCommitments", [netuid, hotkey], [(plain, block)])
        return found

    def metagraph(self, ledger: Ledger, block: int, parameters: bytes) -> bytes:
        """Answer of ``SubnetInfoRuntimeApi_get_metagraph``; fields that this project's nodes do not read are zero."""
        if int.from_bytes(parameters, "little") != ledger.genesis.netuid:
            return b"\x00"
        neurons = ledger.metagraph(block).neurons
        blank = self._blank("SubnetInfoRuntimeApi", "get_metagraph", b"\x01")
        return self._answer(
            "SubnetInfoRuntimeApi",
            "get_metagraph",
            blank
            | {
                "netuid": ledger.genesis.netuid,
                "block": block,
                "num_uids": len(neurons),
                "hotkeys": [neuron.hotkey for neuron in neurons],
                "coldkeys": [neuron.coldkey for neuron in neurons],
                "active": [True] * len(neurons),
                "validator_permit": [neuron.permit for neuron in neurons],
                "last_update": [neuron.last_update for neuron in neurons],
                "incentives": [round(neuron.incentive * rules.U16_MAX) for neuron in neurons],
                "total_stake": [round(neuron.stake * 1e9) for neuron in neurons],
            },
        )

    def payment_info(self) -> bytes:
        """Answer of ``TransactionPaymentApi_query_info``: calls are free."""
        blank = self._blank("TransactionPaymentApi", "query_info", b"")
        return self._answer("TransactionPaymentApi", "query_info", blank)

    def read_extrinsic(self, data: bytes, *, genesis_hash: bytes, hash_of: Any, head: int) -> Extrinsic:
        """Check an extrinsic's envelope and signature, byte by byte.

        Raises:
            InvalidTransaction: with a real node's message.
        """
        body = data[{0: 1, 1: 2, 2: 4}[data[0] & 3] :]
        if body[0] != SIGNED_V4 or body[1] != 0 or body[34] != core.CRYPTO_SR25519:
            raise InvalidTransaction("Transaction has a bad signature")
        signer, signature = core.ss58_encode(body[2:34], SS58_FORMAT), body[35:99]
        decoded = self._core.decode_extrinsic(data, True)
        nonce = int(decoded["nonce"])
        period, phase = decoded["era"]
        birth = (max(head, phase) - phase) // period * period + phase
        extra, signed_too = self._core.signature_payload_parts(
            era={"period": period, "current": birth},
            nonce=nonce,
            tip=0,
            tip_asset_id=None,
            genesis_hash=genesis_hash,
            era_block_hash=hash_of(birth),
        )
        extra, signed_too = bytes(extra), bytes(signed_too)
        call_data = body[99 + len(extra) :]
        payload = call_data + extra + signed_too
        if len(payload) > 256:
            payload = blake2b(payload, digest_size=32).digest()
        if body[99 : 99 + len(extra)] != extra or not core.verify(payload, signature, signer, core.CRYPTO_SR25519):
            raise InvalidTransaction("Transaction has a bad signature")
        call = self._core.decode_call(call_data)
        arguments = {argument["name"]: argument["value"] for argument in call["call_args"]}
        return Extrinsic(data, signer, nonce, call["call_module"], call["call_function"], arguments)

    def _event(self, number: int, error: str | None) -> dict[str, Any]:
        if error is None:
            event = {"ExtrinsicSuccess": {"dispatch_info": DISPATCH_INFO}}
        else:
            pallet, index = self._errors[error]
            module = {"index": pallet, "error": f"0x{index:02x}000000"}
            event = {"ExtrinsicFailed": {"dispatch_error": {"Module": module}, "dispatch_info": DISPATCH_INFO}}
        return {"phase": {"ApplyExtrinsic": number}, "event": {"System": event}, "topics": []}

    def _blank(self, api: str, method: str, prefix: bytes) -> dict[str, Any]:
        """Return the answer's type with zero or empty fields."""
        return self._core.decode(self._apis[api][method]["output"], prefix + bytes(4096), False)

    def _answer(self, api: str, method: str, value: object) -> bytes:
        return bytes(self._core.encode(self._apis[api][method]["output"], value))


def runtime_version() -> dict[str, Any]:
    """Answer of ``state_getRuntimeVersion``."""
    name = {"specName": "node-subtensor", "implName": "node-subtensor", "implVersion": 1, "authoringVersion": 1}
    return name | {"specVersion": SPEC_VERSION, "transactionVersion": TRANSACTION_VERSION, "apis": []}
