"""Half of a window's step: without a change of state, and what the gradient after it predicts."""

import numpy as np
import pytest
import torch

from tplr.compress.payload import build, parse
from tplr.training.alignment import align, probe_gradient
from tplr.training.evaluation import Baseline, half_step_taken, sequence_losses
from tplr.training.fingerprint import digest
from tplr.training.model import build_model
from tplr.training.schemes import local_training, outer_scheme

SCHEMES = ("demo", "sparseloco", "muon")
STEP = 1


@pytest.fixture(params=SCHEMES)
def hparams(request, tiny):
    return tiny(request.param)


@pytest.fixture
def model(hparams):
    return build_model(hparams)


@pytest.fixture
def outer(model, hparams):
    return outer_scheme(weights(model), hparams)


@pytest.fixture
def updates(outer, hparams, model, batches):
    found = []
    for uid in range(3):
        work = local_training(weights(model), hparams).run(model, batches(uid), step=STEP).tensors
        sender = outer_scheme(weights(model), hparams)
        body = sender.pack(work, step=STEP, window=3, uid=uid, pages_digest="0" * 64, batches=4)
        found.append(parse(body, outer.spec, window=3, uid=uid))
    return found


def weights(model) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def copies(model) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in weights(model).items()}


@pytest.mark.parametrize(("count", "read"), [(1, 1), (2, 1), (4, 1), (5, 2), (48, 12)])
def test_the_gradient_reads_the_first_quarter_of_the_batches(count: int, read: int) -> None:
    held_out = np.arange(count * 6).reshape(count, 2, 3)
    assert np.array_equal(Baseline(held_out, np.zeros(2 * count)).for_middle(), held_out[:read])


def test_it_is_half_of_the_step_and_changes_no_state(model, outer, updates):
    before, state = copies(model), digest(outer.shared)
    with half_step_taken(model, outer, updates, step=STEP):
        half = copies(model)
    assert digest(weights(model)) == digest(before)
    assert digest(outer.shared) == state
    outer.apply(updates, step=STEP)
    for name, after in weights(model).items():
        torch.testing.assert_close(half[name], (before[name] + after.detach()) / 2, rtol=1e-5, atol=1e-7)
    assert digest(half) not in (digest(before), digest(weights(model)))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("hparams", ["sparseloco"], indirect=True)
def test_it_includes_the_outer_momentum(nesterov, hparams, model, updates):
    scheme = hparams.sparseloco.model_copy(update={"outer_momentum": 0.9, "outer_nesterov": nesterov})
    outer = outer_scheme(weights(model), hparams.model_copy(update={"sparseloco": scheme}))
    outer.apply(updates, step=0)
    before, state = copies(model), digest(outer.shared)
    with half_step_taken(model, outer, updates[:2], step=STEP):
        half = copies(model)
    assert digest(outer.shared) == state
    outer.apply(updates[:2], step=STEP)
    for name, after in weights(model).items():
        torch.testing.assert_close(half[name], (before[name] + after.detach()) / 2, rtol=1e-5, atol=1e-7)


def test_an_error_leaves_no_byte_of_it(model, outer, updates):
    before = digest(weights(model))
    with (
        pytest.raises(ValueError, match="each uid once"),
        half_step_taken(model, outer, [updates[0], updates[0]], step=STEP),
    ):
        pytest.fail("unreachable")
    assert digest(weights(model)) == before
    with pytest.raises(RuntimeError, match="within"), half_step_taken(model, outer, updates, step=STEP):
        raise RuntimeError("within")
    assert digest(weights(model)) == before


@pytest.mark.parametrize("hparams", ["sparseloco"], indirect=True)
def test_a_step_that_overshoots_shows_its_gain_after_half_of_it_alone(model, outer, batches):
    """A plain gradient, so long that the loss is higher after it: its slope at the start is the steepest."""
    probe = batches(5)
    gradient = probe_gradient(model, probe, "float32").tensors
    chunks = {name: one.grid.cut(one.grid.view(gradient[name])) for name, one in outer.spec.tensors.items()}
    kept = {name: chunks[name].abs().topk(one.k).indices.sort().values for name, one in outer.spec.tensors.items()}
    sent = {name: (where, 30.0 * chunks[name].gather(1, where)) for name, where in kept.items()}
    header = {"window": 3, "uid": 0, "pages_digest": "0" * 64, "batches": 4}
    step = [parse(build(sent, outer.spec, **header), outer.spec, window=3, uid=0)]
    outer.set_caps(step, step=STEP)
    here = align(outer, gradient, step, step=STEP, seed=0)
    with half_step_taken(model, outer, step, step=STEP):
        there = align(outer, probe_gradient(model, probe, "float32").tensors, step, step=STEP, seed=0)
    before = sequence_losses(model, probe, "float32").mean()
    outer.apply(step, step=STEP)
    change = before - sequence_losses(model, probe, "float32").mean()
    at_start, in_the_middle = here.products[0] * here.unit, there.products_in(here.unit)[0] * here.unit
    assert at_start > 0
    assert in_the_middle == pytest.approx(there.products[0] * there.unit)
    assert abs(in_the_middle - change) < 0.5 * abs(at_start - change)
