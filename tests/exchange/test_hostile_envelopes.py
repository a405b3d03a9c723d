"""Many hostile envelopes of every kind: one error or a valid document, at bounded cost."""

import dataclasses
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hostile import KINDS, UID, WINDOW, mutated
from signers import signed, signer

from tplr.errors import PayloadError
from tplr.exchange.envelope import MAX_HEADER_BYTES, Author, Run, body_of, envelope_cap, open_document
from tplr.schemas import Document

# Envelopes of each kind; the long tests continue after the first thousand.
MUTATIONS = pytest.mark.parametrize("mutations", [1_000, pytest.param(20_000, marks=pytest.mark.long)])
ME = signer(UID)


def opens(raw: bytes, schema: type[Document], author: Author = ME, *, window: int = WINDOW) -> Document | None:
    """The document in an envelope, or None after the one error."""
    refusal = ""
    try:
        opened = open_document(raw, schema, window=window, author=author)
    except PayloadError as error:
        refusal = str(error)
    if refusal:
        assert len(refusal) < 600
        return None
    # One document, one body: a reader has exactly the signed bytes.
    assert opened.raw == raw
    assert raw.endswith(b"\n" + body_of(opened.document))
    return opened.document


@MUTATIONS
@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_envelope_is_one_error(kind: str, mutations: int) -> None:
    """Bytes that the author did not sign are never a document, for a change of any byte."""
    document, schema = KINDS[kind], type(KINDS[kind])
    raw = signed(document, schema, window=WINDOW, by=ME)
    assert opens(raw, schema) == document
    chance, line = random.Random(kind), raw.index(b"\n")
    for _ in range(mutations // 2):
        # Most mutations of the whole are of its body: as many are of its header.
        header = mutated(raw[:line], chance) + raw[line:]
        for damaged in (header, mutated_bytes(raw, chance)):
            assert damaged == raw or opens(damaged, schema) is None


def mutated_bytes(raw: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(raw))
    other = chance.choice([b"", raw[at : at + 1] * 2, bytes([raw[at] ^ 1 << chance.randrange(8)])])
    return raw[:at] + other + raw[at + 1 :]


@MUTATIONS
@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_document_that_its_author_signs_is_one_error_or_a_valid_document(kind: str, mutations: int) -> None:
    document, schema = KINDS[kind], type(KINDS[kind])
    body, chance, refused = body_of(document), random.Random(kind), 0
    for _ in range(mutations):
        raw = signed(mutated(body, chance), schema, window=WINDOW, by=ME)
        refused += opens(raw, schema) is None
    assert mutations // 4 < refused < mutations


@pytest.mark.parametrize("kind", KINDS)
def test_an_envelope_is_valid_for_its_run_its_window_its_author_and_its_kind_alone(kind: str) -> None:
    """Each of these is signed, and valid somewhere else."""
    document, schema = KINDS[kind], type(KINDS[kind])
    body = body_of(document)
    elsewhere = [
        signed(body, schema, window=WINDOW, by=signer(UID, netuid=4)),
        signed(body, schema, window=WINDOW, by=signer(UID, version="2")),
        signed(body, schema, window=WINDOW, by=signer(UID, name="eve")),
        signed(body, schema, window=WINDOW, by=signer(UID + 1, name=str(UID))),
        signed(body, schema, window=WINDOW + 1, by=ME),
        signed(body, schema, window=0, by=ME),
        *(signed(body, type(other), window=WINDOW, by=ME) for name, other in KINDS.items() if name != kind),
    ]
    for raw in elsewhere:
        assert opens(raw, schema) is None
    # Nor by a reader who expects something else of the true one.
    raw = signed(body, schema, window=WINDOW, by=ME)
    for author in (
        dataclasses.replace(ME, uid=UID + 1),
        dataclasses.replace(ME, hotkey=signer(UID, name="eve").hotkey),
        dataclasses.replace(ME, run=Run(4, "1")),
        dataclasses.replace(ME, run=Run(3, "2")),
    ):
        assert opens(raw, schema, author) is None
    assert opens(raw, schema, window=WINDOW + 1) is None
    for name, other in KINDS.items():
        assert name == kind or opens(raw, type(other)) is None
    # A header names its author, but does not prove it.
    forged = signed(body, schema, window=WINDOW, by=dataclasses.replace(signer(UID, name="eve"), hotkey=ME.hotkey))
    assert opens(forged, schema) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_header_bomb_is_one_error(kind: str) -> None:
    document, schema = KINDS[kind], type(KINDS[kind])
    raw = signed(document, schema, window=WINDOW, by=ME)
    line, size = raw.index(b"\n"), min(schema.max_bytes, 2**20)
    for head in (
        b"{" * size,
        b"[" * (size // 2) + b"\n" * (size // 2),
        b'{"signature":"' * (size // 14),
        b'{"hotkey":' + b"9" * (size - 10),
        raw[: line - 1] + b"," + b'"more":1,' * (size // 10) + b"}",
        raw[:line].replace(b'"uid":1', b'"uid":1,"uid":1'),
        raw[:line].replace(b'"uid":1', b'"uid":1.0'),
        raw[:line].replace(b'"uid":1', b'"uid": 1'),
        b" " * MAX_HEADER_BYTES + raw[:line],
        raw[:line] + b" ",
        raw[:line] + b"\r",
        b"",
    ):
        assert opens(head + raw[line:], schema) is None
    assert opens(raw[:line], schema) is None
    assert opens(b"\n".join([raw, raw]), schema) is None
    assert opens(raw + b" " * envelope_cap(schema.max_bytes), schema) is None


# Limits for all bombs of every kind together, including making and signing them, and two manifests of 16 MiB.
LIMIT_SECONDS, LIMIT_BYTES = 60, 2**30


@pytest.mark.long
def test_the_largest_envelopes_that_are_fetched_end_within_bounds_of_time_and_memory() -> None:
    """The kernel ends a process that takes more."""
    path = [*(one for one in sys.path if one), str(Path(__file__).parent / "support")]
    command = [sys.executable, "-m", "bounded", str(LIMIT_SECONDS), str(LIMIT_BYTES)]
    done = subprocess.run(command, env={"PYTHONPATH": ":".join(path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    refused, opened = map(int, done.stdout.split())
    assert refused == sum(3 * len(type(one).model_fields) + 1 for one in KINDS.values())
    assert opened == 2
