"""SparseLoCo against a few lines of NumPy and PyTorch's SGD, and limits on a single peer's influence."""

import math

import numpy as np
import pytest
import torch

from tplr.compress.payload import ENTRIES_AT_ONCE, build, parse
from tplr.errors import StateError, TrainingError
from tplr.hparams import OuterRate
from tplr.training.device import DeviceSettings
from tplr.training.fingerprint import digest
from tplr.training.outer.norm_caps import FIRST, FIRST_REACH, HISTORY, norm_bound
from tplr.training.outer.sparseloco import SparselocoOuter

META = {"pages_digest": "00" * 32, "batches": 1}


def packed(scheme, differences, *, uid, step=0, window=9):
    body = scheme.pack(differences, step=step, window=window, uid=uid, **META)
    return parse(body, scheme.spec, window=window, uid=uid)


def dense(update, name):
    """Return the decoded update, in the parameter's shape."""
    grid = update.spec.tensors[name].grid
    indices, values = update.coefficients(name)
    whole = torch.empty(grid.shape)
    grid.view(whole).copy_(grid.join(torch.zeros(grid.chunks, grid.entries).scatter(1, indices, values)))
    return whole


def own(scheme):
    """Return a miner's error feedback."""
    return {name: one for name, one in scheme.state_dict()["tensors"].items() if not name.startswith("shared.")}


# --- reference implementation --------------------------------------------------------------------------------------


def largest(x: np.ndarray, size: int, k: int) -> np.ndarray:
    """Return ``x`` with all but the k largest magnitudes of each block set to zero."""
    matrix = x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x[None]
    tall, wide = (max(d for d in range(1, size + 1) if side % d == 0) for side in matrix.shape)
    kept = np.zeros_like(matrix)
    for top in range(0, matrix.shape[0], tall):
        for left in range(0, matrix.shape[1], wide):
            block = matrix[top : top + tall, left : left + wide]
            threshold = np.sort(np.abs(block).ravel())[-min(k, block.size)]
            kept[top : top + tall, left : left + wide] = np.where(np.abs(block) >= threshold, block, 0)
    return kept.reshape(x.shape)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_several_steps_against_the_reference(momentum, nesterov, hparams, tensors):
    h = hparams("sparseloco", quantization_bits=0, outer_momentum=momentum, outer_nesterov=nesterov)
    parameters = tensors(0)
    theta = {name: torch.nn.Parameter(tensor.double()) for name, tensor in tensors(0).items()}
    outer = torch.optim.SGD(theta.values(), lr=0.5, momentum=momentum, nesterov=nesterov)
    everyone = SparselocoOuter(parameters, h)
    miners = [SparselocoOuter(parameters, h) for _ in range(4)]
    errors = [{name: np.zeros(p.shape) for name, p in parameters.items()} for _ in miners]
    caps = {name: [] for name in parameters}
    for step in range(5):
        # Caps are kept in units of a bound that grows with warm-up and error feedback: see test_norm_caps.py.
        # Very different lengths, so that some updates are scaled down to the usual cap.
        work = [{n: (1 + uid) * t for n, t in tensors(100 * step + uid).items()} for uid in range(4)]
        updates = [packed(m, w, uid=uid, step=step) for uid, (m, w) in enumerate(zip(miners, work, strict=True))]
        for name, tensor in everyone.spec.tensors.items():
            sent = []
            for uid, error in enumerate(errors):
                error[name] = 0.95 * error[name] + work[uid][name].double().numpy()
                sent.append(largest(error[name], 8, tensor.k))
                error[name] -= sent[-1]
                np.testing.assert_allclose(miners[uid].state_dict()["tensors"][name], error[name], atol=1e-5)
            norms, bound = [np.linalg.norm(one) for one in sent], norm_bound(tensor, h.sparseloco, step)
            usual = sorted([*[FIRST] * 8, *caps[name]][-8:])[3] * bound
            # A quarter of four norms is one.
            cap = min(max(min(max(usual, min(norms)), max(norms)), usual / 2), FIRST_REACH * usual, bound)
            caps[name].append(cap / bound)
            clipped = [one * min(1, cap / norm) for one, norm in zip(sent, norms, strict=True)]
            lengths = np.minimum(norms, cap)
            theta[name].grad = torch.from_numpy(sum(clipped) * (lengths**3).sum() / (lengths**2).sum() / lengths.sum())
        outer.step()
        everyone.apply(updates, step=step)
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter.double(), theta[name].data, atol=2e-5, rtol=0, msg=name)


# --- error feedback ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "selection"), [(0, "chunk"), (1, "chunk"), (2, "chunk"), (4, "chunk"), (8, "chunk"), (1, "group")]
)
def test_error_feedback_loses_exactly_what_receivers_decode(bits, selection, hparams, tensors):
    scheme = SparselocoOuter(tensors(0), hparams("sparseloco", quantization_bits=bits, topk_selection=selection))
    for step in range(4):
        before = own(scheme) or {name: torch.zeros_like(d) for name, d in tensors(0).items()}
        work = tensors(step + 1)
        update = packed(scheme, work, uid=3, step=step)
        for name, left in own(scheme).items():
            assert torch.equal(left, before[name].mul(0.95).add(work[name]) - dense(update, name)), (step, name)


def test_what_nobody_got_is_sent_again(hparams, tensors):
    scheme = SparselocoOuter(tensors(0), hparams("sparseloco"))
    packed(scheme, tensors(1), uid=3)
    before = own(scheme)
    body = scheme.pack(tensors(2), step=1, window=9, uid=3, **META)
    scheme.restore(body, window=9, uid=3)
    for name, tensor in own(scheme).items():
        torch.testing.assert_close(tensor, before[name].mul(0.95).add(tensors(2)[name]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("number", [math.nan, math.inf, -1e30])
def test_work_that_is_not_finite_changes_nothing(number, hparams, tensors):
    scheme = SparselocoOuter(tensors(0), hparams("sparseloco"))
    packed(scheme, tensors(1), uid=0)
    before = digest(scheme.state_dict()["tensors"])
    work = tensors(2)
    work["w.2"][3, 4] = number
    with pytest.raises(TrainingError, match=r"w\.2"):
        packed(scheme, work, uid=0)
    assert digest(scheme.state_dict()["tensors"]) == before


# --- the step ------------------------------------------------------------------------------------------------------


def moved(updates, hparams, *, before=(), **changes):
    """Return the decrease of the entries of one matrix, after many windows with the updates ``before``."""
    parameters = {"w": torch.zeros(64, 64)}
    scheme = SparselocoOuter(parameters, one_matrix(hparams, **changes))
    for _ in range(3 * HISTORY if before else 0):
        scheme.apply(before, step=0)
    parameters["w"].zero_()
    scheme.apply(updates, step=0)
    return -parameters["w"].view(-1)


def one_matrix(hparams, **changes):
    settings = {"target_chunk": 64, "topk_compression": 32, "quantization_bits": 0, "outer_learning_rate": 1.0}
    return hparams("sparseloco", **settings | changes)


def made_by_hand(hparams, uid, entries: dict[int, float]):
    spec = SparselocoOuter({"w": torch.zeros(64, 64)}, one_matrix(hparams)).spec
    filler = (i for i in range(4096) if i not in entries)
    entries = entries | {next(filler): 0.0 for _ in range(32 - len(entries))}
    indices, values = torch.tensor([sorted(entries)]), torch.tensor([[entries[i] for i in sorted(entries)]])
    return parse(build({"w": (indices, values)}, spec, window=9, uid=uid, **META), spec, window=9, uid=uid)


@pytest.mark.parametrize("first", [False, True])
def test_no_peer_moves_the_model_more_than_its_share_of_all_norms(hparams, first):
    """In a run's first window a peer's norm is at most the first cap, 2.6 honest norms here."""
    honest = [made_by_hand(hparams, uid, dict.fromkeys(range(32), 1.0)) for uid in range(8)]
    matrix = SparselocoOuter({"w": torch.zeros(64, 64)}, one_matrix(hparams)).spec.tensors["w"]
    length = FIRST * norm_bound(matrix, one_matrix(hparams).sparseloco, 0) if first else 32**0.5
    share = length / (length + len(honest) * 32**0.5)
    before = () if first else honest
    for attack in (
        dict.fromkeys(range(32), 1000000.0),  # scaled
        dict.fromkeys(range(1000, 1032), 1000000.0),  # at indices that no other peer sends
        dict.fromkeys(range(32), -7.0),  # all equal, against the others
    ):
        attacked = moved([*honest, made_by_hand(hparams, 8, attack)], hparams, before=before)
        without = moved(honest, hparams) * 8 / 9
        assert (attacked - without).norm() <= length * share * (1 + 1e-6)


def test_the_step_is_the_mean_of_the_updates_times_their_step_factors(hparams, tensors):
    """In every tensor, though norms differ in one of them: scores weigh tensors as the step does."""
    parameters, h = tensors(0), hparams("sparseloco")
    scheme, senders = SparselocoOuter(parameters, h), [SparselocoOuter(parameters, h) for _ in range(5)]
    before, updates = {name: one.double().clone() for name, one in parameters.items()}, []
    for uid, sender in enumerate(senders):
        work = tensors(uid + 1) | {"w.2": (5 if uid < 2 else 1) * tensors(uid + 1)["w.2"]}
        updates.append(packed(sender, work, uid=uid))
    scheme.set_caps(updates, step=0)
    expected = {}
    for name in parameters:
        sent = [dense(one, name).double() for one in updates]
        factors = scheme.step_factors(name, [float(one.norm()) for one in sent], step=0)
        expected[name] = 0.5 * sum(factor * one for factor, one in zip(factors, sent, strict=True)) / len(sent)
    scheme.apply(updates, step=0)
    for name, one in parameters.items():
        torch.testing.assert_close(before[name] - one.double(), expected[name], rtol=1e-4, atol=1e-6)


def test_order_of_arrival_does_not_matter(hparams):
    """The first two cancel; added between them, the third would be lost in their float64 digits."""
    first, second, third = (
        made_by_hand(hparams, uid, entries)
        for uid, entries in enumerate(({0: 2.0**60}, {0: -(2.0**60)}, {0: 1.0, 1: 2.0**60}))
    )
    expected = moved([first, second, third], hparams, peak=2.0**70)
    assert expected[0] == torch.tensor(1 / 3)
    assert torch.equal(moved([first, third, second], hparams, peak=2.0**70), expected)


def test_next_to_nothing_counts_as_no_peer(hparams):
    updates = [made_by_hand(hparams, uid, {0: value}) for uid, value in enumerate((1e-30, 5.0, 5.0))]
    assert moved(updates, hparams)[0] == pytest.approx(5.0)


def test_nobody_gathered_changes_nothing(hparams, tensors):
    parameters = tensors(0)
    scheme = SparselocoOuter(parameters, hparams("sparseloco", outer_momentum=0.9))
    scheme.apply([packed(scheme, tensors(1), uid=0)], step=0)
    before, state = digest(parameters), scheme.state_dict()
    scheme.apply([], step=1)
    assert digest(parameters) == before
    assert digest(scheme.state_dict()["tensors"]) == digest(state["tensors"])


def test_a_trial_step_moves_the_parameters_along_one_update_and_no_momentum(hparams, tensors):
    parameters = tensors(0)
    scheme = SparselocoOuter(parameters, hparams("sparseloco", outer_momentum=0.9))
    update, before = packed(scheme, tensors(1), uid=0), tensors(0)
    state = digest(scheme.state_dict()["tensors"])
    scheme.trial_step(update, step=4)
    for name, moved in parameters.items():
        expected = before[name].double() - 0.5 * 0.2 * dense(update, name).double()
        torch.testing.assert_close(moved, expected.float(), atol=1e-7, rtol=0)
    assert digest(scheme.state_dict()["tensors"]) == state


@pytest.mark.parametrize("offloaded", [False, True])
def test_the_expected_step_is_a_share_of_the_steps_along_own_work(offloaded, hparams, tensors):
    parameters, settings = tensors(0), DeviceSettings(offload_error_feedback=offloaded)
    scheme = SparselocoOuter(parameters, hparams("sparseloco", expected_share=0.4), settings)
    scheme.expected_step(1, None, step=0)
    assert digest(parameters) == digest(tensors(0))  # nothing is left unsent yet
    update = packed(scheme, tensors(1), uid=0)
    unsent, before = own(scheme), tensors(0)
    for sent in (None, update):
        scheme.expected_step(1, sent, step=1)
        for name, moved in parameters.items():
            lacking = unsent[name] + (dense(sent, name) if sent else 0)
            torch.testing.assert_close(moved, before[name] - 0.5 * 0.4 * lacking, atol=1e-6, rtol=0)
        scheme.expected_step(-1, sent, step=1)
        for name, moved in parameters.items():
            torch.testing.assert_close(moved, before[name], atol=1e-6, rtol=0)
    assert digest(own(scheme)) == digest(unsent)


POINTS = (OuterRate(step=4, rate=1.5), OuterRate(step=6, rate=1.0))


@pytest.mark.parametrize(("at", "rate"), [(0, 0.5), (2, 1.0), (4, 1.5), (5, 1.25), (6, 1.0), (900, 1.0)])
def test_every_step_has_the_outer_rate_of_its_time(at, rate, hparams, tensors):
    """The applied, the trial and the expected step."""
    update = packed(SparselocoOuter(tensors(0), hparams("sparseloco")), tensors(1), uid=0)

    def after(take, **rates) -> dict[str, torch.Tensor]:
        parameters = tensors(0)
        scheme = SparselocoOuter(parameters, hparams("sparseloco", expected_share=0.4, **rates))
        scheme.pack(tensors(2), step=at, window=1, uid=0, pages_digest="00" * 32, batches=1)
        take(scheme)
        return parameters

    for take in (
        lambda scheme: scheme.apply([update], step=at),
        lambda scheme: scheme.trial_step(update, step=at),
        lambda scheme: scheme.expected_step(1, update, step=at),
    ):
        changing = after(take, outer_learning_rate_points=POINTS)
        assert digest(changing) == digest(after(take, outer_learning_rate=rate))


def test_without_a_share_training_begins_at_the_agreed_weights(hparams, tensors):
    parameters = tensors(0)
    scheme = SparselocoOuter(parameters, hparams("sparseloco"))
    update = packed(scheme, tensors(1), uid=0)
    scheme.expected_step(1, update, step=1)
    assert digest(parameters) == digest(tensors(0))


def test_row_blocks_and_threads_do_not_matter(hparams, tensors, monkeypatch):
    h = hparams("sparseloco", outer_momentum=0.9, outer_nesterov=True)
    updates = [packed(SparselocoOuter(tensors(0), h), tensors(uid), uid=uid) for uid in range(5)]

    def applied(order) -> str:
        parameters = tensors(0)
        scheme = SparselocoOuter(parameters, h)
        for step in range(2):
            scheme.apply(order, step=step)
        return digest(parameters)

    whole, threads = applied(updates), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert applied(updates[::-1]) == whole
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr("tplr.compress.chunks.ROW_BLOCK_ENTRIES", {"cpu": 64})
    assert applied(updates) == whole
    for at_once in (1, 2**24):
        monkeypatch.setitem(ENTRIES_AT_ONCE, "cpu", at_once)
        assert applied(updates) == whole
    assert applied(updates[1:]) != whole


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_holds_the_same_bytes(hparams, tensors):
    h = hparams("sparseloco", outer_momentum=0.9)
    updates = [packed(SparselocoOuter(tensors(0), h), tensors(uid), uid=uid) for uid in range(5)]
    held = []
    for device in ("cpu", "cuda"):
        parameters = {name: tensor.to(device) for name, tensor in tensors(0).items()}
        SparselocoOuter(parameters, h).apply(updates, step=0)
        held.append(digest(parameters))
    assert held[0] == held[1]


# --- state ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["version", "key", "momentum", "missing", "shape", "dtype", "nan"])
def test_states_that_do_not_fit_are_refused_and_change_nothing(change, hparams, tensors):
    scheme = SparselocoOuter(tensors(0), hparams("sparseloco", outer_momentum=0.9))
    scheme.apply([packed(scheme, tensors(1), uid=0)], step=0)
    before, state = scheme.state_dict(), scheme.state_dict()
    if change == "version":
        state["version"] += 1
    elif change == "key":
        state["more"] = 1
    elif change == "momentum":  # saved by a run without it
        state["tensors"] = {n: t for n, t in state["tensors"].items() if not n.startswith("shared.")}
    elif change == "missing":
        del state["tensors"]["norm"]
    elif change == "shape":
        state["tensors"]["shared.momentum.norm"] = torch.zeros(15)
    elif change == "dtype":
        state["tensors"]["norm"] = torch.zeros(16).double()
    else:
        state["tensors"]["norm"] = torch.full((16,), math.nan)
    with pytest.raises(StateError):
        scheme.load_state_dict(state)
    assert digest(scheme.state_dict()["tensors"]) == digest(before["tensors"])


def test_the_other_schemes_hparams_are_refused(hparams, tensors):
    with pytest.raises(ValueError, match="'demo', this is 'sparseloco'"):
        SparselocoOuter(tensors(0), hparams("demo"))
