"""The frozen records that travel between parts and between nodes."""

import hashlib
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field

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
    """What a store says of an object without giving its bytes.

    Attributes:
        last_modified: unix seconds by the storage server's clock; S3's header has a resolution of one second, cut off.
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
    """Why a peer's update is not part of a window. All but UNAVAILABLE are judged alike by every node."""

    NO_BUCKET = "no_bucket"  # the chain holds no valid commitment for this uid
    MISSING = "missing"  # nothing there when the time bound passed
    NO_COMMIT = "no_commit"  # no hash was published before the window ended
    TOO_EARLY = "too_early"
    TOO_LATE = "too_late"
    WRONG_SIZE = "wrong_size"
    HASH_MISMATCH = "hash_mismatch"  # the bytes are not those that were committed to
    MALFORMED = "malformed"
    DENIED = "denied"  # the credentials on chain do not open the bucket
    UNAVAILABLE = "unavailable"  # perhaps our own network: never punished


@dataclass(frozen=True)
class UploadBounds:
    """When an object of a window may have been written: unix seconds by the chain's clock, both ends included.

    ``resolution`` is that of the store's ``LastModified``, which S3 cuts off to whole seconds: an object stamped
    ``s`` was written in ``[s, s + resolution)``. Only what is certainly outside is refused, so that every node, and
    every store that rounds so, judges alike.
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


Uid = Annotated[int, Field(ge=0, le=65535)]
Window = Annotated[int, Field(ge=0, lt=2**53)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Blake3 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
UidText = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,4})$")]  # a key of a JSON object


class Wire(BaseModel):
    """Base of all JSON that comes out of a bucket: strict types, no unknown keys, frozen."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Sealed(Wire):
    """A record that shows whether it is as it was written.

    Attributes:
        seal: SHA-256 of all else, as written.
    """

    seal: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""

    def sealed(self) -> Self:
        """This record with the seal that fits it."""
        text = self.model_copy(update={"seal": ""}).model_dump_json()
        return self.model_copy(update={"seal": hashlib.sha256(text.encode()).hexdigest()})


class StartWindow(Wire):
    """``start_window_v{version}.json``: the first window of the run."""

    start_window: Window


class PeerList(Wire):
    """``peers_{first_effective_window}_v{version}.json``: whose updates are gathered from that window on.

    For each of ``peers`` whose update does not count, the next of ``reserve_peers`` whose update does fills in.
    """

    peers: tuple[Uid, ...] = Field(max_length=4096)
    reserve_peers: tuple[Uid, ...] = Field(default=(), max_length=4096)
    initial_selection: bool
    sync_window: Window
    first_effective_window: Window


class DebugReport(Wire):
    """``debug-{window}-{uid}-v{version}.json``: what a node holds after it applied a window.

    ``fingerprint`` hashes entries whose positions nobody knows before the window; ``proof`` others, whose positions
    are this uid's alone, so that it can't be copied; ``digest`` the whole model, at intervals (empty between them).
    """

    window: Window
    uid: Uid
    fingerprint: Sha256
    proof: Sha256
    digest: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
    included: dict[UidText, Sha256] = Field(max_length=4096)
    skipped: dict[UidText, Reason] = Field(max_length=4096)


Loss = Annotated[float, Field(allow_inf_nan=False)]


class Evaluation(Wire):
    """What one miner's update does to the loss: means in nats a token, before and after it is applied alone.

    Attributes:
        own_after, random_after: None if the loss was not finite.
        own_error, random_error: standard errors of the mean difference, from differences sequence by sequence.
        own_sequences, random_sequences: how many were read of each; the random ones are the same for all miners.
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
    """What a validator saw of one miner in one window. What it could not see is None, and moves nothing.

    Attributes:
        listed: on the window's peer list.
        chosen: drawn for evaluation.
        verdict: "valid", or a ``Reason``; None if its update was not asked for.
        own_pages: whether the update names the pages that this uid was given.
        evaluation: None if not chosen, not valid, or not measured by this validator's own fault.
        behind: steps behind by its last true report; ``OUT_OF_SYNC`` if it reports another model, or none.
        copied: rule that names what its update repeats ("copied_indices", "stale"), "" if nothing.
        copied_from: uid of the update that it repeats.
        norm_ratio: norm of its update over the window's median.
        active: uploaded lately.
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
    """All that a validator keeps of one miner.

    Attributes:
        hotkey: a uid that changes hands starts anew.
        mu, sigma: rating.
        gradient_score: of the last evaluation.
        gain: moving average of how near gradient scores came to the upper third of their matches, in [0, 1].
        binary: moving average of the binary indicator, in [-1, 1].
        sync: in [0, 1], of the last report seen.
        evaluations, last_evaluated: how many, hardened also updates that were refused; window of the last (-1: none).
        waiting: windows since it was last evaluated, plus one.
        inactive: windows in a row without an upload.
        signs: of the last gradient scores, oldest first: 1, 0 (not told from zero) or -1.
        multipliers: by rule, below 1 for those that struck and are not recovered from.
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
    signs: tuple[int, ...] = ()
    multipliers: dict[str, float] = Field(default_factory=dict)
    base: float = 0.0
    final: float = 0.0


class WeightsSet(Wire):
    """Weights that a validator set on chain in ``block``, and its weights then in force: where the chain seals weights
    for a while, those that it had set before."""

    block: int
    intended: dict[str, float]
    on_chain: dict[str, float]


class ScoreReport(Sealed):
    """``scores-{window}-{uid}-v{version}.json``: what a validator saw in a window, and what follows from it.

    The standings follow from those of the report before, the sightings and ``hparams`` alone.

    Attributes:
        random_pages: digest of the page list that all were measured on; "" if nobody was.
        faults: what went wrong on the validator's own side.
        sightings, standings, struck: by uid; ``struck`` names the rules that struck in this window.
        weights: by uid, as they would be set now.
        weights_set: the last ones that were.
    """

    window: Window
    uid: Uid
    profile: Literal["documented", "hardened"]
    random_pages: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
    faults: tuple[str, ...]
    observations: dict[str, PeerObservation] = Field(max_length=4096)
    peer_scores: dict[str, PeerScore] = Field(max_length=4096)
    struck: dict[str, tuple[str, ...]] = Field(max_length=4096)
    weights: dict[str, float] = Field(max_length=4096)
    weights_set: WeightsSet | None
