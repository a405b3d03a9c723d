"""Observations, evidence and constants for scoring; tests damage them where needed."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tplr.hparams import HParams, load_hparams
from tplr.schemas import VALID, Alignment, Evaluation, Evidence, LossChange, PeerObservation
from tplr.seeds import Profile


def make_constants(profile: Profile = "hardened", **changes: Any) -> HParams:
    return load_hparams().model_copy(update={"profile": profile, "power_normalisation": 2.0, **changes})


def make_evaluation(assigned: float = 0.02, held_out: float = 0.01, error: float = 0.001) -> Evaluation:
    """Return an evaluation in which losses of 4 and 5 nats improve by these shares, with an error of ``error`` nats."""
    return Evaluation(
        assigned=LossChange(before=4.0, after=4.0 * (1 - assigned), error=error, sequences=64),
        held_out=LossChange(before=5.0, after=5.0 * (1 - held_out), error=error, sequences=64),
    )


def make_observation(uid: int = 1, **seen: Any) -> PeerObservation:
    """Return the observation of an evaluated miner without faults."""
    good: dict[str, Any] = {
        "listed": True,
        "included": True,
        "sampled": True,
        "verdict": VALID,
        "assigned_pages": True,
        "evaluation": make_evaluation(),
        "behind": 0,
    }
    return PeerObservation(hotkey=f"hotkey-{uid}", **{**good, **seen})


def make_alignment(products: Mapping[int, float], *, norms: float = 1.0, shared: float = 0.1) -> Alignment:
    """Return the alignment of updates of unit length with pairwise product ``shared``."""
    uids = sorted(products)
    gram = np.full((len(uids), len(uids)), shared)
    np.fill_diagonal(gram, 1.0)
    return Alignment(
        uids=tuple(uids),
        products=tuple(products[uid] for uid in uids),
        norms=(norms,) * len(uids),
        gram=tuple(gram[np.triu_indices(len(uids))].tolist()),
    )


def make_evidence(window: int, observations: Mapping[int, PeerObservation], **products: float) -> Evidence:
    """Return the evidence of a window in which each miner with a valid update has a predicted gain of 0.3, or
    ``uid_N``."""
    measured = {uid for uid, seen in observations.items() if seen.verdict == VALID and seen.assigned_pages}
    alignment = make_alignment({uid: products.get(f"uid_{uid}", 0.3) for uid in measured}) if measured else None
    return Evidence(
        window=window, observations={str(uid): seen for uid, seen in observations.items()}, alignment=alignment
    )


@pytest.fixture
def constants() -> Callable[..., HParams]:
    return make_constants


@pytest.fixture
def evaluation() -> Callable[..., Evaluation]:
    return make_evaluation


@pytest.fixture
def observation() -> Callable[..., PeerObservation]:
    return make_observation


@pytest.fixture
def evidence() -> Callable[..., Evidence]:
    return make_evidence
