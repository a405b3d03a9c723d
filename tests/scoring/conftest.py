"""Observations and constants to score with; tests spoil them where they want."""

from collections.abc import Callable
from typing import Any

import pytest

from tplr.hparams import HParams, load_hparams
from tplr.schemas import VALID, Evaluation, PeerObservation
from tplr.seeds import Profile


def make_constants(profile: Profile = "hardened") -> HParams:
    scores = {"openskill_beta": 50.0, "openskill_tau": 0.1, "binary_score_ma_alpha": 0.05, "power_normalisation": 2.0}
    limits = {"sync_max_steps_behind": 3, "reset_inactive_windows": 25}
    return load_hparams().model_copy(update={"profile": profile, **scores, **limits})


def make_evaluation(own: float = 0.02, random: float = 0.01, error: float = 0.001) -> Evaluation:
    """One whose losses of 4 and 5 nats improve by these shares, known to ``error`` nats."""
    return Evaluation(
        own_before=4.0,
        own_after=4.0 * (1 - own),
        own_error=error,
        own_sequences=64,
        random_before=5.0,
        random_after=5.0 * (1 - random),
        random_error=error,
        random_sequences=64,
    )


def make_observation(uid: int = 1, **seen: Any) -> PeerObservation:
    """Of a miner that did everything right, and was evaluated."""
    good: dict[str, Any] = {
        "listed": True,
        "chosen": True,
        "verdict": VALID,
        "own_pages": True,
        "evaluation": make_evaluation(),
        "behind": 0,
        "copied": "",
        "norm_ratio": 1.0,
        "active": True,
    }
    return PeerObservation(hotkey=f"hotkey-{uid}", **{**good, **seen})


@pytest.fixture
def constants() -> Callable[..., HParams]:
    return make_constants


@pytest.fixture
def evaluation() -> Callable[..., Evaluation]:
    return make_evaluation


@pytest.fixture
def observation() -> Callable[..., PeerObservation]:
    return make_observation
