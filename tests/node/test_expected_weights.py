"""A miner trains from the weights that it expects once its own work is in them, and packs the change from there."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tplr.compress.payload import parse
from tplr.hparams import HParams
from tplr.localnet.plan import scheme_constants
from tplr.node.train_state import TrainState
from tplr.training.fingerprint import digest
from tplr.training.model import build_model

SHARE = 0.5
ABOUT = {"uid": 3, "pages_digest": "0" * 64}
BATCHES = 4


def trained_state(folder: Path, share: float, outer_delay: int) -> tuple[TrainState, bytes]:
    """Return a state that has packed a window's update, and that update."""
    raw = scheme_constants("muon") | {"outer_delay": outer_delay}
    raw["model"] |= {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    raw["sparseloco"] |= {"expected_share": share}
    hparams = HParams.model_validate(raw)
    state = TrainState(build_model(hparams), hparams, folder)
    state.train(batches_of(0), 0)
    return state, state.pack(window=0, batches=BATCHES, **ABOUT)


def batches_of(window: int) -> np.ndarray:
    return np.random.default_rng(window).integers(0, 64, (BATCHES, 2, 12))


@pytest.mark.parametrize("outer_delay", [0, 1])
def test_training_begins_at_the_expected_weights_and_is_measured_from_there(outer_delay, tmp_path):
    state, body = trained_state(tmp_path / "moved", SHARE, outer_delay)
    other, same = trained_state(tmp_path / "by hand", 0.0, outer_delay)
    assert same == body  # nothing is unsent before the first update
    agreed = digest(state.parameters)
    state.train(batches_of(1), 1)
    assert digest(state.parameters) == agreed

    if outer_delay:  # the set with its update is not applied yet
        other.outer.trial_step(parse(body, other.spec, window=0, uid=3), step=other.global_step, share=SHARE)
    unsent = other.outer.state_dict()["tensors"]
    constants = state._hparams.sparseloco
    with torch.no_grad():
        for name, parameter in other.parameters.items():
            parameter.sub_(unsent[name], alpha=constants.outer_learning_rate * SHARE)
    assert digest(other.parameters) != agreed
    other.train(batches_of(1), 1)
    for name, work in other._work.items():
        torch.testing.assert_close(state._work[name], work, atol=1e-6, rtol=1e-3, msg=name)

    plain, _ = trained_state(tmp_path / "agreed", 0.0, outer_delay)
    plain.train(batches_of(1), 1)
    apart = [torch.dist(state._work[name], work) / torch.linalg.norm(work) for name, work in plain._work.items()]
    assert max(apart) > 0.1


def test_error_feedback_that_is_too_old_moves_no_weights(tmp_path):
    state, _ = trained_state(tmp_path / "returned", SHARE, 0)
    plain, _ = trained_state(tmp_path / "agreed", 0.0, 0)
    agreed, window = digest(plain.parameters), state._hparams.stale_after_windows + 1
    for one in (state, plain):
        one.train(batches_of(1), window)
    assert digest(state.parameters) == agreed
    assert digest(state._work) == digest(plain._work)
    assert state.pack(window=window, batches=BATCHES, **ABOUT) == plain.pack(window=window, batches=BATCHES, **ABOUT)
