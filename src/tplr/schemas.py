"""Frozen records that pass between packages and between nodes."""

import hashlib
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field

Jurisdiction = Literal["default", "eu", "fedramp"]

ACCOUNT_ID = re.compile(r"[0-9a-f]{32}")
ACCESS_KEY_ID = re.compile(r"[0-9a-f]{32}")
SECRET_ACCESS_KEY = re.compile(r"[0-9a-f]{64}")
# S3's own rule for bucket names, without the dots that break TLS host names.
BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One bucket with one credential. ``repr`` shows neither half of the credential.

    Raises:
        ValueError: a part has the wrong alphabet or length. Host names are built from the account id, so nothing
            unchecked may get in here (a 32-character "account id" can be ``127.0.0.1:80/...``).
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
                # The value itself may be half of a secret: say where it is wrong, not what it is.
                raise ValueError(f"bucket {part}: expected {expected}, got {len(getattr(self, part))} characters")
        if self.jurisdiction not in ("default", "eu", "fedramp"):
            raise ValueError(f"bucket jurisdiction: expected default, eu or fedramp, got {self.jurisdiction!r}")


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """A store's description of an object, without its bytes.

    Attributes:
        last_modified: unix seconds by the storage server's clock; S3 truncates to whole seconds.
        etag: as the server gives it, without quotes.
        metadata: user metadata; lower-case keys. Empty in listings.
    """

    key: str
    size: int
    etag: str
    last_modified: float
    metadata: dict[str, str] = field(default_factory=dict)


class PageRef(NamedTuple):
    """``num_rows_per_page`` consecutive rows of one dataset config, from ``row`` on."""

    config: str
    row: int
    split: str


class Reason(StrEnum):
    """Why a peer's update is not part of a window. Every node finds the same reason, except UNAVAILABLE."""

    NO_BUCKET = "no_bucket"  # the chain holds no valid commitment for this uid
    MISSING = "missing"  # no object when the time bound passed
    NO_COMMIT = "no_commit"  # no hash was published before the window ended
    TOO_EARLY = "too_early"
    TOO_LATE = "too_late"
    WRONG_SIZE = "wrong_size"
    HASH_MISMATCH = "hash_mismatch"  # the bytes differ from the committed hash
    MALFORMED = "malformed"
    DENIED = "denied"  # the credentials on chain do not open the bucket
    UNAVAILABLE = "unavailable"  # perhaps our own network: never penalized


@dataclass(frozen=True)
class UploadBounds:
    """Bounds of an object's time of writing: unix seconds by the chain's clock, inclusive.

    ``resolution`` is that of the store's ``LastModified``, which S3 truncates to whole seconds: an object stamped ``s``
    was written in ``[s, s + resolution)``. Only an object certainly outside the bounds is refused, so that the verdict
    is the same on every node and for every store of this resolution.
    """

    start: float
    end: float
    resolution: float = 1.0

    def judge(self, last_modified: float) -> Reason | None:
        """TOO_EARLY, TOO_LATE, or None if the object counts."""
        if last_modified + self.resolution <= self.start:
            return Reason.TOO_EARLY
        if last_modified > self.end:
            return Reason.TOO_LATE
        return None


ANYTIME = UploadBounds(float("-inf"), float("inf"))


Uid = Annotated[int, Field(ge=0, le=65535)]
Window = Annotated[int, Field(ge=0, lt=2**53)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Blake3 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# A key of a JSON object: a uid, 0 to 65535.
UidText = Annotated[
    str, Field(pattern=r"^(0|[1-9][0-9]{0,3}|[1-5][0-9]{4}|6([0-4][0-9]{3}|5([0-4][0-9]{2}|5([0-2][0-9]|3[0-5]))))$")
]


class Wire(BaseModel):
    """Base of all JSON documents in buckets: strict types, finite numbers, no unknown keys, frozen.

    Attributes:
        max_bytes: a larger object is no such document. Enough for 256 uids.
    """

    max_bytes: ClassVar[int] = 2**16

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Sealed(Wire):
    """A document with a checksum.

    Attributes:
        seal: SHA-256 of the document's JSON with an empty seal.
    """

    seal: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""

    def sealed(self) -> Self:
        """This document with its seal."""
        text = self.model_copy(update={"seal": ""}).model_dump_json()
        return self.model_copy(update={"seal": hashlib.sha256(text.encode()).hexdigest()})


class StartWindow(Wire):
    """``start_window_v{version}.json``: the first window of the run."""

    start_window: Window


class PeerList(Wire):
    """``peers_{first_effective_window}_v{version}.json``: the uids whose updates are gathered from that window on.

    Each of ``peers`` without a valid update is replaced by the next of ``reserve_peers`` with one.
    """

    peers: Annotated[tuple[Uid, ...], FailFast()] = Field(max_length=4096)
    reserve_peers: Annotated[tuple[Uid, ...], FailFast()] = Field(default=(), max_length=4096)
    initial_selection: bool
    sync_window: Window
    first_effective_window: Window


class DebugReport(Wire):
    """``debug-{window}-{uid}-v{version}.json``: a node's report after it applied a window.

    Attributes:
        fingerprint: hash of entries whose positions nobody knows before the window ends.
        proof: hash of entries at positions of this uid alone, so that nobody can copy it.
        digest: hash of the whole model, at intervals; empty between them.
        included: SHA-256 of each applied update, by uid.
        skipped: reason for each other peer, by uid.
    """

    window: Window
    uid: Uid
    fingerprint: Sha256
    proof: Sha256
    digest: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
    included: Annotated[dict[UidText, Sha256], FailFast()] = Field(max_length=4096)
    skipped: Annotated[dict[UidText, Reason], FailFast()] = Field(max_length=4096)


Loss = Annotated[float, Field(allow_inf_nan=False)]


class Evaluation(Wire):
    """Effect of one miner's update on the loss: means in nats per token, before and after a trial step along it alone.

    Attributes:
        own_*: on the pages that the miner was assigned.
        random_*: on held-out pages, the same for all miners.
        own_after, random_after: None if the loss was not finite.
        own_error, random_error: standard errors of the mean difference over sequences.
        own_sequences, random_sequences: number of sequences.
    """

    own_before: Loss
    own_after: Loss | None
    own_error: Loss
    own_sequences: int
    random_before: Loss
    random_after: Loss | None
    random_error: Loss
    random_sequences: int


class PeerObservation(Wire):
    """A validator's observation of one miner in one window. A field that it could not observe is None, and changes
    nothing.

    Attributes:
        listed: whether it is on the window's peer list.
        chosen: whether it was sampled for evaluation.
        verdict: "valid", or a ``Reason``; None if its update was not requested.
        own_pages: whether the update names the pages that this uid was assigned.
        evaluation: None if not chosen, not valid, or not measured by this validator's own fault.
        behind: steps behind, by its last true report; ``OUT_OF_SYNC`` if it reports another model, or none.
        copied: rule for the update that it repeats ("copied_indices", "stale"); "" if none.
        copied_from: uid of that update.
        norm_ratio: norm of its update over the window's median.
        active: whether it uploaded recently.
    """

    hotkey: str
    listed: bool = False
    chosen: bool = False
    verdict: str | None = None
    own_pages: bool | None = None
    evaluation: Evaluation | None = None
    behind: int | None = None
    copied: str | None = None
    copied_from: int | None = None
    norm_ratio: Loss | None = None
    active: bool | None = None


VALID = "valid"
OUT_OF_SYNC = -1


class PeerScore(Wire):
    """A validator's score of one miner.

    Attributes:
        hotkey: a uid with a new hotkey starts again.
        mu, sigma: rating.
        gradient_score: of the last evaluation.
        gain: moving average of ``measures.gain``, in [0, 1].
        binary: moving average of the binary indicator, in [-1, 1].
        sync: in [0, 1], of the last report seen.
        evaluations: number of evaluations; hardened, with refused updates.
        last_evaluated: window of the last one; -1 for none.
        waiting: windows since the last evaluation, plus one.
        inactive: consecutive windows without an upload.
        signs: of the last gradient scores, oldest first: 1, 0 (within chance of zero) or -1.
        multipliers: by rule, those below 1.
        base: rating times gain (hardened) times binary times sync.
        final: base times all multipliers.
    """

    hotkey: str
    mu: float = 25.0
    sigma: float = 25.0 / 3.0
    gradient_score: float = 0.0
    gain: float = 0.0
    binary: float = 0.0
    sync: float = 1.0
    evaluations: int = 0
    last_evaluated: int = -1
    waiting: int = 1
    inactive: int = 0
    signs: Annotated[tuple[int, ...], FailFast()] = ()
    multipliers: Annotated[dict[str, float], FailFast()] = Field(default_factory=dict)
    base: float = 0.0
    final: float = 0.0


class WeightsSet(Wire):
    """Weights that a validator set on chain in ``block``, and its weights in force then.

    Where the chain seals weights for a while, ``on_chain`` holds the ones set before.
    """

    block: int
    intended: Annotated[dict[str, float], FailFast()]
    on_chain: Annotated[dict[str, float], FailFast()]


class ScoreReport(Sealed):
    """``scores-{window}-{uid}-v{version}.json``: a validator's observations of a window, and the scores that follow.

    ``peer_scores`` follow from those of the report before, ``observations`` and ``hparams`` alone.

    Attributes:
        random_pages: digest of the held-out page list; "" if nobody was measured.
        faults: failures on the validator's own side.
        observations, peer_scores: by uid.
        struck: rules that struck in this window, by uid.
        weights: by uid, as they would be set now.
        weights_set: the last ones that were set.
    """

    max_bytes: ClassVar[int] = 2**20

    window: Window
    uid: Uid
    profile: Literal["documented", "hardened"]
    random_pages: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
    faults: Annotated[tuple[str, ...], FailFast()]
    observations: Annotated[dict[str, PeerObservation], FailFast()] = Field(max_length=4096)
    peer_scores: Annotated[dict[str, PeerScore], FailFast()] = Field(max_length=4096)
    struck: Annotated[dict[str, tuple[str, ...]], FailFast()] = Field(max_length=4096)
    weights: Annotated[dict[str, float], FailFast()] = Field(max_length=4096)
    weights_set: WeightsSet | None
