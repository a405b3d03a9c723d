"""A document of each kind, and the hostile variants that an author can make of it."""

import json
import random
from collections.abc import Iterator
from typing import Any

from tplr.exchange.aggregates import Included, IncludedSet
from tplr.exchange.ballots import Commitment, Decision, Echo, Proof, Proposal, Relay, Status, Value, Vote
from tplr.exchange.snapshot import Piece, SnapshotManifest, SnapshotShard, TensorLayout
from tplr.schemas import (
    Alignment,
    DebugReport,
    Document,
    EvaluationResult,
    HeldOutLoss,
    PeerList,
    PeerObservation,
    PeerScore,
    Reason,
    ScoreReport,
    ScoreSeal,
    Software,
    StartWindow,
    TaskResult,
)

WINDOW, UID = 7, 1
HASH = "5e" * 32
PEERS = PeerList(
    peers=(1, 2, 65535), reserve_peers=(4,), initial_selection=False, sync_window=7, first_effective_window=9
)
INCLUDED = IncludedSet(
    window=WINDOW,
    version="1",
    included=(Included(uid=1, sha256=HASH, size=100),),
    skipped={"2": Reason.TOO_LATE},
    success_rate=0.5,
)
VALUE = Value(included=INCLUDED, peers=PEERS)
PROOF = Proof(slot=3, value=VALUE, echoes=("an echo", "another"))
DOCUMENTS: list[Document] = [
    StartWindow(start_window=7),
    Software(uid=UID, package="1.2.3", spec_version=4, since=9),
    PEERS,
    Vote(found={"1": HASH}, missing={"2": Reason.MISSING}, peers=PEERS),
    Proposal(slot=3, value=VALUE, votes={"0": HASH}),
    Echo(slot=3, value=HASH),
    Commitment(value=HASH),
    Relay(echo="an echo", proposal="a proposal", votes=("a vote", "another"), proof=PROOF),
    Status(slot=3, votes=("a vote",), proof=PROOF),
    Decision(slot=3, value=VALUE, votes=("a vote",), echoes=("an echo",), commitments=("a commitment",)),
    DebugReport(
        window=WINDOW,
        uid=UID,
        fingerprint=HASH,
        outer_fingerprint=HASH,
        proof=HASH,
        digest="",
        included={"1": HASH},
        skipped={"2": Reason.MISSING},
    ),
    ScoreReport(
        window=WINDOW,
        uid=UID,
        profile="hardened",
        held_out_pages=HASH,
        faults=("chain",),
        observations={"1": PeerObservation(hotkey="a", assigned_products=(0.1, 0.2))},
        alignment=Alignment(uids=(1, 2), products=(0.5, 0.4), norms=(1.0, 2.0), gram=(1.0, 0.1, 1.0)),
        follows_from=(5, 6),
        peer_scores={"1": PeerScore(hotkey="a")},
        struck={"1": ("late",)},
        weights={"1": 1.0},
        weights_set=None,
    ).sealed(),
    ScoreSeal(window=WINDOW, uid=UID, sha256=HASH, weights_due=9),
    EvaluationResult(
        window=WINDOW,
        uid=UID,
        version="1",
        global_step=4,
        digest=HASH,
        precision="float32",
        held_out=HeldOutLoss(pages=HASH, nats_per_token=3.0, bits_per_byte=1.5, tokens=10, bytes=40),
        tasks={"sums": TaskResult(task_version="1.0", fewshot=0, metrics={"acc,none": 0.5}, samples=30)},
        command="tplr eval",
        tools={"tplr": "0.1.0"},
    ).sealed(),
    SnapshotManifest(
        window=WINDOW,
        start_window=1,
        global_step=3,
        version="1",
        values={"parts": {"scores": [1, 2]}},
        tensors={"model.a": TensorLayout(dtype="F32", shape=(2, 3))},
        shards=(
            SnapshotShard(
                name="shard-00000-00000.safetensors",
                size=24,
                blake3s=(HASH,),
                sha256s=(HASH,),
                pieces=(Piece(tensor="model.a", start=0, rows=2),),
            ),
        ),
    ).sealed(),
]
KINDS = {type(one).__name__: one for one in DOCUMENTS}
STRANGE = (None, True, -1, 0, 99999, 2**53, 1e308, "", "é" * 100, [], {}, [[]], {"": {}}, "99999", "\ud800")


def mutated(body: bytes, chance: random.Random) -> bytes:
    """The document with one value replaced, or some of its bytes changed, cut, doubled or inserted."""
    if chance.random() < 0.5:
        document = json.loads(body)
        path = chance.choice(list(_places(document))[1:])
        inner = document
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = chance.choice(STRANGE)
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    start, stop = sorted(chance.randrange(len(body) + 1) for _ in range(2))
    piece = chance.choice([b"", body[start:stop] * 2, chance.randbytes(8), b"[" * 2000, b"1e999", b'"\\ud800"'])
    return body[:start] + piece + body[stop if chance.random() < 0.5 else start :]


def bombs(schema: type[Document], size: int) -> Iterator[bytes]:
    """Documents of ``size`` bytes with as many wrong entries as fit, in each of the schema's fields."""
    for name in schema.model_fields:
        yield f'{{"{name}":['.encode() + b"1," * (size // 2) + b"1]}"
        yield f'{{"{name}":['.encode() + b"{}," * (size // 3) + b"{}]}"
        yield f'{{"{name}":{{'.encode() + b",".join(b'"%x":[]' % i for i in range(size // 14)) + b"}}"
    yield b"[" * size


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a JSON document."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _places(value[key], (*path, key))
