"""DeMo against a few lines of NumPy, and limits on a single peer's influence."""

import math

import numpy as np
import pytest
import scipy.fft
import torch

from tplr.compress import chunks
from tplr.compress.dct import inverse, inverse_sparse
from tplr.compress.payload import Update, build, parse
from tplr.errors import EmptyUpdate, StateError, TrainingError
from tplr.hparams import LearningRate
from tplr.training.fingerprint import digest
from tplr.training.outer import demo
from tplr.training.outer.demo import DemoOuter
from tplr.training.outer.signs import zero_limit
from tplr.training.schedule import learning_rate

SCHEDULE = LearningRate(peak=1e-2, warmup_steps=3, t_max=5, start_factor=0.1, floor_factor=0.1)  # of conftest
META = {"pages_digest": "00" * 32, "batches": 1}


def packed(scheme, gradients, *, uid, step=0, window=9):
    body = scheme.pack(gradients, step=step, window=window, uid=uid, **META)
    return parse(body, scheme.spec, window=window, uid=uid)


def copies(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


# --- reference implementation --------------------------------------------------------------------------------------


def to_blocks(x: np.ndarray, size: int) -> np.ndarray:
    x = x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x[None]
    tall, wide = (max(d for d in range(1, size + 1) if side % d == 0) for side in x.shape)
    return np.einsum("aibj->abij", x.reshape(x.shape[0] // tall, tall, x.shape[1] // wide, wide))


def from_blocks(blocks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.einsum("abij->aibj", blocks).reshape(shape)


def reference_step(momentum, gradient, lr, decay, k):
    """Return the new momentum and the sent coefficients (zero if not sent) of one parameter on one miner."""
    momentum = decay * momentum + lr * gradient
    blocks = scipy.fft.dctn(to_blocks(momentum, 8), axes=(2, 3), norm="ortho")
    flat = blocks.reshape(-1, blocks.shape[2] * blocks.shape[3])
    keep = np.argsort(-np.abs(flat), axis=1)[:, :k]
    sent = np.zeros_like(flat)
    np.put_along_axis(sent, keep, np.take_along_axis(flat, keep, axis=1), axis=1)
    sent = sent.reshape(blocks.shape)
    return momentum - from_blocks(scipy.fft.idctn(sent, axes=(2, 3), norm="ortho"), momentum.shape), sent


def reference_sign(sent_by_peer, shape):
    mean = sum(sent / (np.linalg.norm(sent) + 1e-8) for sent in sent_by_peer) / len(sent_by_peer)
    return np.sign(from_blocks(scipy.fft.idctn(mean, axes=(2, 3), norm="ortho"), shape))


def test_the_limit_of_zero_of_a_step_follows_from_all_its_updates(monkeypatch, hparams, tensors):
    scheme, limits = DemoOuter(tensors(0), hparams()), []
    updates = [packed(DemoOuter(tensors(0), hparams()), tensors(uid), uid=uid) for uid in (1, 2)]
    real = demo.signs_of_sum
    monkeypatch.setattr(demo, "signs_of_sum", lambda *args: limits.append(args[2]) or real(*args))
    scheme.apply(updates[::-1], step=0)
    assert {*limits} == {zero_limit(updates)}


def test_several_steps_against_the_reference(hparams, tensors):
    h = hparams(quantization_bits=0, weight_decay=0.01)
    parameters = tensors(0)
    theta = {name: tensor.numpy().copy() for name, tensor in parameters.items()}
    miners = [DemoOuter(parameters, h) for _ in range(3)]
    momenta = [{name: np.zeros(p.shape) for name, p in parameters.items()} for _ in miners]
    for step in range(5):
        lr = learning_rate(step, SCHEDULE)
        gradients = [tensors(100 * step + uid) for uid in range(3)]
        updates = [packed(m, g, uid=uid, step=step) for uid, (m, g) in enumerate(zip(miners, gradients, strict=True))]
        sent = [{} for _ in miners]
        for uid, momentum in enumerate(momenta):
            for name in momentum:
                k = miners[0].spec.tensors[name].k
                momentum[name], sent[uid][name] = reference_step(
                    momentum[name], gradients[uid][name].double().numpy(), lr, 0.9, k
                )
                np.testing.assert_allclose(
                    miners[uid].state_dict()["tensors"][name].numpy(), momentum[name], atol=1e-6, err_msg=name
                )
        miners[0].apply(updates, step=step)
        for name, before in theta.items():
            sign = reference_sign([peer[name] for peer in sent], before.shape).astype(np.float32)
            theta[name] = before * np.float32(1 - lr * 0.01) - np.float32(lr) * sign
            np.testing.assert_array_equal(parameters[name].numpy(), theta[name])


# --- error feedback -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "selection"), [(0, "chunk"), (1, "chunk"), (2, "chunk"), (4, "chunk"), (8, "chunk"), (1, "group")]
)
def test_the_momentum_loses_exactly_what_receivers_decode(bits, selection, hparams, tensors):
    scheme = DemoOuter(tensors(0), hparams(quantization_bits=bits, topk_selection=selection))
    for step in range(7):
        before = scheme.state_dict()["tensors"] or {name: torch.zeros_like(g) for name, g in tensors(0).items()}
        gradients = tensors(step + 1)
        update = packed(scheme, gradients, uid=3, step=step)
        lr = learning_rate(step, SCHEDULE)
        for name, tensor in scheme.spec.tensors.items():
            grid = tensor.grid
            indices, values = update.coefficients(name)
            expected = before[name].mul(0.9).add(gradients[name], alpha=lr)
            grid.view(expected).sub_(grid.join(inverse_sparse(indices, values, grid)))
            assert torch.equal(scheme.state_dict()["tensors"][name], expected), (step, name)


def test_honest_norms_stay_below_the_largest_while_no_update_is_applied(hparams, tensors):
    """At a run's start all windows only measure; the largest norm depends on the validator's gradient alone."""
    scheme, gradients = DemoOuter(tensors(0), hparams()), tensors(1)
    length = math.hypot(*(float(one.norm()) for one in gradients.values()))
    norms = []
    for window in range(12):
        update = packed(scheme, gradients, uid=1, window=window)
        norms.append(math.hypot(*map(update.norm, scheme.spec.tensors)))
    assert max(norms) > 1.5 * norms[0]
    assert 0 < max(norms) < scheme.largest_norm(0, gradient=length) < 1e5 * min(norms)
    assert scheme.largest_norm(0, gradient=2 * length) == 2 * scheme.largest_norm(0, gradient=length)


def test_the_largest_norm_is_that_of_the_highest_rate_so_far(hparams, tensors):
    schedule = {"peak": 1e-2, "warmup_steps": 4, "t_max": 8, "start_factor": 0.25, "floor_factor": 0.1}
    scheme = DemoOuter(tensors(0), hparams(**schedule, momentum_decay=0.5))
    largest = [scheme.largest_norm(step, gradient=3.0) for step in (0, 2, 4, 11)]
    assert largest == pytest.approx([rate * 2 * demo.LONGEST_GRADIENT * 3.0 for rate in (2.5e-3, 6.25e-3, 1e-2, 1e-2)])


def test_what_is_lost_in_a_window_is_made_up_for_later(hparams, tensors):
    """Values are coarse and coefficients few, yet over many windows everything arrives."""
    scheme = DemoOuter(tensors(0), hparams(momentum_decay=1.0, warmup_steps=0, t_max=10**9, peak=1.0))
    gradients, windows = tensors(1), 200
    for _ in range(windows):
        packed(scheme, gradients, uid=0)
    for name, left in scheme.state_dict()["tensors"].items():
        assert left.norm() < 0.2 * windows * gradients[name].norm(), name


def test_packing_leaves_parameters_and_gradients_alone(hparams, tensors):
    parameters, gradients = tensors(0), tensors(1)
    packed(DemoOuter(parameters, hparams()), gradients, uid=0)
    assert digest(parameters) == digest(tensors(0))
    assert digest(gradients) == digest(tensors(1))


@pytest.mark.parametrize("number", [math.nan, math.inf, -1e30])
def test_a_gradient_that_is_not_finite_changes_nothing(number, hparams, tensors):
    scheme = DemoOuter(tensors(0), hparams())
    packed(scheme, tensors(1), uid=0)
    before = digest(scheme.state_dict()["tensors"])
    gradients = tensors(2)
    gradients["w.2"][3, 4] = number
    with pytest.raises(TrainingError, match=r"w\.2"):
        packed(scheme, gradients, uid=0)
    assert digest(scheme.state_dict()["tensors"]) == before


@pytest.mark.parametrize("wrong", [{"norm": None}, {"other": torch.zeros(3)}, {"norm": torch.zeros(3)}])
def test_gradients_of_another_model_are_refused(wrong, hparams, tensors):
    gradients = {name: g for name, g in (tensors(1) | wrong).items() if g is not None}
    with pytest.raises(ValueError, match=r"norm|other"):
        packed(DemoOuter(tensors(0), hparams()), gradients, uid=0)


def test_no_gradient_at_all_moves_nothing(hparams, tensors):
    parameters = tensors(0)
    scheme = DemoOuter(parameters, hparams())
    body = scheme.pack({name: torch.zeros_like(p) for name, p in parameters.items()}, step=0, window=9, uid=0, **META)
    with pytest.raises(EmptyUpdate):
        parse(body, scheme.spec, window=9, uid=0)
    scheme.apply([Update(spec=scheme.spec, window=9, uid=0, body=body, **META)], step=0)
    assert digest(parameters) == digest(tensors(0))


# --- the step -------------------------------------------------------------------------------------------------------


@pytest.fixture
def peers(hparams, tensors):
    """Return updates of five miners with gradients that agree in part."""

    def make(count: int = 5, **changes):
        common = tensors(50)
        made = []
        for uid in range(count):
            gradients = {name: g + common[name] for name, g in tensors(60 + uid).items()}
            made.append(packed(DemoOuter(tensors(0), hparams(**changes)), gradients, uid=uid))
        return made

    return make


def applied(updates, hparams, tensors, **changes) -> str:
    parameters = tensors(0)
    DemoOuter(parameters, hparams(**changes)).apply(updates, step=4)
    return digest(parameters)


def test_order_of_arrival_does_not_matter(peers, hparams, tensors):
    updates = peers()
    assert applied(updates, hparams, tensors) == applied(updates[::-1], hparams, tensors)
    assert applied(updates, hparams, tensors) != applied(updates[1:], hparams, tensors)


def test_row_blocks_and_threads_do_not_matter(peers, hparams, tensors, monkeypatch):
    updates = peers()
    whole = applied(updates, hparams, tensors)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert applied(updates, hparams, tensors) == whole
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setitem(chunks.ROW_BLOCK_ENTRIES, "cpu", 64)
    assert applied(updates, hparams, tensors) == whole
    assert [u.body for u in peers()] == [u.body for u in updates]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_holds_the_same_bytes(peers, hparams, tensors):
    updates = peers()
    parameters = {name: p.cuda() for name, p in tensors(0).items()}
    DemoOuter(parameters, hparams()).apply(updates, step=4)
    assert digest(parameters) == applied(updates, hparams, tensors)


def test_nobody_gathered_changes_nothing(hparams, tensors):
    assert applied([], hparams, tensors, weight_decay=0.5) == digest(tensors(0))


def test_the_same_uid_twice_or_another_window_or_layout_is_refused(peers, hparams, tensors):
    first, second, *_ = peers()
    later = packed(DemoOuter(tensors(0), hparams()), tensors(1), uid=1, window=10)
    foreign = packed(DemoOuter(tensors(0), hparams(topk_compression=4)), tensors(1), uid=1)
    for updates in ([first, first], [first, later], [first, foreign], [foreign]):
        with pytest.raises(ValueError, match="expected"):
            applied(updates, hparams, tensors)
    assert applied([first, second], hparams, tensors)


def one_matrix(hparams, **changes):
    parameters = {"w": torch.zeros(64, 64)}
    h = hparams(target_chunk=64, topk_compression=32, quantization_bits=0, warmup_steps=0, peak=1.0, **changes)
    return parameters, DemoOuter(parameters, h)


def made_by_hand(scheme, uid, entries: dict[int, float]):
    filler = (i for i in range(4096) if i not in entries)
    entries = entries | {next(filler): 0.0 for _ in range(32 - len(entries))}
    indices = torch.tensor([sorted(entries)])
    values = torch.tensor([[entries[i] for i in sorted(entries)]])
    body = build({"w": (indices, values)}, scheme.spec, window=9, uid=uid, **META)
    return parse(body, scheme.spec, window=9, uid=uid)


def test_what_cancels_is_zero_and_not_the_rounding_of_some_machine(hparams):
    parameters, scheme = one_matrix(hparams)
    # cos(3y) - cos(3x) is zero on the diagonal.
    scheme.apply([made_by_hand(scheme, 0, {3: 1.7, 3 * 64: -1.7})], step=0)
    assert not parameters["w"].diagonal().any()
    assert parameters["w"][5, 6] != 0
    parameters["w"].zero_()
    scheme.apply([made_by_hand(scheme, 0, {5: 1.1, 70: 0.3}), made_by_hand(scheme, 1, {5: -1.1, 70: -0.3})], step=0)
    assert not parameters["w"].any()


def test_chunks_that_nobody_sent_stay(hparams):
    parameters = {"w": torch.zeros(128, 64)}
    scheme = DemoOuter(parameters, hparams(target_chunk=64, topk_compression=32))
    gradient = torch.zeros(128, 64)
    gradient[:64] = torch.randn(64, 64, generator=torch.Generator().manual_seed(8))
    scheme.apply([packed(scheme, {"w": gradient}, uid=0)], step=0)
    assert parameters["w"][:64].any()
    assert not parameters["w"][64:].any()


def flipped(hparams, attack: dict[int, float]) -> float:
    """Return the share of entries with signs that a fifth peer flips against four agreeing peers."""
    chance = torch.Generator().manual_seed(11)
    honest = {int(i): float(v) for i, v in zip(range(0, 64 * 32, 64), torch.randn(32, generator=chance), strict=True)}
    results = []
    for extra in ({}, attack):
        parameters, scheme = one_matrix(hparams)
        updates = [made_by_hand(scheme, uid, honest) for uid in range(4)]
        updates += [made_by_hand(scheme, 4, extra)] if extra else []
        scheme.apply(updates, step=0)
        results.append(parameters["w"].clone())
    return (results[0] != results[1]).double().mean().item()


def test_influence_of_one_peer_is_bounded_however_large_or_lonely(hparams):
    lonely = {
        i + 7: v
        for i, v in zip(
            range(0, 64 * 32, 64), torch.randn(32, generator=torch.Generator().manual_seed(12)).tolist(), strict=True
        )
    }
    scaled = {i: 1e6 * v for i, v in lonely.items()}
    level = dict.fromkeys(lonely, 1.0)
    against = dict.fromkeys(range(0, 64 * 32, 64), -1.0)  # at the indices of the others
    # Two independent directions of weights 4/5 and 1/5 disagree on about atan(1/4) / pi = 8 % of signs; if indices that
    # no other peer sends had full weight, it would be atan(1) / pi = 25 %.
    for attack in (lonely, level, against):
        assert 0 < flipped(hparams, attack) < 0.15
    assert flipped(hparams, scaled) == pytest.approx(flipped(hparams, lonely), abs=0.001)


# --- probe and state ------------------------------------------------------------------------------------------------


def test_a_trial_step_moves_the_parameters_along_one_update(peers, hparams, tensors):
    parameters = tensors(0)
    parameters["norm"][0] = -0.0
    scheme = DemoOuter(parameters, hparams())
    update, before = peers()[2], copies(parameters)
    lr = np.float32(learning_rate(4, SCHEDULE) * 0.2)
    scheme.trial_step(update, step=4)
    for name, tensor in scheme.spec.tensors.items():
        indices, values = update.coefficients(name)
        dense = torch.zeros(tensor.grid.chunks, tensor.grid.entries).double().scatter(1, indices, values.double())
        sign = torch.empty(tensor.grid.shape)
        tensor.grid.view(sign).copy_(tensor.grid.join(inverse(dense, tensor.grid)).sign())
        np.testing.assert_array_equal(parameters[name].numpy(), before[name].numpy() - lr * sign.numpy())


def test_parameters_that_require_gradients_are_stepped_in_place(peers, hparams, tensors):
    live = {name: torch.nn.Parameter(tensor) for name, tensor in tensors(0).items()}
    scheme = DemoOuter(live, hparams())
    scheme.apply(peers(), step=4)
    assert all(one.grad_fn is None for one in live.values())
    assert digest(live) == applied(peers(), hparams, tensors)


def test_a_restart_continues_with_the_same_bytes(hparams, tensors):
    whole, first = DemoOuter(tensors(0), hparams()), DemoOuter(tensors(0), hparams())
    second = DemoOuter(tensors(0), hparams())
    for step in range(6):
        continued = first if step < 3 else second
        if step == 3:
            state = first.state_dict()
            second.load_state_dict(state)
            first.pack(tensors(99), step=0, window=0, uid=0, **META)  # changes neither the state nor its reader
            state["tensors"]["norm"].zero_()
        expected = packed(whole, tensors(step), uid=1, step=step)
        assert packed(continued, tensors(step), uid=1, step=step).body == expected.body


def test_an_update_that_was_packed_before_a_reset_is_not_restored(hparams, tensors):
    scheme = DemoOuter(tensors(0), hparams())
    bodies = [scheme.pack(tensors(step), step=step, window=step, uid=1, **META) for step in (8, 9)]
    scheme.own_applied(10)  # a reset, while the last update is being published
    scheme.restore(bodies[1], window=9, uid=1)
    assert scheme.state_dict()["tensors"] == {}


def test_a_node_that_never_packed_has_nothing_to_keep(hparams, tensors):
    state = DemoOuter(tensors(0), hparams()).state_dict()
    assert state == {"version": 3, "window": None, "taken_back": [], "tensors": {}}
    DemoOuter(tensors(0), hparams()).load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"more": 1},
        {"tensors": {"norm": torch.zeros(16)}},
        {"norm": torch.zeros(15)},
        {"norm": torch.zeros(16).double()},
        {"norm": torch.full((16,), math.nan)},
    ],
)
def test_states_that_do_not_fit_are_refused_and_change_nothing(change, hparams, tensors):
    scheme = DemoOuter(tensors(0), hparams())
    packed(scheme, tensors(1), uid=0)
    state = scheme.state_dict()
    before = digest(state["tensors"])
    if "norm" in change:
        state["tensors"] |= change
    else:
        state |= change
    with pytest.raises(StateError, match=r"demo|error feedback"):
        scheme.load_state_dict(state)
    assert digest(scheme.state_dict()["tensors"]) == before


def test_parameters_in_half_precision_are_refused(hparams):
    with pytest.raises(ValueError, match="float32"):
        DemoOuter({"w": torch.zeros(4, 4, dtype=torch.bfloat16)}, hparams())


def test_an_update_is_measured_with_the_factor_with_which_it_is_applied(hparams, tensors):
    """An update with a norm near the epsilon has half of the weight of a usual one."""
    parameters = tensors(0)
    scheme = DemoOuter(parameters, hparams(quantization_bits=0))
    name = next(iter(parameters))
    assert scheme.step_factors(name, [0.0, 1e-8, 1.0], step=0) == pytest.approx([1e8, 5e7, 1.0], rel=1e-6)
