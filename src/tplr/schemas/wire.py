"""Bases and field types of all JSON documents."""

import hashlib
from typing import Annotated, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, Strict

from tplr.schemas.objects import Reason

Uid = Annotated[int, Field(ge=0, le=65535)]
Window = Annotated[int, Field(ge=0, lt=2**53)]
Loss = Annotated[float, Field(allow_inf_nan=False)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Blake3 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# A key of a JSON object: a uid, 0 to 65535.
UidText = Annotated[
    str, Field(pattern=r"^(0|[1-9][0-9]{0,3}|[1-5][0-9]{4}|6([0-4][0-9]{3}|5([0-4][0-9]{2}|5([0-2][0-9]|3[0-5]))))$")
]


ItemT = TypeVar("ItemT")
# A JSON array whose validation stops at the first wrong entry: errors about a million entries take gigabytes.
Items = Annotated[tuple[ItemT, ...], FailFast(), Strict(False)]
ReasonText = Annotated[Reason, Strict(False)]


class Wire(BaseModel):
    """Base of all JSON documents and their parts: strict types, finite numbers, no unknown keys, frozen.

    Parsed JSON is validated as Python objects (``untrusted.py``), so arrays are ``Items`` and enumerations not strict.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Document(Wire):
    """Base of whole documents, each in an envelope with its author's signature (``exchange/envelope.py``).

    Attributes:
        kind: stored in the envelope, so that a document is never accepted as one of another kind.
        max_bytes: maximum size of a document; enough for 256 uids.
    """

    kind: ClassVar[str]
    max_bytes: ClassVar[int] = 2**16


class Sealed(Document):
    """A document with a checksum.

    Attributes:
        seal: SHA-256 of the document's JSON with an empty seal.
    """

    seal: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""

    def sealed(self) -> Self:
        """Return this document with its seal."""
        text = self.model_copy(update={"seal": ""}).model_dump_json()
        return self.model_copy(update={"seal": hashlib.sha256(text.encode()).hexdigest()})
