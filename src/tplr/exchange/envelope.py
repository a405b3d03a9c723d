"""The envelope of a document: who says it, in which run, about which window, and the author's signature.

An envelope is a line with a header, then the body, both in canonical JSON. A reader knows what the header must say,
except for the signature: it compares the bytes, and parses no header. A signature is over the hash of the body and
everything in the header, so a document is evidence about its author alone, and nobody can use it in another run, window
or kind. sr25519 signatures of one message differ: the hash of its body identifies a document, not that of its envelope.
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
# The window of a document that is about no window.
WHOLE_RUN = 0
SIGNATURE = re.compile(rb'"signature":"([0-9a-f]{128})"')
# In the header, and in the lines that are signed: nothing that JSON escapes, no end of line.
KIND = re.compile(r"[a-z][a-z0-9-]{0,31}")
VERSION = re.compile(r"[A-Za-z0-9._-]{1,64}")

DocumentT = TypeVar("DocumentT", bound=Document)


@dataclass(frozen=True)
class Run:
    """What a signature is valid for: a subnet, and the version of the rules that the run began with.

    Raises:
        ValueError: the version can be no part of an envelope.
    """

    netuid: int
    version: str

    def __post_init__(self) -> None:
        if not VERSION.fullmatch(self.version):
            raise ValueError(f"version {self.version!r}: expected at most 64 of A-Z, a-z, 0-9, '.', '_' and '-'")


@dataclass(frozen=True)
class Author:
    """Whose documents of a run: ``hotkey`` holds ``uid``, by the chain."""

    run: Run
    uid: int
    hotkey: str


@dataclass(frozen=True)
class Signer(Author):
    """An author who signs here, by ``Chain.sign``."""

    sign: Callable[[bytes], bytes]

    @classmethod
    def with_key(cls, run: Run, uid: int, keypair: Keypair) -> Self:
        """One whose key is here."""
        return cls(run, uid, keypair.ss58_address, lambda message: hotkeys.sign(keypair, message))


@dataclass(frozen=True)
class _Label:
    """What an envelope says of its document."""

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
        """What is signed: less than 256 bytes, whatever the label is."""
        run, uid = self.author.run, self.author.uid
        lines = ("tplr/v1", str(run.netuid), run.version, self.kind, str(self.window), str(uid), sha256)
        return "\n".join(lines).encode()


@dataclass(frozen=True)
class Signed(Generic[DocumentT]):
    """An opened envelope: its signature is that of ``author``.

    Attributes:
        sha256: of the body: identifies the document.
        raw: the whole envelope, to relay or to embed as it is.
    """

    document: DocumentT
    kind: str
    window: int
    author: Author
    sha256: str
    raw: bytes


def canonical(value: Any) -> bytes:
    """The one encoding of a JSON value: sorted keys, no spaces, UTF-8, finite numbers.

    Raises:
        ValueError: it holds infinity, NaN or a lone surrogate.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def body_of(document: Wire) -> bytes:
    """The bytes of a document in its envelope. Raises as ``canonical``."""
    return canonical(document.model_dump(mode="json"))


def body_sha256(document: Wire) -> str:
    """What identifies a document, ``Signed.sha256``. Raises as ``canonical``."""
    return hashlib.sha256(body_of(document)).hexdigest()


def sign_document(document: Document, *, window: int, signer: Signer, kind: str | None = None) -> bytes:
    """The envelope of a document.

    Args:
        kind: default: the schema's.

    Raises:
        ValueError: the document has no canonical encoding.
        ConfigError: there is no private key.
    """
    return sign_body(body_of(document), kind=kind or document.kind, window=window, signer=signer)


def sign_body(body: bytes, *, kind: str, window: int, signer: Signer) -> bytes:
    """The envelope of any bytes. Raises ConfigError without a private key."""
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

    The signature is verified before anything is parsed. Time and memory stay in proportion to ``len(raw)``. A document
    with a field ``window``, ``uid`` or ``version`` must say there what its envelope says.

    Args:
        kind: default: the schema's.
        max_bytes: of the body; default: the schema's.

    Raises:
        PayloadError: it is no such document, whatever the bytes are.
    """
    kind = kind or schema.kind
    label = _Label(author, kind, window)
    name = f"document {kind!r} of window {window} by uid {author.uid}"
    if len(raw) > envelope_cap(schema.max_bytes if max_bytes is None else max_bytes):
        raise PayloadError(f"{name}: {len(raw)} bytes are more than it may have")
    head, newline, body = raw[:MAX_HEADER_BYTES].partition(b"\n")
    body = raw[len(head) + len(newline) :]
    found = SIGNATURE.search(head)
    signature = found[1].decode() if found else "0" * 128
    if head + newline != label.header(signature):
        raise PayloadError(
            f"{name}: not signed as such in {author.run} by {author.hotkey}: its header is {head[:200]!r}"[:480]
        )
    sha256 = hashlib.sha256(body).hexdigest()
    if not hotkeys.verify(author.hotkey, label.message(sha256), bytes.fromhex(signature)):
        raise PayloadError(f"{name}: hotkey {author.hotkey} has not signed it")
    document = parse_untrusted(body, schema, name)
    _check_canonical(document, body, name)
    for field, value in (("window", window), ("uid", author.uid), ("version", version_at(author.run.version, window))):
        if getattr(document, field, value) != value:
            raise PayloadError(f"{name}: its body says {field} {getattr(document, field)!r}"[:400])
    return Signed(document=document, kind=kind, window=window, author=author, sha256=sha256, raw=raw)


def envelope_cap(body_bytes: int) -> int:
    """The size in bytes that no envelope of a body of at most ``body_bytes`` exceeds."""
    return MAX_HEADER_BYTES + body_bytes


def _check_canonical(document: Wire, body: bytes, name: str) -> None:
    """Raise PayloadError unless ``body`` is the document's one encoding: one document has one hash."""
    try:
        same = body_of(document) == body
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"{name}: {type(error).__name__}: {str(error)[:200]}") from error
    if not same:
        raise PayloadError(f"{name}: its JSON is not canonical: expected sorted keys, each once, and no spaces")
