"""Buckets, their objects, and when and why an object counts."""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

Jurisdiction = Literal["default", "eu", "fedramp"]

ACCOUNT_ID = re.compile(r"[0-9a-f]{32}")
ACCESS_KEY_ID = re.compile(r"[0-9a-f]{32}")
SECRET_ACCESS_KEY = re.compile(r"[0-9a-f]{64}")
# S3's rule for bucket names, without dots, which break TLS host names.
BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One bucket with one credential. ``repr`` shows neither half of the credential.

    Raises:
        ValueError: a part has the wrong alphabet or length. Host names are built from the account id, so it must be
            checked (a 32-character "account id" can be ``127.0.0.1:80/...``).
    """

    name: str
    account_id: str
    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    jurisdiction: Jurisdiction = "default"
    session_token: str = field(default="", repr=False)  # of a temporary credential

    def __post_init__(self) -> None:
        checks = {
            "name": (BUCKET_NAME, "a bucket name (3 to 63 of a-z, 0-9, -)"),
            "account_id": (ACCOUNT_ID, "32 characters of 0-9a-f"),
            "access_key_id": (ACCESS_KEY_ID, "32 characters of 0-9a-f"),
            "secret_access_key": (SECRET_ACCESS_KEY, "64 characters of 0-9a-f"),
        }
        for part, (pattern, expected) in checks.items():
            if not pattern.fullmatch(getattr(self, part)):
                # The value may be half of a secret, so the message does not contain it.
                raise ValueError(f"bucket {part}: expected {expected}, got {len(getattr(self, part))} characters")
        if self.jurisdiction not in ("default", "eu", "fedramp"):
            raise ValueError(f"bucket jurisdiction: expected default, eu or fedramp, got {self.jurisdiction!r}")


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """A store's description of an object, without its bytes.

    Attributes:
        last_modified: Unix seconds by the storage server's clock; S3 truncates to whole seconds.
        etag: as the server sends it, without quotes.
        metadata: user metadata; lower-case keys. Empty in listings.
    """

    key: str
    size: int
    etag: str
    last_modified: float
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def in_parts(self) -> bool:
        """Whether it was uploaded in parts, by its ETag; some servers then report the time of the upload's start."""
        return "-" in self.etag


class PageRef(NamedTuple):
    """``num_rows_per_page`` consecutive rows of one dataset config, from ``row`` on."""

    config: str
    row: int
    split: str


class Reason(StrEnum):
    """The reason why a peer's update is not part of a window. All nodes find the same one, except UNAVAILABLE."""

    NO_BUCKET = "no_bucket"  # the chain holds no valid commitment for this uid
    MISSING = "missing"  # no object when the time bound passed
    NO_COMMIT = "no_commit"  # no hash was published before the window ended
    TOO_EARLY = "too_early"
    TOO_LATE = "too_late"
    WRONG_SIZE = "wrong_size"
    HASH_MISMATCH = "hash_mismatch"  # the bytes differ from the committed hash
    MALFORMED = "malformed"
    EMPTY = "empty"  # every value is zero
    DENIED = "denied"  # the credentials on chain do not open the bucket
    EXCLUDED = "excluded"  # by electors, before the next peer list: it broke a rule, or does not help
    UNAVAILABLE = "unavailable"  # perhaps our own network: never penalized


@dataclass(frozen=True)
class UploadBounds:
    """Inclusive bounds of an object's time of writing, in Unix seconds by the chain's clock.

    ``resolution`` is that of the store's ``LastModified``, which S3 truncates to whole seconds: an object stamped ``s``
    was written in ``[s, s + resolution)``. An object is refused only if it is certainly outside the bounds, so that the
    verdict is the same on every node and for every store of this resolution.
    """

    start: float
    end: float
    resolution: float = 1.0

    def judge(self, last_modified: float) -> Reason | None:
        """Return TOO_EARLY, TOO_LATE, or None if the time is within the bounds."""
        if last_modified + self.resolution <= self.start:
            return Reason.TOO_EARLY
        if last_modified > self.end:
            return Reason.TOO_LATE
        return None


ANYTIME = UploadBounds(float("-inf"), float("inf"))
