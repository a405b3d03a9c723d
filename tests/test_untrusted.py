"""The border for other people's JSON: damaged documents of every kind end in one error, at a bounded price."""

import json
import random
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import FailFast, ValidationError

import tplr.exchange.aggregates
import tplr.exchange.snapshot  # noqa: F401 - its records are found among the subclasses
from tplr.errors import PayloadError
from tplr.exchange.aggregates import Included, IncludedSet
from tplr.exchange.snapshot import Piece, SnapshotManifest, SnapshotShard, TensorLayout
from tplr.schemas import (
    Alignment,
    DebugReport,
    EvaluationResult,
    HeldOutLoss,
    PeerList,
    PeerObservation,
    PeerScore,
    Reason,
    ScoreReport,
    ScoreSeal,
    StartWindow,
    TaskResult,
    Wire,
)
from tplr.untrusted import parse_untrusted

MUTATIONS = 20_000
HASH = "5e" * 32
DOCUMENTS: list[Wire] = [
    StartWindow(start_window=7),
    PeerList(peers=(1, 2, 65535), reserve_peers=(4,), initial_selection=False, sync_window=7, first_effective_window=9),
    DebugReport(
        window=7, uid=1, fingerprint=HASH, proof=HASH, digest="", included={"1": HASH}, skipped={"2": Reason.MISSING}
    ),
    IncludedSet(
        window=7,
        version="1",
        included=(Included(uid=1, sha256=HASH, size=100),),
        skipped={"2": Reason.TOO_LATE},
        success_rate=0.5,
    ),
    ScoreReport(
        window=7,
        uid=1,
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
    ScoreSeal(window=7, uid=1, sha256=HASH, weights_due=9),
    EvaluationResult(
        window=7,
        uid=1,
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
        window=7,
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


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a JSON document."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def mutated(body: bytes, chance: random.Random) -> bytes:
    """The document with one value replaced, or some of its bytes changed, cut, doubled or inserted."""
    if chance.random() < 0.5:
        document = json.loads(body)
        path = chance.choice(list(places(document))[1:])
        inner = document
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = chance.choice(STRANGE)
        return json.dumps(document).encode()
    start, stop = sorted(chance.randrange(len(body) + 1) for _ in range(2))
    piece = chance.choice([b"", body[start:stop] * 2, chance.randbytes(8), b"[" * 2000, b"1e999", b'"\\ud800"'])
    return body[:start] + piece + body[stop if chance.random() < 0.5 else start :]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_document_is_one_error_or_a_valid_document(kind: str) -> None:
    schema, body = type(KINDS[kind]), KINDS[kind].model_dump_json().encode()
    assert parse_untrusted(body, schema, kind) == KINDS[kind]
    chance, errors = random.Random(kind), []
    for _ in range(MUTATIONS):
        damaged = mutated(body, chance)
        try:
            found = parse_untrusted(damaged, schema, kind)
        except PayloadError as error:
            errors.append(str(error))
        else:
            # What is accepted can be written and read again; ``values`` may be anything, infinity too.
            again = parse_untrusted(found.model_dump_json().encode(), schema, kind)
            assert again.model_dump(exclude={"values"}) == found.model_dump(exclude={"values"})
    assert len(errors) > MUTATIONS // 4
    assert all(error.startswith(f"{kind} is no {kind}: ") and len(error) < 500 for error in errors)


def bombs(schema: type[Wire], size: int) -> Iterator[bytes]:
    """Documents of ``size`` bytes with as many wrong entries as fit, in each of the schema's fields."""
    for name in schema.model_fields:
        yield f'{{"{name}":['.encode() + b"1," * (size // 2) + b"1]}"
        yield f'{{"{name}":['.encode() + b"{}," * (size // 3) + b"{}]}"
        yield f'{{"{name}":{{'.encode() + b",".join(b'"%x":[]' % i for i in range(size // 10)) + b"}}"
    yield b"[" * size


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_of_wrong_entries_costs_one_error_a_field(kind: str) -> None:
    schema = type(KINDS[kind])
    for bomb in bombs(schema, min(schema.max_bytes, 2**18)):
        with pytest.raises(ValidationError) as found:
            schema.model_validate_json(bomb)
        # Without fail-fast it is one for each entry: 250,000 in 1 MiB, whose text has 42 MB.
        errors = found.value.errors(include_input=False, include_url=False, include_context=False)
        assert len([one for one in errors if one["type"] != "extra_forbidden"]) <= 3 * len(schema.model_fields)


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_keys_are_counted_not_listed(kind: str) -> None:
    schema = type(KINDS[kind])
    bomb = b"{" + b",".join(b'"%x":1' % i for i in range(5000)) + b"}"
    with pytest.raises(PayloadError) as refused:
        parse_untrusted(bomb, schema, kind)
    assert len(str(refused.value)) < 500


def all_records(base: type[Wire]) -> Iterator[type[Wire]]:
    for one in base.__subclasses__():
        yield one
        yield from all_records(one)


def test_every_container_of_a_record_stops_at_its_first_wrong_entry() -> None:
    found = [one for one in all_records(Wire) if one.__module__.startswith("tplr.")]
    assert {SnapshotManifest, PeerList} <= {*found}
    for record in found:
        for name, field in record.model_fields.items():
            if typing.get_origin(field.annotation) in (tuple, dict, list) and (record, name) not in BOUNDED:
                assert any(isinstance(one, FailFast) for one in field.metadata), f"{record.__name__}.{name}"


# Whatever is in there is accepted; the number of bytes is the bound.
BOUNDED = {(SnapshotManifest, "values")}
