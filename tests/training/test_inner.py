"""The inner loop against plain PyTorch, and the state that it leaves."""

import math

import pytest
import torch

from tplr.errors import StateError
from tplr.training.fingerprint import digest
from tplr.training.inner import InnerLoop
from tplr.training.loss import batch_loss
from tplr.training.model import build_model
from tplr.training.schedule import learning_rate

RATE = {"peak": 1e-2, "warmup_steps": 3, "t_max": 20, "start_factor": 0.1, "floor_factor": 0.1}
SETTINGS = {"inner_steps": 3, "batches_per_inner_step": 2, "inner_learning_rate": RATE, "gradient_clip_norm": 0.5}
OPTIMIZERS = {"adamw": {}, "muon": {"inner_optimizer": "muon", "muon_momentum": 0.9}}


@pytest.fixture
def loop(tiny):
    """A model and its inner loop: three steps of two batches, most of them clipped."""

    def make(**changes):
        hparams = tiny("sparseloco", **SETTINGS | changes)
        model = build_model(hparams)
        return hparams, model, InnerLoop(dict(model.named_parameters()), hparams)

    return make


def plain(hparams, windows, batches_of_step):
    """Yield the differences of each window, computed with only PyTorch."""
    c = hparams.sparseloco
    model = build_model(hparams)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    muon = [one for one in model.model.layers.parameters() if one.dim() == 2 and c.inner_optimizer == "muon"]
    rest = [one for one in model.parameters() if not any(one is other for other in muon)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, betas=(c.adam_beta1, c.adam_beta2), eps=c.adam_epsilon, weight_decay=c.weight_decay)
    ]
    if muon:
        options = {"weight_decay": c.weight_decay, "momentum": c.muon_momentum, "adjust_lr_fn": "match_rms_adamw"}
        optimizers.append(torch.optim.Muon(muon, **options))
    for window, batches in windows:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(start[name])
        for index in range(c.inner_steps):
            share = batches[index * batches_of_step : (index + 1) * batches_of_step]
            if not len(share):
                break
            model.zero_grad()
            sum(batch_loss(model, batch) for batch in share).div(len(share)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), c.gradient_clip_norm)
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = learning_rate(window * c.inner_steps + index, c.inner_learning_rate)
                optimizer.step()
        yield {name: start[name] - parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("changes", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_windows_are_those_of_plain_pytorch(changes, loop, batches, monkeypatch):
    """Accumulation, clipping, schedule, moments that continue across windows; the second window is cut short."""
    # PyTorch's Muon multiplies matrices in bfloat16 always, ours in the run's precision.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    hparams, model, inner = loop(**changes)
    before = digest(dict(model.named_parameters()))
    windows = [(0, batches(0, 6)), (1, batches(1, 3)), (3, batches(2, 8))]  # two batches are left over in the last
    for (window, own), expected in zip(windows, plain(hparams, windows, 2), strict=True):
        work = inner.run(model, own, step=window)
        assert (work.train_stats.batches, work.train_stats.skipped) == (min(len(own), 6), 0)
        assert work.train_stats.tokens == own[:6].size
        for name, tensor in work.tensors.items():
            torch.testing.assert_close(tensor, expected[name], atol=2e-6, rtol=1e-3, msg=f"{window} {name}")
        assert digest(dict(model.named_parameters())) == before
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_that_time_cuts_short_is_taken_with_what_it_had(loop, batches):
    hparams, model, inner = loop()
    answers = iter([False, False, False, True])
    work = inner.run(model, batches(0, 6), step=0, stop=lambda: next(answers))
    assert work.train_stats.batches == 3
    (expected,) = plain(hparams, [(0, batches(0, 3))], 2)
    for name, tensor in work.tensors.items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-6, rtol=1e-3)


def paused_after(steps):
    """Return a function for the check before each inner step: it pauses training after a number of steps."""
    asked = iter([False] * steps)
    return lambda: next(asked, True)


def test_a_training_that_was_paused_goes_on_from_the_model_as_it_then_is(loop, batches):
    """Pauses are between inner steps; in a pause the model is the agreed one, and other code may change it."""
    hparams, model, inner = loop()
    parameters = dict(model.named_parameters())
    start, moved = digest(parameters), {name: 0.01 * torch.ones_like(one) for name, one in parameters.items()}
    own = batches(0, 6)
    part = inner.run(model, own, step=0, pause=lambda: True)  # before the first step
    assert (part.tensors, part.train_stats.batches) == ({}, 0)
    part = inner.run(model, own, step=0, pause=paused_after(1), unfinished=part.unfinished)
    assert (part.tensors, part.train_stats.batches, digest(parameters)) == ({}, 2, start)
    assert inner.state_dict()["steps_done"] == 1
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.sub_(moved[name])
    agreed = digest(parameters)
    work = inner.run(model, own, step=1, unfinished=part.unfinished)  # its position is the step at which it began
    assert (work.train_stats.batches, work.unfinished, digest(parameters)) == (6, None, agreed)

    c = hparams.sparseloco
    reference = build_model(hparams)
    begin = {name: one.detach().clone() for name, one in reference.named_parameters()}
    betas = (c.adam_beta1, c.adam_beta2)
    optimizer = torch.optim.AdamW(reference.parameters(), betas=betas, eps=c.adam_epsilon, weight_decay=c.weight_decay)
    for index in range(3):
        if index == 1:
            with torch.no_grad():
                for name, one in reference.named_parameters():
                    one.sub_(moved[name])
        optimizer.zero_grad()
        sum(batch_loss(reference, batch) for batch in own[2 * index : 2 * index + 2]).div(2).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), c.gradient_clip_norm)
        optimizer.param_groups[0]["lr"] = learning_rate(index, c.inner_learning_rate)
        optimizer.step()
    for name, one in reference.named_parameters():
        torch.testing.assert_close(work.tensors[name], begin[name] - moved[name] - one.detach(), atol=2e-6, rtol=1e-3)


def test_training_starts_where_the_model_is_expected_and_is_measured_from_there(loop, batches):
    _, model, inner = loop()
    parameters = dict(model.named_parameters())
    before = digest(parameters)

    @torch.no_grad()
    def expect(sign: int) -> None:
        for parameter in parameters.values():
            parameter.sub_(sign * 0.01)

    work = inner.run(model, batches(0, 6), step=0, expect=expect)
    assert digest(parameters) == before
    _, moved, other = loop()
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.sub_(0.01)
    for name, tensor in other.run(moved, batches(0, 6), step=0).tensors.items():
        torch.testing.assert_close(work.tensors[name], tensor, atol=2e-6, rtol=1e-3)


def test_no_time_at_all_leaves_everything_as_it_was(loop, batches):
    _, model, inner = loop()
    inner.run(model, batches(), step=0)
    state, before = inner.state_dict(), digest(dict(model.named_parameters()))
    work = inner.run(model, batches(), step=1, stop=lambda: True)
    assert work.tensors == {}
    assert math.isnan(work.train_stats.loss)
    assert digest(inner.state_dict()["tensors"]) == digest(state["tensors"])
    assert digest(dict(model.named_parameters())) == before


def test_steps_without_a_finite_loss_or_gradient_are_left_out(loop, batches):
    _, model, inner = loop(batches_per_inner_step=1, inner_steps=3)
    own = batches(0, 3)
    own[own == 63] = 0
    own[0, 0, 0] = 63
    with torch.no_grad():
        model.model.embed_tokens.weight[63] = math.inf  # so the first loss is not finite
    scales = iter([1.0, math.inf, 1.0])  # nor is the second gradient
    model.lm_head.weight.register_hook(lambda gradient: gradient * next(scales))
    work = inner.run(model, own, step=0)
    assert (work.train_stats.batches, work.train_stats.skipped) == (1, 2)
    assert math.isfinite(work.train_stats.loss)
    assert work.tensors["lm_head.weight"].isfinite().all()
    assert inner.state_dict()["steps_done"] == 1


def test_bfloat16_is_near_and_not_the_same(loop, batches):
    works = []
    for precision in ("float32", "bfloat16"):
        _, model, inner = loop(precision=precision)
        works.append(inner.run(model, batches(), step=0))
    exact, short = (torch.cat([t.flatten() for t in work.tensors.values()]) for work in works)
    assert exact.dtype == short.dtype == torch.float32
    assert 0 < (exact - short).norm() < 0.5 * exact.norm()
    assert works[0].train_stats.loss == pytest.approx(works[1].train_stats.loss, rel=0.01)


@pytest.mark.parametrize("changes", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("restarted", [False, True])
def test_moments_are_dropped_when_they_are_stale(restarted, changes, loop, batches):
    for at, stale in ((5, False), (6, True)):
        _, model, inner = loop(stale_after_windows=5, **changes)
        _, _, fresh = loop(stale_after_windows=5, **changes)
        inner.run(model, batches(0), step=0)
        if restarted:
            state = inner.state_dict()
            _, _, inner = loop(stale_after_windows=5, **changes)
            inner.load_state_dict(state)
        again = inner.run(model, batches(1), step=at).tensors
        assert (digest(again) == digest(fresh.run(model, batches(1), step=at).tensors)) == stale


@pytest.mark.parametrize("changes", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_restart_between_windows_changes_nothing(changes, loop, batches):
    _, model, inner = loop(**changes)
    inner.run(model, batches(0, 6), step=0)
    _, again, restarted = loop(**changes)
    restarted.load_state_dict(inner.state_dict())
    for window in (1, 2):
        expected = inner.run(model, batches(window, 6), step=window).tensors
        assert digest(restarted.run(again, batches(window, 6), step=window).tensors) == digest(expected)
    assert digest(restarted.state_dict()["tensors"]) == digest(inner.state_dict()["tensors"])


def test_a_state_of_another_optimizer_is_refused(loop, batches):
    _, model, adamw = loop()
    _, _, muon = loop(**OPTIMIZERS["muon"])
    adamw.run(model, batches(), step=0)
    with pytest.raises(StateError, match="another model's"):
        muon.load_state_dict(adamw.state_dict())


@pytest.mark.parametrize("change", ["version", "key", "missing", "nan"])
def test_states_that_do_not_fit_are_refused_and_change_nothing(change, loop, batches):
    _, model, inner = loop()
    inner.run(model, batches(), step=0)
    before, state = inner.state_dict(), inner.state_dict()
    if change == "version":
        state["version"] = 0
    elif change == "key":
        del state["steps_done"]
    elif change == "missing":
        del state["tensors"]["exp_avg.model.norm.weight"]
    else:
        state["tensors"]["exp_avg.model.norm.weight"][0] = math.nan
    with pytest.raises(StateError, match="inner loop"):
        inner.load_state_dict(state)
    assert digest(inner.state_dict()["tensors"]) == digest(before["tensors"])
