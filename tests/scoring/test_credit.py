"""Credit of miners whose updates are a common gradient plus noise: equal content is paid once."""

import math

import numpy as np
import pytest

from tplr.scoring.credit import MOST_EVEN, PRIOR_WINDOWS, Credit, credit, even_scales, means_and_errors, non_negative
from tplr.training.alignment import Alignment

ENTRIES, WINDOWS = 20_000, 20


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


class World:
    """Honest updates are the true gradient plus independent noise; a validator's gradient also has some noise."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.truth = unit(self.random.standard_normal(ENTRIES))
        self.windows: list[Alignment] = []

    def honest(self, cosine: float = 0.7) -> np.ndarray:
        noise = unit(self.random.standard_normal(ENTRIES))
        return cosine * self.truth + math.sqrt(1 - cosine**2) * noise

    def changed(self, update: np.ndarray, alike: float) -> np.ndarray:
        """Return an update with this cosine with another one, and otherwise noise."""
        return alike * update + math.sqrt(1 - alike**2) * unit(self.random.standard_normal(ENTRIES))

    def see(self, updates: dict[int, np.ndarray]) -> None:
        x = np.stack([updates[uid] for uid in sorted(updates)])
        gradient = self.honest(0.5)
        upper = np.triu_indices(len(x))
        norms = np.linalg.norm(x, axis=1)
        self.windows.append(
            Alignment(tuple(sorted(updates)), tuple(x @ gradient), tuple(norms), tuple((x @ x.T)[upper]))
        )

    def credit(self, counted=None) -> dict[int, float]:
        counted = counted or [dict.fromkeys(one.uids, True) for one in self.windows]
        return {uid: one.value for uid, one in credit(self.windows, counted).items()}


def test_equal_miners_have_equal_credit_however_many_they_are():
    for count in (1, 2, 3, 20):
        world = World()
        for _ in range(WINDOWS):
            world.see({uid: world.honest() for uid in range(count)})
        found = world.credit()
        assert max(found.values()) < 1.1 * min(found.values()), count
        assert found[0] == pytest.approx(0.35, rel=0.1)  # the cosine with the validator's gradient, without sharing


@pytest.mark.parametrize("scale", [1.0, 0.1, 10.0])
def test_clones_are_paid_as_one(scale):
    world = World()
    for _ in range(WINDOWS):
        updates = {uid: world.honest() for uid in range(3)}
        clone = scale * world.honest()
        world.see(updates | dict.fromkeys(range(3, 11), clone))
    found = world.credit()
    clones = sum(found[uid] for uid in range(3, 11))
    assert clones == pytest.approx(scale * np.mean([found[uid] for uid in range(3)]), rel=0.15)
    assert found[3] == pytest.approx(found[10])


def test_near_clones_are_paid_as_little_more_than_one():
    world = World()
    for _ in range(WINDOWS):
        updates = {uid: world.honest() for uid in range(3)}
        source = world.honest()
        world.see(updates | {uid: world.changed(source, 0.9) for uid in range(3, 11)})
    found = world.credit()
    assert sum(found[uid] for uid in range(3, 11)) < 1.2 * np.mean([found[uid] for uid in range(3)])


@pytest.mark.parametrize(("uids", "at_once"), [(8, 2), (6, 2), (4, 2), (12, 3)])
def test_clones_in_turns_are_paid_as_one(uids, at_once):
    """In each window some of an owner's uids send one work, and other ones each time."""
    world, counted = World(), []
    for window in range(WINDOWS):
        turn = [8 + int(one) for one in np.random.default_rng(window).permutation(uids)[:at_once]]
        updates = {uid: world.honest() for uid in range(7)}
        world.see(updates | dict.fromkeys(turn, world.honest()))
        counted.append(dict.fromkeys(updates, True) | {8 + uid: 8 + uid in turn for uid in range(uids)})
    found = world.credit(counted)
    equal = np.mean([found[uid] for uid in range(7)])
    assert sum(found[8 + uid] for uid in range(uids)) < 1.1 * equal
    assert min(found[uid] for uid in range(7)) > 0.85 * equal  # and the others lose nothing


def test_honest_miners_with_few_common_windows_share_nothing():
    world, counted = World(), []
    for window in range(WINDOWS):
        world.see({uid: world.honest() for uid in range(6)})
        counted.append({0: True, 1: window >= WINDOWS - 3, 2: window < 5, 3: 4 <= window < 12, 4: True, 5: True})
    found = credit(world.windows, counted)
    assert min(one.own for one in found.values()) > 0.95


@pytest.mark.parametrize("clones", [1, 2])
def test_who_is_alone_is_paid_for_its_windows(clones):
    """Two clones without any other miner are paid at most the target for clones: they explain all of the gradient."""
    world, counted = World(), []
    for window in range(WINDOWS):
        world.see(dict.fromkeys(range(clones), world.honest()))
        counted.append({uid: bool(window % 2) for uid in range(clones)})
    found = credit(world.windows, counted)
    assert 0.95 < sum(one.own for one in found.values()) < (1.05 if clones == 1 else 1.2)


def test_a_copy_with_noise_earns_little_and_takes_nothing():
    world = World()
    for _ in range(WINDOWS):
        updates = {uid: world.honest() for uid in range(4)}
        world.see(updates | {9: world.changed(updates[0], 0.75)})
    found = world.credit()
    assert found[9] < 0.1 * found[1]
    assert found[0] > 0.85 * found[1]


def test_better_updates_earn_more_and_what_does_not_help_earns_nothing():
    world = World()
    for _ in range(WINDOWS):
        updates = {uid: world.honest(cosine) for uid, cosine in enumerate((0.3, 0.5, 0.7))}
        world.see(updates | {3: -world.honest(), 4: world.changed(world.truth, 0.0), 5: np.zeros(ENTRIES)})
    found = world.credit()
    assert 0 < found[0] < found[1] < found[2]
    assert found[2] / found[0] == pytest.approx(7 / 3, rel=0.2)
    assert [found[uid] for uid in (3, 4, 5)] == pytest.approx([0, 0, 0], abs=1e-3)


def test_presence_counts_linearly_and_a_blank_window_not_at_all():
    world, counted = World(), []
    for window in range(WINDOWS):
        world.see({uid: world.honest() for uid in range(5)})
        counted.append({0: True, 1: bool(window % 2), 2: True if window % 2 else None, 3: window < 15, 4: True})
    found = world.credit(counted)
    assert found[1] == pytest.approx(found[0] / 2, rel=0.1)
    assert found[2] == pytest.approx(found[0], rel=0.1)
    assert found[3] == pytest.approx(0.75 * found[0], rel=0.1)
    for one in counted:
        del one[4]  # it left
    assert 4 not in world.credit(counted)


def test_chance_is_no_credit_and_one_window_is_only_chance():
    world = World()
    for _ in range(WINDOWS):
        world.see({uid: world.honest(0.7 if uid < 3 else 0.0) for uid in range(12)})
        if len(world.windows) == 1:
            assert set(world.credit().values()) == {0.0}
    every = credit(world.windows, [dict.fromkeys(one.uids, True) for one in world.windows])
    assert sum(every[uid].value for uid in range(3, 12)) < 0.02 * every[0].value
    assert every[0].mean - 2 * every[0].error > 0
    spread = np.std([one.products[0] for one in world.windows], ddof=1) / math.sqrt(WINDOWS)
    assert every[0].error == pytest.approx(spread, rel=0.5)


def test_a_trend_is_no_chance():
    steps = [Alignment((1, 2), (1.0 - 0.04 * i, 0.5), (1.0, 1.0), (1.0, 0.0, 1.0)) for i in range(WINDOWS)]
    found = credit(steps, [{1: True, 2: True}] * WINDOWS)
    assert found[1].error < 0.01 * found[1].mean


def test_without_evidence_there_is_no_credit():
    assert credit([], []) == {}
    empty = Alignment((), (), (), ())
    assert credit([empty], [{}]) == {}
    assert credit([empty], [{4: False, 5: None}]) == {4: Credit(0.0, 0.0, 0.0), 5: Credit(0.0, 0.0, 0.0)}


def test_own_part_and_those_of_others_sum_to_one():
    """Clones share only with each other; a miner that ranks after another gets nothing for the common part."""
    world = World()
    for _ in range(WINDOWS):
        one = world.honest()
        world.see({1: one, 2: one, 3: world.honest(), 4: world.honest()})
    counted = [dict.fromkeys(range(1, 5), True)] * WINDOWS
    found = credit(world.windows, counted)
    for uid, one in found.items():
        assert one.value == one.beyond * one.own
        assert one.own + sum(one.shared.values()) == pytest.approx(1.0), uid
    assert (found[1].own, found[1].shared[2]) == pytest.approx((0.5, 0.5), abs=0.05)
    after = credit(world.windows, counted, first=(1,))
    assert 2 not in after[1].shared
    assert (after[1].own, after[2].own) == pytest.approx((1.0, 0.0), abs=0.05)
    assert after[2].shared[1] > 0.95


def test_non_negative_least_squares_meets_its_conditions():
    random = np.random.default_rng(0)
    for count in (1, 2, 5, 30):
        for _ in range(20):
            rows = random.standard_normal((count + 3, count))
            matrix, vector = rows.T @ rows, random.standard_normal(count)
            found = non_negative(matrix, vector)
            slope = matrix @ found - vector
            assert (found >= 0).all()
            assert slope.min() > -1e-9
            assert np.abs(slope[found > 0]).max(initial=0) < 1e-8
    assert non_negative(np.zeros((2, 2)), np.ones(2)).tolist() == [0, 0]


def column(*samples: float, length: int = 4) -> list[float]:
    return [*samples, *[math.nan] * (length - len(samples))]


def test_the_standard_error_is_of_the_noise_and_of_no_trend() -> None:
    noise = np.random.default_rng(1).standard_normal(4000)
    trend = np.linspace(0, 100, 4000)
    means, errors = means_and_errors(np.stack([noise, noise + trend], axis=1))
    assert means == pytest.approx([noise.mean(), noise.mean() + 50])
    assert errors == pytest.approx([1 / math.sqrt(4000)] * 2, rel=0.05)


def test_few_samples_have_the_usual_spread_too() -> None:
    usual = 0.02  # half of the squared differences of 1.0, 0.8 and 1.0
    columns = [column(1.0, 0.8, 1.0, 0.8), column(0.5, 0.5), column(0.5), column()]
    means, errors = means_and_errors(np.array(columns).T)
    assert means == pytest.approx([0.9, 0.5, 0.5, 0.0])
    spreads = [
        usual,
        PRIOR_WINDOWS * usual / 2 / (1 + PRIOR_WINDOWS),
        usual / 2,
        usual / 2,
    ]  # the median of 0 and usual
    assert errors[1:] == pytest.approx(
        [math.sqrt(one / count) for one, count in zip(spreads[1:], (2, 1, 1), strict=True)]
    )


def test_who_sends_anything_sets_no_usual_spread() -> None:
    """A majority that alternates between help and harm does not prevent others from being distinguished from chance."""
    wild = [column(0.5, -0.5, 0.5, -0.5)] * 9
    honest = [column(0.30, 0.31, 0.30, 0.31)] * 2
    _, errors = means_and_errors(np.array(honest + wild).T)
    assert errors[:2] == pytest.approx([math.sqrt(0.01**2 / 2 / 4)] * 2)
    assert min(errors[2:]) > 0.1


def test_who_is_not_applied_sets_no_usual_spread_if_others_help() -> None:
    """Anybody can have many on probation whose updates help, and vary more than those of others."""
    many = [column(0.9, 0.2, 0.9, 0.2)] * 9
    honest = [column(0.30, 0.31, 0.30, 0.31)] * 2
    samples = np.array(honest + many).T
    alone = np.sqrt(0.01**2 / 2 / 4)
    for applied in (np.arange(11) < 2, np.ones(11, dtype=bool)):
        _, errors = means_and_errors(samples, applied)
        assert (errors[0] == pytest.approx(alone)) == (not applied.all())
    nobody = means_and_errors(samples, np.zeros(11, dtype=bool))
    assert [one.tolist() for one in nobody] == [one.tolist() for one in means_and_errors(samples)]


def test_without_a_spread_to_see_an_error_is_as_large_as_the_mean() -> None:
    means, errors = means_and_errors(np.array([[0.3, -0.2]]))
    assert (means.tolist(), errors.tolist()) == ([0.3, -0.2], [0.3, 0.2])
    assert means_and_errors(np.zeros((0, 2)))[1].tolist() == [0.0, 0.0]


def test_who_comes_first_is_paid_as_if_alone_and_a_clone_gets_nothing() -> None:
    world = World()
    for _ in range(WINDOWS):
        one, other = world.honest(), world.honest()
        world.see({1: one, 2: other, 3: world.honest(), 4: one, 5: world.changed(other, 0.9)})
    counted = [dict.fromkeys(range(1, 6), True)] * WINDOWS
    shared, found = credit(world.windows, counted), credit(world.windows, counted, first=(1, 2))
    assert shared[4].value == pytest.approx(shared[3].value / 2, rel=0.1)
    assert [found[uid].value / found[3].value for uid in (1, 2)] == pytest.approx([1.0, 1.0], abs=0.15)
    assert found[4].value == pytest.approx(0.0, abs=0.05 * found[3].value)
    assert found[5].value < 0.2 * found[3].value
    assert found[3].value == pytest.approx(found[3].mean, rel=0.1)  # a miner with independent content loses nothing


# --- every window has the same weight -------------------------------------------------------------------------------


def test_a_lost_window_costs_one_window_s_pay_however_large_the_gains_were_then():
    gains = [0.08 * 0.9**window for window in range(WINDOWS)]  # gains of a new model: they fall to an eighth

    def loses(lost: int, *, even: bool) -> float:
        world = World()
        for gain in gains:
            world.see({uid: world.honest() for uid in range(4)})
            one = world.windows[-1]
            world.windows[-1] = one._replace(products=tuple(gain / 0.35 * x for x in one.products))
        counted = [{uid: uid > 0 or window != lost for uid in range(4)} for window in range(WINDOWS)]
        rows = [[x for x, counts in zip(one.products, row.values(), strict=True) if counts] for one, row in
                zip(world.windows, counted, strict=True)]  # fmt: skip
        found = credit(world.windows, counted, scales=even_scales(rows) if even else None)
        return found[0].value / np.mean([found[uid].value for uid in (1, 2, 3)])

    fair = 1 - 1 / WINDOWS
    for lost in (0, 2, 10, 19):
        assert loses(lost, even=True) == pytest.approx(fair, abs=0.06), lost
    assert loses(0, even=False) < fair - 0.06  # the loss without even scales


def test_scales_follow_the_usual_gain_and_not_one_window_or_one_miner():
    usual = [[0.08, 0.08, 0.08]] * 10 + [[0.02, 0.02, 0.02]] * 10
    scales = even_scales(usual)
    assert scales[0] * 0.08 == pytest.approx(scales[-1] * 0.02)
    assert scales == pytest.approx(even_scales([[*row[:2], 50.0] for row in usual]))  # a minority sets nothing
    odd = [*usual[:5], [-1.0, -1.0, -1.0], *usual[6:]]
    assert even_scales(odd) == pytest.approx(scales)  # and neither does one window


def test_scales_are_bounded_and_1_where_nothing_is_known():
    assert even_scales([]).tolist() == []
    assert even_scales([[], [], []]).tolist() == [1.0, 1.0, 1.0]
    assert even_scales([[-0.1], [-0.2]]).tolist() == [1.0, 1.0]  # no update helps, so there is nothing to scale
    assert even_scales([[], [0.1], []]).tolist() == [1.0, 1.0, 1.0]
    start = even_scales([[], [], *[[0.5]] * 9, *[[0.1]] * 9])
    assert start[:3].tolist() == [start[2]] * 3  # before the first list: as in the nearest window with a list
    assert start[2] == pytest.approx(start[-1] / 5)
    harmed = even_scales([[1.0]] * 12 + [[0.05]] * 4 + [[-0.2]] * 4)
    assert harmed[-1] == 1.0  # windows around it have no usual gain
    far = even_scales([[1e-9]] * 10 + [[1.0]] * 10 + [[1e9]] * 10)
    assert far.min() == 1 / MOST_EVEN
    assert far.max() == MOST_EVEN


def test_a_false_report_has_credits_too():
    """A validator can publish any numbers as inner products, and everybody computes what follows from them."""
    for gram in ((-1.0, 2.0, 1.0), (1.0, 5.0, 1.0), (1.0, -5.0, 1.0), (1e-3, 1.0, -1.0)):
        found = credit([Alignment((1, 2), (0.5, 0.4), (1.0, 1.0), gram)] * 5, [{1: True, 2: True}] * 5)
        assert all(math.isfinite(one.value) and one.value >= 0 for one in found.values()), gram
