"""Frozen records that are passed between packages and between nodes."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar, Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, Strict, model_validator

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


Uid = Annotated[int, Field(ge=0, le=65535)]
Window = Annotated[int, Field(ge=0, lt=2**53)]
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


class StartWindow(Document):
    """``start_window_v{version}.json``: the first window of the run."""

    kind: ClassVar[str] = "start-window"

    start_window: Window


class PeerList(Document):
    """``peers_{first_effective_window}_v{version}.json``: the uids whose updates are gathered from that window on.

    Each of ``peers`` without a valid update is replaced by the next of ``reserve_peers`` with one. Updates of uids on
    ``probation`` are measured, but not applied.
    """

    kind: ClassVar[str] = "peers"

    peers: Items[Uid] = Field(max_length=4096)
    reserve_peers: Items[Uid] = Field(default=(), max_length=4096)
    probation: Items[Uid] = Field(default=(), max_length=4096)
    initial_selection: bool
    sync_window: Window
    first_effective_window: Window


class Software(Document):
    """``software-{uid}.json``: a node's software versions, written at its start.

    Attributes:
        package: version of this package.
        spec_version: newest version of the run's rules that the node knows.
        since: first window under these rules; 0 if the run began with them.
    """

    kind: ClassVar[str] = "software"
    max_bytes: ClassVar[int] = 2**10

    uid: Uid
    package: Annotated[str, Field(pattern=r"^[0-9]{1,6}(\.[0-9]{1,6}){1,3}$")]
    spec_version: Annotated[int, Field(ge=0, lt=2**31)]
    since: Window


class DebugReport(Document):
    """``debug-{window}-{uid}-v{version}.json``: a node's report after it applied a window.

    Attributes:
        fingerprint: hash of entries at positions that are unpredictable before the window ends.
        outer_fingerprint: hash of the outer scheme's state that is equal on all nodes: norm caps and outer momentum.
        proof: hash of entries at positions specific to this uid, so that other uids can't copy it.
        digest: hash of the whole model, at intervals; empty in other windows.
        included: SHA-256 of each applied update, by uid.
        skipped: reason for each other peer, by uid.
    """

    kind: ClassVar[str] = "debug"

    window: Window
    uid: Uid
    fingerprint: Sha256
    outer_fingerprint: Sha256
    proof: Sha256
    digest: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
    included: Annotated[dict[UidText, Sha256], FailFast()] = Field(max_length=4096)
    skipped: Annotated[dict[UidText, ReasonText], FailFast()] = Field(max_length=4096)


Loss = Annotated[float, Field(allow_inf_nan=False)]
PRODUCT_DECIMALS, PRODUCT_LIMIT = 6, 1e9
Product = Annotated[float, Field(ge=-PRODUCT_LIMIT, le=PRODUCT_LIMIT)]


class LossChange(Wire):
    """Effect of an update on the loss on some sequences: means in nats per token.

    Attributes:
        before, after: mean loss before and after a trial step along this update only; ``after`` is None if the loss was
            not finite.
        error: standard error of the mean difference over sequences.
        sequences: number of sequences.
    """

    before: Loss
    after: Loss | None
    error: Loss
    sequences: int


class Evaluation(Wire):
    """Effect of one miner's update on the loss.

    Attributes:
        assigned: on the miner's assigned pages; None if not measured.
        held_out: on held-out pages, which are the same for all miners; if ``assigned`` is None, on a quarter of them.
    """

    assigned: LossChange | None
    held_out: LossChange


class PeerObservation(Wire):
    """A validator's observation of one miner in one window. A field that it could not observe is None.

    Attributes:
        listed: whether it is on the window's peer list.
        probation: whether it is on probation: measured, but not applied.
        included: whether its update is in the window's included set.
        sampled: whether it was sampled for evaluation.
        verdict: "valid", or a ``Reason``; None if its update was not requested.
        assigned_pages: whether the update names the pages assigned to this uid.
        assigned_products: products of the own-pages test (``scoring/own_pages.py``) of all updates of the window's
            ``Alignment`` with the gradient on the pages assigned to this uid. Empty if it was not tested.
        evaluation: losses; None if not measured. They are measured for only some of the sampled miners, unless there
            are too few updates for the own-pages test.
        behind: steps behind, by its last valid proof; ``OUT_OF_SYNC`` if it reports another model, or none; ``UNREAD``
            if its bucket refused this validator, or did not answer.
        copied: documented profile: the rule that found a copy ("copied_indices"); "" if none.
        copied_from: documented profile: uid of the copied update.
        active: documented profile: whether the uid uploaded recently.
    """

    hotkey: str
    listed: bool = False
    probation: bool = False
    included: bool = False
    sampled: bool = False
    verdict: str | None = None
    assigned_pages: bool | None = None
    assigned_products: Items[Product] = ()
    evaluation: Evaluation | None = None
    behind: int | None = None
    copied: str | None = None
    copied_from: int | None = None
    active: bool | None = None


VALID = "valid"
OUT_OF_SYNC = -1
UNREAD = -2  # counts as OUT_OF_SYNC


class Alignment(Wire):
    """Products of all measured updates with the validator's gradient g on held-out pages, and with each other.

    d is the step of an update as it is applied. ``scale`` is common to the window: it makes the median of ``<d, d>``
    over the included updates 1 (``training/alignment.py``). Numbers are rounded by ``published``.

    Attributes:
        uids: ascending.
        products: ``<g, d_i> / (|g| * scale)`` by uid. Predicted gains follow from these and from those of the tests.
        norms: L2 norm of all values sent by the uid.
        gram: ``<d_i, d_j> / scale**2``, upper triangle with diagonal, row by row.
        largest_norm: the largest norm that honest training can have at this step; None if the scheme has no bound.
        loss: mean loss on the held-out pages without any update, nats per token; None in reports of earlier versions,
            which an audit refuses.
    """

    uids: Items[Uid] = Field(max_length=4096)
    products: Items[Product] = Field(max_length=4096)
    norms: Items[float] = Field(max_length=4096)
    gram: Items[Product]
    largest_norm: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    loss: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        count = len(self.uids)
        if list(self.uids) != sorted({*self.uids}):
            raise ValueError("uids: expected ascending ones")
        if not len(self.products) == len(self.norms) == count or len(self.gram) != count * (count + 1) // 2:
            raise ValueError(f"expected {count} products and norms, and {count * (count + 1) // 2} entries of gram")
        return self


def published(numbers: Iterable[float]) -> tuple[float, ...]:
    """Round and clip inner products for publication and scoring: ``PRODUCT_DECIMALS``, ``PRODUCT_LIMIT``."""
    return tuple(round(max(-PRODUCT_LIMIT, min(PRODUCT_LIMIT, one)), PRODUCT_DECIMALS) for one in numbers)


class Evidence(Wire):
    """A validator's observations of one window. Scores are a pure function of evidence (``scoring/board.py``).

    Attributes:
        observations: by uid.
        alignment: None if no update was measured.
    """

    window: Window
    observations: Annotated[dict[UidText, PeerObservation], FailFast()] = Field(max_length=4096)
    alignment: Alignment | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        _check_products(self.observations, self.alignment)
        return self


def _check_products(observations: Mapping[str, PeerObservation], alignment: Alignment | None) -> None:
    """Raise ValueError unless every own-pages test has a product for each measured update."""
    count = len(alignment.uids) if alignment else 0
    if any(len(one.assigned_products) not in (0, count) for one in observations.values()):
        raise ValueError(f"assigned_products: expected {count}, one for each measured update")


class PeerScore(Wire):
    """A validator's score of one miner by the evidence of the last windows.

    Attributes:
        hotkey: the scored hotkey; evidence about another hotkey of the uid does not count.
        measured: number of windows in which its update was measured, applied or on probation.
        mean, error: mean cosine of its step and the gradients over these windows, and the standard error of the mean.
        presence: share of the windows, without blank ones, that count for it.
        credit: its gain beyond chance over all windows, times the part of it that is its own (``scoring/credit.py``).
        merit: ``final`` as if every measured update had been included, without windows in which its update was not
            requested. The peer list is ranked by it.
        tests: number of own-pages tests.
        own_pages: in [0, 1], from the mean of these tests.
        calibration: in [0, 1], the part of its predicted gains that shows on held-out pages, compared with the other
            miners' (``scoring/calibration.py``).
        final: ``credit * own_pages * calibration``.
    """

    hotkey: str
    measured: int = 0
    mean: float = 0.0
    error: float = 0.0
    presence: float = 0.0
    credit: float = 0.0
    merit: float = 0.0
    tests: int = 0
    own_pages: float = 0.0
    calibration: float = 1.0
    final: float = 0.0


class DocumentedScore(Wire):
    """A validator's score of one miner in the documented profile.

    Attributes:
        hotkey: the scored hotkey; a uid with a new hotkey starts from zero.
        mu, sigma: the rating's mean and uncertainty.
        gradient_score: score of the last evaluation.
        binary: moving average of the binary indicator, in [-1, 1].
        sync: sync score of the last report that was read, in [0, 1].
        evaluations: number of evaluations.
        last_evaluated: window of the last evaluation; -1 for none.
        waiting: number of windows since the last evaluation, plus one.
        inactive: number of consecutive windows without an upload.
        multipliers: those below 1, by rule.
        base: rating times binary times sync.
        final: base times all multipliers.
    """

    hotkey: str
    mu: float = 25.0
    sigma: float = 25.0 / 3.0
    gradient_score: float = 0.0
    binary: float = 0.0
    sync: float = 1.0
    evaluations: int = 0
    last_evaluated: int = -1
    waiting: int = 1
    inactive: int = 0
    multipliers: Annotated[dict[str, float], FailFast()] = Field(default_factory=dict)
    base: float = 0.0
    final: float = 0.0


class WeightsSet(Wire):
    """Weights that a validator set on chain in ``block``, and its weights in force after that.

    If the chain seals weights for some epochs, ``on_chain`` contains earlier ones.
    """

    block: int
    intended: Annotated[dict[str, float], FailFast()]
    on_chain: Annotated[dict[str, float], FailFast()]


class ScoreReport(Sealed):
    """``scores-{window}-{uid}-v{version}.json``: a validator's observations of a window, and the resulting scores.

    ``peer_scores`` depend only on this report's ``evidence``, the earlier reports in ``follows_from``, and ``hparams``.

    Attributes:
        held_out_pages: digest of the held-out page list; "" if no miner was measured.
        faults: failures on the validator's own side.
        observations, alignment: see ``Evidence``.
        follows_from: windows of the earlier reports, ascending.
        peer_scores: by uid.
        struck: rules that were broken in this window, by uid.
        weights: weights by uid, as they would be set now.
        weights_set: the weights that were last set.
        salt: random, so that the report can't be guessed from its hash while it is sealed; "" if it is not sealed.
    """

    kind: ClassVar[str] = "scores"
    max_bytes: ClassVar[int] = 2**20

    window: Window
    uid: Uid
    profile: Literal["documented", "hardened"]
    held_out_pages: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
    faults: Items[str]
    observations: Annotated[dict[UidText, PeerObservation], FailFast()] = Field(max_length=4096)
    alignment: Alignment | None
    follows_from: Items[Window] = Field(max_length=4096)
    peer_scores: Annotated[dict[UidText, PeerScore | DocumentedScore], FailFast()] = Field(max_length=4096)
    struck: Annotated[dict[UidText, Items[str]], FailFast()] = Field(max_length=4096)
    weights: Annotated[dict[UidText, float], FailFast()] = Field(max_length=4096)
    weights_set: WeightsSet | None
    salt: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        _check_products(self.observations, self.alignment)
        return self

    @property
    def evidence(self) -> Evidence:
        """The evidence that the scores follow from, together with the earlier reports."""
        return Evidence(window=self.window, observations=self.observations, alignment=self.alignment)

    @property
    def held_out_loss(self) -> float | None:
        """Mean loss on the held-out pages before the window, nats per token; None if no update was measured.

        In reports of earlier versions, and with the documented profile, it is that of one evaluated update.
        """
        if self.alignment and self.alignment.loss is not None:
            return self.alignment.loss
        return next((one.evaluation.held_out.before for one in self.observations.values() if one.evaluation), None)


class ScoreSeal(Document):
    """``scores-seal-{window}-{uid}-v{version}.json``: commits to a score report that is published later.

    Attributes:
        sha256: hash of the report's bytes.
        weights_due: window in which the next weights are due, which follow from the report.
    """

    kind: ClassVar[str] = "scores-seal"

    window: Window
    uid: Uid
    sha256: Sha256
    weights_due: Window


class TaskResult(Wire):
    """One task's result of an evaluation.

    Attributes:
        task_version: version of the task's definition, as numbered by its author.
        fewshot: number of examples in each prompt.
        metrics: by name and filter, as lm-evaluation-harness names them.
        samples: number of questions.
    """

    task_version: Annotated[str, Field(max_length=64)]
    fewshot: Annotated[int, Field(ge=0, lt=2**31)]
    metrics: Annotated[dict[str, float], FailFast()] = Field(max_length=256)
    samples: Annotated[int, Field(ge=0, lt=2**53)]


class HeldOutLoss(Wire):
    """A model's loss on held-out pages.

    Attributes:
        pages: digest of the page list.
        nats_per_token: mean over all predictions.
        bits_per_byte: loss of the predictions of text, without special tokens, per byte of that text in UTF-8.
        tokens: number of predictions.
        bytes: size of the predicted text.
    """

    pages: Sha256
    nats_per_token: Loss
    bits_per_byte: Loss
    tokens: Annotated[int, Field(gt=0, lt=2**53)]
    bytes: Annotated[int, Field(gt=0, lt=2**53)]


class EvaluationResult(Sealed):
    """``evaluation-{window}-{uid}-v{version}.json``: an evaluation of a run's model on held-out pages and tasks.

    Attributes:
        window: the last window that the model has applied.
        uid: of the evaluator; None without a uid.
        version: of the run's rules, as in object keys.
        global_step: number of outer steps applied.
        digest: of the model's float32 weights, as in nodes' reports.
        precision: of the forward passes.
        tasks: by name.
        command: the exact command line.
        tools: versions of the programs that computed it, by name.
    """

    kind: ClassVar[str] = "evaluation"
    max_bytes: ClassVar[int] = 2**20

    window: Window
    uid: Uid | None = None
    version: Annotated[str, Field(max_length=64)]
    global_step: Window
    digest: Sha256
    precision: Literal["float32", "bfloat16"]
    held_out: HeldOutLoss
    tasks: Annotated[dict[str, TaskResult], FailFast()] = Field(max_length=1024)
    command: Annotated[str, Field(max_length=8192)]
    tools: Annotated[dict[str, str], FailFast()] = Field(max_length=64)
