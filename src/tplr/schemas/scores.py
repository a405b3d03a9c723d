"""What a validator observes and how it scores: evidence, scores and score reports."""

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import FailFast, Field, model_validator

from tplr.schemas.wire import Document, Items, Loss, Sealed, Sha256, Uid, UidText, Window, Wire

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
        listed: whether the window's set has its update, or a reason why not: it is on the peer list, or in the reserve.
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

    d is the step of an update as it is applied, and ``scale`` the length of the longest step that any update could
    make in the window (``training/alignment.py``). Products are rounded by ``published``.

    Attributes:
        uids: ascending.
        products: ``<g, d_i> / (|g| * scale)`` by uid. Predicted gains follow from these and from those of the tests.
        middle: ``<h, d_i> / (|g| * scale)``, where h is the gradient on the first quarter of the batches, in the middle
            of the window's step. Empty if the window has no included update.
        norms: L2 norm of all values sent by the uid.
        gram: ``<d_i, d_j> / scale**2``, upper triangle with diagonal, row by row.
        unit: a product times it is in proportion to the loss that the step gains if it is taken alone; with SparseLoCo
            it is this loss in nats, to first order. 1 in reports of earlier versions, which an audit refuses.
        largest_norm: the largest norm that honest training can have at this step; None in DeMo's reports of earlier
            versions, which an audit refuses.
        loss: mean loss on the held-out pages without any update, nats per token; None in reports of earlier versions,
            which an audit refuses.
    """

    uids: Items[Uid] = Field(max_length=4096)
    products: Items[Product] = Field(max_length=4096)
    middle: Items[Product] = Field(default=(), max_length=4096)
    norms: Items[float] = Field(max_length=4096)
    gram: Items[Product]
    unit: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    largest_norm: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    loss: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        count = len(self.uids)
        if list(self.uids) != sorted({*self.uids}):
            raise ValueError("uids: expected ascending ones")
        if not len(self.products) == len(self.norms) == count or len(self.gram) != count * (count + 1) // 2:
            raise ValueError(f"expected {count} products and norms, and {count * (count + 1) // 2} entries of gram")
        if len(self.middle) not in (0, count):
            raise ValueError(f"middle: expected {count} products, or none")
        return self


def published(numbers: Iterable[float]) -> tuple[float, ...]:
    """Round and clip inner products for publication and scoring: ``PRODUCT_DECIMALS``, ``PRODUCT_LIMIT``.

    NaN becomes the least one, so that it is never paid.
    """
    known = (-PRODUCT_LIMIT if math.isnan(one) else one for one in numbers)
    return tuple(round(max(-PRODUCT_LIMIT, min(PRODUCT_LIMIT, one)), PRODUCT_DECIMALS) for one in known)


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
        tests: number of own-pages tests, with those that are missing by the validator's own fault.
        own_pages: in [0, 1], from the mean of these tests.
        calibration: in [0, 1], the part of its predicted gains that shows on held-out pages and that its work explains,
            compared with the other miners' (``scoring/calibration.py``).
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
