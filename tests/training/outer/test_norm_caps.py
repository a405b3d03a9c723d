"""The norm with which an update counts: a window's step is bounded for any updates, in both schemes."""

import functools
import itertools
import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import Update, build, parse
from tplr.errors import EmptyUpdate
from tplr.hparams import DemoParams, HParams, LearningRate, OuterRate, SparselocoParams
from tplr.training.fingerprint import digest
from tplr.training.outer.norm_caps import (
    FIRST,
    FIRST_REACH,
    HISTORY,
    LOWEST,
    RISE,
    effective_count,
    largest_norm,
    last_caps,
    no_history,
    norm_bound,
    recorded,
    window_cap,
)
from tplr.training.outer.sparseloco import SparselocoOuter
from tplr.training.schemes import outer_scheme

META = {"pages_digest": "00" * 32, "batches": 1}
SHAPES = {"matrix": (16, 16), "vector": (12,)}
CONSTANTS = SparselocoParams(
    inner_steps=4,
    batches_per_inner_step=1,
    inner_learning_rate=LearningRate(peak=1e-2, warmup_steps=8, t_max=100, start_factor=0.25, floor_factor=0.1),
    adam_beta1=0.9,
    adam_beta2=0.95,
    adam_epsilon=1e-8,
    weight_decay=0.1,
    gradient_clip_norm=1.0,
    error_feedback_decay=0.75,
    outer_learning_rate=0.5,
    outer_momentum=0.0,
    outer_nesterov=False,
)
USUAL = 0.02  # size of an honest entry
# Bounds that are the same in all windows, 16 times a usual norm; the first cap is two.
STEADY = {
    "inner_learning_rate": CONSTANTS.inner_learning_rate.model_copy(update={"peak": 4 * USUAL, "warmup_steps": 0}),
    "error_feedback_decay": 0.0,
}
SPEC = PayloadSpec.of(SHAPES, outer="sparseloco", target_chunk=8, topk=5, bits=0)


def hparams(scheme: str, **changes) -> HParams:
    common = {
        "target_chunk": 8,
        "topk_compression": 5,
        "quantization_bits": 0,
        "quantization_scale": "chunk",
        "quantization_codebook": "lloyd",
        "quantization_rounding": "nearest",
        "stale_after_windows": 9,
        "eval_lr_factor": 0.2,
    }
    if scheme == "demo":
        rate = LearningRate(peak=1e-2, warmup_steps=0, t_max=100, start_factor=0.1, floor_factor=0.1)
        own = {"demo": DemoParams(learning_rate=rate, momentum_decay=0.9, weight_decay=0.0)}
    else:
        own = {"sparseloco": CONSTANTS.model_copy(update=changes)}
    return HParams.model_construct(outer=scheme, **own, **common)


@functools.cache  # many windows and cases have the same updates
def sent(uid: int, size: float, *, scheme: str = "sparseloco", seed: int = 0) -> Update:
    """Return an update with entries of this size and random signs; it may be empty."""
    spec = SPEC if scheme == "sparseloco" else PayloadSpec.of(SHAPES, outer="demo", target_chunk=8, topk=5, bits=0)
    chance = np.random.default_rng([uid, seed])
    made = {}
    for name, one in spec.tensors.items():
        where = [sorted(chance.choice(one.grid.entries, one.k, replace=False)) for _ in range(one.grid.chunks)]
        signs = chance.choice([-1.0, 1.0], (one.grid.chunks, one.k))
        made[name] = torch.tensor(np.array(where)), torch.tensor(signs * size).float()
    body = build(made, spec, window=9, uid=uid, **META)
    return Update(spec=spec, window=9, uid=uid, body=body, **META)


def weights() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name, shape in SHAPES.items()}


def moved(scheme, parameters, updates, step: int) -> dict[str, float]:
    """Return the norm of the step of each tensor."""
    before = {name: one.clone() for name, one in parameters.items()}
    scheme.apply(updates, step=step)
    return {name: float((one.double() - before[name].double()).norm()) for name, one in parameters.items()}


def length(size: float, name: str) -> float:
    """Return the norm of a tensor with sent entries of this size."""
    return size * math.sqrt(SPEC.tensors[name].grid.chunks * SPEC.tensors[name].k)


def bound(name: str, step: int, **changes) -> float:
    return norm_bound(SPEC.tensors[name], CONSTANTS.model_copy(update=changes), step)


def test_the_bound_is_what_inner_steps_and_error_feedback_explain():
    # Four steps of at most 1e-2 * (0.25 + 0.75 * 3 / 8); then two independent windows, 0.75 of the first.
    assert bound("matrix", 0) == pytest.approx(4 * 1e-2 * (0.25 + 0.75 * 3 / 8) * math.sqrt(4 * 5))
    assert bound("matrix", 1) == pytest.approx(4 * 1e-2 * (0.25 + 0.75 * 7 / 8) * 1.25 * math.sqrt(4 * 5))
    assert bound("matrix", 200) == bound("matrix", 1000) == pytest.approx(4 * 1e-2 * math.sqrt(4 * 5 / (1 - 0.75**2)))
    forever = CONSTANTS.model_copy(update={"error_feedback_decay": 1.0})
    assert norm_bound(SPEC.tensors["matrix"], forever, 1000) == pytest.approx(4e-2 * 10 * math.sqrt(4 * 5))


def test_the_largest_norm_is_that_of_windows_in_one_direction():
    def largest(step: int) -> float:
        return largest_norm(SPEC.tensors["matrix"], CONSTANTS, step)

    assert largest(0) == pytest.approx(bound("matrix", 0) / (1 - 0.75))
    assert largest(200) == pytest.approx(4 * 1e-2 * math.sqrt(4 * 5) / (1 - 0.75))
    scheme = SparselocoOuter(weights(), hparams("sparseloco"))
    tensors = scheme.spec.tensors.values()
    assert scheme.largest_norm(7, gradient=1.0) == pytest.approx(
        math.sqrt(sum(largest_norm(one, scheme._constants, 7) ** 2 for one in tensors))
    )
    assert scheme.largest_norm(7, gradient=1.0) == scheme.largest_norm(7, gradient=9.0)


def test_honest_norms_stay_below_the_largest_while_no_update_is_applied():
    """At a run's start all windows only measure: the step stays 0, and error feedback grows in one direction."""
    parameters = weights()
    scheme = SparselocoOuter(parameters, hparams("sparseloco", quantization_bits=0))
    change = 4 * 1e-2 * (0.25 + 0.75 * 3 / 8)  # of each entry in a window; see the bound
    work = {name: torch.full_like(one, change) for name, one in parameters.items()}
    norms = []
    for window in range(12):
        body = scheme.pack(work, step=0, window=window, uid=0, pages_digest="0" * 64, batches=1)
        update = parse(body, scheme.spec, window=window, uid=0)
        norms.append(math.hypot(*map(update.norm, scheme.spec.tensors)))
    assert max(norms) > 1.5 * norms[0]
    assert norms[0] == pytest.approx(math.hypot(*(bound(name, 0) for name in scheme.spec.tensors)))
    assert max(norms) < scheme.largest_norm(0, gradient=1.0)


# One window: sizes of the entries of its peers' updates, from nothing to the largest that the codec lets through.
SIZES = st.one_of(st.just(0.0), st.floats(-30, 29).map(lambda power: 10.0**power), st.just(USUAL))
WINDOWS = st.lists(st.lists(SIZES, min_size=1, max_size=9), min_size=1, max_size=12)


@settings(max_examples=60)
@given(windows=WINDOWS, momentum=st.sampled_from([0.0, 0.9]), nesterov=st.booleans())
def test_whatever_is_sent_every_step_of_sparseloco_is_bounded(windows, momentum, nesterov):
    parameters = weights()
    h = hparams("sparseloco", outer_momentum=momentum, outer_nesterov=nesterov and momentum > 0)
    scheme = SparselocoOuter(parameters, h)
    for step, sizes in enumerate(windows):
        histories = {name: last_caps(one, FIRST) for name, one in scheme._cap_history.items()}
        updates = [sent(uid, size, seed=step) for uid, size in enumerate(sizes)]
        for name, found in moved(scheme, parameters, updates, step).items():
            limit = bound(name, step)
            if not momentum:  # momentum carries the last windows' steps
                limit *= min(1.0, (FIRST_REACH if step < HISTORY else RISE) * statistics.median_low(histories[name]))
            assert found <= 0.5 * limit / (1 - momentum) * (1 + 1e-5)


@settings(max_examples=60)
@given(sizes=st.lists(SIZES, min_size=1, max_size=9))
def test_whatever_is_sent_no_entry_moves_further_than_the_learning_rate_under_demo(sizes):
    parameters = weights()
    scheme = outer_scheme(parameters, hparams("demo"))
    scheme.apply([sent(uid, size, scheme="demo") for uid, size in enumerate(sizes)], step=0)
    assert all(one.abs().max() <= 1e-2 * (1 + 1e-6) for one in parameters.values())


def after_honest_windows(count: int) -> tuple[dict[str, torch.Tensor], SparselocoOuter]:
    parameters = weights()
    scheme = SparselocoOuter(parameters, hparams("sparseloco", **STEADY))
    for step in range(count):
        scheme.apply([sent(uid, USUAL, seed=step) for uid in range(20)], step=step)
    return parameters, scheme


def test_a_giant_alone_or_giants_only_move_hardly_more_than_an_honest_peer():
    for giants, honest in ((1, 0), (11, 9), (20, 0)):
        parameters, scheme = after_honest_windows(HISTORY)
        updates = [sent(uid, 1e19 if uid < giants else USUAL) for uid in range(giants + honest)]
        for name, found in moved(scheme, parameters, updates, step=HISTORY).items():
            assert found <= 0.5 * RISE * length(USUAL, name) * (1 + 1e-5)


def test_giants_in_the_first_window_move_no_more_than_a_share_of_the_bound():
    parameters = weights()
    scheme = SparselocoOuter(parameters, hparams("sparseloco"))
    for name, found in moved(scheme, parameters, [sent(0, 1e19)], step=0).items():
        assert found == pytest.approx(0.5 * RISE * FIRST * bound(name, 0), rel=1e-5)


@pytest.mark.parametrize(
    ("giants", "short", "share"), [(2, 0, RISE * FIRST), (3, 0, 1.0), (3, 1, FIRST), (19, 1, RISE * FIRST)]
)
def test_a_single_short_update_keeps_the_first_cap_from_rising_at_once(giants, short, share):
    """Beside a short one three giants are three quarters of all, and nineteen are more."""
    parameters = weights()
    scheme = SparselocoOuter(parameters, hparams("sparseloco"))
    updates = [same_direction(uid, 1e19 if uid < giants else 1e-9) for uid in range(giants + short)]
    for name, found in moved(scheme, parameters, updates, step=0).items():
        assert found == pytest.approx(0.5 * share * bound(name, 0), rel=1e-4)


def test_a_larger_outer_rate_makes_no_first_step_of_giants_longer():
    def steps(rate: float) -> dict[str, float]:
        parameters = weights()
        scheme = SparselocoOuter(parameters, hparams("sparseloco", outer_learning_rate=rate))
        return moved(scheme, parameters, [sent(0, 1e19)], step=0)

    usual = steps(1.0)
    assert steps(4.0) == pytest.approx(usual, rel=1e-5)
    for name, found in steps(0.25).items():
        assert found == pytest.approx(0.25 * usual[name], rel=1e-5)


def test_a_rate_that_rises_later_makes_no_first_step_longer():
    def step(at: int, *points: OuterRate) -> dict[str, float]:
        parameters = weights()
        scheme = SparselocoOuter(parameters, hparams("sparseloco", outer_learning_rate_points=points))
        return moved(scheme, parameters, [sent(0, 1e19)], step=at)

    assert step(0, OuterRate(step=8, rate=4.0)) == step(0)
    halves = {name: found / 2 for name, found in step(8).items()}
    assert step(8, OuterRate(step=8, rate=0.25)) == pytest.approx(halves, rel=1e-5)


def test_giants_that_stay_raise_the_caps_to_the_bound_and_no_further():
    parameters, scheme = after_honest_windows(HISTORY)
    found = [moved(scheme, parameters, [sent(0, 1e19, seed=w)], step=100)["matrix"] for w in range(12 * HISTORY)]
    assert all(after >= before * (1 - 1e-6) for before, after in itertools.pairwise(found))
    assert found[-1] == pytest.approx(0.5 * bound("matrix", 100, **STEADY), rel=1e-5)


@settings(max_examples=200)
@given(
    honest=st.lists(st.floats(1e-4, 0.05), min_size=1, max_size=5),
    others=st.lists(st.lists(st.floats(1e-30, 1e30), max_size=15), min_size=1, max_size=40),
    first=st.booleans(),
)
def test_while_a_quarter_is_honest_no_others_move_the_cap_beyond_honest_norms(honest, others, first):
    history = [0.02] * HISTORY
    for window in others:
        cap = window_cap([*honest, *window[: 3 * len(honest)]], history, first=first)
        assert min(*honest, 0.02) * (1 - 1e-6) <= cap <= max(*honest, 0.02) * (1 + 1e-6)
        history = [*history[1:], cap]


def test_the_cap_follows_when_all_norms_fall_or_rise():
    history, usual = [0.1] * HISTORY, 0.1
    for factor in (0.97, 1.03):
        for _ in range(60):
            usual *= factor
            norms = [usual * one for one in (0.5, 0.8, 1.0, 1.0, 1.3)]
            cap = window_cap(norms, history)
            history = [*history[1:], cap]
        assert norms[0] < cap < norms[-1]


def test_giants_that_are_three_quarters_lengthen_no_step_however_long_they_stay():
    parameters, scheme = after_honest_windows(HISTORY)
    for step in range(HISTORY, 4 * HISTORY):
        updates = [sent(uid, 1e19 if uid < 15 else USUAL, seed=step) for uid in range(20)]
        for name, found in moved(scheme, parameters, updates, step=step).items():
            assert found <= 0.5 * length(USUAL, name) * (1 + 1e-5)


@pytest.mark.parametrize(
    ("small", "size"), [*((small, 0.0) for small in (9, 10, 15, 19)), *((small, 1e-25) for small in (9, 10, 15, 16))]
)
def test_nothing_or_next_to_nothing_does_not_shorten_the_step_of_the_others(small, size):
    """Zeros are refused when they are gathered; here they are accepted. Beside 1e-25 the others must be a fifth."""
    parameters, scheme = after_honest_windows(HISTORY)
    alone, honest = after_honest_windows(HISTORY)
    others = [sent(uid, USUAL) for uid in range(small, 20)]
    found = moved(scheme, parameters, [*(sent(uid, size) for uid in range(small)), *others], step=HISTORY)
    assert found == pytest.approx(moved(honest, alone, others, step=HISTORY), rel=1e-5)


def same_direction(uid: int, size: float) -> Update:
    """Return an update that differs in nothing but its length from those of other uids."""
    return replace(sent(0, size), uid=uid)


@pytest.mark.parametrize("small", [1, 5, 12])
@pytest.mark.parametrize("share", [0.05, 0.1, 0.2])
def test_short_updates_beside_three_others_lower_no_cap_and_hardly_shorten_the_step(small, share):
    """The mean of three and twelve of a twentieth would be 0.24 as long as that of the three."""
    parameters, scheme = after_honest_windows(HISTORY)
    left = (3 + small * share**3) / (3 + small * share**2)
    for step in range(HISTORY, 3 * HISTORY):
        updates = [same_direction(uid, USUAL if uid < 3 else share * USUAL) for uid in range(3 + small)]
        found = moved(scheme, parameters, updates, step=step)
        assert found == pytest.approx({name: 0.5 * length(USUAL, name) * left for name in SHAPES}, rel=1e-4)


def test_short_updates_alone_in_the_first_window_do_not_set_the_cap():
    parameters = weights()
    scheme = SparselocoOuter(parameters, hparams("sparseloco", **STEADY))
    scheme.apply([sent(uid, 0.05 * USUAL) for uid in range(6)], step=0)
    for step in range(1, HISTORY):
        updates = [same_direction(uid, USUAL if uid < 3 else 0.05 * USUAL) for uid in range(15)]
        found = moved(scheme, parameters, updates, step=step)
    assert found["matrix"] == pytest.approx(0.5 * length(USUAL, "matrix") * 3.0015 / 3.03, rel=1e-4)


@pytest.mark.parametrize(("giants", "honest"), [(1, 4), (2, 8), (2, 13), (3, 12), (3, 17)])
def test_fewer_than_a_quarter_of_giants_do_not_keep_the_first_cap(giants, honest):
    """Honest norms are a third of it; below a quarter of it they could not lower it beside three giants of fifteen."""
    parameters = weights()
    scheme = SparselocoOuter(parameters, hparams("sparseloco", **STEADY))
    for step in range(3 * HISTORY):
        sizes = [1e19] * giants + [USUAL * 2 / 3] * honest
        found = moved(scheme, parameters, [same_direction(uid, one) for uid, one in enumerate(sizes)], step=step)
    assert found == pytest.approx({name: 0.5 * length(USUAL * 2 / 3, name) for name in SHAPES}, rel=1e-4)


def test_short_norms_do_not_lower_a_cap_if_three_and_a_fifth_are_longer():
    assert window_cap([0.06] * 12 + [0.2] * 3, [0.25]) == np.float32(0.2)
    assert window_cap([0.06] * 12 + [0.4] * 3, [0.25]) == 0.25
    assert window_cap([0.07] * 12 + [0.2] * 3, [0.25]) == 0.125  # more than a quarter of the usual cap
    assert window_cap([0.06] * 8 + [0.2] * 2, [0.25]) == 0.125  # two
    assert window_cap([0.06] * 13 + [0.2] * 3, [0.25]) == 0.125  # less than a fifth
    assert window_cap([0.06] * 15, [0.25]) == 0.125


@pytest.mark.parametrize("short", [0.2, 0.01])
@pytest.mark.parametrize(("giants", "honest"), [(1, 4), (1, 14), (2, 13), (3, 17), (3, 12), (3, 4)])
def test_fewer_than_three_quarters_raise_no_cap_however_short_all_others_are(giants, honest, short):
    """Three and a fifth keep the first cap; fewer do not even that."""
    history = [FIRST] * HISTORY
    for _ in range(8 * HISTORY):
        history = [*history[1:], window_cap([1e19] * giants + [short * FIRST] * honest, history)]
    kept = giants >= max(3, (giants + honest) / 5)
    assert history[-1] == (FIRST if kept else np.float32(max(LOWEST, short * FIRST)))


def test_the_count_is_the_number_of_equal_updates_and_smaller_otherwise():
    assert effective_count([0.2] * 5) == pytest.approx(5)
    assert effective_count([0.2] * 4 + [0.1, 0.0]) == pytest.approx(0.9 * 0.17 / 0.033)
    assert effective_count([]) == effective_count([0.0, 0.0]) == 1
    assert effective_count([1e-300, 1e-300]) == pytest.approx(2)


@settings(max_examples=200)
@given(norms=st.lists(st.one_of(st.just(0.0), st.floats(1e-30, 1e30)), min_size=1, max_size=15))
def test_the_step_is_no_longer_than_the_longest_update_and_no_shorter_than_the_mean(norms):
    count = effective_count(norms)
    assert math.fsum(norms) / count <= max(norms) * (1 + 1e-9)
    assert 1 - 1e-9 <= count <= len(norms) * (1 + 1e-9)


@pytest.mark.long
def test_many_tiny_updates_do_not_lower_the_caps_and_tiny_ones_alone_are_forgotten():
    """A usual cap changes in every fifth window, so 19 rises by a quarter from the lowest one take 95."""
    parameters, scheme = after_honest_windows(HISTORY)
    usual = last_caps(scheme._cap_history["matrix"], FIRST)[-1]
    for step in range(HISTORY, 2 * HISTORY):
        scheme.apply([sent(uid, 1e-25 if uid < 16 else USUAL, seed=step) for uid in range(20)], step=step)
        assert last_caps(scheme._cap_history["matrix"], FIRST)[-1] == usual
    for step in range(2 * HISTORY, 8 * HISTORY):
        scheme.apply([sent(uid, 1e-25, seed=step) for uid in range(20)], step=step)
    assert float(scheme._cap_history["matrix"][-1]) == LOWEST
    found = [
        moved(scheme, parameters, [sent(uid, USUAL, seed=step) for uid in range(20)], step=step)["matrix"]
        for step in range(8 * HISTORY, 8 * HISTORY + 96)
    ]
    assert last_caps(scheme._cap_history["matrix"], FIRST)[-1] == usual
    assert found[-1] > found[0]


def test_a_window_of_nothing_leaves_the_caps():
    parameters, scheme = after_honest_windows(3)
    before = digest(scheme.state_dict()["tensors"])
    assert moved(scheme, parameters, [sent(0, 0.0)], step=3) == {"matrix": 0.0, "vector": 0.0}
    assert digest(scheme.state_dict()["tensors"]) == before


def test_caps_follow_the_quartiles_within_reach_of_the_history():
    assert window_cap([0.1, 0.2, 0.3, 0.4], [0.25]) == 0.25
    assert window_cap([0.1, 0.3, 0.3, 0.4], [0.25]) == 0.25  # three of four are above it, and one is not
    assert window_cap([0.3, 0.31, 0.35, 0.4], [0.25]) == np.float32(0.3)
    assert window_cap([0.2, 0.2, 0.2, 0.2, 0.3], [0.25]) == np.float32(0.2)
    assert window_cap([0.9], [0.125, 0.25, 0.375]) == 0.3125
    assert window_cap([9.0], [0.5, 0.875, 0.875]) == 1.0
    assert window_cap([1e-9], [0.125, 0.25, 0.375]) == 0.125
    assert window_cap([0.0], [0.25]) == 0.3125
    assert window_cap([], [0.25]) == 0.3125
    assert window_cap([], [0.1]) == np.float32(0.125)


def test_a_first_cap_rises_at_once_to_norms_that_are_up_to_eight_times_as_long():
    """A run's first cap is a guess; after as many windows as count, a cap is what the last ones were."""
    parameters = weights()
    scheme = SparselocoOuter(parameters, hparams("sparseloco", **STEADY))
    long = [same_direction(uid, 5 * USUAL) for uid in range(4)]
    for step in range(HISTORY):
        assert moved(scheme, parameters, long, step=step) == pytest.approx(
            {name: 0.5 * length(5 * USUAL, name) for name in SHAPES}, rel=1e-5
        )
    longer = [same_direction(uid, 15 * USUAL) for uid in range(4)]
    assert moved(scheme, parameters, longer, step=HISTORY) == pytest.approx(
        {name: 0.5 * length(5 * RISE * USUAL, name) for name in SHAPES}, rel=1e-5
    )
    assert FIRST * FIRST_REACH == 1.0


def test_a_warm_up_lifts_the_caps_and_not_their_history():
    """So does error feedback, which holds the work of more windows."""
    parameters = weights()
    scheme = SparselocoOuter(parameters, hparams("sparseloco"))
    for step in range(6):
        grown = FIRST * bound("matrix", step) / length(1.0, "matrix")
        found = moved(scheme, parameters, [sent(uid, grown, seed=step) for uid in range(1)], step=step)
        assert found["matrix"] == pytest.approx(0.5 * length(grown, "matrix"), rel=1e-5)
    assert scheme._cap_history["matrix"].tolist() == pytest.approx([0.0] * 2 + [FIRST] * 6, rel=1e-6)


def test_a_history_keeps_the_last_windows():
    history = no_history()
    assert last_caps(history, 0.5) == [0.5] * HISTORY
    for cap in range(1, HISTORY + 3):
        history = recorded(history, float(cap))
    assert last_caps(history, FIRST) == [float(cap) for cap in range(3, HISTORY + 3)]


def test_the_caps_survive_a_restart_and_come_with_a_checkpoint():
    windows = [[sent(uid, 10.0 ** (-1 - uid - 2 * (step % 3)), seed=step) for uid in range(3)] for step in range(9)]

    def gone_through(scheme, parameters, start: int) -> str:
        for step in range(start, len(windows)):
            scheme.apply(windows[step], step=step)
        return digest(parameters)

    def at_the_fifth() -> tuple[SparselocoOuter, dict[str, torch.Tensor]]:
        parameters = weights()
        scheme = SparselocoOuter(parameters, hparams("sparseloco"))
        for step in range(5):
            scheme.apply(windows[step], step=step)
        return scheme, parameters

    scheme, parameters = at_the_fifth()
    state, model = scheme.state_dict(), {name: one.clone() for name, one in parameters.items()}
    expected = gone_through(scheme, parameters, 5)
    shared = {name: one for name, one in state["tensors"].items() if name in scheme.shared_shapes}
    assert {name: one.shape for name, one in shared.items()} == scheme.shared_shapes
    for load in (
        lambda fresh: fresh.load_state_dict(state),
        lambda fresh: fresh.load_shared(shared),
    ):
        copies = {name: one.clone() for name, one in model.items()}
        fresh = SparselocoOuter(copies, hparams("sparseloco"))
        load(fresh)
        assert gone_through(fresh, copies, 5) == expected
    scheme, parameters = at_the_fifth()
    scheme.reset_shared()
    assert gone_through(scheme, parameters, 5) != expected  # the caps matter


def test_the_order_of_arrival_does_not_matter():
    digests = set()
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        parameters = weights()
        scheme = SparselocoOuter(parameters, hparams("sparseloco"))
        for step in range(3):
            updates = [sent(uid, 10.0 ** (uid - 3 + step), seed=step) for uid in range(4)]
            scheme.set_caps([updates[i] for i in order], step=step)
            scheme.trial_step(updates[3], step=step)
            scheme.apply([updates[i] for i in order], step=step)
        digests.add(digest(parameters | scheme.state_dict()["tensors"]))
    assert len(digests) == 1


def test_a_trial_step_is_a_part_of_the_step_as_applied():
    """It is clipped to the cap of the window's updates; the count of the step does not change it."""
    parameters, scheme = after_honest_windows(HISTORY)
    giant, others = sent(0, 5.0), [sent(uid, USUAL if uid < 4 else USUAL / 20) for uid in range(1, 12)]
    before, history = {name: one.clone() for name, one in parameters.items()}, scheme.state_dict()["tensors"]
    scheme.set_caps([giant, *others], step=HISTORY)
    scheme.trial_step(giant, step=HISTORY)
    for name, one in parameters.items():
        assert float((one - before[name]).norm()) == pytest.approx(0.5 * 0.2 * length(USUAL, name), rel=1e-4)
        one.copy_(before[name])
    assert digest(scheme.state_dict()["tensors"]) == digest(history)
    # Without the window's updates the cap is the largest possible, and it ends with the window.
    scheme.apply(others, step=HISTORY)
    before = {name: one.clone() for name, one in parameters.items()}
    scheme.trial_step(giant, step=HISTORY + 1)
    for name, one in parameters.items():
        limit = RISE * length(USUAL, name)
        assert float((one - before[name]).norm()) == pytest.approx(0.5 * 0.2 * limit, rel=1e-4)


def test_an_update_of_zeros_is_refused():
    for scheme in ("sparseloco", "demo"):
        nothing = sent(3, 0.0, scheme=scheme)
        with pytest.raises(EmptyUpdate, match="every value is zero"):
            parse(nothing.body, nothing.spec, window=9, uid=3)
        tiny = sent(3, 1e-40, scheme=scheme)
        assert parse(tiny.body, tiny.spec, window=9, uid=3).uid == 3


def test_taking_back_an_update_of_zeros_changes_nothing():
    scheme = SparselocoOuter(weights(), hparams("sparseloco"))
    body = scheme.pack(weights(), step=0, window=9, uid=3, **META)
    scheme.restore(body, window=9, uid=3)
    assert not any(one.any() for name, one in scheme.state_dict()["tensors"].items())
