"""The envelope of a document: its author, run and window, and the author's signature.

An envelope is one header line and the body, both in canonical JSON. A reader knows the expected header except for the
signature, so it compares the bytes and parses no header. The signature covers the hash of the body and all other header
fields, so a document is evidence about its author only and is not valid for another run, window or kind. sr25519
signatures of one message differ, so a document is identified by the hash of its body, not of its envelope.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from bittensor_core import Keypair

from tplr.chain import hotkeys
from tplr.errors import PayloadError
from tplr.keys import version_at
from tplr.schemas import Document, Wire
from tplr.untrusted import parse_untrusted

MAX_HEADER_BYTES = 512
# The window of a document that does not belong to a window.
WHOLE_RUN = 0
# Of the genesis hash: the whole one would make a message too long (``Chain.sign``).
CHAIN_DIGITS = 32
SIGNATURE = re.compile(rb'"signature":"([0-9a-f]{128})"')
# For the header and the signed lines: no characters that JSON escapes, and no line breaks.
KIND = re.compile(r"[a-z][a-z0-9-]{0,31}")
VERSION = re.compile(r"[A-Za-z0-9._-]{1,64}")

DocumentT = TypeVar("DocumentT", bound=Document)


@dataclass(frozen=True)
class Run:
    """The scope of a signature: a subnet of a chain, and the version of the rules that the run began with.

    Attributes:
        genesis: hash of the chain's block 0, 0x-hex; "" only in simulations without a chain.

    Raises:
        ValueError: the version is not allowed in an envelope.
    """

    netuid: int
    version: str
    genesis: str = ""

    def __post_init__(self) -> None:
        if not VERSION.fullmatch(self.version):
            raise ValueError(f"version {self.version!r}: expected at most 64 of A-Z, a-z, 0-9, '.', '_' and '-'")


@dataclass(frozen=True)
class Author:
    """The author of documents of a run: ``hotkey`` holds ``uid`` on chain."""

    run: Run
    uid: int
    hotkey: str


@dataclass(frozen=True)
class Signer(Author):
    """An author whose documents this node can sign, by ``Chain.sign``."""

    sign: Callable[[bytes], bytes]

    @classmethod
    def with_key(cls, run: Run, uid: int, keypair: Keypair) -> Self:
        """Return a signer that uses this key pair."""
        return cls(run, uid, keypair.ss58_address, lambda message: hotkeys.sign(keypair, message))


@dataclass(frozen=True)
class _Label:
    """The header fields of an envelope, except for the signature."""

    author: Author
    kind: str
    window: int

    def __post_init__(self) -> None:
        if not KIND.fullmatch(self.kind):
            raise ValueError(f"kind {self.kind!r} of a document: expected at most 32 of a-z, 0-9 and '-'")

    def header(self, signature: str) -> bytes:
        fields = {
            "hotkey": self.author.hotkey,
            "kind": self.kind,
            "netuid": self.author.run.netuid,
            "signature": signature,
            "uid": self.author.uid,
            "version": self.author.run.version,
            "window": self.window,
        }
        return canonical(fields) + b"\n"

    def message(self, sha256: str) -> bytes:
        """Return the signed message: less than 256 bytes for every label."""
        run, uid = self.author.run, self.author.uid
        chain = run.genesis.removeprefix("0x")[:CHAIN_DIGITS]
        lines = ("tplr/v1", chain, str(run.netuid), run.version, self.kind, str(self.window), str(uid), sha256)
        return "\n".join(lines).encode()


@dataclass(frozen=True)
class Signed(Generic[DocumentT]):
    """An opened envelope with the verified signature of ``author``.

    Attributes:
        sha256: hash of the body; identifies the document.
        raw: the whole envelope, to relay or embed unchanged.
    """

    document: DocumentT
    kind: str
    window: int
    author: Author
    sha256: str
    raw: bytes


def canonical(value: Any) -> bytes:
    """Return the canonical encoding of a JSON value: sorted keys, no spaces, UTF-8, finite numbers.

    Raises:
        ValueError: it contains infinity, NaN or a lone surrogate.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def body_of(document: Wire) -> bytes:
    """Return the canonical JSON of a document, the body of its envelope. Raises as ``canonical``."""
    return canonical(document.model_dump(mode="json"))


def body_sha256(document: Wire) -> str:
    """Return the hash that identifies a document, as ``Signed.sha256``. Raises as ``canonical``."""
    return hashlib.sha256(body_of(document)).hexdigest()


def sign_document(document: Document, *, window: int, signer: Signer, kind: str | None = None) -> bytes:
    """Sign a document and return its envelope.

    Args:
        kind: default: the schema's.

    Raises:
        ValueError: the document has no canonical encoding.
        ConfigError: there is no private key.
    """
    return sign_body(body_of(document), kind=kind or document.kind, window=window, signer=signer)


def sign_body(body: bytes, *, kind: str, window: int, signer: Signer) -> bytes:
    """Sign any bytes and return their envelope. Raises ConfigError without a private key."""
    label = _Label(signer, kind, window)
    signature = signer.sign(label.message(hashlib.sha256(body).hexdigest()))
    return label.header(signature.hex()) + body


def open_document(
    raw: bytes,
    schema: type[DocumentT],
    *,
    window: int,
    author: Author,
    kind: str | None = None,
    max_bytes: int | None = None,
) -> Signed[DocumentT]:
    """Check an envelope and parse its document.

    The signature is verified before anything is parsed. Time and memory are proportional to ``len(raw)``. If a document
    has a field ``window``, ``uid`` or ``version``, its value must be that of the envelope.

    Args:
        kind: default: the schema's.
        max_bytes: maximum size of the body; default: the schema's.

    Raises:
        PayloadError: the bytes are not such a document; no other error is raised for invalid bytes.
    """
    kind = kind or schema.kind
    label = _Label(author, kind, window)
    name = f"document {kind!r} of window {window} by uid {author.uid}"
    limit = envelope_cap(schema.max_bytes if max_bytes is None else max_bytes)
    if len(raw) > limit:
        raise PayloadError(f"{name}: {len(raw)} bytes, expected at most {limit}")
    head, newline, body = raw[:MAX_HEADER_BYTES].partition(b"\n")
    body = raw[len(head) + len(newline) :]
    found = SIGNATURE.search(head)
    signature = found[1].decode() if found else "0" * 128
    if head + newline != label.header(signature):
        raise PayloadError(
            f"{name}: not a document of {author.run} signed by {author.hotkey}: its header is {head[:200]!r}"[:480]
        )
    sha256 = hashlib.sha256(body).hexdigest()
    if not hotkeys.verify(author.hotkey, label.message(sha256), bytes.fromhex(signature)):
        raise PayloadError(f"{name}: not signed by hotkey {author.hotkey}")
    document = parse_untrusted(body, schema, name)
    _check_canonical(document, body, name)
    for field, value in (("window", window), ("uid", author.uid), ("version", version_at(author.run.version, window))):
        if getattr(document, field, value) != value:
            raise PayloadError(f"{name}: its body says {field} {getattr(document, field)!r}"[:400])
    return Signed(document=document, kind=kind, window=window, author=author, sha256=sha256, raw=raw)


def envelope_cap(body_bytes: int) -> int:
    """Return the maximum size in bytes of an envelope whose body has at most ``body_bytes``."""
    return MAX_HEADER_BYTES + body_bytes


def _check_canonical(document: Wire, body: bytes, name: str) -> None:
    """Raise PayloadError unless ``body`` is the document's canonical encoding, so that one document has one hash."""
    try:
        same = body_of(document) == body
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"{name}: {type(error).__name__}: {str(error)[:200]}") from error
    if not same:
        raise PayloadError(f"{name}: its JSON is not canonical: expected sorted keys, each once, and no spaces")
