"""Inner products from sparse coordinates, against whole tensors and against the loss after a trial step."""

import math

import numpy as np
import pytest
import torch

from tplr.compress import inner_products
from tplr.compress.payload import build, decode_all, parse
from tplr.errors import TrainingError
from tplr.scoring.credit import gram_of
from tplr.training.alignment import align, probe_gradient
from tplr.training.evaluation import baseline, sequence_losses, trial_step_applied
from tplr.training.fingerprint import digest
from tplr.training.gradient import WindowGradient
from tplr.training.model import build_model
from tplr.training.schemes import local_training, outer_scheme

SCHEMES = ("demo", "sparseloco", "muon")


@pytest.fixture(params=SCHEMES)
def hparams(request, tiny):
    return tiny(request.param)


@pytest.fixture
def model(hparams):
    return build_model(hparams)


@pytest.fixture
def outer(model, hparams):
    return outer_scheme(dict(model.named_parameters()), hparams)


@pytest.fixture
def updates(model, outer, hparams, batches):
    """Return updates of four miners; that of uid 4 is twice as long, and that of uid 9 the opposite of another."""
    found = []
    for uid, seed, factor in ((2, 0, 1.0), (4, 1, 2.0), (7, 2, 1.0), (9, 1, -1.0)):
        work = local_training(outer._parameters, hparams).run(model, batches(seed), step=1).tensors
        sender = outer_scheme(outer._parameters, hparams)
        tensors = {name: factor * one for name, one in work.items()}
        body = sender.pack(tensors, step=1, window=3, uid=uid, pages_digest="0" * 64, batches=4)
        found.append(parse(body, outer.spec, window=3, uid=uid))
    return found


def steps(outer, updates) -> np.ndarray:
    """Return the applied steps, whole and in the basis of the coordinates: [updates, entries]."""
    rows = [[] for _ in updates]
    for tensor in outer.spec.tensors.values():
        indices, values = decode_all(updates, [tensor])
        lengths = values.double().square().sum(dim=(1, 2)).sqrt()
        for row, where, what, factor in zip(
            rows, indices, values, outer.step_factors(tensor.name, lengths.tolist(), step=1), strict=True
        ):
            whole = torch.zeros(tensor.grid.chunks, tensor.grid.entries).scatter_(1, where, what)
            row.append(factor * whole.double().flatten())
    return torch.stack([torch.cat(row) for row in rows]).numpy()


def test_the_gradient_and_the_losses_are_those_of_separate_passes(model, batches):
    before, probe = digest(dict(model.named_parameters())), batches(5)
    found = probe_gradient(model, probe, "float32")
    expected = WindowGradient("float32").run(model, probe, step=0).tensors
    assert found.tensors.keys() == expected.keys()
    for name, one in found.tensors.items():
        torch.testing.assert_close(one, expected[name], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(found.baseline.losses, baseline(model, probe, "float32").losses, rtol=1e-6)
    assert all(one.grad is None for one in model.parameters())
    assert digest(dict(model.named_parameters())) == before


def test_a_gradient_of_nothing_or_of_a_ruined_model(model, batches):
    with pytest.raises(ValueError, match="no batches"):
        probe_gradient(model, batches(5)[:0], "float32")
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(TrainingError, match="no update can be measured"):
        probe_gradient(model, batches(5), "float32")


@pytest.mark.parametrize("hparams", ["sparseloco"], indirect=True)
def test_a_parameter_that_takes_no_part_in_the_loss_is_named(model, batches):
    model.spare = torch.nn.Parameter(torch.zeros(64, 64))
    for gradient in (probe_gradient, lambda *given: WindowGradient("float32").run(*given[:2], step=0)):
        with pytest.raises(AssertionError, match="spare takes no part in the loss"):
            gradient(model, batches(1), "float32")


def test_products_are_those_of_whole_tensors(model, outer, updates, batches):
    gradient = probe_gradient(model, batches(5), "float32").tensors
    found = align(outer, gradient, updates[::-1], step=1, seed=0)
    d = steps(outer, updates)
    chunks = [(one.grid, gradient[name]) for name, one in outer.spec.tensors.items()]
    g = torch.cat([outer.in_basis(grid.cut(grid.view(one)), grid).flatten() for grid, one in chunks]).double().numpy()
    caps = {name: outer.norm_cap(name, step=1) for name in outer.spec.tensors}
    scale = np.linalg.norm([cap * outer.step_factors(name, [cap], step=1)[0] for name, cap in caps.items()])
    assert found.uids == (2, 4, 7, 9)
    np.testing.assert_allclose(found.products, d @ g / (np.linalg.norm(g) * scale), rtol=1e-5)
    np.testing.assert_allclose(found.gram, (d @ d.T)[np.triu_indices(4)] / scale**2, rtol=1e-6, atol=1e-8)
    assert found.unit == pytest.approx(outer.rate(1) * np.linalg.norm(g) * np.linalg.norm([*caps.values()]), rel=1e-6)
    plain = align(outer, gradient, updates, step=1, seed=0, pairs=False)
    np.testing.assert_allclose(plain.products, found.products, rtol=1e-12)
    sent = [decode_all(updates, [tensor])[1].flatten(1).double() for tensor in outer.spec.tensors.values()]
    np.testing.assert_allclose(found.norms, torch.cat(sent, dim=1).norm(dim=1), rtol=1e-7)


def test_a_large_gradient_s_norm_is_exact(tiny):
    """A CPU's float32 sum of squares loses each small one beside the large ones before it."""
    outer = outer_scheme({"w": torch.nn.Parameter(torch.zeros(2048, 2048))}, tiny("sparseloco"))
    body = outer.pack({"w": torch.randn(2048, 2048)}, step=1, window=3, uid=2, pages_digest="0" * 64, batches=4)
    update = parse(body, outer.spec, window=3, uid=2)
    gradient = torch.ones(2048, 2048)
    gradient[0, :16] = 4096.0
    found = align(outer, {"w": gradient}, [update], step=1, seed=0)
    twice = align(outer, {"w": gradient.double()}, [update], step=1, seed=0)
    np.testing.assert_allclose(found.products, twice.products, rtol=1e-5)


def multiplied(outer, update, factor, uid):
    """Return an update with these values times ``factor``, from ``uid``."""
    kept = {name: update.coefficients(name) for name in outer.spec.tensors}
    sent = {name: (places, factor * values) for name, (places, values) in kept.items()}
    body = build(sent, outer.spec, window=3, uid=uid, pages_digest="0" * 64, batches=4)
    return parse(body, outer.spec, window=3, uid=uid)


@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_updates_that_are_only_measured_change_no_product(model, outer, updates, batches, size):
    """A majority on probation, of any norm, leaves the products of applied updates as they are."""
    gradient = probe_gradient(model, batches(5), "float32").tensors
    outer.set_caps(updates, step=1)
    alone = align(outer, gradient, updates, step=1, seed=0)
    crowd = [*updates, *(multiplied(outer, updates[0], size, uid) for uid in range(20, 26))]
    found = align(outer, gradient, crowd, step=1, seed=0)
    np.testing.assert_allclose(found.products[: len(updates)], alone.products, rtol=1e-9)
    assert found.unit == pytest.approx(alone.unit, rel=1e-9)


@pytest.mark.parametrize("size", [1e-18, 1 / 30, 30])
def test_a_majority_of_applied_updates_hardly_changes_the_other_products(model, outer, updates, batches, size):
    """Short or long in one window, it may move the norm caps of the window, as it may without being measured."""
    gradient = probe_gradient(model, batches(5), "float32").tensors
    crowd = [multiplied(outer, one, 1.0, 20 + 10 * number + one.uid) for number in range(2) for one in updates]
    outer.set_caps([*updates, *crowd], step=1)
    alone = align(outer, gradient, [*updates, *crowd], step=1, seed=0)
    changed = [multiplied(outer, one, size, one.uid) for one in crowd]
    outer.set_caps([*updates, *changed], step=1)
    found = align(outer, gradient, [*updates, *changed], step=1, seed=0)
    assert max(map(abs, (*found.gram, *found.products))) <= 1 + 1e-6  # norms are float32
    lengths, before = (np.sqrt(np.diag(gram_of(one)))[: len(updates)] for one in (found, alone))
    assert (lengths < 1.3 * before).all()
    assert (lengths > 0.7 * before).all()


def test_a_gradient_that_is_not_finite_measures_nobody(model, outer, updates, batches):
    gradient = probe_gradient(model, batches(5), "float32").tensors
    next(iter(gradient.values())).fill_(torch.inf)
    with pytest.raises(TrainingError, match="no update can be measured"):
        align(outer, gradient, updates, step=1, seed=0)


def test_products_foretell_the_change_of_the_loss(model, outer, updates, batches):
    probe = batches(1)  # pages on which uid 4 trained; uid 9 sends the opposite
    found = align(outer, probe_gradient(model, probe, "float32").tensors, updates, step=1, seed=0)
    before, falls = sequence_losses(model, probe, "float32").mean(), []
    for update in updates:
        with trial_step_applied(model, outer, update, step=1):
            falls.append(before - sequence_losses(model, probe, "float32").mean())
    assert np.argmax(found.products) == np.argmax(falls) == 1
    assert np.argmin(found.products) == np.argmin(falls) == 3
    assert found.products[3] < 0 < found.products[1]


@pytest.mark.long
@pytest.mark.parametrize("hparams", ["demo", "sparseloco"], indirect=True)
def test_a_sample_of_the_chunks_is_an_unbiased_estimate(model, outer, updates, batches, monkeypatch):
    gradient = probe_gradient(model, batches(1), "float32").tensors
    whole = align(outer, gradient, updates, step=1, seed=0)
    monkeypatch.setattr(inner_products, "LEAST_CHUNKS", 2)
    monkeypatch.setattr(inner_products, "SAMPLED_CHUNKS", 12)
    seen = []
    for seed in range(200):
        one = align(outer, gradient, updates, step=1, seed=seed)
        assert one.norms == pytest.approx(whole.norms, rel=1e-12)
        seen.append(np.concatenate([one.products, one.gram]))
    assert np.std(seen, axis=0).max() > 0.01
    error = np.std(seen, axis=0) / np.sqrt(len(seen))
    assert (np.abs(np.mean(seen, axis=0) - np.concatenate([whole.products, whole.gram])) < 5 * error + 0.02).all()


def test_some_of_the_updates_are_aligned_as_when_all_were(model, outer, updates, batches, monkeypatch):
    """An audit lacks deleted updates; the sampled chunks depend on the original number of updates."""
    gradient = probe_gradient(model, batches(1), "float32").tensors
    monkeypatch.setattr(inner_products, "LEAST_CHUNKS", 2)
    monkeypatch.setattr(inner_products, "PAIRS", 12 * len(updates) ** 2)
    every = align(outer, gradient, updates, step=1, seed=3)
    some = align(outer, gradient, updates[:2], step=1, seed=3, together=len(updates))
    assert some.products == pytest.approx(every.products[:2], rel=1e-9)
    assert some.products != pytest.approx(align(outer, gradient, updates[:2], step=1, seed=3).products, rel=1e-3)


def test_without_updates_there_are_no_products(model, outer, batches):
    found = align(outer, probe_gradient(model, batches(1), "float32").tensors, [], step=1, seed=0)
    assert found[:4] == ((), (), (), ())
    gradient = probe_gradient(model, batches(1), "float32").tensors
    length = math.hypot(*(float(one.norm()) for one in gradient.values()))
    assert found.largest_norm == pytest.approx(outer.largest_norm(1, gradient=length))
