"""A synthetic run of any length: records, neurons and events, explained by the validator's own code."""

import random
from dataclasses import dataclass

from tplr.chain import Neuron
from tplr.node.audit_stamps import AuditStamp
from tplr.node.window_time import PHASES
from tplr.page.assemble import assemble
from tplr.page.document import Checkpoint, Evaluation, Payment, Run, RunDocument
from tplr.page.history import MinerScore, WindowRecord
from tplr.page.own_events import NodeEvents
from tplr.schemas import (
    Alignment,
    LossChange,
    PeerObservation,
    PeerScore,
    Reason,
    ScoreReport,
    WeightsSet,
    published,
)
from tplr.schemas import Evaluation as MeasuredLosses
from tplr.scoring.board import CreditShares, pay
from tplr.scoring.calibration import Calibration
from tplr.scoring.credit import Credit
from tplr.scoring.explain import explain_rows

FIRST = 40
POWER = 2.0
WINDOW_SECONDS = 1200.0
REASONS = (Reason.MISSING, Reason.TOO_LATE, Reason.NO_COMMIT, Reason.UNAVAILABLE, Reason.MALFORMED)
RUN = Run(
    network="finney",
    netuid=3,
    version="1",
    profile="hardened",
    scheme="sparseloco",
    model_type="llama",
    parameters=1_073_741_824,
    validator=0,
    start_window=FIRST,
    block=123_456,
    window_seconds=WINDOW_SECONDS,
    pay_windows=20,
    sequence_length=2048,
)


@dataclass
class _Miner:
    """A miner's skill, and its last predicted gains (None: its update did not count)."""

    uid: int
    skill: float
    reliability: float
    gains: list[float | None]


def synthetic_document(windows: int, miners: int, *, seed: int = 1, names: dict[int, str] | None = None) -> RunDocument:
    """Return the document of a synthetic run; ``names`` are those of nodes by uid. Miner 3, if it exists, diverges."""
    draw = random.Random(seed)
    crew = [_Miner(uid, draw.uniform(0.12, 0.35), draw.uniform(0.9, 1.0), []) for uid in range(1, miners + 1)]
    records = {FIRST + at: _record(draw, crew, at, windows) for at in range(windows)}
    neurons = [Neuron(0, "5Validator", "cold", 1e5, True, 0)]
    neurons += [Neuron(one.uid, f"5Miner{one.uid:042d}", "cold", 100.0, False, 0) for one in crew]
    checkpoints = [
        Checkpoint(window=window, uid=0, bytes=12 * 2**30, kept=window > FIRST + windows - 100)
        for window in range(FIRST + 49, FIRST + windows, 50)
    ]
    audits = [AuditStamp(first=FIRST, last=FIRST + 1, validator=0, agrees=True, text="included sets and scores")]
    evaluations = [
        Evaluation(
            window=FIRST + at, task=task, metric=metric, value=start + change * at / windows, error=error, uid=uid
        )
        for at in range(9, windows, 10)
        for task, metric, start, change, error, uid in (
            ("held-out pages", "bits per byte", 2.4, -1.3, None, 0),
            ("arithmetic", "acc", 0.25, 0.4, 0.02, None),
        )
    ]
    events = [_events(draw, one, windows, (names or {}).get(one.uid, f"miner-{one.uid}")) for one in crew]
    return assemble(RUN, records, checkpoints, neurons, evaluations=evaluations, events=events, audits=audits)


def _record(draw: random.Random, crew: list[_Miner], at: int, windows: int) -> WindowRecord:
    window, loss = FIRST + at, 10.5 - 7.4 * (1 - (1 - at / windows) ** 6) + draw.gauss(0, 0.02)
    included, skipped, struck = [], {}, {}
    for one in crew:
        there = draw.random() < one.reliability
        one.gains = [*one.gains, one.skill + draw.gauss(0, 0.05) if there else None][-20:]
        if there:
            included.append(one.uid)
        else:
            skipped[one.uid] = draw.choice(REASONS)
            if skipped[one.uid] is Reason.MALFORMED:
                struck[str(one.uid)] = ("malformed",)
    report = _report(draw, crew, window, loss, skipped, struck)
    shares = _shares(report)
    models = {one.uid: f"{window:012x}" for one in crew} | {0: f"{window:012x}"}
    if at in (windows // 2, windows // 2 + 1) and 3 in models:
        models[3] = "f" * 12
    return WindowRecord(
        window=window,
        start=1.79e9 + WINDOW_SECONDS * at,
        included=tuple(included),
        skipped={uid: reason.value for uid, reason in skipped.items()},
        tokens=len(included) * 512 * 2048,
        models=models,
        held_out=loss,
        assigned=loss - 0.01,
        scores={
            int(uid): MinerScore(
                pay=report.weights[uid],
                credit=score.credit,
                struck=report.struck.get(uid, ()),
                rows=tuple(explain_rows(report, int(uid), power=POWER, shares=shares)),
            )
            for uid, score in report.peer_scores.items()
            if isinstance(score, PeerScore)
        },
        payment=Payment(block=window // 50 * 6000, window=window // 50 * 50, weights={1: 0.5, 2: 0.5}),
    )


def _shares(report: ScoreReport) -> CreditShares:
    """Return the shares of miners without copiers."""
    scores = {int(uid): one for uid, one in report.peer_scores.items() if isinstance(one, PeerScore)}
    found = {uid: Credit(one.credit, one.mean, one.error, one.credit, 1.0) for uid, one in scores.items()}
    calibrations = {
        uid: Calibration(by_loss=one.calibration, by_gradient=1.0, by_middle=1.0) for uid, one in scores.items()
    }
    scale = 0.9 + report.window % 7 / 30
    return CreditShares(credits=found, steps=dict.fromkeys(scores, 4), scale=scale, calibrations=calibrations)


def _report(
    draw: random.Random,
    crew: list[_Miner],
    window: int,
    loss: float,
    skipped: dict[int, Reason],
    struck: dict[str, tuple[str, ...]],
) -> ScoreReport:
    here = [one for one in crew if one.gains[-1] is not None]
    alignment = Alignment(
        uids=tuple(one.uid for one in here),
        products=published(one.gains[-1] or 0.0 for one in here),
        norms=(1.0,) * len(here),
        gram=(0.3,) * (len(here) * (len(here) + 1) // 2),
    )
    observations, scores = {}, {}
    for one in crew:
        gains = [gain or 0.0 for gain in one.gains]
        mean = sum(gains) / len(gains)
        error = (sum((gain - mean) ** 2 for gain in gains) / len(gains) ** 2) ** 0.5
        present = [gain for gain in one.gains if gain is not None]
        credit = mean * max(0.0, 1 - (2 * error / mean) ** 2) if mean > 0 else 0.0
        calibration = 1.0 if draw.random() < 0.9 else draw.random()
        sampled = draw.random() < 0.33 and one in here
        change = LossChange(before=loss, after=loss - 0.01 * draw.random(), error=0.003 * draw.random(), sequences=64)
        observations[str(one.uid)] = PeerObservation(
            hotkey=f"5Miner{one.uid:042d}",
            listed=True,
            included=one in here,
            sampled=sampled,
            verdict=skipped[one.uid].value if one.uid in skipped else "valid",
            assigned_pages=True if one in here else None,
            assigned_products=published(draw.gauss(other.gains[-1] or 0.0, 0.05) for other in here) if sampled else (),
            evaluation=MeasuredLosses(assigned=change, held_out=change) if sampled and draw.random() < 0.25 else None,
            behind=0,
        )
        scores[str(one.uid)] = PeerScore(
            hotkey=f"5Miner{one.uid:042d}",
            measured=len(present),
            mean=mean,
            error=error,
            presence=len(present) / len(gains),
            credit=credit,
            merit=credit,
            tests=min(7, len(gains)),
            own_pages=1.0,
            calibration=calibration,
            final=credit * calibration,
        )
    paid = {uid: pay(score, POWER) for uid, score in scores.items()}
    total = sum(paid.values()) or 1.0
    return ScoreReport(
        window=window,
        uid=0,
        profile="hardened",
        held_out_pages="",
        faults=(),
        observations=observations,
        alignment=alignment,
        follows_from=tuple(range(max(FIRST, window - 19), window)),
        peer_scores=scores,
        struck=struck,
        weights={uid: one / total for uid, one in paid.items()},
        weights_set=WeightsSet(
            block=window // 50 * 6000,
            intended={uid: one.uid / 210 for uid, one in zip(scores, crew, strict=True)},
            on_chain={uid: one.uid / 210 + 1e-6 * (window // 50) for uid, one in zip(scores, crew, strict=True)},
        ),
    )


def _events(draw: random.Random, miner: _Miner, windows: int, name: str) -> NodeEvents:
    span = range(FIRST, FIRST + windows)
    seconds = {}
    for window in span:
        training = draw.uniform(0.86, 0.97)
        rest = (1 - training) / (len(PHASES) - 1)
        seconds[window] = tuple(WINDOW_SECONDS * (training if phase == "training" else rest) for phase in PHASES)
    losses = {window: 10.5 - 7.4 * (1 - (1 - at / windows) ** 6) for at, window in enumerate(span)}
    return NodeEvents(name=name, role="miner", uid=miner.uid, training_loss=losses, seconds=seconds)
