"""The envelope of a document, with real key pairs: signer, content, run and window."""

import dataclasses
import json
import random
from typing import Any

import pytest
from bittensor_core import Keypair

from tplr.errors import ConfigError, PayloadError
from tplr.exchange.envelope import (
    MAX_HEADER_BYTES,
    Author,
    Run,
    Signer,
    body_of,
    body_sha256,
    canonical,
    open_document,
    sign_body,
    sign_document,
)
from tplr.schemas import DebugReport, Reason, ScoreSeal, StartWindow, WeightsSet

ALICE, EVE = Keypair.create_from_uri("//alice"), Keypair.create_from_uri("//eve")
RUN = Run(netuid=3, version="1")
HASH = "5e" * 32
REPORT = DebugReport(
    window=7,
    uid=1,
    fingerprint=HASH,
    outer_fingerprint=HASH,
    proof=HASH,
    digest="",
    included={"1": HASH},
    skipped={"2": Reason.MISSING},
)
AUTHOR = Author(RUN, 1, ALICE.ss58_address)
READ: dict[str, Any] = {"window": 7, "author": AUTHOR}


def signer(keypair: Keypair = ALICE, run: Run = RUN, uid: int = 1) -> Signer:
    return Signer.with_key(run, uid, keypair)


def signed(**change: Any) -> bytes:
    return sign_document(REPORT, **{"window": 7, "signer": signer()} | change)


def test_what_is_signed_is_opened() -> None:
    raw = signed()
    opened = open_document(raw, DebugReport, **READ)
    assert opened.document == REPORT
    assert (opened.kind, opened.window, opened.author) == ("debug", 7, AUTHOR)
    assert opened.raw == raw
    assert opened.sha256 == body_sha256(REPORT)


def test_an_envelope_is_a_line_and_a_body_of_canonical_json() -> None:
    head, body = signed().split(b"\n")
    header = json.loads(head)
    assert list(header) == ["hotkey", "kind", "netuid", "signature", "uid", "version", "window"]
    assert canonical(header) == head
    assert canonical(json.loads(body)) == body == body_of(REPORT)


def test_the_hash_of_the_body_identifies_a_document_not_its_signature() -> None:
    one, two = signed(), signed()
    assert one != two
    assert open_document(one, DebugReport, **READ).sha256 == open_document(two, DebugReport, **READ).sha256


@pytest.mark.parametrize(
    ("said", "other", "asked"),
    [
        (b'"kind":"debug"', b'"kind":"vote"', {"kind": "vote"}),
        (b'"netuid":3', b'"netuid":4', {"author": Author(Run(4, "1"), 1, ALICE.ss58_address)}),
        (b'"uid":1', b'"uid":2', {"author": Author(RUN, 2, ALICE.ss58_address)}),
        (b'"version":"1"', b'"version":"2"', {"author": Author(Run(3, "2"), 1, ALICE.ss58_address)}),
        (b'"window":7', b'"window":8', {"window": 8}),
    ],
)
def test_a_signature_under_another_label_is_none(said: bytes, other: bytes, asked: dict[str, Any]) -> None:
    """A changed header that a reader expects has no valid signature."""
    head, body = signed().split(b"\n")
    assert said in head
    with pytest.raises(PayloadError, match="not signed by hotkey"):
        open_document(head.replace(said, other) + b"\n" + body, DebugReport, **READ | asked)


def test_what_is_signed_has_less_than_256_bytes() -> None:
    lengths = []

    def sign(message: bytes) -> bytes:
        lengths.append(len(message))
        return bytes(64)

    run = Run(netuid=65535, version="v" * 64, genesis=f"0x{'ab' * 32}")
    widest = Signer(run, 65535, ALICE.ss58_address, sign)
    raw = sign_document(REPORT, kind="k" * 32, window=2**53 - 1, signer=widest)
    assert lengths[0] < 256
    assert raw.index(b"\n") < MAX_HEADER_BYTES


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "scores"},
        {"window": 8},
        {"signer": signer(uid=2)},
        {"signer": signer(EVE)},
        {"signer": signer(run=Run(netuid=4, version="1"))},
        {"signer": signer(run=Run(netuid=3, version="2"))},
        {"signer": signer(run=Run(netuid=3, version="1", genesis=f"0x{'ab' * 32}"))},
        {"signer": dataclasses.replace(signer(EVE), hotkey=ALICE.ss58_address)},
    ],
)
def test_a_document_of_another_kind_window_author_or_run_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(PayloadError):
        open_document(signed(**change), DebugReport, **READ)


@pytest.mark.parametrize("change", [{"window": 8}, {"uid": 2}])
def test_a_body_that_contradicts_its_envelope_is_refused(change: dict[str, Any]) -> None:
    """Its author signed it: a report of another window is valid there, but not in this window."""
    raw = sign_document(REPORT.model_copy(update=change), window=7, signer=signer())
    with pytest.raises(PayloadError, match=f"its body says {next(iter(change))} {next(iter(change.values()))}"):
        open_document(raw, DebugReport, **READ)


def test_a_header_may_not_be_moved_to_another_document() -> None:
    """Like a replay of a run's document in another run, window, kind or bucket."""
    raw = signed()
    for old, new in ((b'"window":7}', b'"window":8}'), (b'"netuid":3', b'"netuid":4'), (b'"uid":1', b'"uid":2')):
        moved = raw.replace(old, new, 1)
        assert moved != raw
        read = READ | {"window": 8} if old == b'"window":7}' else READ
        read = read | {"author": dataclasses.replace(AUTHOR, run=Run(4, "1"))} if old == b'"netuid":3' else read
        read = read | {"author": dataclasses.replace(AUTHOR, uid=2)} if old == b'"uid":1' else read
        with pytest.raises(PayloadError, match="not signed by hotkey"):
            open_document(moved, DebugReport, **read)
    with pytest.raises(PayloadError, match="not signed by hotkey"):
        open_document(raw.replace(b"missing", b"denied", 1), DebugReport, **READ)


def encodings(text: str) -> list[str]:
    """Other texts with the same meaning for JSON parsers."""
    value = json.loads(text)
    reordered = {key: value[key] for key in reversed(value)}
    return [
        " " + text,
        text + "\n",
        text.replace(":", ": ", 1),
        json.dumps(reordered, separators=(",", ":")),
        text[:-1] + ',"window":7}',
        text.replace('"window":7', '"window":7.0'),
        text.replace("missing", "miss\\u0069ng"),
    ]


@pytest.mark.parametrize("body", encodings(body_of(REPORT).decode()))
def test_one_document_has_one_encoding(body: str) -> None:
    """Otherwise equal statements of two electors would have different hashes. The author signs the exact bytes."""
    raw = sign_body(body.encode(), kind="debug", window=7, signer=signer())
    with pytest.raises(PayloadError, match=r"is not canonical|is not a valid DebugReport"):
        open_document(raw, DebugReport, **READ)


def test_all_finite_numbers_are_read_as_they_were_written() -> None:
    chance = random.Random(0)
    numbers = [chance.uniform(-1, 1) * 10.0 ** chance.randrange(-300, 300) for _ in range(2000)]
    numbers += [0.0, -0.0, 1.0, 1e16, 1e-7, 5e-324, 2.0**53, 0.1]
    weights = WeightsSet(block=1, intended={str(at): one for at, one in enumerate(numbers)}, on_chain={})
    body = canonical(weights.model_dump(mode="json"))
    assert canonical(WeightsSet.model_validate_json(body).model_dump(mode="json")) == body


def test_what_has_no_canonical_encoding_is_not_signed() -> None:
    for value in (float("inf"), float("nan"), "\ud800"):
        with pytest.raises(ValueError, match=r"JSON|surrogate"):
            canonical({"a": value})


def test_an_address_alone_signs_nothing() -> None:
    reader = Keypair(ss58_address=ALICE.ss58_address)
    with pytest.raises(ConfigError):
        sign_document(REPORT, window=7, signer=signer(reader))


def test_a_version_that_could_end_a_line_is_no_version() -> None:
    for version in ("", "1\n2", "é", "v" * 65):
        with pytest.raises(ValueError, match="version"):
            Run(netuid=3, version=version)
    with pytest.raises(ValueError, match="kind"):
        signed(kind="debug\nscores")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\n",
        b"{}\n{}",
        body_of(REPORT),
        b"\n" * 10_000,
        b'"signature":"' + b"0" * 128 + b'"\n{}',
        b"[" * 60_000,
        b"\xff" * 60_000,
    ],
)
def test_what_is_no_envelope_is_one_error(raw: bytes) -> None:
    with pytest.raises(PayloadError) as refused:
        open_document(raw, DebugReport, **READ)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("signature", ["0" * 128, "F" * 128, "0" * 127, "0" * 130, "zz" * 64, ""])
def test_a_wrong_signature_is_one_error(signature: str) -> None:
    header = json.loads(signed().split(b"\n")[0]) | {"signature": signature}
    with pytest.raises(PayloadError):
        open_document(canonical(header) + b"\n" + body_of(REPORT), DebugReport, **READ)


def test_a_kind_is_no_other_kind() -> None:
    raw = sign_document(StartWindow(start_window=7), window=0, signer=signer())
    with pytest.raises(PayloadError):
        open_document(raw, ScoreSeal, window=0, author=AUTHOR)
    assert open_document(raw, StartWindow, window=0, author=AUTHOR).kind == "start-window"


def test_larger_than_its_kind_is_refused_before_anything_is_hashed() -> None:
    with pytest.raises(PayloadError, match="bytes, expected at most"):
        open_document(b" " * (2**16 + MAX_HEADER_BYTES + 1), DebugReport, **READ)
